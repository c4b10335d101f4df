/* The stand-in's memory. What CUDA made is on its device or the host's; all other memory serves every device, as if it
 * was managed: so that a test may pass on what TensorFlow or NumPy have on the host. */
#define _POSIX_C_SOURCE 200809L

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

enum { ON_HOST = -1, FIRST_ADDRESS = 1 << 20 };

typedef struct piece {
  char* begin;
  size_t size;
  int device;
  struct piece* next;
} piece;

static piece* pieces;

static cudaError_t make(const char* name, void** pointer, size_t size, int device) {
  cudaError_t error = standin_enter_cuda(name, (int)size);
  piece* one;
  if (error != 0) return standin_leave_cuda(error);
  one = malloc(sizeof(*one));
  *one = (piece){malloc(size > 0 ? size : 1), size, device, pieces};
  pieces = one;
  *pointer = one->begin;
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
  free(one->begin);
  free(one);
  standin_count("memory", -1);
  return standin_leave_cuda(error);
}

cudaError_t cudaMalloc(void** pointer, size_t size) {
  return make("cudaMalloc", pointer, size, standin_current_device());
}

cudaError_t cudaMallocHost(void** pointer, size_t size) { return make("cudaMallocHost", pointer, size, ON_HOST); }
cudaError_t cudaFree(void* pointer) { return end("cudaFree", pointer); }
cudaError_t cudaFreeHost(void* pointer) { return end("cudaFreeHost", pointer); }

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  int error = FAILURE;
  standin_lock();
  if (standin_is_told("cudaMemcpy", -1, &error)) return standin_leave_cuda(error);
  if (kind != 4) return standin_leave_cuda(BAD_HANDLE); /* cudaMemcpyDefault: the pointers tell */
  memcpy(to, from, size);
  return standin_leave_cuda(0);
}

/* CU_POINTER_ATTRIBUTE_MEMORY_TYPE (host 1, device 2), _IS_MANAGED and _DEVICE_ORDINAL; zeros for no CUDA's. */
int cuPointerGetAttributes(unsigned int n, int* attributes, void** data, unsigned long long address) {
  int error = FAILURE, type = 2, is_managed = 1, device = 0;
  standin_lock();
  if (standin_is_told("cuPointerGetAttributes", -1, &error)) return standin_leave_cuda(error);
  if (address < FIRST_ADDRESS) type = is_managed = 0;
  for (const piece* one = pieces; one != NULL; one = one->next) {
    const unsigned long long begin = (uintptr_t)one->begin;
    if (address < begin || address >= begin + one->size) continue;
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
