/* A libcudart to go with standin_nccl.c: devices 0 to 7, the current one per thread, streams that are always idle.
 * Same STANDIN_LOG; STANDIN_FAIL=<call>[:<n>] makes a call fail with error 999. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAILURE = 999, DEVICES = 8 };

struct CUstream_st {
  int device;
};

static __thread int current = 5; /* not 0, so that a device that is not restored shows */

static int call(const char* name, int value) {
  static int calls;
  const char* path = getenv("STANDIN_LOG");
  const char* told = getenv("STANDIN_FAIL");
  const size_t length = strlen(name);
  FILE* file = path != NULL ? fopen(path, "a") : NULL;
  if (file != NULL) {
    fprintf(file, "%s %d\n", name, value);
    fclose(file);
  }
  if (told == NULL || strncmp(told, name, length) != 0 || (told[length] != '\0' && told[length] != ':')) return 0;
  return ++calls == (told[length] == ':' ? atoi(told + length + 1) : 1) ? FAILURE : 0;
}

const char* cudaGetErrorString(int error) { return error == FAILURE ? "told to fail" : "no error"; }

int cudaGetDevice(int* device) {
  *device = current;
  return 0;
}

int cudaSetDevice(int device) {
  const int error = call("cudaSetDevice", device);
  if (error == 0 && (device < 0 || device >= DEVICES)) return FAILURE;
  if (error == 0) current = device;
  return error;
}

int cudaDeviceSynchronize(void) { return call("cudaDeviceSynchronize", current); }

int cudaStreamCreateWithFlags(struct CUstream_st** stream, unsigned int flags) {
  const int error = call("cudaStreamCreateWithFlags", (int)flags);
  if (error != 0) return error;
  *stream = malloc(sizeof(**stream));
  (*stream)->device = current;
  return 0;
}

int cudaStreamSynchronize(struct CUstream_st* stream) { return call("cudaStreamSynchronize", stream->device); }

int cudaStreamDestroy(struct CUstream_st* stream) {
  const int error = call("cudaStreamDestroy", stream->device);
  free(stream);
  return error;
}
