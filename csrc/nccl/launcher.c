/* Groups that are only enqueued: arrive, launch, deliver, and the thread that polls launched groups; see README.md. */
#define _POSIX_C_SOURCE 200809L

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nccl/api.h"

#define NCS_LOOK_S 2e-3      /* between looks of the thread that polls */
#define NCS_WAY_OUT_S 1.0    /* after ncs_launcher_interrupt, the time for a group to end */

struct ncs_launcher {
  pthread_mutex_t mutex; /* not held during calls that may hang; while it is held, NCCL is only asked for its state */
  pthread_cond_t changed;
  int n;
  double timeout_s;       /* 0: no limit */
  ncs_nccl_comm* comm;    /* NULL: closed, or failed */
  ncs_nccl_comm* doomed;  /* the polling thread aborts it once it is not reserved */
  ncs_cuda cuda;          /* as the contexts, of the first communicator; the same for each */
  int is_reserved, is_polled;  /* is_reserved: a launch, say, uses the communicator */
  ncs_launched *first, **last; /* groups that are not known to have ended, in their order */
  ncs_launched* launching;     /* the one among them whose launch has not ended */
  int64_t n_launched, n_ended; /* written atomically: they are read without the lock */
  int64_t n_collectives;
  int64_t interrupted_ns; /* 0: no cancellation is requested. Atomic, not under the lock */
  ncs_launch_failure failure;
  CUcontext contexts[]; /* [n] the devices' primary contexts, which outlive a communicator */
};

struct ncs_arrival {
  ncs_launcher* launcher;
  int rank, n_buffers;
  int users;          /* references, and the group that it went into until its delivery */
  cudaStream_t stream; /* NULL: not known */
  cudaEvent_t before; /* NULL: goes with the group, or there is none */
  void* kept;
  void (*let_go)(void* kept);
  ncs_buffer buffers[];
};

enum { ENDED = NCS_RUNNING + 1, FAILED }; /* a group's last stages */

struct ncs_launched {
  ncs_launcher* launcher;
  ncs_launched* next;
  int users; /* references, and the list of groups under way */
  int stage, was_delivered; /* stage: an ncs_stage, or one of the last */
  double since;             /* when the stage began */
  ncs_launch_failure named; /* its number, label and collectives, as a failure reports them */
  cudaEvent_t *before, *end; /* [n]; NULL where there is none */
  ncs_arrival* arrivals[];   /* [n]; NULL where it is delivered */
};

/* ---- Failure. All under the lock ---- */

static void find_progress(const ncs_launcher* launcher, const ncs_launched* group, ncs_launch_failure* reported) {
  for (int r = 0; r < launcher->n && r < NCS_MOST_RANKS; ++r) {
    int* reached = &reported->progress[r];
    ncclResult_t state = ncclSuccess;
    *reached = NCS_ABSENT;
    if (group->stage == NCS_LAUNCHING) {
      launcher->comm->nccl->ncclCommGetAsyncError(launcher->comm->comms[r], &state);
      if (state == ncclSuccess) *reached = NCS_LAUNCHED;
    } else if (group->stage == NCS_OWN_WORK) {
      if (group->before[r] == NULL || launcher->cuda.cudaEventQuery(group->before[r]) == 0) *reached = NCS_LAUNCHED;
    } else if (group->end[r] != NULL) {
      *reached = launcher->cuda.cudaEventQuery(group->end[r]) == 0 ? NCS_DONE : NCS_LAUNCHED;
    }
  }
}

/* Reports a group, in any thread; querying an event needs a context. NCCL is asked nothing during a launch. */
static void describe(const ncs_launcher* launcher, const ncs_launched* group, ncs_launch_failure* reported) {
  ncclResult_t status;
  *reported = group->named;
  reported->stage = group->stage;
  reported->waited_s = ncs_now_s() - group->since;
  if (launcher->comm == NULL || group == launcher->launching) return;
  NCS_ENTER(&launcher->cuda, launcher->contexts[0], NULL, &status);
  if (status == ncclSuccess) find_progress(launcher, group, reported);
}

