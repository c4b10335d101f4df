/* The stand-in's memory. What CUDA made is on its device or the host's; all other memory serves every device, as if it
 * was managed: so that a test may pass on what TensorFlow or NumPy have on the host. Fresh memory of a device is NaN in
 * all floating-point types and -1 in integers, so that a read that comes too early shows. */
#define _POSIX_C_SOURCE 200809L

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

enum { ON_HOST = -1, FIRST_ADDRESS = 1 << 20, ALIGNMENT = 256 };

typedef struct piece {
  char* begin;
  size_t size;
  int device;
  struct piece* next;
} piece;

static piece* pieces;
static size_t in_use[STANDIN_DEVICES], limit = (size_t)1 << 40;
static double link_gb_per_s, link_us; /* between the host and each device */

void standin_copy_link(double gb_per_s, double us) {
  link_gb_per_s = gb_per_s;
  link_us = us;
}

__attribute__((constructor)) static void begin(void) {
  const char *megabytes = getenv("STANDIN_MEMORY_MB"), *link = getenv("STANDIN_COPY_LINK");
  if (megabytes != NULL) limit = (size_t)atol(megabytes) << 20;
  if (link != NULL) sscanf(link, "%lf,%lf", &link_gb_per_s, &link_us);
}

static cudaError_t make(const char* name, void** pointer, size_t size, int device) {
  cudaError_t error = standin_enter_cuda(name, (int)size);
  piece* one;
  if (error == 0 && device != ON_HOST && size > limit - in_use[device]) error = NO_MEMORY;
  if (error == 0 && posix_memalign(pointer, ALIGNMENT, size > 0 ? size : 1) != 0) error = NO_MEMORY;
  if (error != 0) return standin_leave_cuda(error);
  one = malloc(sizeof(*one));
  *one = (piece){*pointer, size, device, pieces};
  pieces = one;
  if (device != ON_HOST) {
    in_use[device] += size;
    memset(*pointer, 0xff, size);
  }
  standin_count("memory", 1);
  return standin_leave_cuda(0);
}

static cudaError_t end(const char* name, void* pointer) {
  cudaError_t error;
  piece **at = &pieces, *one;
  if (pointer == NULL) return 0;
  standin_outwait(standin_current_device());
  error = standin_enter_cuda(name, standin_current_device());
  while (*at != NULL && (*at)->begin != pointer) at = &(*at)->next;
  one = *at;
  if (one == NULL) return standin_leave_cuda(INVALID_VALUE);
  *at = one->next;
  if (one->device != ON_HOST) in_use[one->device] -= one->size;
  free(one->begin);
  free(one);
  standin_count("memory", -1);
  return standin_leave_cuda(error);
}

cudaError_t standin_take(int device, long long bytes) {
  if (bytes > (long long)(limit - in_use[device])) return NO_MEMORY;
  in_use[device] += (size_t)bytes;
  return 0;
}

cudaError_t cudaMalloc(void** pointer, size_t size) {
  return make("cudaMalloc", pointer, size, standin_current_device());
}

cudaError_t cudaMallocHost(void** pointer, size_t size) { return make("cudaMallocHost", pointer, size, ON_HOST); }
cudaError_t cudaFree(void* pointer) { return end("cudaFree", pointer); }
cudaError_t cudaFreeHost(void* pointer) { return end("cudaFreeHost", pointer); }

cudaError_t cudaMemGetInfo(size_t* left, size_t* all) {
  cudaError_t error = standin_ask_cuda("cudaMemGetInfo");
  *left = limit - in_use[standin_current_device()];
  *all = limit;
  return standin_leave_cuda(error);
}

/* ---- Copies ---- */

typedef struct {
  void* to;
  const void* from; /* NULL: set to `value` */
  size_t size;
  double least_s;
  int value;
} transfer;

static const piece* find(const void* pointer) {
  const piece* one = pieces;
  while (one != NULL && ((const char*)pointer < one->begin || (const char*)pointer >= one->begin + one->size))
    one = one->next;
  return one;
}

