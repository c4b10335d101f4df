/* A libcudart (and the calls of libcuda in use) over host memory: 8 devices and their contexts. Streams and events are
 * in standin_streams.c, memory is in standin_memory.c. See standin.h. What CUDA would answer by undefined behaviour,
 * such as a handle that was destroyed, is an error. */
#define _POSIX_C_SOURCE 200809L

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

static __thread int context = 6; /* 1 + the current context's device; not 1, so that what is not restored shows */
static __thread int depth;
static __thread cudaError_t last_error;

/* The devices that CUDA_VISIBLE_DEVICES leaves, by the numbers that they have without it. */
static int visible[STANDIN_DEVICES], n_visible, is_begun;
static const char* lost_path;

int standin_current_device(void) { return context > 0 ? context - 1 : 0; }
int standin_has_context(void) { return context != 0; }
int* standin_depth(void) { return &depth; }

/* Whether the file of lost devices has a device's number. */
static int is_in_file(int number) {
  char text[STANDIN_DEVICES + 1] = "";
  FILE* file = lost_path != NULL ? fopen(lost_path, "r") : NULL;
  if (file == NULL) return 0;
  text[fread(text, 1, STANDIN_DEVICES, file)] = 0;
  fclose(file);
  return strchr(text, '0' + number) != NULL;
}

static int is_lost(int device) { return device < n_visible && is_in_file(visible[device]); }

static int fails_by_loss(void) { return standin_has_context() && is_lost(standin_current_device()); }

/* As CUDA: what is lost is not counted, so that the others' numbers change, and the list ends at what is not there. */
__attribute__((constructor)) static void begin(void) {
  const char* given = getenv("CUDA_VISIBLE_DEVICES");
  char copy[512] = "", *rest = NULL;
  int present[STANDIN_DEVICES], n_present = 0;
  lost_path = getenv("STANDIN_LOST");
  for (int i = 0; i < STANDIN_DEVICES; ++i)
    if (!is_in_file(i)) present[n_present++] = i;
  memcpy(visible, present, sizeof(visible));
  n_visible = n_present;
  if (given == NULL) return;
  n_visible = 0;
  snprintf(copy, sizeof(copy), "%s", given);
  for (char* one = strtok_r(copy, ",", &rest); one != NULL; one = strtok_r(NULL, ",", &rest)) {
    const int by_uuid = strncmp(one, STANDIN_UUID, strlen(STANDIN_UUID)) == 0;
    int found = -1;
    for (int i = 0; i < n_present; ++i)
      if (by_uuid ? present[i] == atoi(one + strlen(STANDIN_UUID)) : one[0] >= '0' && one[0] <= '9' && atoi(one) == i)
        found = present[i];
    if (found < 0 || n_visible == STANDIN_DEVICES) break;
    visible[n_visible++] = found;
  }
}

cudaError_t standin_enter_cuda(const char* name, int value) {
  char text[16];
  int error = FAILURE;
  standin_lock();
  __atomic_store_n(&is_begun, 1, __ATOMIC_RELAXED);
  snprintf(text, sizeof(text), "%d", value);
  standin_log(name, text);
  if (fails_by_loss() && strcmp(name, "cudaSetDevice") != 0) return LOST_DEVICE;
  return standin_is_told(name, -1, &error) ? error : 0;
}

cudaError_t standin_ask_cuda(const char* name) {
  int error = FAILURE;
  standin_lock();
  if (standin_is_told(name, -1, &error)) return error;
  if (fails_by_loss()) return LOST_DEVICE;
  return context == 0 ? NO_CONTEXT : 0;
}

cudaError_t standin_leave_cuda(cudaError_t error) {
  standin_unlock();
  if (error != 0 && error != NOT_READY) last_error = error;
  return error;
}

cudaError_t cudaGetLastError(void) {
  const cudaError_t error = last_error;
  last_error = 0;
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
    case LOST_DEVICE: return "unspecified launch failure";
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
  __atomic_store_n(&is_begun, 1, __ATOMIC_RELAXED);
  *count = n_visible;
  return standin_leave_cuda(standin_is_told("cudaGetDeviceCount", -1, &error) ? error : 0);
}

cudaError_t cudaSetDevice(int device) {
  cudaError_t error = standin_enter_cuda("cudaSetDevice", device);
  if (error == 0 && (device < 0 || device >= n_visible)) error = NO_SUCH_DEVICE;
  if (error == 0 && is_lost(device)) error = LOST_DEVICE;
  if (error == 0) context = device + 1;
  return standin_leave_cuda(error);
}

int cuDriverGetVersion(int* version) {
  const char* told = getenv("STANDIN_DRIVER");
  *version = told != NULL ? atoi(told) : 12090;
  return 0;
}

int cuInit(unsigned flags) {
  (void)flags;
  __atomic_store_n(&is_begun, 1, __ATOMIC_RELAXED);
  return n_visible > 0 ? 0 : NO_DEVICE;
}

int cuDeviceGetCount(int* count) {
  *count = n_visible;
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < n_visible ? 0 : NO_SUCH_DEVICE;
}

int cuDeviceGetUuid(unsigned char* uuid, int device) {
  memset(uuid, 0, 15);
  uuid[15] = (unsigned char)visible[device];
  return 0;
}

int cuCtxGetCurrent(void** current) {
  if (!__atomic_load_n(&is_begun, __ATOMIC_RELAXED)) return NOT_BEGUN;
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