/* Drops a request for cancellation. */
static void stay(ncs_launcher* launcher) { __atomic_store_n(&launcher->interrupted_ns, 0, __ATOMIC_RELAXED); }

/* Fails the groups under way, and has the polling thread abort the communicator. `group` is the one to be named; NULL:
 * the failure came before there was a group. */
static void fail_groups(ncs_launcher* launcher, const ncs_launched* group, ncclResult_t status,
                        const ncs_failure* failure) {
  ncs_launch_failure* reported = &launcher->failure;
  if (reported->status == ncclSuccess) {
    memset(reported, 0, sizeof(*reported));
    if (group != NULL) describe(launcher, group, reported);
    reported->group = launcher->n_ended + 1; /* of those under way, which all fail, the first */
    reported->failure.index = -1;
    if (failure != NULL) reported->failure = *failure;
    reported->status = status;
  }
  launcher->doomed = launcher->comm;
  launcher->comm = NULL;
  stay(launcher);
  for (ncs_launched* one = launcher->first; one != NULL; one = one->next) {
    one->stage = FAILED;
    reported->was_delivered |= one->was_delivered;
  }
  pthread_cond_broadcast(&launcher->changed);
}

static void drop_groups(ncs_launcher* launcher, ncs_launched** dropped) {
  *dropped = launcher->first;
  launcher->first = NULL;
  launcher->last = &launcher->first;
}

/* Outside the lock, under which buffers must not be let go. */
static void release_groups(ncs_launched* dropped) {
  while (dropped != NULL) {
    ncs_launched* next = dropped->next;
    ncs_launched_release(dropped);
    dropped = next;
  }
}

/* Why a stage that began at `since` is given up: ncclTimeout; ncclInProgress, by a request; ncclSuccess: it is not. */
static ncclResult_t find_way_out(const ncs_launcher* launcher, double since, double now) {
  const int64_t interrupted_ns = __atomic_load_n(&launcher->interrupted_ns, __ATOMIC_RELAXED);
  if (launcher->timeout_s > 0 && now - since >= launcher->timeout_s) return ncclTimeout;
  return interrupted_ns > 0 && now - 1e-9 * (double)interrupted_ns >= NCS_WAY_OUT_S ? ncclInProgress : ncclSuccess;
}

/* ---- Polling ---- */

/* Reports NCCL's errors; work that it has not launched yet belongs to a later group. */
static ncclResult_t look_at_nccl(const ncs_launcher* launcher, ncs_failure* failure) {
  const ncclResult_t status = ncs_ask_nccl(launcher->comm, failure);
  return status == ncclInProgress ? ncclSuccess : status;
}

/* Looks once at the groups under way, under the lock; moves ended groups to *ended. ncclInProgress if any has not
 * ended. */
static ncclResult_t look(ncs_launcher* launcher, ncs_launched** ended) {
  ncs_failure failure = {"", "", -1};
  ncclResult_t status = ncclSuccess;
  while (launcher->first != NULL && launcher->comm != NULL) {
    ncs_launched* group = launcher->first;
    const int is_running = group->stage == NCS_RUNNING;
    const double now = ncs_now_s();
    status = look_at_nccl(launcher, &failure);
    if (status == ncclSuccess)
      status = ncs_look_at_events(&launcher->cuda, is_running ? group->end : group->before, launcher->n, &failure);
    if (status == ncclSuccess && !is_running) {
      group->stage = NCS_RUNNING;
      group->since = now;
      continue;
    }
    if (status == ncclSuccess) status = look_at_nccl(launcher, &failure); /* an error may have ended the group */
    if (status == ncclInProgress) {
      status = find_way_out(launcher, group->since, now);
      if (status == ncclSuccess) return ncclInProgress;
    }
    if (status != ncclSuccess) {
      fail_groups(launcher, group, status, &failure);
      return ncclSuccess;
    }
    launcher->first = group->next;
    if (launcher->first == NULL) launcher->last = &launcher->first;
    else launcher->first->since = now; /* NCCL runs group after group */
    group->stage = ENDED;
    group->next = *ended;
    *ended = group;
    stay(launcher);
    __atomic_store_n(&launcher->n_ended, group->named.group, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&launcher->changed);
  }
  return status;
}

