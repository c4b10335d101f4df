/* A libcudart (and the calls of libcuda in use) over host memory: 8 devices, streams that are really queues, events;
 * memory is in standin_memory.c. See standin.h. What CUDA would answer by undefined behaviour, such as a handle that
 * was destroyed, is an error. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "standin.h"


typedef struct work {
  int (*advance)(void* what);
  void* what;
  long number;
  struct work* next;
} work;

/* Streams are never freed, so that a use after their end is told from a good one. */
struct CUstream_st {
  int device, priority, alive;
  work* first;
  struct CUstream_st* next;
};

/* Captures what is queued on its device at the time. */
struct CUevent_st {
  int device, was_working;
  long number; /* of the last work that was queued anywhere then */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static cudaStream_t streams;
static long n_queued;
static __thread int context = 6; /* 1 + the current context's device; not 1, so that what is not restored shows */
static __thread int depth;

void standin_lock(void) { pthread_mutex_lock(&lock); }
void standin_unlock(void) { pthread_mutex_unlock(&lock); }
int standin_stream_device(cudaStream_t stream) { return stream->alive ? stream->device : -1; }
int standin_current_device(void) { return context > 0 ? context - 1 : 0; }
int* standin_depth(void) { return &depth; }

double standin_now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void standin_push(cudaStream_t stream, int (*advance)(void* what), void* what) {
  work** last = &stream->first;
  while (*last != NULL) last = &(*last)->next;
  *last = malloc(sizeof(**last));
  **last = (work){advance, what, ++n_queued, NULL};
}

void standin_progress(void) {
  for (int moved = 1; moved;) {
    moved = 0;
    for (cudaStream_t stream = streams; stream != NULL; stream = stream->next) {
      while (stream->first != NULL && stream->first->advance(stream->first->what)) {
        work* done = stream->first;
        stream->first = done->next;
        free(done);
        moved = 1;
      }
    }
  }
}

cudaError_t standin_enter_cuda(const char* name, int value) {
  char text[16];
  int error = FAILURE;
  standin_lock();
  snprintf(text, sizeof(text), "%d", value);
  standin_log(name, text);
  return standin_is_told(name, -1, &error) ? error : 0;
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

static int is_busy(int device) {
  if (standin_is_working(device)) return 1;
  for (cudaStream_t stream = streams; stream != NULL; stream = stream->next)
    if (stream->alive && stream->device == device && stream->first != NULL) return 1;
  return 0;
}

cudaError_t cudaDeviceSynchronize(void) {
  cudaError_t error = standin_enter_cuda("cudaDeviceSynchronize", standin_current_device());
  if (error == 0 && depth > 0) error = OPEN_GROUP;
  for (standin_progress(); error == 0 && is_busy(standin_current_device()); standin_progress()) {
    standin_unlock();
    nanosleep(&(struct timespec){0, 1000000}, NULL);
    standin_lock();
  }
  return standin_leave_cuda(error);
}

/* ---- Events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  cudaError_t error = standin_enter_cuda("cudaEventCreateWithFlags", (int)flags);
  if (error != 0) return standin_leave_cuda(error);
  *event = malloc(sizeof(**event));
  **event = (struct CUevent_st){standin_current_device(), 0, 0};
  standin_count("event", 1);
  return standin_leave_cuda(0);
}

#ifndef STANDIN_OLD_DRIVER
int cuCtxRecordEvent(void* recorded, cudaEvent_t event) {
  const int device = (int)(intptr_t)recorded - 1;
  cudaError_t error = standin_enter_cuda("cuCtxRecordEvent", device);
  if (error == 0 && (context == 0 || event->device != device)) error = BAD_HANDLE;
  if (error != 0) return standin_leave_cuda(error);
  event->was_working = standin_is_working(device);
  event->number = n_queued;
  return standin_leave_cuda(0);
}
#endif

cudaError_t cudaEventQuery(cudaEvent_t event) {
  int error = FAILURE;
  standin_lock();
  if (standin_is_told("cudaEventQuery", -1, &error)) return standin_leave_cuda(error);
  if (context == 0) return standin_leave_cuda(NO_CONTEXT);
  standin_progress();
  for (cudaStream_t stream = streams; stream != NULL; stream = stream->next)
    if (stream->alive && stream->device == event->device && stream->first != NULL &&
        stream->first->number <= event->number)
      return standin_leave_cuda(NOT_READY);
  return standin_leave_cuda(event->was_working && standin_is_working(event->device) ? NOT_READY : 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  cudaError_t error = standin_enter_cuda("cudaEventDestroy", event->device);
  free(event);
  standin_count("event", -1);
  return standin_leave_cuda(error);
}

/* ---- Streams ---- */

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}

static cudaError_t create_stream(const char* name, cudaStream_t* stream, int priority) {
  cudaError_t error = standin_enter_cuda(name, priority);
  if (error != 0) return standin_leave_cuda(error);
  *stream = malloc(sizeof(**stream));
  **stream = (struct CUstream_st){standin_current_device(), priority, 1, NULL, streams};
  streams = *stream;
  standin_count("stream", 1);
  return standin_leave_cuda(0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return create_stream("cudaStreamCreateWithFlags", stream, (int)flags);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority) {
  if (flags != 1) return BAD_HANDLE; /* one that waits for the legacy stream would be a mistake of ours */
  return create_stream("cudaStreamCreateWithPriority", stream, priority);
}

/* Lets everything go on; whether this stream is through. */
static cudaError_t ask(cudaStream_t stream) {
  if (depth > 0) return OPEN_GROUP;
  if (!stream->alive) return BAD_HANDLE;
  standin_progress();
  return stream->first == NULL ? 0 : NOT_READY;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  int error = FAILURE;
  standin_lock();
  if (context == 0) return standin_leave_cuda(NO_CONTEXT);
  return standin_leave_cuda(standin_is_told("cudaStreamQuery", -1, &error) ? error : ask(stream));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  cudaError_t error = standin_enter_cuda("cudaStreamSynchronize", stream->device);
  if (error == 0) error = ask(stream);
  while (error == NOT_READY) {
    standin_unlock();
    nanosleep(&(struct timespec){0, 1000000}, NULL);
    standin_lock();
    error = ask(stream);
  }
  return standin_leave_cuda(error);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  cudaError_t error = standin_enter_cuda("cudaStreamDestroy", stream->device);
  if (!stream->alive) return standin_leave_cuda(BAD_HANDLE);
  standin_progress();
  /* CUDA would let the work end by itself; here nobody would be left to wait for it. */
  if (error == 0 && stream->first != NULL) error = NOT_READY;
  stream->alive = 0;
  standin_count("stream", -1);
  return standin_leave_cuda(error);
}
