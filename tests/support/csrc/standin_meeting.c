/* What collectives of the stand-in do: all ranks' requests meet, are compared, and done at once over host memory, at the
 * end of the time that they take. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin_nccl.h"

static double link_gb_per_s, link_us;
static double s_per_byte; /* what this machine needs to do them */

void standin_link(double gb_per_s, double us) {
  link_gb_per_s = gb_per_s;
  link_us = us;
}

__attribute__((constructor)) static void begin(void) {
  const char* link = getenv("STANDIN_LINK");
  if (link != NULL) sscanf(link, "%lf,%lf", &link_gb_per_s, &link_us);
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
  const size_t block = asked->count * ncs_size_of(asked->dtype), n = (size_t)asked->comm->clique->n;
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
  ncs_pool_create(1, NCS_INSTRUCTION_SET_BASELINE, &pool);
  const ncs_reduced tensor = {sends, recvs, 1, count};
  status = ncs_cpu_reduce(pool, &tensor, 1, NULL, n, first->dtype, op >= FIRST_SCALED ? ncclSum : op);
  ncs_pool_destroy(pool);
  for (int r = 0; r < n; ++r) free(scaled[r]);
  return status;
}

/* Calls `act` with each message that was sent, and how it is received; whether all match. */
static int for_messages(const meeting* at, void (*act)(const message* sent, const message* taken)) {
  const int n = at->clique->n;
  for (int to = 0; to < n; ++to) {
    if (at->clique->members[to] == NULL) continue; /* another process' */
    for (int from = 0; from < n; ++from) {
      const message* sent = find(&at->requests[from], 1, to);
      const message* taken = find(&at->requests[to], 0, from);
      if (sent == NULL && taken == NULL) continue;
      if (sent == NULL || taken == NULL || sent->count != taken->count || sent->dtype != taken->dtype) {
        standin_say("rank %d's send to %d and that rank's receive do not match", from, to);
        return 0;
      }
      if (act != NULL) act(sent, taken);
    }
  }
  return 1;
}

static void move(const message* sent, const message* taken) {
  memmove(taken->buffer, sent->buffer, sent->count * ncs_size_of(sent->dtype));
}

/* What a rank receives into: NULL if nothing, or if it is another process'. */
static void* find_recv(const meeting* at, int r, size_t* size) {
  const request* first = &at->requests[0];
  *size = first->count * ncs_size_of(first->dtype) * (first->kind == ALL_GATHER ? (size_t)at->clique->n : 1);
  return first->kind == MESSAGES || (first->kind == REDUCE && r != first->root) ? NULL : at->requests[r].recv;
}

static void run(void* met) {
  meeting* at = met;
  const int n = at->clique->n;
  const request* first = &at->requests[0];
  const size_t size = ncs_size_of(first->dtype), bytes = first->count * size;
  char* whole = malloc(n_sent(first, n) * size * (size_t)n + 1);
  if (first->kind == MESSAGES) for_messages(at, move);
  if (first->kind == ALL_REDUCE || first->kind == REDUCE || first->kind == REDUCE_SCATTER)
    at->status = reduce(at, n_sent(first, n), whole);
  if (first->kind == BROADCAST) memcpy(whole, at->requests[first->root].send, bytes);
  if (first->kind == ALL_GATHER)
    for (int r = 0; r < n; ++r) memcpy(whole + (size_t)r * bytes, at->requests[r].send, bytes);
  for (int r = 0; r < n; ++r) {
    size_t received;
    void* recv = find_recv(at, r, &received);
    if (recv != NULL && bytes > 0 && at->status == 0)
      memcpy(recv, whole + (first->kind == REDUCE_SCATTER ? (size_t)r * bytes : 0), received);
  }
  free(whole);
}

static void corrupt(const meeting* at) {
  for (int r = 0; r < at->clique->n; ++r) {
    size_t size;
    unsigned char* recv = find_recv(at, r, &size);
    for (int from = 0; from < at->clique->n; ++from) {
      const message* taken = find(&at->requests[r], 0, from);
      if (taken != NULL) recv = taken->buffer, size = taken->count;
      if (recv != NULL && size > 0 && at->requests[r].comm != NULL && standin_is_corrupt(from, r)) *recv ^= 1;
    }
  }
}

/* All that a rank sends or receives, and how long the link takes, by nccl-tests' doc/PERFORMANCE.md. */
static size_t payload(const meeting* at) {
  const request* first = &at->requests[0];
  size_t most = 0;
  if (first->kind != MESSAGES)
    return first->count * ncs_size_of(first->dtype) *
           (first->kind == REDUCE_SCATTER || first->kind == ALL_GATHER ? (size_t)at->clique->n : 1);
  for (int r = 0; r < at->clique->n; ++r) {
    const request* asked = &at->requests[r];
    size_t sent = 0;
    for (int i = 0; i < asked->n_messages; ++i)
      if (asked->messages[i].is_send && asked->messages[i].peer != r)
        sent += asked->messages[i].count * ncs_size_of(asked->messages[i].dtype);
    if (sent > most) most = sent;
  }
  return most;
}

