/* The meter: timestamps of begins and ends, recorded by any number of threads and taken by one. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ncclsync.h"

struct ncs_meter {
  pthread_mutex_t mutex; /* guards what follows */
  ncs_timestamp* timestamps;
  size_t count, capacity;
  void (*listener)(void* context, int span, int ends, int64_t value);
  void* context;
};

ncclResult_t ncs_meter_create(/*outputs*/ ncs_meter** meter) {
  ncs_meter* made = calloc(1, sizeof(*made));
  *meter = NULL;
  if (made == NULL) return ncclSystemError;
  pthread_mutex_init(&made->mutex, NULL);
  *meter = made;
  return ncclSuccess;
}

void ncs_meter_destroy(ncs_meter* meter) {
  if (meter == NULL) return;
  pthread_mutex_destroy(&meter->mutex);
  free(meter->timestamps);
  free(meter);
}

void ncs_meter_listen(ncs_meter* meter, void (*listener)(void* context, int span, int ends, int64_t value),
                      void* context) {
  pthread_mutex_lock(&meter->mutex);
  meter->listener = listener;
  meter->context = context;
  pthread_mutex_unlock(&meter->mutex);
}

ncclResult_t ncs_meter_record(ncs_meter* meter, int span, int ends, int64_t value) {
  void (*listener)(void* context, int span, int ends, int64_t value);
  void* context;
  struct timespec now;
  pthread_mutex_lock(&meter->mutex);
  if (meter->count == meter->capacity) {
    const size_t capacity = meter->capacity == 0 ? 256 : 2 * meter->capacity;
    ncs_timestamp* timestamps = realloc(meter->timestamps, capacity * sizeof(*timestamps));
    if (timestamps == NULL) {
      pthread_mutex_unlock(&meter->mutex);
      return ncclSystemError;
    }
    meter->timestamps = timestamps;
    meter->capacity = capacity;
  }
  clock_gettime(CLOCK_MONOTONIC, &now); /* under the mutex, so that the timestamps are in the order of their times */
  meter->timestamps[meter->count++] =
      (ncs_timestamp){(int64_t)now.tv_sec * 1000000000 + now.tv_nsec, value, (int32_t)span, (int32_t)ends};
  listener = meter->listener;
  context = meter->context;
  pthread_mutex_unlock(&meter->mutex);
  if (listener != NULL) listener(context, span, ends, value);
  return ncclSuccess;
}

size_t ncs_meter_take(ncs_meter* meter, size_t most, /*outputs*/ ncs_timestamp* timestamps) {
  size_t taken;
  pthread_mutex_lock(&meter->mutex);
  taken = meter->count < most ? meter->count : most;
  if (taken > 0) memcpy(timestamps, meter->timestamps, taken * sizeof(*timestamps));
  meter->count -= taken;
  if (meter->count > 0) memmove(meter->timestamps, meter->timestamps + taken, meter->count * sizeof(*timestamps));
  pthread_mutex_unlock(&meter->mutex);
  return taken;
}
