/* A libnccl for machines without a GPU: the calls that ncclsync makes and those near them, with their real ABI, over
 * host memory. What NCCL answers by a hang or by undefined behaviour (collectives that do not match, two threads in
 * one communicator, a use after its end) is an error here. Every call is logged, and may be told to fail: standin.h. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "standin_nccl.h"

static char last_error[256];
static __thread request queue[MAX_QUEUE];
static __thread int queued, failed_inside;

void standin_say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
}

/* ---- Calls ---- */

/* Takes the lock, logs, and does what it was told. Every call begins so and ends by `leave`. */
int standin_enter(const char* name, const char* format, int value) {
  char text[64];
  int status = ncclSystemError;
  standin_lock();
  snprintf(text, sizeof(text), format, value);
  standin_log(name, text);
  if (!standin_is_told(name, -1, &status)) return 0;
  standin_say("the stand-in was told to fail %s", name);
  return status;
}

int standin_leave(int status) {
  if (status != 0 && *standin_depth() > 0) failed_inside = status;
  standin_unlock();
  return status;
}

int standin_refuse(int status, const char* why) {
  standin_say("%s", why);
  return status;
}

/* Before the lock: two threads in one communicator meet here or not at all. */
int standin_occupy(ncclComm_t comm) { return comm != NULL && __atomic_exchange_n(&comm->busy, 1, __ATOMIC_ACQ_REL); }
void standin_release(ncclComm_t comm) {
  if (comm != NULL) __atomic_store_n(&comm->busy, 0, __ATOMIC_RELEASE);
}

int standin_check(ncclComm_t comm, int was_busy, int must_be_ready) {
  if (comm == NULL) return standin_refuse(ncclInvalidArgument, "comm argument is NULL");
  if (!comm->is_alive) return standin_refuse(ncclInvalidArgument, "the communicator was destroyed");
  if (was_busy || (comm->owner != NULL && comm->owner != standin_depth()))
    return standin_refuse(ncclInvalidUsage, "a communicator is used by two threads at once");
  if (must_be_ready && comm->state == ncclInProgress)
    return standin_refuse(ncclInvalidArgument, "the communicator is used before its previous operation has ended");
  if (must_be_ready && comm->state != 0) return standin_refuse(comm->state, "the communicator has failed");
  return 0;
}

int standin_version(void) {
  const char* told = getenv("STANDIN_VERSION");
  return told != NULL ? atoi(told) : 23203;
}

int ncclGetVersion(int* version) {
  *version = standin_version();
  return 0;
}

const char* ncclGetErrorString(int result) { return result == 0 ? "no error" : "stand-in error"; }

const char* ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  return last_error;
}

/* ---- Collectives ---- */

int ncclGroupStart(void) {
  const int status = standin_enter("ncclGroupStart", "%d", *standin_depth());
  if (status == 0) ++*standin_depth();
  return standin_leave(status);
}

static int submit(request* asked) {
  ncclComm_t comm = asked->comm;
  if (comm->blocking) return standin_meet(asked);
  if (comm->n_unlaunched == MAX_QUEUE) return standin_refuse(ncclInternalError, "too many collectives");
  for (int r = 0; r < comm->clique->n; ++r) { /* the other ranks of this very group can be compared at once */
    const ncclComm_t other = comm->clique->members[r];
    const int i = comm->n_unlaunched;
    if (other != NULL && other != comm && other->n_launched == comm->n_launched && i < other->n_unlaunched &&
        !standin_fit(asked, &other->unlaunched[i])) {
      standin_say("collective %d of ranks %d and %d do not match", i, r, comm->rank);
      return ncclInvalidUsage;
    }
  }
  comm->unlaunched[comm->n_unlaunched++] = *asked;
  if (standin_is_told("stuck", comm->rank, NULL)) comm->is_stuck = 1;
  standin_wait_again(comm);
  return 0;
}

int ncclGroupEnd(void) {
  int status = standin_enter("ncclGroupEnd", "%d", queued), waits = 0;
  if (*standin_depth() == 0) return standin_leave(status != 0 ? status : standin_refuse(ncclInvalidUsage, "no group is open"));
  if (--*standin_depth() > 0) return standin_leave(status);
  if (status == 0) status = failed_inside;
  for (int i = 0; i < queued; ++i) queue[i].comm->owner = NULL;
  for (int i = 0; i < queued && status == 0; ++i) {
    status = submit(&queue[i]);
    waits = waits || !queue[i].comm->blocking;
  }
  queued = failed_inside = 0;
  if (status == 0 && waits) standin_start_thread();
  return standin_leave(status == 0 && waits ? ncclInProgress : status);
}

static void* end_at_once(void* unused) {
  standin_lock();
  standin_count("thread", -1);
  standin_unlock();
  return unused;
}

void standin_start_thread(void) {
  pthread_t thread;
  if (getenv("STANDIN_DELAY_US") == NULL || pthread_create(&thread, NULL, end_at_once, NULL) != 0) return;
  pthread_detach(thread);
  standin_count("thread", 1);
}

