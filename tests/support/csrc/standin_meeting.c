/* What collectives of the stand-in do: all ranks' requests meet, are compared, and done at once over host memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin_nccl.h"

size_t standin_size_of(int dtype) {
  const char* name;
  int value;
  size_t size = 0;
  for (int i = 0; ncs_dtype_describe(i, &name, &value, &size) == 0; ++i)
    if (value == dtype) return size;
  return 0;
}

/* How many elements a rank contributes and receives. */
static size_t n_sent(const request* asked, int n) {
  return asked->count * (asked->kind == REDUCE_SCATTER ? (size_t)n : 1);
}

int standin_fit(const request* one, const request* other) {
  return one->kind == other->kind &&
         (one->kind == MESSAGES || (one->count == other->count && one->dtype == other->dtype && one->op == other->op &&
                                    one->root == other->root));
}

/* What a rank sends and receives is apart, or in place as NCCL defines it: at the same address, or, of blocks, with
 * the rank's own block at the address of the other buffer. Else ranks would read what they have already written. */
int standin_is_in_order(const request* asked) {
  const size_t block = asked->count * standin_size_of(asked->dtype), n = (size_t)asked->comm->clique->n;
  const size_t own = (size_t)asked->comm->rank * block;
  const uintptr_t send = (uintptr_t)asked->send, recv = (uintptr_t)asked->recv;
  const uintptr_t send_end = send + (asked->kind == REDUCE_SCATTER ? n : 1) * block;
  const uintptr_t recv_end = recv + (asked->kind == ALL_GATHER ? n : 1) * block;
  if (asked->kind == MESSAGES || block == 0 || recv == 0 || send_end <= recv || recv_end <= send) return 1;
  if (asked->kind == REDUCE_SCATTER) return recv == send + own;
  return send == recv + (asked->kind == ALL_GATHER ? own : 0);
}

static const message* find(const request* asked, int is_send, int peer) {
  for (int i = 0; i < asked->n_messages; ++i)
    if (asked->messages[i].is_send == is_send && asked->messages[i].peer == peer) return &asked->messages[i];
  return NULL;
}

static void corrupt(void* bytes, int from, int to) {
  if (standin_is_corrupt(from, to)) *(unsigned char*)bytes ^= 1;
}

/* All ranks' numbers, combined, into `result`. */
static int reduce(const meeting* at, size_t count, void* result) {
  const int n = at->clique->n;
  const request* first = &at->requests[0];
  const void* sends[MAX_RANKS];
  void *recvs[MAX_RANKS], *scaled[MAX_RANKS] = {NULL};
  ncs_pool* pool;
  int op = first->op, status;
  for (int r = 0; r < n; ++r) {
    const request* asked = &at->requests[r];
    sends[r] = asked->send;
    recvs[r] = result;
    if (op < FIRST_SCALED) continue;
    scaled[r] = malloc(count * sizeof(double) + 1);
    for (size_t i = 0; i < count; ++i) {
      const double scalar = asked->comm->scaled[op - FIRST_SCALED].scalar;
      if (asked->dtype == ncclFloat32) ((float*)scaled[r])[i] = (float)scalar * ((const float*)asked->send)[i];
      else ((double*)scaled[r])[i] = scalar * ((const double*)asked->send)[i];
    }
    sends[r] = scaled[r];
  }
  ncs_pool_create(1, NCS_LEVEL_BASELINE, &pool);
  status = ncs_cpu_all_reduce(pool, sends, recvs, n, count, first->dtype, op >= FIRST_SCALED ? ncclSum : op);
  ncs_pool_destroy(pool);
  for (int r = 0; r < n; ++r) free(scaled[r]);
  return status;
}

static int exchange_messages(const meeting* at) {
  const int n = at->clique->n;
  for (int to = 0; to < n; ++to) {
    if (at->clique->members[to] == NULL) continue; /* another process' */
    for (int from = 0; from < n; ++from) {
      const message* sent = find(&at->requests[from], 1, to);
      const message* taken = find(&at->requests[to], 0, from);
      if (sent == NULL && taken == NULL) continue;
      if (sent == NULL || taken == NULL || sent->count != taken->count || sent->dtype != taken->dtype) {
        standin_say("rank %d's send to %d and that rank's receive do not match", from, to);
        return ncclInvalidUsage;
      }
      memmove(taken->buffer, sent->buffer, sent->count * standin_size_of(sent->dtype));
      if (sent->count > 0) corrupt(taken->buffer, from, to);
    }
  }
  return 0;
}