/* Looks once; takes and gives back the lock. Where CUDA refuses the look, the groups fail: their end is not seen. */
static ncclResult_t look_once(void* launcher_, ncs_failure* unused) {
  ncs_launcher* launcher = launcher_;
  ncs_launched* ended = NULL;
  ncs_failure failure = {"", "", -1};
  ncclResult_t status = ncclSuccess;
  (void)unused;
  pthread_mutex_lock(&launcher->mutex);
  if (launcher->first != NULL && launcher->comm != NULL) {
    status = ncclInProgress;
    if (!launcher->is_reserved) {
      NCS_ENTER(&launcher->cuda, launcher->contexts[0], &failure, &status);
      if (status == ncclSuccess) {
        status = look(launcher, &ended);
      } else {
        fail_groups(launcher, launcher->first, status, &failure);
        status = ncclSuccess;
      }
    }
  }
  pthread_mutex_unlock(&launcher->mutex);
  release_groups(ended);
  return status;
}

static void* poll_groups(void* launcher_) {
  ncs_launcher* launcher = launcher_;
  const struct timespec nap = {0, (long)(NCS_LOOK_S * 1e9)};
  for (;;) {
    ncs_nccl_comm* doomed;
    ncs_launched* failed = NULL;
    pthread_mutex_lock(&launcher->mutex);
    while (launcher->doomed != NULL ? launcher->is_reserved : launcher->first == NULL && launcher->comm != NULL)
      pthread_cond_wait(&launcher->changed, &launcher->mutex);
    if (launcher->doomed == NULL && launcher->comm == NULL) { /* closed: the next launch starts another thread */
      launcher->is_polled = 0;
      pthread_mutex_unlock(&launcher->mutex);
      return NULL;
    }
    doomed = launcher->doomed;
    if (doomed != NULL) drop_groups(launcher, &failed);
    pthread_mutex_unlock(&launcher->mutex);
    if (doomed != NULL) {
      ncs_nccl_abort(doomed, NULL); /* the failure is reported already, before the GPUs' streams go on */
      pthread_mutex_lock(&launcher->mutex);
      launcher->doomed = NULL;
      pthread_cond_broadcast(&launcher->changed);
      pthread_mutex_unlock(&launcher->mutex);
      release_groups(failed);
    } else if (look_once(launcher, NULL) == ncclInProgress) {
      nanosleep(&nap, NULL);
    }
  }
  return NULL;
}

/* Under the lock. */
static ncclResult_t start_polling(ncs_launcher* launcher, ncs_failure* failure) {
  pthread_t thread;
  if (launcher->is_polled) return ncclSuccess;
  if (ncs_start_thread(&thread, poll_groups, launcher) != 0)
    return ncs_fail(failure, ncclSystemError, "pthread_create", -1, "no thread to poll collectives");
  pthread_detach(thread);
  launcher->is_polled = 1;
  return ncclSuccess;
}

/* ---- Arrive ---- */

/* CUDA has refused: the state of its streams is not known. */
static void fail_before_launch(ncs_launcher* launcher, ncclResult_t status, const ncs_failure* failure) {
  pthread_mutex_lock(&launcher->mutex);
  if (launcher->comm != NULL && start_polling(launcher, NULL) == ncclSuccess)
    fail_groups(launcher, NULL, status, failure);
  pthread_mutex_unlock(&launcher->mutex);
}

