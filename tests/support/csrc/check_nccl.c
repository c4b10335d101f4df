/* Runs the files nccl*.c over the stand-in libraries under a sanitizer: every call, every failure of creation, aborts
 * in the middle, GPUs that stay busy, communicators of several threads. As check_cpu.c: silent and 0 if all is well.
 * Arguments: the stand-in libnccl and libcudart. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ncclsync.h"
#include "standin.h"

enum { N = 3, COUNT = 1000, CALLERS = 4, ROUNDS = 20 };

#define EXPECT(condition)                                                  \
  if (!(condition)) {                                                      \
    fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
    exit(1);                                                               \
  }

static ncs_nccl* nccl;
static const char* cuda_path;

static ncclResult_t create(int first_device, ncs_nccl_comm** comm) {
  const int ranks[N] = {0, 1, 2}, devices[N] = {first_device, first_device + 1, first_device + 2};
  const ncs_ranks own = {NULL, N, N, ranks, devices, 0};
  ncs_failure failure;
  ncclResult_t status = ncs_nccl_create(nccl, cuda_path, cuda_path, &own, &failure, comm);
  if (status != ncclSuccess) return status;
  status = ncs_nccl_wait(*comm, 5.0, &failure);
  if (status != ncclSuccess) ncs_nccl_abort(*comm, NULL);
  return status;
}

static void end(ncs_nccl_comm* comm) {
  EXPECT(ncs_nccl_finalize(comm, NULL) == ncclSuccess);
  EXPECT(ncs_nccl_wait(comm, 5.0, NULL) == ncclSuccess);
  EXPECT(ncs_nccl_destroy(comm, NULL) == ncclSuccess);
}

/* Every rank's `blocks` blocks of COUNT floats, in one piece of memory each. */
static float* make(float* at[N], int blocks) {
  float* all = calloc((size_t)N * COUNT * (size_t)blocks, sizeof(*all));
  for (int r = 0; r < N; ++r) {
    at[r] = all + (size_t)r * COUNT * (size_t)blocks;
    for (int i = 0; i < COUNT * blocks; ++i) at[r][i] = (float)(100 * r + i / COUNT);
  }
  return all;
}

enum { MOST = 2 };

/* Of each rank, a buffer for each collective. */
typedef struct {
  ncs_buffer ranks[N][MOST];
} group;

static void add(group* all, int i, int kind, float** sends, float** recvs) {
  for (int r = 0; r < N; ++r)
    all->ranks[r][i] = (ncs_buffer){kind, ncclSum, 2, sends[r], recvs[r], COUNT, ncclFloat32};
}

static ncclResult_t run(ncs_nccl_comm* comm, const group* all, int n, double slice_s, ncs_failure* failure) {
  const ncs_buffer* const ranks[N] = {all->ranks[0], all->ranks[1], all->ranks[2]};
  ncclResult_t status = ncs_nccl_wait_for_devices(comm, 5.0, failure);
  if (status != ncclSuccess) return status;
  status = ncs_nccl_launch_group(comm, ranks, n, failure);
  return status == ncclSuccess ? ncs_nccl_wait(comm, slice_s, failure) : status;
}

static ncclResult_t reduce(ncs_nccl_comm* comm, double slice_s, ncs_failure* failure) {
  float* at[N];
  float* all = make(at, 1);
  group what;
  ncclResult_t status;
  add(&what, 0, NCS_ALL_REDUCE, at, at);
  status = run(comm, &what, 1, slice_s, failure);
  for (int r = 0; r < N && status == ncclSuccess; ++r) EXPECT(at[r][COUNT - 1] == 300.0f);
  free(all);
  return status;
}

static void check_collectives(ncs_nccl_comm* comm) {
  float *sends[N], *recvs[N], *copies[N], got[2];
  float *all = make(sends, N), *all_received = make(recvs, N), *all_copied = make(copies, 1);
  group both;
  uintptr_t places[] = {64, 0};
  int devices[2];
  ncs_failure failure;
  void* scratch;
  EXPECT(reduce(comm, 5.0, &failure) == ncclSuccess);
  add(&both, 0, NCS_ALL_TO_ALL, sends, recvs);
  add(&both, 1, NCS_BROADCAST, copies, copies);
  EXPECT(run(comm, &both, 2, 5.0, &failure) == ncclSuccess);
  for (int r = 0; r < N; ++r) {
    for (int p = 0; p < N; ++p) EXPECT(recvs[r][p * COUNT + COUNT - 1] == (float)(100 * p + r));
    EXPECT(copies[r][0] == 200.0f);
  }
  EXPECT(ncs_nccl_scratch(comm, 1, sizeof(got), &failure, &scratch) == ncclSuccess);
  places[1] = (uintptr_t)scratch;
  EXPECT(ncs_nccl_find_devices(comm, places, 2, &failure, devices) == ncclSuccess);
  EXPECT(devices[0] == NCS_NOWHERE && devices[1] >= 0);
  standin_fail("cuPointerGetAttributes:2");
  EXPECT(ncs_nccl_find_devices(comm, places, 2, &failure, devices) == ncclUnhandledCudaError);
  standin_fail("");
  EXPECT(ncs_nccl_copy(comm, 1, scratch, copies[0], sizeof(got), &failure) == ncclSuccess);
  EXPECT(ncs_nccl_copy(comm, 1, got, scratch, sizeof(got), &failure) == ncclSuccess && got[0] == 200.0f);
  EXPECT(ncs_nccl_scratch(comm, 2, 16, &failure, &scratch) == ncclSuccess); /* freed with the communicator */
  free(all);
  free(all_received);
  free(all_copied);
}

