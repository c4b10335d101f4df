/* All-reduces made from C, as a program would that has its buffers ready, in one of two ways, each with a wait for each
 * rank's stream at its end. For tests/gpu/overhead.py, which compares ncclsync with the first one.
 *   plain     straight: blocking communicators, one group of all ranks' calls
 *   launcher  by csrc/nccl/launcher.c: each rank's stream arrives, one launch, a delivery to each stream
 *
 * overhead NCCL CUDART DRIVER RANKS WAY; then, for each line "BYTES WARMUPS REPETITIONS" of the input, a line with the
 * microseconds of each repetition. All ranks are on GPU 0. Build: cc -O2 -Icsrc overhead.c csrc/nccl/X.c
 * csrc/ncclsync.c -ldl -lpthread, for all of csrc/nccl */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nccl/api.h"

enum { MAX_RANKS = 8 };

typedef struct {
  void (*join)(void);
  void (*all_reduce)(size_t count);
  void (*part)(void);
} way;

static const char *nccl_path, *cudart_path, *driver_path;
static ncs_nccl* nccl;
static ncs_nccl_comm* comm; /* the launcher's */
static ncs_launcher* launcher;
static ncs_cuda cuda;
static cudaError_t (*synchronize)(cudaStream_t stream);
static ncclResult_t (*init_all)(ncclComm_t* comm, int n, const int* devices);
static int n;
static ncclComm_t comms[MAX_RANKS];
static cudaStream_t streams[MAX_RANKS];
static void *sends[MAX_RANKS], *recvs[MAX_RANKS];

static void fail(const char* call, const char* words) {
  fprintf(stderr, "%s: %s\n", call, words);
  exit(1);
}

static void check_cuda(cudaError_t error, const char* call) {
  if (error != 0) fail(call, cuda.cudaGetErrorString(error));
}

static void check_nccl(ncclResult_t status, const char* call) {
  if (status != ncclSuccess) fail(call, nccl->ncclGetLastError(NULL));
}

static void check(ncclResult_t status, const ncs_failure* failure) {
  if (status != ncclSuccess) fail(failure->call, failure->message);
}

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

static void* find(const char* path, const char* name) {
  void *handle = dlopen(path, RTLD_NOW), *symbol = handle != NULL ? dlsym(handle, name) : NULL;
  if (symbol == NULL) fail("dlsym", dlerror());
  return symbol;
}

static void load(void) {
  ncs_failure failure;
  int version;
  void* symbol;
  check(ncs_nccl_open(nccl_path, &failure, &nccl, &version), &failure);
  check(ncs_load_cuda(cudart_path, driver_path, &cuda, &failure), &failure);
  symbol = find(cudart_path, "cudaStreamSynchronize");
  memcpy(&synchronize, &symbol, sizeof(symbol));
  symbol = find(nccl_path, "ncclCommInitAll");
  memcpy(&init_all, &symbol, sizeof(symbol));
}

static void make_streams(void) {
  check_cuda(cuda.cudaSetDevice(0), "cudaSetDevice");
  for (int r = 0; r < n; ++r)
    check_cuda(cuda.cudaStreamCreateWithPriority(&streams[r], NCS_CUDA_STREAM_NON_BLOCKING, 0),
               "cudaStreamCreateWithPriority");
}

static void wait_for_streams(void) {
  for (int r = 0; r < n; ++r) check_cuda(synchronize(streams[r]), "cudaStreamSynchronize");
}

/* Rank r sends r + 1 everywhere. */
static void allocate(size_t count) {
  const size_t size = count * sizeof(float);
  float* numbers = malloc(size);
  if (numbers == NULL) fail("malloc", "no memory");
  for (int r = 0; r < n; ++r) {
    for (size_t i = 0; i < count; ++i) numbers[i] = (float)(r + 1);
    check_cuda(cuda.cudaMalloc(&sends[r], size), "cudaMalloc");
    check_cuda(cuda.cudaMalloc(&recvs[r], size), "cudaMalloc");
    check_cuda(cuda.cudaMemcpy(sends[r], numbers, size, NCS_CUDA_MEMCPY_DEFAULT), "cudaMemcpy");
  }
  free(numbers);
}

/* What was timed must have happened. */
static void check_and_free(size_t count) {
  const size_t size = count * sizeof(float);
  float* numbers = malloc(size);
  if (numbers == NULL) fail("malloc", "no memory");
  for (int r = 0; r < n; ++r) {
    check_cuda(cuda.cudaMemcpy(numbers, recvs[r], size, NCS_CUDA_MEMCPY_DEFAULT), "cudaMemcpy");
    for (size_t i = 0; i < count; ++i)
      if (numbers[i] != (float)(n * (n + 1) / 2)) fail("ncclAllReduce", "a wrong sum");
    check_cuda(cuda.cudaFree(sends[r]), "cudaFree");
    check_cuda(cuda.cudaFree(recvs[r]), "cudaFree");
  }
  free(numbers);
}