ncclResult_t ncs_arrive(ncs_launcher* launcher, int rank, void* stream, const ncs_buffers* buffers,
                        ncs_failure* failure, ncs_arrival** out) {
  const size_t size = (size_t)buffers->n * sizeof(*buffers->buffers);
  ncs_arrival* arrival = calloc(1, sizeof(*arrival) + size);
  const ncs_cuda* cuda = &launcher->cuda;
  ncclResult_t status = ncclSuccess;
  *out = NULL;
  if (arrival == NULL) return ncclSystemError;
  arrival->launcher = launcher;
  arrival->rank = rank;
  arrival->stream = stream;
  arrival->n_buffers = buffers->n;
  arrival->users = 1;
  if (size > 0) memcpy(arrival->buffers, buffers->buffers, size);
  if (buffers->n > 0) {
    NCS_ENTER(cuda, launcher->contexts[rank], failure, &status);
    if (status == ncclSuccess) status = ncs_make_event(cuda, &arrival->before, failure);
    if (status == ncclSuccess) status = ncs_record(cuda, launcher->contexts[rank], stream, arrival->before, failure);
  }
  if (status != ncclSuccess) {
    fail_before_launch(launcher, status, failure);
    ncs_arrival_release(arrival);
    return status;
  }
  arrival->kept = buffers->kept;
  arrival->let_go = buffers->let_go;
  *out = arrival;
  return ncclSuccess;
}

static void destroy_event(const ncs_launcher* launcher, int rank, cudaEvent_t event) {
  ncclResult_t status;
  if (event == NULL) return;
  NCS_ENTER(&launcher->cuda, launcher->contexts[rank], NULL, &status);
  if (status == ncclSuccess) launcher->cuda.cudaEventDestroy(event);
}

void ncs_arrival_release(ncs_arrival* arrival) {
  if (arrival == NULL || __atomic_sub_fetch(&arrival->users, 1, __ATOMIC_ACQ_REL) > 0) return;
  destroy_event(arrival->launcher, arrival->rank, arrival->before);
  if (arrival->let_go != NULL) arrival->let_go(arrival->kept);
  free(arrival);
}

/* ---- Launch ---- */

static ncs_launched* make_launched(ncs_launcher* launcher, int64_t label, ncs_arrival* const* arrivals) {
  const size_t n = (size_t)launcher->n;
  const ncs_arrival* first = arrivals[0];
  ncs_launched* made =
      calloc(1, sizeof(*made) + n * (sizeof(*made->arrivals) + sizeof(*made->before) + sizeof(*made->end)));
  if (made == NULL) return NULL;
  made->before = (cudaEvent_t*)(made->arrivals + n);
  made->end = made->before + n;
  made->launcher = launcher;
  made->users = 1;
  made->named.label = label;
  made->named.n_collectives = first->n_buffers;
  for (int i = 0; i < first->n_buffers && i < NCS_MOST_NAMED; ++i) {
    made->named.counts[i] = (int64_t)first->buffers[i].count;
    made->named.dtypes[i] = first->buffers[i].dtype;
  }
  for (size_t r = 0; r < n; ++r) {
    __atomic_fetch_add(&arrivals[r]->users, 1, __ATOMIC_RELAXED);
    made->arrivals[r] = arrivals[r];
    made->before[r] = arrivals[r]->before;
    arrivals[r]->before = NULL;
  }
  return made;
}

/* Waits until NCCL has launched its work, which no GPU holds up. */
static ncclResult_t wait_for_nccl(const ncs_launcher* launcher, const ncs_nccl_comm* comm, double since,
                                  ncs_failure* failure) {
  for (;;) {
    ncclResult_t status = ncs_ask_nccl(comm, failure);
    const double now = ncs_now_s();
    if (status != ncclInProgress) return status;
    status = find_way_out(launcher, since, now);
    if (status != ncclSuccess) return status;
    ncs_nap(now - since);
  }
}