/* In place and not; a rank's part of what it sends is its own block. */
static void check_blocks(ncs_nccl_comm* comm) {
  float *sends[N], *parts[N], *wholes[N], *own[N];
  float *all = make(sends, N), *all_parts = make(parts, 1), *all_wholes = make(wholes, N);
  for (int r = 0; r < N; ++r) own[r] = wholes[r] + r * COUNT;
  group both, in_place;
  add(&both, 0, NCS_REDUCE_SCATTER, sends, parts);
  add(&both, 1, NCS_ALL_GATHER, own, wholes);
  add(&in_place, 0, NCS_REDUCE_SCATTER, wholes, own);
  EXPECT(run(comm, &both, 2, 5.0, NULL) == ncclSuccess);
  for (int r = 0; r < N; ++r) {
    EXPECT(parts[r][COUNT - 1] == 300.0f + (float)(N * r));
    for (int p = 0; p < N; ++p) EXPECT(wholes[r][p * COUNT] == (float)(101 * p));
  }
  EXPECT(run(comm, &in_place, 1, 5.0, NULL) == ncclSuccess);
  for (int r = 0; r < N; ++r)
    for (int p = 0; p < N; ++p) EXPECT(wholes[r][p * COUNT + COUNT - 1] == (float)((p == r ? N : 1) * 101 * p));
  free(all);
  free(all_parts);
  free(all_wholes);
}

static void check_failures(void) {
  static const char* const calls[] = {"cudaSetDevice",   "cudaStreamCreateWithPriority", "ncclGetUniqueId",
                                      "ncclGroupStart",  "ncclCommInitRankConfig",       "ncclGroupEnd",
                                      "ncclCommGetAsyncError"};
  int progress[N];
  ncs_nccl_comm* comm;
  ncs_failure failure;
  char told[64];
  for (size_t i = 0; i < sizeof(calls) / sizeof(*calls); ++i)
    for (int nth = 1; nth <= 6; ++nth) {
      snprintf(told, sizeof(told), "%s:%d", calls[i], nth);
      standin_fail(told);
      if (create(0, &comm) != ncclSuccess) continue;
      standin_fail("");
      end(comm);
    }
  standin_fail("");
  EXPECT(create(0, &comm) == ncclSuccess);
  standin_fail("stuck:1");
  EXPECT(reduce(comm, 0.01, &failure) == ncclInProgress);
  EXPECT(ncs_nccl_get_progress(comm, progress) == ncclSuccess);
  EXPECT(progress[0] == NCS_LAUNCHED && progress[1] == NCS_ABSENT && progress[2] == NCS_LAUNCHED);
  EXPECT(ncs_nccl_abort(comm, &failure) == ncclSuccess);
  EXPECT(create(0, &comm) == ncclSuccess);
  for (int is_awaited = 1; is_awaited >= 0; --is_awaited) {
    standin_fail("working:1");
    EXPECT(ncs_nccl_wait_for_devices(comm, 0.01, &failure) == ncclInProgress);
    EXPECT(ncs_nccl_get_progress(comm, progress) == ncclSuccess);
    EXPECT(progress[0] == NCS_LAUNCHED && progress[1] == NCS_ABSENT && progress[2] == NCS_LAUNCHED);
    if (is_awaited) standin_fail("");
    if (is_awaited) EXPECT(ncs_nccl_wait_for_devices(comm, 5.0, &failure) == ncclSuccess);
  }
  standin_fail("working:1=20"); /* the abort begins with the wait still under way */
  EXPECT(ncs_nccl_abort(comm, NULL) == ncclSuccess);
  standin_fail("async:2=6");
  EXPECT(create(0, &comm) == ncclSuccess);
  EXPECT(reduce(comm, 5.0, &failure) == ncclRemoteError && strcmp(failure.call, "ncclCommGetAsyncError") == 0);
  EXPECT(ncs_nccl_abort(comm, NULL) == ncclSuccess);
  standin_fail("");
}

static void* use_one(void* first_device) {
  ncs_nccl_comm* comm;
  EXPECT(create(*(int*)first_device, &comm) == ncclSuccess);
  for (int i = 0; i < ROUNDS; ++i) EXPECT(reduce(comm, 5.0, NULL) == ncclSuccess);
  end(comm);
  return NULL;
}

int main(int argc, char** argv) {
  pthread_t callers[CALLERS];
  int first_devices[CALLERS];
  ncs_nccl_comm* comm;
  int version;
  EXPECT(argc == 3);
  cuda_path = argv[2];
  EXPECT(ncs_nccl_open(argv[1], NULL, &nccl, &version) == ncclSuccess);
  EXPECT(create(4, &comm) == ncclSuccess);
  check_collectives(comm);
  check_blocks(comm);
  end(comm);
  check_failures();
  for (int i = 0; i < CALLERS; ++i) {
    first_devices[i] = i;
    EXPECT(pthread_create(&callers[i], NULL, use_one, &first_devices[i]) == 0);
  }
  for (int i = 0; i < CALLERS; ++i) pthread_join(callers[i], NULL);
  EXPECT(standin_alive("comm") == 0 && standin_alive("stream") == 0 && standin_alive("memory") == 0);
  return 0;
}