static int run(const meeting* at) {
  const int n = at->clique->n;
  const request* first = &at->requests[0];
  const size_t size = standin_size_of(first->dtype), bytes = first->count * size;
  char* whole = malloc(n_sent(first, n) * size * (size_t)n + 1);
  int status = 0;
  if (first->kind == MESSAGES) status = exchange_messages(at);
  if (first->kind == ALL_REDUCE || first->kind == REDUCE || first->kind == REDUCE_SCATTER)
    status = reduce(at, n_sent(first, n), whole);
  if (first->kind == BROADCAST) memcpy(whole, at->requests[first->root].send, bytes);
  if (first->kind == ALL_GATHER)
    for (int r = 0; r < n; ++r) memcpy(whole + (size_t)r * bytes, at->requests[r].send, bytes);
  for (int r = 0; r < n && status == 0 && first->kind != MESSAGES && bytes > 0; ++r) {
    void* recv = at->requests[r].recv;
    if (recv == NULL || (first->kind == REDUCE && r != first->root)) continue;
    if (first->kind == REDUCE_SCATTER) memcpy(recv, whole + (size_t)r * bytes, bytes);
    else memcpy(recv, whole, first->kind == ALL_GATHER ? bytes * (size_t)n : bytes);
    for (int from = 0; from < n; ++from) corrupt(recv, from, r);
  }
  free(whole);
  return status;
}

static int all_fit(const meeting* at) {
  for (int r = 1; r < at->clique->n; ++r)
    if (!standin_fit(&at->requests[0], &at->requests[r])) return 0;
  return 1;
}

/* A rank's stream has come to the meeting; whether it may go on behind it. */
static int attend(void* what) {
  attendance* mine = what;
  meeting* at = mine->at;
  const int n = at->clique->n;
  int n_arrived = 0, status;
  if (at->clique->members[mine->rank]->is_aborted || at->is_done) {
    free(mine);
    return 1;
  }
  if (standin_now_s() < at->not_before[mine->rank]) return 0;
  if (!at->has_arrived[mine->rank]) standin_send_request(at, mine->rank);
  at->has_arrived[mine->rank] = 1;
  for (int r = 0; r < n; ++r) {
    if (!at->has_arrived[r] && at->clique->members[r] == NULL) at->has_arrived[r] = standin_receive_request(at, r);
    n_arrived += at->has_arrived[r];
  }
  if (at->is_broken || n_arrived < n) return 0;
  status = all_fit(at) ? run(at) : ncclInvalidUsage;
  for (int r = 0; r < n; ++r) {
    ncclComm_t member = at->clique->members[r];
    if (member != NULL && status != 0) member->state = status;
    else if (member != NULL) standin_is_told("late", r, &member->state);
  }
  standin_forget_requests(at);
  at->is_broken = status != 0;
  at->is_done = status == 0;
  if (at->is_done) free(mine);
  return at->is_done;
}

static meeting* find_meeting(clique* of, long number) {
  meeting* at = of->meetings;
  while (at != NULL && at->number != number) at = at->next;
  if (at != NULL) return at;
  at = calloc(1, sizeof(*at));
  at->clique = of;
  at->number = number;
  at->next = of->meetings;
  return of->meetings = at;
}

int standin_meet(const request* asked) {
  ncclComm_t comm = asked->comm;
  clique* all = comm->clique;
  meeting* at = find_meeting(all, comm->n_launched++);
  const int rank = comm->rank;
  int milliseconds = 20, error = ncclSystemError;
  attendance* mine;
  for (int r = 0; r < all->n; ++r) {
    if (!at->is_asked[r] || standin_fit(asked, &at->requests[r])) continue;
    standin_say("collective %ld of ranks %d and %d do not match", at->number, r, rank);
    for (int member = 0; member < all->n; ++member)
      if (all->members[member] != NULL) all->members[member]->state = ncclInvalidUsage;
    return ncclInvalidUsage;
  }
  at->requests[rank] = *asked;
  at->is_asked[rank] = 1;
  if (standin_is_told("slow", rank, &milliseconds)) at->not_before[rank] = standin_now_s() + 1e-3 * milliseconds;
  if (standin_is_told("async", rank, &error)) {
    standin_say("told to fail asynchronously");
    comm->state = error;
    at->is_broken = 1;
  }
  mine = malloc(sizeof(*mine));
  *mine = (attendance){at, rank};
  standin_push(asked->stream, attend, mine);
  return 0;
}