/* Unless an arrival has failed meanwhile, and all groups with it. */
static void begin_stage(ncs_launcher* launcher, ncs_launched* made, int stage) {
  pthread_mutex_lock(&launcher->mutex);
  if (made->stage != FAILED) made->stage = stage;
  made->since = ncs_now_s();
  pthread_mutex_unlock(&launcher->mutex);
}

/* With the communicator reserved, and some rank's context current. */
static ncclResult_t enqueue(ncs_launcher* launcher, ncs_nccl_comm* comm, ncs_launched* made,
                            const ncs_buffer* const* buffers, ncs_failure* failure) {
  const ncs_cuda* cuda = &launcher->cuda;
  ncclResult_t status = ncclSuccess;
  for (int r = 0; r < launcher->n && status == ncclSuccess; ++r)
    if (made->before[r] != NULL) status = NCS_CUDA(cudaStreamWaitEvent, (comm->streams[r], made->before[r], 0));
  if (status != ncclSuccess) return status;
  begin_stage(launcher, made, NCS_LAUNCHING);
  status = ncs_nccl_launch_group(comm, buffers, made->named.n_collectives, failure);
  if (status == ncclSuccess) status = wait_for_nccl(launcher, comm, made->since, failure);
  for (int r = 0; r < launcher->n && status == ncclSuccess; ++r) {
    status = NCS_CUDA(cuCtxSetCurrent, (launcher->contexts[r]));
    if (status == ncclSuccess) status = ncs_make_event(cuda, &made->end[r], failure);
    if (status == ncclSuccess) status = NCS_CUDA(cudaEventRecord, (made->end[r], comm->streams[r]));
  }
  if (status == ncclSuccess) begin_stage(launcher, made, NCS_OWN_WORK);
  return status;
}

/* With the communicator reserved. */
static ncclResult_t launch(ncs_launcher* launcher, ncs_nccl_comm* comm, ncs_launched* made,
                           const ncs_buffer* const* buffers, ncs_failure* failure) {
  ncclResult_t status;
  pthread_mutex_lock(&launcher->mutex);
  status = start_polling(launcher, failure);
  if (status == ncclSuccess) {
    if (launcher->first == NULL) stay(launcher); /* a request from before the group does not count */
    made->named.group = __atomic_add_fetch(&launcher->n_launched, 1, __ATOMIC_RELEASE);
    made->named.first = launcher->n_collectives + 1;
    made->since = ncs_now_s();
    launcher->n_collectives += made->named.n_collectives;
    /* Under way until it is known to have ended, or an abort has ended; a part of it may be on the streams then. */
    ++made->users;
    *launcher->last = launcher->launching = made;
    launcher->last = &made->next;
    pthread_cond_broadcast(&launcher->changed);
  }
  pthread_mutex_unlock(&launcher->mutex);
  if (status != ncclSuccess) return status;
  NCS_ENTER(&launcher->cuda, launcher->contexts[0], failure, &status);
  if (status == ncclSuccess) status = enqueue(launcher, comm, made, buffers, failure);
  pthread_mutex_lock(&launcher->mutex);
  launcher->launching = NULL;
  if (status != ncclSuccess && launcher->comm != NULL) fail_groups(launcher, made, status, failure);
  pthread_mutex_unlock(&launcher->mutex);
  return status;
}

/* Refuses buffers that do not fit each other. TensorFlow has given each the memory of its rank's device; towers that
 * share a device may have been given one piece of it. */