static double link_s(const meeting* at) {
  const double n = at->clique->n, ring = (n - 1) / n;
  const int kind = at->requests[0].kind;
  const double factor = kind == ALL_REDUCE ? 2 * ring : kind == REDUCE_SCATTER || kind == ALL_GATHER ? ring : 1;
  return link_gb_per_s > 0 ? 1e-6 * link_us + 1e-9 * factor * (double)payload(at) / link_gb_per_s : 0;
}

/* While the link is busy, what is received is neither the old nor the new. In place, that would be what is sent. */
static void poison(const meeting* at) {
  for (int r = 0; r < at->clique->n; ++r) {
    size_t size;
    char* recv = find_recv(at, r, &size);
    const request* asked = &at->requests[r];
    const char *send = asked->send, *end = send + n_sent(asked, at->clique->n) * ncs_size_of(asked->dtype);
    if (recv != NULL && (recv >= end || recv + size <= send)) memset(recv, 0xff, size);
  }
}

static int all_fit(const meeting* at) {
  for (int r = 1; r < at->clique->n; ++r)
    if (!standin_fit(&at->requests[0], &at->requests[r])) return 0;
  return 1;
}

static void forget(meeting* at) {
  meeting** link = &at->clique->meetings;
  while (*link != at) link = &(*link)->next;
  *link = at->next;
  free(at);
}

/* This rank's stream goes on. */
static double leave(attendance* mine) {
  meeting* at = mine->at;
  int n_here = 0;
  for (int r = 0; r < at->clique->n; ++r) n_here += at->clique->members[r] != NULL;
  if (++at->n_left == n_here && at->is_done) forget(at);
  free(mine);
  return 0;
}

static void end_meeting(meeting* at, int status) {
  for (int r = 0; r < at->clique->n; ++r) {
    ncclComm_t member = at->clique->members[r];
    if (member != NULL && status != 0) member->state = status;
    else if (member != NULL) standin_is_told("late", r, &member->state);
  }
  standin_forget_requests(at);
  at->is_broken = status != 0;
  at->is_done = status == 0;
  standin_stir();
}

/* A rank's stream has come to the meeting; 0, or how soon to ask again whether it may go on after it. */
static double attend(void* what) {
  attendance* mine = what;
  meeting* at = mine->at;
  const int n = at->clique->n;
  const double now_s = standin_now_s(), again_s = getenv("STANDIN_FOLDER") != NULL ? 1e-3 : 1e-2;
  double begin_s;
  int n_arrived = 0;
  if (at->is_running) return again_s;
  if (at->clique->members[mine->rank]->is_aborted || at->is_done) return leave(mine);
  if (now_s < at->not_before[mine->rank]) return at->not_before[mine->rank] - now_s;
  if (!at->has_arrived[mine->rank]) standin_send_request(at, mine->rank);
  at->has_arrived[mine->rank] = 1;
  for (int r = 0; r < n; ++r) {
    if (!at->has_arrived[r] && at->clique->members[r] == NULL) at->has_arrived[r] = standin_receive_request(at, r);
    n_arrived += at->has_arrived[r] && (at->clique->members[r] == NULL || !at->clique->members[r]->is_aborted);
  }
  if (at->is_broken || n_arrived < n) return again_s;
  if (at->ends_s == 0) {
    if (!all_fit(at) || (at->requests[0].kind == MESSAGES && !for_messages(at, NULL))) {
      end_meeting(at, ncclInvalidUsage);
      return again_s;
    }
    at->ends_s = now_s + link_s(at);
    if (at->ends_s > now_s) poison(at);
  }
  /* Late, so that it is wrong to let go of a buffer before: but not so late that the machine's own time adds up. */
  begin_s = at->ends_s - s_per_byte * (double)payload(at);
  if (now_s < begin_s) return begin_s - now_s;
  if (!at->is_computed) {
    at->is_running = 1;
    standin_run_apart(run, at);
    at->is_running = 0;
    at->is_computed = 1;
    corrupt(at);
    if (payload(at) > 0) s_per_byte += 0.2 * ((standin_now_s() - now_s) / (double)payload(at) - s_per_byte);
  }
  if (standin_now_s() < at->ends_s) return at->ends_s - standin_now_s();
  end_meeting(at, at->status);
  return at->status == 0 ? leave(mine) : again_s;
}

static int is_any_running(const clique* of) {
  for (const meeting* at = of->meetings; at != NULL; at = at->next)
    if (at->is_running) return 1;
  return 0;
}

void standin_let_end(const clique* of) {
  while (is_any_running(of)) standin_wait(1e-3);
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
