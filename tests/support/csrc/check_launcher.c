/* Runs nccl/launcher.c over the stand-in libraries under a sanitizer: an arrival that fails while another thread has
 * the communicator reserved, or ends it; a thread without a context that asks what is pending; one that lets go what an
 * earlier communicator has left. As check_cpu.c: silent and 0 if all is well. Arguments: the stand-in libnccl and libcudart. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "ncclsync.h"
#include "standin.h"

enum { N = 2, COUNT = 100, ROUNDS = 40 };

#define EXPECT(condition)                                                  \
  if (!(condition)) {                                                      \
    fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
    exit(1);                                                               \
  }

int cuCtxSetCurrent(void* context);

static ncs_nccl* nccl;
static const char* cuda_path;
static ncs_launcher* launcher;
static float numbers[N][COUNT];

static ncs_nccl_comm* join(void) {
  const int ranks[N] = {0, 1}, devices[N] = {4, 0};
  const ncs_ranks own = {NULL, N, N, ranks, devices, 0};
  ncs_nccl_comm* comm;
  EXPECT(ncs_nccl_create(nccl, cuda_path, cuda_path, &own, NULL, &comm) == ncclSuccess);
  EXPECT(ncs_nccl_wait(comm, 5.0, NULL) == ncclSuccess);
  return comm;
}

static ncs_nccl_comm* open_launcher(void) {
  ncs_nccl_comm* comm = join();
  ncs_launcher_open(launcher, comm);
  return comm;
}

static int n_arrived, n_let_go;

static void let_go(void* kept) {
  (void)kept;
  __atomic_add_fetch(&n_let_go, 1, __ATOMIC_RELAXED);
}

static ncclResult_t arrive(int rank, ncs_arrival** arrival) {
  const ncs_buffer buffer = {NCS_ALL_REDUCE, ncclSum, 0, numbers[rank], numbers[rank], COUNT, ncclFloat32};
  const ncs_buffers buffers = {&buffer, 1, NULL, let_go};
  const ncclResult_t status = ncs_arrive(launcher, rank, NULL, &buffers, NULL, arrival);
  if (status == ncclSuccess) ++n_arrived;
  return status;
}

/* CUDA was told to refuse. */
static void* fail_to_arrive(void* unused) {
  ncs_arrival* arrival;
  (void)unused;
  EXPECT(arrive(0, &arrival) == ncclUnhandledCudaError);
  return NULL;
}

static void* look_on(void* unused) {
  (void)unused;
  for (int i = 0; i < ROUNDS; ++i) {
    EXPECT(ncs_launcher_wait(launcher, 0.001) != ncclTimeout);
    ncs_launcher_get_pending(launcher);
  }
  return NULL;
}

static ncclResult_t run(ncs_nccl_comm* comm) {
  const ncs_buffer sums[N] = {{NCS_ALL_REDUCE, ncclSum, 0, numbers[0], numbers[0], COUNT, ncclFloat32},
                              {NCS_ALL_REDUCE, ncclSum, 0, numbers[1], numbers[1], COUNT, ncclFloat32}};
  const ncs_buffer* const ranks[N] = {&sums[0], &sums[1]};
  ncclResult_t status = ncs_nccl_launch_group(comm, ranks, 1, NULL);
  if (status == ncclSuccess) status = ncclInProgress;
  while (status == ncclInProgress) status = ncs_nccl_wait(comm, 0.001, NULL);
  return status;
}

static void end(ncs_nccl_comm* comm) {
  EXPECT(ncs_nccl_finalize(comm, NULL) == ncclSuccess);
  EXPECT(ncs_nccl_wait(comm, 5.0, NULL) == ncclSuccess);
  EXPECT(ncs_nccl_destroy(comm, NULL) == ncclSuccess);
}

