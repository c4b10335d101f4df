/* The stand-in's communicators: how their ranks find each other, what state they are in, how they end. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "standin_nccl.h"

typedef struct {
  size_t size;
  unsigned int magic, version;
  int blocking;
  int cgaClusterSize, minCTAs, maxCTAs; /* these are of 2.17 */
  const char* netName;
} ncclConfig_t;

static clique* cliques;
static long n_ids;

/* By STANDIN_NCCL, as "channels,KiB". What connects two ranks by a channel takes 12 MiB of each: the receiver's buffers of
 * the protocols LL (0.5 MiB), LL128 (4.7) and Simple (4), and the sender's, in pieces of 2 MiB. Source: NCCL 2.30,
 * src/init.cc (DEFAULT_BUFFSIZE and beside it), src/transport/p2p.cc. */
static int n_channels = 16;
static long connection_kib = 12 << 10;
enum { RING, TREE, PAIRS, SMALL = 1 << 16 };

__attribute__((constructor)) static void begin(void) {
  const char* told = getenv("STANDIN_NCCL");
  if (told != NULL) sscanf(told, "%d,%ld", &n_channels, &connection_kib);
}

/* Since 2.22 NCCL connects what an algorithm needs when a collective first takes it: here small all-reduces a tree, other
 * collectives a ring, messages each pair. All by every channel. */
static int connect(ncclComm_t comm, const request* asked) {
  const size_t bytes = asked->count * ncs_size_of(asked->dtype);
  const int sort = asked->kind == MESSAGES ? PAIRS : asked->kind == ALL_REDUCE && bytes < SMALL ? TREE : RING;
  const int channels = comm->max_ctas > 0 && comm->max_ctas < n_channels ? comm->max_ctas : n_channels;
  const int peers = sort == PAIRS ? comm->clique->n - 1 : sort == TREE ? 2 : 1;
  const long long taken = (long long)channels * peers * connection_kib << 10;
  if (comm->connected & 1u << sort || comm->clique->n == 1) return 0;
  if (standin_take(comm->device, taken) != 0) return standin_refuse(ncclUnhandledCudaError, "Cuda failure 2 'out of memory'");
  comm->connected |= 1u << sort;
  comm->taken += taken;
  return 0;
}

int ncclGetUniqueId(ncclUniqueId* id) {
  int status = standin_enter("ncclGetUniqueId", "%d", 0);
  memset(id, 0, sizeof(*id));
  snprintf(id->internal, sizeof(id->internal), "stand-in-%ld-%ld", (long)getpid(), ++n_ids);
  return standin_leave(status);
}

static clique* find_clique(const ncclUniqueId* id, int n) {
  clique* one = cliques;
  while (one != NULL && memcmp(&one->id, id, sizeof(*id)) != 0) one = one->next;
  if (one != NULL) return one;
  one = calloc(1, sizeof(*one));
  one->id = *id;
  one->n = n;
  one->next = cliques;
  return cliques = one;
}

static ncclComm_t make_comm(int device, int blocking) {
  ncclComm_t comm = calloc(1, sizeof(*comm));
  comm->device = device;
  comm->blocking = blocking;
  comm->is_alive = 1;
  comm->state = ncclInProgress;
  standin_count("comm", 1);
  standin_count("thread", 1); /* its proxy's */
  return comm;
}

/* As NCCL does: since 2.30, where it is asked for. */
static int may_share_a_device(void) {
  const char* asked = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return standin_version() >= 23000 && asked != NULL && strcmp(asked, "1") == 0;
}

static int join(ncclComm_t comm, clique* all, int n, int rank) {
  if (n != all->n || n > MAX_RANKS || rank < 0 || rank >= n) return standin_refuse(ncclInvalidArgument, "no such rank");
  if (all->members[rank] != NULL) return standin_refuse(ncclInvalidUsage, "a rank was created twice");
  for (int r = 0; r < n; ++r)
    if (all->members[r] != NULL && all->members[r]->device == comm->device && !may_share_a_device()) {
      standin_say("Duplicate GPU detected : rank %d and rank %d both on CUDA device %d", rank, r, comm->device);
      return ncclInvalidUsage;
    }
  comm->clique = all;
  comm->rank = rank;
  all->members[rank] = comm;
  ++all->n_joined;
  standin_announce(all, "joined", rank);
  comm->is_stuck = standin_is_told("stuck_init", rank, NULL);
  if (standin_is_told("async_init", rank, &comm->state)) standin_say("told to fail asynchronously");
  return 0;
}

