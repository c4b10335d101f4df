/* Runs nccl/launcher.c over the stand-in libraries under a sanitizer: an arrival that fails while another thread runs a
 * group, closes the communicator or aborts it; a thread without a context that asks what is pending. As check_cpu.c: silent
 * and 0 if all is well. Arguments: the stand-in libnccl and libcudart. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

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

static ncs_nccl_comm* open_launcher(void) {
  const int ranks[N] = {0, 1}, devices[N] = {4, 0};
  const ncs_ranks own = {NULL, N, N, ranks, devices};
  ncs_nccl_comm* comm;
  int blocks;
  EXPECT(ncs_nccl_create(nccl, cuda_path, cuda_path, &own, NULL, &comm) == ncclSuccess);
  EXPECT(ncs_nccl_wait(comm, 5.0, NULL) == ncclSuccess);
  EXPECT(ncs_launcher_open(launcher, comm, &blocks) == ncclSuccess && !blocks);
  return comm;
}

static void let_go(void* kept) { (void)kept; }

static ncclResult_t arrive(int rank, ncs_arrival** arrival) {
  const ncs_buffer buffer = {numbers[rank], numbers[rank], COUNT, ncclFloat32};
  const ncs_buffers buffers = {&buffer, 1, NULL, let_go};
  return ncs_arrive(launcher, rank, NULL, &buffers, NULL, arrival);
}

/* CUDA was told to refuse. */
static void* fail_to_arrive(void* unused) {
  ncs_arrival* arrival;
  (void)unused;
  EXPECT(arrive(0, &arrival) == ncclUnhandledCudaError);
  return NULL;
}

static void* look_on(void* unused) {
  ncs_launch_failure pending;
  (void)unused;
  for (int i = 0; i < ROUNDS; ++i) {
    EXPECT(ncs_launcher_wait(launcher, 0.001) != ncclTimeout);
    EXPECT(ncs_launcher_get_pending(launcher, &pending) == ncclSuccess);
  }
  return NULL;
}

static void end(ncs_nccl_comm* comm) {
  EXPECT(ncs_nccl_wait_for_devices(comm, 5.0, NULL) == ncclSuccess);
  EXPECT(ncs_nccl_finalize(comm, NULL) == ncclSuccess);
  EXPECT(ncs_nccl_wait(comm, 5.0, NULL) == ncclSuccess);
  EXPECT(ncs_nccl_destroy(comm, NULL) == ncclSuccess);
}

/* In the midst of a collective, or before it; then the communicator is closed, or aborted, or left to the launcher. */
static void fail_beside_others(int round) {
  const ncs_collective sum = {NCS_ALL_REDUCE, NULL, NULL, COUNT, ncclFloat32, ncclSum, 0};
  ncs_launch_failure failure;
  ncs_arrival* arrivals[N];
  ncs_launched* group = NULL;
  pthread_t other, onlooker;
  ncs_nccl_comm* comm = open_launcher();
  int was_open;
  for (int r = 0; r < N; ++r) EXPECT(arrive(r, &arrivals[r]) == ncclSuccess);
  standin_fail(round % 2 ? "cudaEventCreateWithFlags:1" : "slow:1:1=20,cudaEventCreateWithFlags:3");
  if (round % 2 == 0) EXPECT(ncs_launch(launcher, 0, arrivals, &sum, 1, NULL, &group) == ncclSuccess);
  EXPECT(pthread_create(&onlooker, NULL, look_on, NULL) == 0);
  EXPECT(pthread_create(&other, NULL, fail_to_arrive, NULL) == 0);
  if (round % 2) {
    pthread_join(other, NULL);
    EXPECT(ncs_launch(launcher, 0, arrivals, &sum, 1, NULL, &group) == ncclInvalidUsage && group == NULL);
  }
  if (round % 6 < 2) {
    EXPECT(ncs_launcher_close(launcher, &was_open) == ncclSuccess);
    if (was_open) end(comm);
  } else if (round % 6 < 4) {
    EXPECT(ncs_launcher_abort(launcher, ncclInvalidUsage, NULL) == ncclSuccess);
  } else if (group != NULL) {
    EXPECT(ncs_launched_wait(group, 5.0) == ncclRemoteError || ncs_launched_wait(group, 0.0) == ncclSuccess);
  }
  if (round % 2 == 0) pthread_join(other, NULL);
  pthread_join(onlooker, NULL);
  EXPECT(ncs_launcher_wait_for_abort(launcher, 5.0, NULL) == ncclSuccess);
  EXPECT(ncs_launcher_get_failure(launcher, &failure) == ncclSuccess);
  EXPECT(failure.status == ncclUnhandledCudaError || failure.status == ncclInvalidUsage || round % 6 < 4);
  for (int r = 0; r < N; ++r) ncs_arrival_release(arrivals[r]);
  ncs_launched_release(group);
  standin_fail("");
  EXPECT(standin_alive("comm") == 0);
}

