/* A libcudart (and the calls of libcuda in use) over host memory: 8 devices and their contexts. Streams and events are
 * in standin_streams.c, memory is in standin_memory.c. See standin.h. What CUDA would answer by undefined behaviour,
 * such as a handle that was destroyed, is an error. */
#include <stdint.h>
#include <stdio.h>

#include "standin.h"

static __thread int context = 6; /* 1 + the current context's device; not 1, so that what is not restored shows */
static __thread int depth;

int standin_current_device(void) { return context > 0 ? context - 1 : 0; }
int standin_has_context(void) { return context != 0; }
int* standin_depth(void) { return &depth; }

cudaError_t standin_enter_cuda(const char* name, int value) {
  char text[16];
  int error = FAILURE;
  standin_lock();
  snprintf(text, sizeof(text), "%d", value);
  standin_log(name, text);
  return standin_is_told(name, -1, &error) ? error : 0;
}

cudaError_t standin_ask_cuda(const char* name) {
  int error = FAILURE;
  standin_lock();
  if (standin_is_told(name, -1, &error)) return error;
  return context == 0 ? NO_CONTEXT : 0;
}

cudaError_t standin_leave_cuda(cudaError_t error) {
  standin_unlock();
  return error;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case 0: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case NO_MEMORY: return "out of memory";
    case 35: return "CUDA driver version is insufficient for CUDA runtime version";
    case NO_SUCH_DEVICE: return "invalid device ordinal";
    case NO_CONTEXT: return "invalid device context"; /* CUDA would make one, which takes memory */
    case 217: return "peer access is not supported between these two devices";
    case BAD_HANDLE: return "invalid resource handle";
    case NOT_READY: return "device not ready";
    case UNSUPPORTED_IN_CAPTURE: return "operation not permitted when stream is capturing";
    case INVALID_CAPTURE: return "operation failed due to a previous error during capture";
    case WRONG_THREAD: return "attempt to terminate a thread-local capture sequence from another thread";
    case OPEN_GROUP: return "a group of NCCL calls is open";
    case FAILURE: return "told to fail";
    default: return "unrecognized error code";
  }
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 12090;
  return 0;
}

/* ---- Devices and contexts ---- */

cudaError_t cudaGetDevice(int* device) {
  int error = FAILURE;
  standin_lock();
  *device = standin_current_device();
  return standin_leave_cuda(standin_is_told("cudaGetDevice", -1, &error) ? error : 0);
}

cudaError_t cudaGetDeviceCount(int* count) {
  int error = FAILURE;
  standin_lock();
  *count = STANDIN_DEVICES;
  return standin_leave_cuda(standin_is_told("cudaGetDeviceCount", -1, &error) ? error : 0);
}

cudaError_t cudaSetDevice(int device) {
  cudaError_t error = standin_enter_cuda("cudaSetDevice", device);
  if (error == 0 && (device < 0 || device >= STANDIN_DEVICES)) error = NO_SUCH_DEVICE;
  if (error == 0) context = device + 1;
  return standin_leave_cuda(error);
}

int cuCtxGetCurrent(void** current) {
  *current = (void*)(intptr_t)context;
  return 0;
}

int cuCtxSetCurrent(void* current) {
  int error = FAILURE;
  standin_lock();
  if (standin_is_told("cuCtxSetCurrent", -1, &error)) return standin_leave_cuda(error);
  context = (int)(intptr_t)current;
  return standin_leave_cuda(0);
}