/* In the midst of a collective, or before it; then the communicator is released, or closed and ended. */
static void fail_while_reserved(int round) {
  pthread_t other, onlooker;
  ncs_nccl_comm* comm = open_launcher();
  EXPECT(ncs_launcher_reserve(launcher) != NULL);
  standin_fail("slow:1:1=20,cudaEventCreateWithFlags:1");
  EXPECT(pthread_create(&onlooker, NULL, look_on, NULL) == 0);
  EXPECT(pthread_create(&other, NULL, fail_to_arrive, NULL) == 0);
  if (round % 2) pthread_join(other, NULL);
  EXPECT(run(comm) == ncclSuccess);
  if (!(round % 2)) pthread_join(other, NULL);
  EXPECT(ncs_launcher_get_failure(launcher).status == ncclUnhandledCudaError);
  if (round % 4 < 2) {
    ncs_launcher_close(launcher, ncclInvalidUsage);
    end(comm);
  } else {
    EXPECT(standin_alive("comm") == N && ncs_launcher_wait_for_abort(launcher, 0.0) == ncclInProgress);
    ncs_launcher_release(launcher);
  }
  EXPECT(ncs_launcher_wait_for_abort(launcher, 5.0) == ncclSuccess);
  EXPECT(ncs_launcher_reserve(launcher) == NULL);
  EXPECT(standin_alive("comm") == 0);
  pthread_join(onlooker, NULL);
}

static void* ask(void* pending) {
  cuCtxSetCurrent(NULL);
  *(ncs_launch_failure*)pending = ncs_launcher_get_pending(launcher);
  EXPECT(!standin_has_context());
  return NULL;
}

static void* close_it(void* unused) {
  (void)unused;
  cuCtxSetCurrent(NULL);
  ncs_launcher_close(launcher, ncclInvalidUsage);
  EXPECT(!standin_has_context());
  return NULL;
}

/* A rank whose own work goes on, then one that is slow: each is told from the others in a thread without a context. */
static void ask_without_context(const char* instruction, int stage, int own, int others) {
  ncs_arrival* arrivals[N];
  ncs_launch_failure reported;
  ncs_launched* group;
  pthread_t thread;
  ncs_nccl_comm* comm = open_launcher();
  standin_fail(instruction);
  for (int r = 0; r < N; ++r) EXPECT(arrive(r, &arrivals[r]) == ncclSuccess);
  EXPECT(ncs_launch(launcher, 0, arrivals, NULL, &group) == ncclSuccess);
  for (int i = 0; i < 1000 && (i == 0 || reported.stage != stage || reported.progress[0] != others); ++i) {
    EXPECT(pthread_create(&thread, NULL, ask, &reported) == 0);
    pthread_join(thread, NULL);
    EXPECT(ncs_launcher_wait(launcher, 0.002) == ncclInProgress);
  }
  EXPECT(reported.stage == stage && reported.progress[0] == others && reported.progress[1] == own);
  EXPECT(pthread_create(&thread, NULL, close_it, NULL) == 0);
  pthread_join(thread, NULL);
  EXPECT(ncs_launcher_get_failure(launcher).status == ncclInvalidUsage);
  standin_fail("");
  EXPECT(ncs_nccl_abort(comm, NULL) == ncclSuccess);
  for (int r = 0; r < N; ++r) ncs_arrival_release(arrivals[r]);
  ncs_launched_release(group);
}

/* NCCL may write them until the abort, which a reservation holds back here. */
static void fail_keeps_buffers(void) {
  const struct timespec nap = {0, 10000000};
  ncs_arrival* arrivals[N];
  ncs_launched* group;
  open_launcher();
  standin_fail("slow:1:1=200");
  for (int r = 0; r < N; ++r) EXPECT(arrive(r, &arrivals[r]) == ncclSuccess);
  EXPECT(ncs_launch(launcher, 0, arrivals, NULL, &group) == ncclSuccess);
  EXPECT(ncs_launcher_reserve(launcher) != NULL);
  standin_fail("cudaEventCreateWithFlags:1");
  fail_to_arrive(NULL);
  for (int r = 0; r < N; ++r) {
    EXPECT(ncs_deliver(group, r, NULL, 0, NULL) == ncclRemoteError);
    ncs_arrival_release(arrivals[r]);
  }
  ncs_launched_release(group);
  EXPECT(__atomic_load_n(&n_let_go, __ATOMIC_RELAXED) == 0);
  ncs_launcher_release(launcher);
  EXPECT(ncs_launcher_wait_for_abort(launcher, 5.0) == ncclSuccess);
  for (int i = 0; i < 500 && __atomic_load_n(&n_let_go, __ATOMIC_RELAXED) < N; ++i) nanosleep(&nap, NULL);
  EXPECT(__atomic_load_n(&n_let_go, __ATOMIC_RELAXED) == N);
}

