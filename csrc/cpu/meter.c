/* The meter: what began and ended when, noted by any number of threads and taken by one. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ncclsync.h"

struct ncs_meter {
  pthread_mutex_t mutex; /* guards what follows */
  ncs_stamp* stamps;
  size_t count, capacity;
  void (*listener)(void* context, int span, int ends, int64_t value);
  void* context;
};

ncclResult_t ncs_meter_create(/*outputs*/ ncs_meter** meter) {
  ncs_meter* made = calloc(1, sizeof(*made));
  *meter = NULL;
  if (made == NULL) return ncclSystemError;
  if (pthread_mutex_init(&made->mutex, NULL) != 0) {
    free(made);
    return ncclSystemError;
  }
  *meter = made;
  return ncclSuccess;
}

ncclResult_t ncs_meter_destroy(ncs_meter* meter) {
  if (meter == NULL) return ncclSuccess;
  pthread_mutex_destroy(&meter->mutex);
  free(meter->stamps);
  free(meter);
  return ncclSuccess;
}

ncclResult_t ncs_meter_listen(ncs_meter* meter, void (*listener)(void* context, int span, int ends, int64_t value),
                              void* context) {
  pthread_mutex_lock(&meter->mutex);
  meter->listener = listener;
  meter->context = context;
  pthread_mutex_unlock(&meter->mutex);
  return ncclSuccess;
}

ncclResult_t ncs_meter_note(ncs_meter* meter, int span, int ends, int64_t value) {
  void (*listener)(void* context, int span, int ends, int64_t value);
  void* context;
  struct timespec now;
  pthread_mutex_lock(&meter->mutex);
  if (meter->count == meter->capacity) {
    const size_t capacity = meter->capacity == 0 ? 256 : 2 * meter->capacity;
    ncs_stamp* stamps = realloc(meter->stamps, capacity * sizeof(*stamps));
    if (stamps == NULL) {
      pthread_mutex_unlock(&meter->mutex);
      return ncclSystemError;
    }
    meter->stamps = stamps;
    meter->capacity = capacity;
  }
  clock_gettime(CLOCK_MONOTONIC, &now); /* under the mutex, so that the stamps are in the order of their times */
  meter->stamps[meter->count++] =
      (ncs_stamp){(int64_t)now.tv_sec * 1000000000 + now.tv_nsec, value, (int32_t)span, (int32_t)ends};
  listener = meter->listener;
  context = meter->context;
  pthread_mutex_unlock(&meter->mutex);
  if (listener != NULL) listener(context, span, ends, value);
  return ncclSuccess;
}

ncclResult_t ncs_meter_take(ncs_meter* meter, size_t most, /*outputs*/ ncs_stamp* stamps, size_t* taken) {
  pthread_mutex_lock(&meter->mutex);
  *taken = meter->count < most ? meter->count : most;
  if (*taken > 0) memcpy(stamps, meter->stamps, *taken * sizeof(*stamps));
  meter->count -= *taken;
  if (meter->count > 0) memmove(meter->stamps, meter->stamps + *taken, meter->count * sizeof(*stamps));
  pthread_mutex_unlock(&meter->mutex);
  return ncclSuccess;
}