/* Takes one call in: at once, or, in a group, for its end. */
static int ask(const char* name, request asked, const message* one) {
  ncclComm_t comm = asked.comm;
  const int was_busy = standin_occupy(comm);
  int status = standin_enter(name, "%d on stream", comm != NULL ? comm->rank : -1), device;
  request* mine = NULL;
  if (status == 0) status = standin_check(comm, was_busy, 1);
  if (status == 0 && comm->is_finalized) status = standin_refuse(ncclInvalidArgument, "the communicator was finalized");
  if (status == 0 && asked.stream == NULL) status = standin_refuse(ncclInvalidUsage, "the legacy default stream");
  if (status == 0 && (device = standin_stream_device(asked.stream)) != comm->device) {
    standin_say("rank %d is on device %d, its stream on %d", comm->rank, comm->device, device);
    status = ncclInvalidUsage;
  }
  if (status == 0 && asked.dtype > ncclBfloat16) status = standin_refuse(ncclInvalidArgument, "no such dtype");
  if (status == 0 && !standin_is_in_order(&asked)) {
    standin_say("%s on rank %d: what is sent and what is received overlap, and not in place", name, comm->rank);
    status = ncclInvalidArgument;
  }
  if (status == 0 && queued == MAX_QUEUE) status = standin_refuse(ncclInternalError, "too many calls in a group");
  if (status == 0) {
    for (int i = 0; i < queued && one != NULL; ++i)
      if (queue[i].comm == comm && queue[i].kind == MESSAGES) mine = &queue[i];
    if (mine == NULL) {
      mine = &queue[queued++];
      *mine = asked;
    }
    if (one != NULL && mine->n_messages == MAX_MESSAGES) status = standin_refuse(ncclInternalError, "too many messages");
    else if (one != NULL) mine->messages[mine->n_messages++] = *one;
  }
  if (status == 0 && *standin_depth() > 0) {
    comm->owner = standin_depth();
  } else if (status == 0) {
    status = submit(&queue[--queued]);
    if (status == 0 && !comm->blocking) status = ncclInProgress;
  }
  if (!was_busy) standin_release(comm);
  return standin_leave(status);
}

int ncclAllReduce(const void* send, void* recv, size_t count, int dtype, int op, ncclComm_t comm, cudaStream_t stream) {
  return ask("ncclAllReduce", (request){.comm = comm, .stream = stream, .kind = ALL_REDUCE, .send = send,
             .recv = recv, .count = count, .dtype = dtype, .op = op}, NULL);
}

int ncclBroadcast(const void* send, void* recv, size_t count, int dtype, int root, ncclComm_t comm,
                  cudaStream_t stream) {
  return ask("ncclBroadcast", (request){.comm = comm, .stream = stream, .kind = BROADCAST, .send = send,
             .recv = recv, .count = count, .dtype = dtype, .root = root}, NULL);
}

int ncclReduce(const void* send, void* recv, size_t count, int dtype, int op, int root, ncclComm_t comm,
               cudaStream_t stream) {
  return ask("ncclReduce", (request){.comm = comm, .stream = stream, .kind = REDUCE, .send = send, .recv = recv,
             .count = count, .dtype = dtype, .op = op, .root = root}, NULL);
}

int ncclAllGather(const void* send, void* recv, size_t count, int dtype, ncclComm_t comm, cudaStream_t stream) {
  return ask("ncclAllGather", (request){.comm = comm, .stream = stream, .kind = ALL_GATHER, .send = send,
             .recv = recv, .count = count, .dtype = dtype}, NULL);
}

int ncclReduceScatter(const void* send, void* recv, size_t count, int dtype, int op, ncclComm_t comm,
                      cudaStream_t stream) {
  return ask("ncclReduceScatter", (request){.comm = comm, .stream = stream, .kind = REDUCE_SCATTER, .send = send,
             .recv = recv, .count = count, .dtype = dtype, .op = op}, NULL);
}

int ncclSend(const void* send, size_t count, int dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  return ask("ncclSend", (request){.comm = comm, .stream = stream, .kind = MESSAGES, .dtype = dtype},
             &(message){1, peer, dtype, (void*)(uintptr_t)send, count});
}

int ncclRecv(void* recv, size_t count, int dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  return ask("ncclRecv", (request){.comm = comm, .stream = stream, .kind = MESSAGES, .dtype = dtype},
             &(message){0, peer, dtype, recv, count});
}

/* ---- Operations of a rank's own ---- */

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, ncclComm_t comm) {
  int status = standin_enter("ncclRedOpCreatePreMulSum", "%d", comm->rank);
  if (status == 0 && (residence != 1 || (dtype != ncclFloat32 && dtype != ncclFloat64)))
    status = standin_refuse(ncclInvalidArgument, "the stand-in scales float32 and float64 by scalars in host memory only");
  for (int i = 0; i < MAX_SCALED && status == 0; ++i) {
    if (comm->scaled[i].dtype != 0) continue;
    comm->scaled[i].dtype = dtype;
    comm->scaled[i].scalar = dtype == ncclFloat32 ? (double)*(float*)scalar : *(double*)scalar;
    *op = FIRST_SCALED + i;
    return standin_leave(0);
  }
  return standin_leave(status != 0 ? status : standin_refuse(ncclInternalError, "too many operations"));
}

int ncclRedOpDestroy(int op, ncclComm_t comm) {
  int status = standin_enter("ncclRedOpDestroy", "%d", comm->rank);
  if (status == 0 && (op < FIRST_SCALED || op >= FIRST_SCALED + MAX_SCALED))
    status = standin_refuse(ncclInvalidArgument, "no such operation");
  if (status == 0) comm->scaled[op - FIRST_SCALED].dtype = 0;
  return standin_leave(status);
}