/* Under the lock, which it gives up meanwhile; for blocking communicators outside a group. */
static int wait_for(ncclComm_t comm) {
  const double until = standin_now_s() + 20.0;
  while (comm->clique->n_joined < comm->clique->n) {
    if (standin_now_s() > until) return standin_refuse(ncclInternalError, "the other ranks did not come within 20 s");
    standin_wait(1e-3);
  }
  comm->state = 0;
  return 0;
}

int ncclCommInitRankConfig(ncclComm_t* comm, int n, ncclUniqueId id, int rank, ncclConfig_t* config) {
  const char* nvls = getenv("NCCL_NVLS_ENABLE");
  char text[16];
  int status = standin_enter("ncclCommInitRankConfig", "%d", rank);
  if (nvls != NULL) standin_log("NCCL_NVLS_ENABLE", nvls); /* which NCCL reads now */
  *comm = NULL;
  if (status == 0 && config != NULL && config->magic != 0xcafebeef)
    status = standin_refuse(ncclInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  if (status != 0) return standin_leave(status);
  if (config != NULL && (int)config->version > standin_version())
    return standin_leave(standin_refuse(ncclInvalidArgument, "ncclConfig_t is of a newer NCCL"));
  *comm = make_comm(standin_current_device(), config == NULL || config->blocking != 0);
  if (config != NULL && config->size >= sizeof(*config) && config->maxCTAs > 0) {
    snprintf(text, sizeof(text), "%d", (*comm)->max_ctas = config->maxCTAs);
    standin_log("maxCTAs", text);
  }
  status = join(*comm, find_clique(&id, n), n, rank);
  if (status == 0 && (*comm)->blocking && *standin_depth() == 0) status = wait_for(*comm);
  if (status != 0) {
    standin_count("comm", -1);
    standin_count("thread", -1);
    (*comm)->is_alive = 0;
    if ((*comm)->clique == NULL) free(*comm); /* nobody knows it */
    *comm = NULL;
  }
  return standin_leave(status != 0 || (*comm)->blocking ? status : *standin_depth() > 0 ? 0 : ncclInProgress);
}

int ncclCommInitRank(ncclComm_t* comm, int n, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, n, id, rank, NULL);
}

int ncclCommInitAll(ncclComm_t* comms, int n, const int* devices) {
  int status = standin_enter("ncclCommInitAll", "%d", n);
  ncclUniqueId id = {{0}};
  snprintf(id.internal, sizeof(id.internal), "all %ld", ++n_ids);
  for (int r = 0; r < n && status == 0; ++r) {
    comms[r] = make_comm(devices != NULL ? devices[r] : r, 1);
    status = join(comms[r], find_clique(&id, n), n, r);
    comms[r]->state = 0;
  }
  return standin_leave(status);
}

/* Ranks of equal color become a clique, in the order of their keys; it happens when all have asked. */
int ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* new, ncclConfig_t* config) {
  const int was_busy = standin_occupy(comm);
  int status = standin_enter("ncclCommSplit", "%d", color);
  if (status == 0) status = standin_check(comm, was_busy, 1);
  *new = NULL;
  if (status == 0) {
    clique* all = comm->clique;
    if (color >= 0) *new = make_comm(comm->device, config == NULL ? comm->blocking : config->blocking != 0);
    all->split_colors[comm->rank] = color;
    all->split_keys[comm->rank] = key;
    all->split_comms[comm->rank] = *new;
    if (++all->n_split == all->n) {
      all->n_split = 0;
      ++n_ids;
      for (int r = 0; r < all->n; ++r) {
        ncclUniqueId id = {{0}};
        int n = 0, rank = 0;
        if (all->split_comms[r] == NULL) continue;
        for (int other = 0; other < all->n; ++other) {
          const int is_same = all->split_colors[other] == all->split_colors[r];
          const int is_before = all->split_keys[other] < all->split_keys[r] ||
                                (all->split_keys[other] == all->split_keys[r] && other < r);
          n += is_same;
          rank += is_same && is_before;
        }
        snprintf(id.internal, sizeof(id.internal), "split %ld of color %d", n_ids, all->split_colors[r]);
        join(all->split_comms[r], find_clique(&id, n), n, rank);
        if (all->split_comms[r]->blocking) all->split_comms[r]->state = 0;
      }
    }
  }
  if (!was_busy) standin_release(comm);
  return standin_leave(status);
}

