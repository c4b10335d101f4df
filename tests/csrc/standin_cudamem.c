/* standin_cudart.c with memory: device memory is host memory. For doctor's known-answer all-reduce.
 * STANDIN_MEMORY=hang: cudaMalloc does not return; wrong: cudaMemcpy flips a bit; full: there is none. */
#define _POSIX_C_SOURCE 200809L

#include "standin_cudart.c"

#include <unistd.h>

static int is_told(const char* what) {
  const char* told = getenv("STANDIN_MEMORY");
  return told != NULL && strcmp(told, what) == 0;
}

int cudaRuntimeGetVersion(int* version) {
  *version = 12090;
  return 0;
}

int cudaMalloc(void** pointer, size_t size) {
  while (is_told("hang")) sleep(1);
  if (is_told("full")) return FAILURE;
  *pointer = malloc(size);
  return *pointer == NULL ? FAILURE : 0;
}

int cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  (void)kind;
  memcpy(to, from, size);
  if (is_told("wrong")) ((char*)to)[4 * 1000 + 2] ^= 1;
  return 0;
}