static void* launch_and_wait(void* unused) {
  ncs_arrival* arrivals[N];
  ncs_launched* group;
  (void)unused;
  for (int r = 0; r < N; ++r) EXPECT(arrive(r, &arrivals[r]) == ncclSuccess);
  EXPECT(ncs_launch(launcher, 0, arrivals, NULL, &group) == ncclSuccess);
  EXPECT(ncs_launched_wait(group) == ncclRemoteError);
  for (int r = 0; r < N; ++r) ncs_arrival_release(arrivals[r]);
  ncs_launched_release(group);
  return NULL;
}

/* An arrival for the next group fails while NCCL launches one: this one fails with it, and nobody waits for ever. */
static void fail_during_a_launch(void) {
  const struct timespec nap = {0, 1000000};
  ncs_launch_failure reported = {.status = ncclSuccess};
  int64_t launched, ended;
  pthread_t thread;
  open_launcher();
  standin_fail("launching:1:0");
  EXPECT(pthread_create(&thread, NULL, launch_and_wait, NULL) == 0);
  while (reported.status != ncclInProgress || reported.stage != NCS_LAUNCHING) {
    reported = ncs_launcher_get_pending(launcher);
    ncs_launcher_get_groups(launcher, &launched, &ended);
    EXPECT(launched >= ended);
    nanosleep(&nap, NULL);
  }
  standin_fail("launching:1:0,cudaEventCreateWithFlags:1");
  fail_to_arrive(NULL);
  standin_fail("");
  pthread_join(thread, NULL);
  EXPECT(ncs_launcher_get_failure(launcher).status == ncclUnhandledCudaError);
  EXPECT(ncs_launcher_wait_for_abort(launcher, 5.0) == ncclSuccess);
}

static void* release(void* arrival) {
  ncs_arrival_release(arrival);
  return NULL;
}

/* Of a graph that has failed, in its thread, while the next communicator is opened. */
static void release_during_open(void) {
  ncs_arrival* arrival;
  pthread_t thread;
  ncs_nccl_comm* comm = open_launcher();
  EXPECT(arrive(0, &arrival) == ncclSuccess);
  ncs_launcher_close(launcher, ncclInvalidUsage);
  end(comm);
  comm = join();
  EXPECT(pthread_create(&thread, NULL, release, arrival) == 0);
  ncs_launcher_open(launcher, comm);
  pthread_join(thread, NULL);
  ncs_launcher_close(launcher, ncclInvalidUsage);
  end(comm);
}

int main(int argc, char** argv) {
  int version;
  EXPECT(argc == 3);
  cuda_path = argv[2];
  EXPECT(ncs_nccl_open(argv[1], NULL, &nccl, &version) == ncclSuccess);
  EXPECT(ncs_launcher_create(N, 0, &launcher) == ncclSuccess);
  for (int round = 0; round < ROUNDS; ++round) fail_while_reserved(round);
  fail_keeps_buffers();
  release_during_open();
  for (int round = 0; round < 5; ++round) fail_during_a_launch();
  ask_without_context("working:0", NCS_OWN_WORK, NCS_ABSENT, NCS_LAUNCHED);
  EXPECT(__atomic_load_n(&n_let_go, __ATOMIC_RELAXED) == n_arrived);
  EXPECT(standin_alive("comm") == 0 && standin_alive("stream") == 0 && standin_alive("event") == 0);
  return 0;
}