/* ---- Plain ---- */

static void join_plainly(void) {
  int devices[MAX_RANKS] = {0};
  check_nccl(init_all(comms, n, devices), "ncclCommInitAll");
}

static void all_reduce_plainly(size_t count) {
  check_nccl(nccl->ncclGroupStart(), "ncclGroupStart");
  for (int r = 0; r < n; ++r)
    check_nccl(nccl->ncclAllReduce(sends[r], recvs[r], count, ncclFloat32, ncclSum, comms[r], streams[r]),
               "ncclAllReduce");
  check_nccl(nccl->ncclGroupEnd(), "ncclGroupEnd");
  wait_for_streams();
}

static void part_plainly(void) {
  for (int r = 0; r < n; ++r) check_nccl(nccl->ncclCommDestroy(comms[r]), "ncclCommDestroy");
}

/* ---- By the launcher ---- */

static void wait_for_comm(void) {
  ncs_failure failure;
  ncclResult_t status;
  do status = ncs_nccl_wait(comm, 1.0, &failure);
  while (status == ncclInProgress);
  check(status, &failure);
}

static void join_launcher(void) {
  ncs_failure failure;
  int devices[MAX_RANKS] = {0}, ranks[MAX_RANKS];
  const ncs_ranks own = {NULL, n, n, ranks, devices, 0};
  for (int r = 0; r < n; ++r) ranks[r] = r;
  check(ncs_nccl_create(nccl, cudart_path, driver_path, &own, &failure, &comm), &failure);
  wait_for_comm();
  if (ncs_launcher_create(n, 60.0, &launcher) != ncclSuccess) fail("ncs_launcher_create", "no memory");
  ncs_launcher_open(launcher, comm);
}

static void let_go(void* kept) { (void)kept; }

static void all_reduce_by_launcher(size_t count) {
  ncs_failure failure;
  ncs_arrival* arrivals[MAX_RANKS];
  ncs_launched* launched;
  for (int r = 0; r < n; ++r) {
    const ncs_buffer buffer = {NCS_ALL_REDUCE, ncclSum, 0, sends[r], recvs[r], count, ncclFloat32};
    const ncs_buffers buffers = {&buffer, 1, NULL, let_go};
    check(ncs_arrive(launcher, r, streams[r], &buffers, &failure, &arrivals[r]), &failure);
  }
  check(ncs_launch(launcher, 0, arrivals, &failure, &launched), &failure);
  for (int r = 0; r < n; ++r) {
    ncs_arrival_release(arrivals[r]);
    check(ncs_deliver(launched, r, streams[r], 0, &failure), &failure);
  }
  ncs_launched_release(launched);
  wait_for_streams();
}

static void part_launcher(void) {
  ncs_failure failure;
  while (ncs_launcher_wait(launcher, 1.0) == ncclInProgress) continue;
  ncs_launcher_close(launcher, ncclInvalidUsage);
  check(ncs_nccl_finalize(comm, &failure), &failure);
  wait_for_comm();
  check(ncs_nccl_destroy(comm, &failure), &failure);
}

int main(int argc, char** argv) {
  static const way plain = {join_plainly, all_reduce_plainly, part_plainly};
  static const way by_launcher = {join_launcher, all_reduce_by_launcher, part_launcher};
  const way* chosen;
  size_t bytes;
  int warmups, repetitions;
  if (argc != 6 || (n = atoi(argv[4])) < 1 || n > MAX_RANKS) fail("overhead", "expected NCCL CUDART DRIVER RANKS WAY");
  chosen = strcmp(argv[5], "launcher") == 0 ? &by_launcher : &plain;
  nccl_path = argv[1];
  cudart_path = argv[2];
  driver_path = argv[3];
  load();
  make_streams();
  chosen->join();
  while (scanf("%zu %d %d", &bytes, &warmups, &repetitions) == 3) {
    const size_t count = bytes / sizeof(float);
    allocate(count);
    for (int i = 0; i < warmups; ++i) chosen->all_reduce(count);
    for (int i = 0; i < repetitions; ++i) {
      const double begin = now_us();
      chosen->all_reduce(count);
      printf("%.3f ", now_us() - begin);
    }
    check_and_free(count);
    printf("\n");
    fflush(stdout);
  }
  chosen->part();
  return 0;
}