static ncclResult_t check_buffers(const ncs_buffer* const* buffers, int n, int n_collectives, ncs_failure* failure) {
  for (int i = 0; i < n_collectives; ++i) {
    const ncs_buffer* first = &buffers[0][i];
    if (ncs_size_of(first->dtype) == 0)
      return ncs_fail(failure, ncclInvalidArgument, "ncs_launch", i, "Expected a dtype of NCCL's. Received: another");
    for (int r = 1; r < n; ++r) {
      const ncs_buffer* one = &buffers[r][i];
      if (one->count != first->count || one->dtype != first->dtype)
        return ncs_fail(failure, ncclInvalidArgument, "ncs_launch", i,
                        "Expected the towers' tensors to be of one size. Received: %zu elements on tower 0, %zu on "
                        "tower %d", first->count, one->count, r);
      for (int s = 0; s < r && one->count > 0; ++s)
        if (buffers[s][i].recv == one->recv)
          return ncs_fail(failure, ncclInvalidArgument, "ncs_launch", i,
                          "Expected each tower to receive into memory of its own. Received: that of tower %d", s);
    }
  }
  return ncclSuccess;
}

ncs_nccl_comm* ncs_launcher_reserve(ncs_launcher* launcher) {
  ncs_nccl_comm* comm;
  pthread_mutex_lock(&launcher->mutex);
  while (launcher->is_reserved) pthread_cond_wait(&launcher->changed, &launcher->mutex);
  comm = launcher->comm;
  launcher->is_reserved = comm != NULL;
  pthread_mutex_unlock(&launcher->mutex);
  return comm;
}

static ncclResult_t launch_alone(ncs_launcher* launcher, ncs_launched* made, const ncs_buffer* const* buffers,
                                 ncs_failure* failure) {
  ncs_nccl_comm* comm = ncs_launcher_reserve(launcher);
  ncclResult_t status;
  if (comm == NULL)
    return ncs_fail(failure, ncclInvalidUsage, "ncs_launch", -1,
                    "Expected an open communicator. Received: one that is closed, or that a failed collective has "
                    "aborted");
  status = launch(launcher, comm, made, buffers, failure);
  ncs_launcher_release(launcher);
  return status;
}

ncclResult_t ncs_launch(ncs_launcher* launcher, int64_t label, ncs_arrival* const* arrivals, ncs_failure* failure,
                        ncs_launched** out) {
  const ncs_buffer* buffers[NCS_MOST_RANKS];
  const int n_collectives = arrivals[0]->n_buffers;
  ncclResult_t status;
  ncs_launched* made;
  for (int r = 0; r < launcher->n; ++r) buffers[r] = arrivals[r]->buffers;
  status = check_buffers(buffers, launcher->n, n_collectives, failure);
  made = status == ncclSuccess ? make_launched(launcher, label, arrivals) : NULL;
  if (status == ncclSuccess && made == NULL) status = ncclSystemError;
  if (status == ncclSuccess && n_collectives > 0) status = launch_alone(launcher, made, buffers, failure);
  else if (status == ncclSuccess) made->stage = ENDED;
  *out = status == ncclSuccess ? made : NULL;
  if (status != ncclSuccess) ncs_launched_release(made);
  return status;
}

/* ---- Deliver ---- */

/* Lets a stream's later work wait for the group's end; NULL: that of all streams of rank's context. */
static ncclResult_t order(const ncs_launched* launched, int rank, cudaStream_t stream, ncs_failure* failure) {
  const ncs_launcher* launcher = launched->launcher;
  const ncs_cuda* cuda = &launcher->cuda;
  ncclResult_t status;
  if (launched->end[rank] == NULL) return ncclSuccess;
  NCS_ENTER(cuda, launcher->contexts[rank], failure, &status);
  if (status == ncclSuccess) status = ncs_order(cuda, launcher->contexts[rank], stream, launched->end[rank], failure);
  return status;
}

static ncclResult_t look_for_end(void* launched_, ncs_failure* failure) {
  const ncs_launched* launched = launched_;
  ncs_launcher* launcher = launched->launcher;
  ncclResult_t status;
  pthread_mutex_lock(&launcher->mutex);
  status = launched->stage == FAILED ? ncclRemoteError : launched->stage == ENDED ? ncclSuccess : ncclInProgress;
  pthread_mutex_unlock(&launcher->mutex);
  if (status == ncclInProgress) look_once(launcher, failure);
  return status;
}