static void* ask(void* pending) {
  cuCtxSetCurrent(NULL);
  EXPECT(ncs_launcher_get_pending(launcher, pending) == ncclSuccess);
  EXPECT(!standin_has_context());
  return NULL;
}

static void* close_it(void* was_open) {
  cuCtxSetCurrent(NULL);
  EXPECT(ncs_launcher_close(launcher, was_open) == ncclSuccess);
  EXPECT(!standin_has_context());
  return NULL;
}

/* A rank whose own work goes on, then one that is slow: each is told from the others in a thread without a context. */
static void ask_without_context(const char* instruction, int stage, int own, int others) {
  const ncs_collective sum = {NCS_ALL_REDUCE, NULL, NULL, COUNT, ncclFloat32, ncclSum, 0};
  ncs_arrival* arrivals[N];
  ncs_launch_failure reported;
  ncs_launched* group;
  pthread_t thread;
  ncs_nccl_comm* comm = open_launcher();
  int was_open;
  standin_fail(instruction);
  for (int r = 0; r < N; ++r) EXPECT(arrive(r, &arrivals[r]) == ncclSuccess);
  EXPECT(ncs_launch(launcher, 0, arrivals, &sum, 1, NULL, &group) == ncclSuccess);
  for (int i = 0; i < 1000 && (i == 0 || reported.stage != stage || reported.progress[0] != others); ++i) {
    EXPECT(pthread_create(&thread, NULL, ask, &reported) == 0);
    pthread_join(thread, NULL);
    EXPECT(ncs_launcher_wait(launcher, 0.002) == ncclInProgress);
  }
  EXPECT(reported.stage == stage && reported.progress[0] == others && reported.progress[1] == own);
  EXPECT(pthread_create(&thread, NULL, close_it, &was_open) == 0);
  pthread_join(thread, NULL);
  EXPECT(was_open);
  EXPECT(ncs_launcher_get_failure(launcher, &reported) == ncclSuccess && reported.status == ncclInvalidUsage);
  standin_fail("");
  EXPECT(ncs_nccl_abort(comm, NULL) == ncclSuccess);
  for (int r = 0; r < N; ++r) ncs_arrival_release(arrivals[r]);
  ncs_launched_release(group);
}

int main(int argc, char** argv) {
  int64_t arrivals, groups, events;
  EXPECT(argc == 3);
  cuda_path = argv[2];
  EXPECT(ncs_nccl_open(argv[1], NULL, &nccl) == ncclSuccess);
  EXPECT(ncs_launcher_create(N, &launcher) == ncclSuccess);
  for (int round = 0; round < ROUNDS; ++round) fail_beside_others(round);
  ask_without_context("working:0", NCS_OWN_WORK, NCS_ABSENT, NCS_LAUNCHED);
  EXPECT(ncs_launcher_alive(&arrivals, &groups, &events) == ncclSuccess);
  EXPECT(arrivals == 0 && groups == 0 && events == 0);
  EXPECT(standin_alive("comm") == 0 && standin_alive("stream") == 0 && standin_alive("event") == 0);
  return ncs_nccl_close(nccl) == ncclSuccess ? 0 : 1;
}
