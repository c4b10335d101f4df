/* All-reduces made straight from C, as a program would that has its buffers ready: blocking communicators, one group
 * of all ranks' calls, a wait for each stream. For tests/gpu/overhead.py, which compares ncclsync with it.
 *
 * overhead NCCL CUDART DRIVER RANKS; then, for each line "BYTES WARMUPS REPETITIONS" of the input, a line with the
 * microseconds of each repetition. All ranks are on GPU 0. Build: cc -O2 -Icsrc overhead.c csrc/nccl/library.c
 * csrc/ncclsync.c -ldl */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nccl/api.h"

enum { MAX_RANKS = 8 };

static ncs_nccl* nccl;
static ncs_cuda cuda;
static cudaError_t (*synchronize)(cudaStream_t stream);
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

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

static void load(const char* nccl_path, const char* cudart_path, const char* driver_path) {
  ncs_failure failure;
  void *handle, *symbol;
  if (ncs_nccl_open(nccl_path, &failure, &nccl) != ncclSuccess) fail(failure.call, failure.message);
  if (ncs_load_cuda(cudart_path, driver_path, &cuda, &failure) != ncclSuccess) fail(failure.call, failure.message);
  handle = dlopen(cudart_path, RTLD_NOW);
  symbol = handle != NULL ? dlsym(handle, "cudaStreamSynchronize") : NULL;
  if (symbol == NULL) fail("dlsym", dlerror());
  memcpy(&synchronize, &symbol, sizeof(symbol));
}

static void join(void) {
  int devices[MAX_RANKS] = {0};
  check_cuda(cuda.cudaSetDevice(0), "cudaSetDevice");
  for (int r = 0; r < n; ++r)
    check_cuda(cuda.cudaStreamCreateWithPriority(&streams[r], NCS_CUDA_STREAM_NON_BLOCKING, 0),
               "cudaStreamCreateWithPriority");
  check_nccl(nccl->ncclCommInitAll(comms, n, devices), "ncclCommInitAll");
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

static void all_reduce(size_t count) {
  check_nccl(nccl->ncclGroupStart(), "ncclGroupStart");
  for (int r = 0; r < n; ++r)
    check_nccl(nccl->ncclAllReduce(sends[r], recvs[r], count, ncclFloat32, ncclSum, comms[r], streams[r]),
               "ncclAllReduce");
  check_nccl(nccl->ncclGroupEnd(), "ncclGroupEnd");
  for (int r = 0; r < n; ++r) check_cuda(synchronize(streams[r]), "cudaStreamSynchronize");
}

int main(int argc, char** argv) {
  size_t bytes;
  int warmups, repetitions;
  if (argc != 5 || (n = atoi(argv[4])) < 1 || n > MAX_RANKS) fail("overhead", "expected NCCL CUDART DRIVER RANKS");
  load(argv[1], argv[2], argv[3]);
  join();
  while (scanf("%zu %d %d", &bytes, &warmups, &repetitions) == 3) {
    const size_t count = bytes / sizeof(float);
    allocate(count);
    for (int i = 0; i < warmups; ++i) all_reduce(count);
    for (int i = 0; i < repetitions; ++i) {
      const double begin = now_us();
      all_reduce(count);
      printf("%.3f ", now_us() - begin);
    }
    check_and_free(count);
    printf("\n");
    fflush(stdout);
  }
  for (int r = 0; r < n; ++r) check_nccl(nccl->ncclCommDestroy(comms[r]), "ncclCommDestroy");
  return 0;
}