ncclResult_t ncs_launched_wait(ncs_launched* launched) { return ncs_poll(look_for_end, launched, HUGE_VAL, NULL); }

static void let_arrival_go(ncs_launched* launched, int rank) {
  ncs_arrival* arrival = launched->arrivals[rank];
  launched->arrivals[rank] = NULL;
  ncs_arrival_release(arrival);
}

/* After a failure the group keeps the arrival until it is aborted: NCCL may write the buffers until then. */
ncclResult_t ncs_deliver(ncs_launched* launched, int rank, void* stream, int waits, ncs_failure* failure) {
  ncs_launcher* launcher = launched->launcher;
  ncclResult_t status = ncclSuccess;
  if (waits) status = ncs_launched_wait(launched);
  else {
    pthread_mutex_lock(&launcher->mutex);
    if (launched->stage == FAILED) status = ncclRemoteError;
    else launched->was_delivered = 1;
    pthread_mutex_unlock(&launcher->mutex);
  }
  if (status != ncclSuccess) return ncs_fail(failure, status, "ncs_deliver", -1, "a collective has failed");
  status = order(launched, rank, stream, failure);
  if (status == ncclSuccess) let_arrival_go(launched, rank);
  return status;
}

void* ncs_launched_get_kept(const ncs_launched* launched, int rank) {
  return launched->arrivals[rank] != NULL ? launched->arrivals[rank]->kept : NULL;
}

void ncs_launched_release(ncs_launched* launched) {
  if (launched == NULL || __atomic_sub_fetch(&launched->users, 1, __ATOMIC_ACQ_REL) > 0) return;
  for (int r = 0; r < launched->launcher->n; ++r) {
    if (launched->arrivals[r] != NULL) {
      order(launched, r, launched->arrivals[r]->stream, NULL);
      let_arrival_go(launched, r);
    }
    destroy_event(launched->launcher, r, launched->before[r]);
    destroy_event(launched->launcher, r, launched->end[r]);
  }
  free(launched);
}

/* ---- The launcher ---- */

ncclResult_t ncs_launcher_create(int n_ranks, double timeout_s, ncs_launcher** out) {
  ncs_launcher* launcher = calloc(1, sizeof(*launcher) + (size_t)n_ranks * sizeof(*launcher->contexts));
  *out = NULL;
  if (launcher == NULL) return ncclSystemError;
  pthread_mutex_init(&launcher->mutex, NULL);
  pthread_cond_init(&launcher->changed, NULL);
  launcher->n = n_ranks;
  launcher->timeout_s = timeout_s;
  launcher->last = &launcher->first;
  *out = launcher;
  return ncclSuccess;
}

void ncs_launcher_know(ncs_launcher* launcher, const ncs_nccl_comm* comm) {
  if (launcher->contexts[0] != NULL) return; /* arrivals and groups read it without the lock */
  launcher->cuda = comm->cuda;
  memcpy(launcher->contexts, comm->contexts, (size_t)launcher->n * sizeof(*launcher->contexts));
}

ncclResult_t ncs_launcher_synchronize(const ncs_launcher* launcher, ncs_failure* failure) {
  const ncs_cuda* cuda = &launcher->cuda;
  ncclResult_t status = ncclSuccess;
  for (int r = 0; r < launcher->n && status == ncclSuccess; ++r) {
    NCS_ENTER(cuda, launcher->contexts[r], failure, &status);
    if (status == ncclSuccess) status = NCS_CUDA(cudaDeviceSynchronize, ());
  }
  return status;
}

void ncs_launcher_open(ncs_launcher* launcher, ncs_nccl_comm* comm) {
  ncs_launcher_know(launcher, comm);
  pthread_mutex_lock(&launcher->mutex);
  launcher->comm = comm;
  launcher->is_reserved = 0;
  stay(launcher);
  memset(&launcher->failure, 0, sizeof(launcher->failure));
  __atomic_store_n(&launcher->n_ended, launcher->n_launched, __ATOMIC_RELEASE);
  pthread_cond_broadcast(&launcher->changed);
  pthread_mutex_unlock(&launcher->mutex);
}