static int device_of(const void* pointer) {
  const piece* one = find(pointer);
  return one != NULL ? one->device : ON_HOST;
}

int standin_device_of(const void* pointer) {
  int device;
  standin_lock();
  device = device_of(pointer);
  standin_unlock();
  return device;
}

/* What is neither of a device nor the host's counts as the host's. */
static transfer plan_copy(void* to, const void* from, size_t size) {
  const int to_device = device_of(to) >= 0, from_device = device_of(from) >= 0;
  transfer planned = {to, from, size, 0, 0};
  if (to_device == from_device) return planned;
  if (link_gb_per_s > 0) planned.least_s = 1e-6 * link_us + 1e-9 * (double)size / link_gb_per_s;
  standin_count(to_device ? "to_device" : "to_host", 1);
  standin_count(to_device ? "bytes_to_device" : "bytes_to_host", (long long)size);
  return planned;
}

/* The bytes move at the end: who reads too early, or lets go of what is still copied, notices. */
static void do_transfer(const transfer* what) {
  if (what->least_s > 0) standin_nap(what->least_s);
  if (what->from != NULL) memmove(what->to, what->from, what->size);
  else memset(what->to, what->value, what->size);
}

static void run_transfer(void* what) {
  do_transfer(what);
  free(what);
}

static void push_transfer(cudaStream_t stream, transfer planned) {
  transfer* own;
  if (standin_adds_node(stream)) return;
  own = malloc(sizeof(*own));
  *own = planned;
  standin_push_run(stream, NULL, run_transfer, own);
}

/* Waits for no stream, as CUDA's waits for none that was created as non-blocking. */
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  cudaError_t error = standin_ask_cuda("cudaMemcpy");
  transfer planned;
  if (error == 0 && kind != 4) error = BAD_HANDLE; /* cudaMemcpyDefault: the pointers tell */
  if (error == 0) planned = plan_copy(to, from, size);
  standin_leave_cuda(error);
  if (error == 0) do_transfer(&planned);
  return error;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, cudaStream_t stream) {
  cudaError_t error = standin_enter_cuda("cudaMemcpyAsync", standin_stream_device(stream));
  if (error == 0 && (kind != 4 || standin_stream_device(stream) < 0)) error = BAD_HANDLE;
  if (error == 0) push_transfer(stream, plan_copy(to, from, size));
  return standin_leave_cuda(error);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  cudaError_t error = standin_enter_cuda("cudaMemsetAsync", standin_stream_device(stream));
  if (error == 0 && standin_stream_device(stream) < 0) error = BAD_HANDLE;
  if (error == 0) push_transfer(stream, (transfer){to, NULL, size, 0, value});
  return standin_leave_cuda(error);
}

/* CU_POINTER_ATTRIBUTE_MEMORY_TYPE (host 1, device 2), _IS_MANAGED and _DEVICE_ORDINAL; zeros for no CUDA's. */
int cuPointerGetAttributes(unsigned int n, int* attributes, void** data, unsigned long long address) {
  int error = FAILURE, type = 2, is_managed = 1, device = 0;
  const piece* one;
  standin_lock();
  if (standin_is_told("cuPointerGetAttributes", -1, &error)) return standin_leave_cuda(error);
  one = find((const void*)(uintptr_t)address);
  if (address < FIRST_ADDRESS) type = is_managed = 0;
  if (one != NULL) {
    type = one->device == ON_HOST ? 1 : 2;
    device = one->device == ON_HOST ? 0 : one->device;
    is_managed = 0;
  }
  for (unsigned int i = 0; i < n; ++i) {
    if (attributes[i] == 8) *(unsigned char*)data[i] = (unsigned char)is_managed; /* more need not be written */
    else *(int*)data[i] = attributes[i] == 2 ? type : device;
  }
  return standin_leave_cuda(0);
}