/* ---- State and end ---- */

/* What was launched comes to the streams only now: before, a stream that is asked would seem to be through. */
static int launch(ncclComm_t comm) {
  int status = 0;
  for (int i = 0; i < comm->n_unlaunched && status == 0; ++i) {
    status = connect(comm, &comm->unlaunched[i]);
    if (status == 0) status = standin_meet(&comm->unlaunched[i]);
  }
  comm->n_unlaunched = 0;
  return status;
}

int ncclCommGetAsyncError(ncclComm_t comm, int* error) {
  const int was_busy = standin_occupy(comm);
  int status, told = ncclSystemError, ignored;
  standin_lock();
  status = standin_check(comm, was_busy, 0);
  if (status == 0 && comm->state == ncclInProgress && comm->is_asked++ > 0 && !comm->is_stuck &&
      !standin_is_told("launching", comm->rank, &ignored)) {
    const clique* all = comm->clique;
    if (all != NULL && standin_announced(all, "joined", all->n_joined) == all->n &&
        (!comm->is_finalized || standin_announced(all, "ended", all->n_finalized) == all->n)) {
      comm->state = 0;
      status = launch(comm);
      if (status != 0) comm->state = status;
      status = 0;
    }
  }
  if (status == 0) *error = comm->state;
  if (status == 0 && standin_is_told("ncclCommGetAsyncError", -1, &told)) {
    standin_say("the stand-in was told to fail ncclCommGetAsyncError");
    *error = comm->state = told;
  }
  if (!was_busy) standin_release(comm);
  standin_unlock();
  return status;
}

void standin_wait_again(ncclComm_t comm) {
  comm->state = ncclInProgress;
  comm->is_asked = 0;
}

static void end(ncclComm_t comm) {
  if (comm->clique != NULL) standin_let_end(comm->clique);
  standin_stir();
  standin_progress();
  comm->is_alive = 0;
  if (!comm->is_finalized && comm->clique != NULL) ++comm->clique->n_finalized;
  if (comm->clique != NULL) standin_announce(comm->clique, "ended", comm->rank);
  standin_take(comm->device, -comm->taken);
  standin_count("thread", -1);
  standin_count("comm", -1);
}

int ncclCommFinalize(ncclComm_t comm) {
  const int was_busy = standin_occupy(comm);
  int status = standin_enter("ncclCommFinalize", "%d", comm->rank);
  if (status == 0) status = standin_check(comm, was_busy, 1);
  if (status == 0 && comm->is_finalized) status = standin_refuse(ncclInvalidArgument, "the communicator was finalized before");
  if (status == 0) {
    comm->is_finalized = 1;
    ++comm->clique->n_finalized;
    standin_announce(comm->clique, "ended", comm->rank);
    standin_wait_again(comm);
  }
  if (!was_busy) standin_release(comm);
  return standin_leave(status != 0 || *standin_depth() > 0 ? status : ncclInProgress);
}

static int is_unfinished(const clique* all, int rank) {
  for (const meeting* at = all->meetings; at != NULL; at = at->next)
    if (at->is_asked[rank] && !at->is_done) return 1;
  return 0;
}

int ncclCommDestroy(ncclComm_t comm) {
  const int was_busy = standin_occupy(comm);
  standin_outwait(comm->device);
  int status = standin_enter("ncclCommDestroy", "%d", comm->rank);
  if (status == 0) status = standin_check(comm, was_busy, 0);
  if (status == 0 && *standin_depth() > 0) status = standin_refuse(ncclInvalidUsage, "a group is open");
  if (status == 0) {
    standin_progress();
    if (is_unfinished(comm->clique, comm->rank)) status = standin_refuse(ncclInvalidUsage, "a collective is under way");
  }
  if (status == 0 || comm->is_alive) {
    comm->is_aborted = status != 0; /* so that nothing stays on the stream */
    end(comm);
  }
  if (!was_busy) standin_release(comm);
  return standin_leave(status);
}

int ncclCommAbort(ncclComm_t comm) {
  const int was_busy = standin_occupy(comm);
  standin_outwait(comm->device);
  int status = standin_enter("ncclCommAbort", "%d", comm->rank);
  if (status == 0) status = standin_check(comm, was_busy, 0);
  if (comm->is_alive) {
    comm->is_aborted = 1;
    end(comm);
  }
  if (!was_busy) standin_release(comm);
  return standin_leave(status);
}