void ncs_launcher_close(ncs_launcher* launcher, int status) {
  ncs_launched* dropped = NULL;
  int is_callers; /* to end */
  pthread_mutex_lock(&launcher->mutex);
  is_callers = launcher->comm != NULL || launcher->is_reserved;
  if (launcher->comm != NULL && launcher->first != NULL)
    fail_groups(launcher, launcher->first, (ncclResult_t)status, NULL);
  launcher->comm = NULL;
  if (is_callers) launcher->doomed = NULL;
  if (launcher->doomed == NULL) drop_groups(launcher, &dropped);
  launcher->is_reserved = 0;
  pthread_cond_broadcast(&launcher->changed);
  pthread_mutex_unlock(&launcher->mutex);
  release_groups(dropped);
}

void ncs_launcher_release(ncs_launcher* launcher) {
  pthread_mutex_lock(&launcher->mutex);
  launcher->is_reserved = 0;
  pthread_cond_broadcast(&launcher->changed);
  pthread_mutex_unlock(&launcher->mutex);
}

int64_t ncs_launcher_count(ncs_launcher* launcher, int n_collectives) {
  int64_t first;
  pthread_mutex_lock(&launcher->mutex);
  first = launcher->n_collectives + 1;
  launcher->n_collectives += n_collectives;
  pthread_mutex_unlock(&launcher->mutex);
  return first;
}

void ncs_launcher_get_groups(const ncs_launcher* launcher, int64_t* launched, int64_t* ended) {
  *ended = __atomic_load_n(&launcher->n_ended, __ATOMIC_ACQUIRE);
  *launched = __atomic_load_n(&launcher->n_launched, __ATOMIC_ACQUIRE);
}

ncclResult_t ncs_launcher_wait(ncs_launcher* launcher, double slice_s) {
  return ncs_poll(look_once, launcher, slice_s, NULL);
}

ncs_launch_failure ncs_launcher_get_failure(ncs_launcher* launcher) {
  ncs_launch_failure failure;
  pthread_mutex_lock(&launcher->mutex);
  failure = launcher->failure;
  pthread_mutex_unlock(&launcher->mutex);
  return failure;
}

ncs_launch_failure ncs_launcher_get_pending(ncs_launcher* launcher) {
  ncs_launch_failure pending = {.status = ncclSuccess};
  const ncs_launched* group;
  pthread_mutex_lock(&launcher->mutex);
  group = launcher->launching != NULL || launcher->comm == NULL ? launcher->launching : launcher->first;
  if (group != NULL) {
    describe(launcher, group, &pending);
    pending.status = ncclInProgress;
  }
  pthread_mutex_unlock(&launcher->mutex);
  return pending;
}

void ncs_launcher_interrupt(ncs_launcher* launcher) {
  int64_t never = 0;
  __atomic_compare_exchange_n(&launcher->interrupted_ns, &never, (int64_t)(1e9 * ncs_now_s()), 0, __ATOMIC_RELAXED,
                              __ATOMIC_RELAXED);
}

static ncclResult_t look_at_abort(void* launcher_, ncs_failure* failure) {
  ncs_launcher* launcher = launcher_;
  int is_under_way;
  (void)failure;
  pthread_mutex_lock(&launcher->mutex);
  is_under_way = launcher->doomed != NULL;
  pthread_mutex_unlock(&launcher->mutex);
  return is_under_way ? ncclInProgress : ncclSuccess;
}

ncclResult_t ncs_launcher_wait_for_abort(ncs_launcher* launcher, double slice_s) {
  return ncs_poll(look_at_abort, launcher, slice_s, NULL);
}
