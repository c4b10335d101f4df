/* The beat: a thread that tells other processes that this one is alive. It does not need Python's lock, which a call
 * may hold for long. */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "ncclsync.h"

struct ncs_listener {
  struct ncs_listener* next;
  int fd;
  size_t size;
  char message[NCS_MOST_BEAT];
};

struct ncs_beat {
  pthread_mutex_t mutex; /* guards what follows */
  pthread_cond_t wake;
  struct ncs_listener* listeners;
  double interval_s;
  int is_ending;
  pthread_t thread;
};

/* Returns whether to keep the listener. */
static int send_beat(const struct ncs_listener* listener) {
  const ssize_t sent = send(listener->fd, listener->message, listener->size, MSG_DONTWAIT | MSG_NOSIGNAL);
  const int is_full = sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  return sent == (ssize_t)listener->size || is_full; /* otherwise closed, or cut off: the reader learns it by silence */
}

static void discard(struct ncs_listener* listener) {
  close(listener->fd);
  free(listener);
}

static struct timespec after(double seconds) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  at.tv_sec += (time_t)seconds;
  at.tv_nsec += (long)(1e9 * (seconds - (double)(time_t)seconds));
  if (at.tv_nsec >= 1000000000L) {
    at.tv_nsec -= 1000000000L;
    at.tv_sec += 1;
  }
  return at;
}

static void* run(void* argument) {
  ncs_beat* beat = argument;
  pthread_mutex_lock(&beat->mutex);
  while (!beat->is_ending) {
    const struct timespec next = after(beat->interval_s);
    struct ncs_listener** at = &beat->listeners;
    while (*at != NULL) {
      struct ncs_listener* listener = *at;
      if (send_beat(listener)) {
        at = &listener->next;
      } else {
        *at = listener->next;
        discard(listener);
      }
    }
    while (!beat->is_ending && pthread_cond_timedwait(&beat->wake, &beat->mutex, &next) == 0) continue;
  }
  pthread_mutex_unlock(&beat->mutex);
  return NULL;
}

ncclResult_t ncs_beat_create(double interval_s, /*outputs*/ ncs_beat** beat) {
  pthread_condattr_t monotonic;
  ncs_beat* made = NULL;
  *beat = NULL;
  if (!(interval_s > 0 && interval_s < 1e6)) return ncclInvalidArgument;
  made = calloc(1, sizeof(*made));
  if (made == NULL) return ncclSystemError;
  made->interval_s = interval_s;
  if (pthread_condattr_init(&monotonic) != 0) goto fail;
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&made->wake, &monotonic);
  pthread_condattr_destroy(&monotonic);
  pthread_mutex_init(&made->mutex, NULL);
  if (ncs_start_thread(&made->thread, run, made) != 0) goto fail_thread;
  *beat = made;
  return ncclSuccess;
fail_thread:
  pthread_mutex_destroy(&made->mutex);
  pthread_cond_destroy(&made->wake);
fail:
  free(made);
  return ncclSystemError;
}

ncclResult_t ncs_beat_add(ncs_beat* beat, int fd, const void* message, size_t size) {
  struct ncs_listener* listener = NULL;
  if (fd < 0 || size == 0 || size > NCS_MOST_BEAT) return ncclInvalidArgument;
  listener = calloc(1, sizeof(*listener));
  if (listener == NULL) return ncclSystemError;
  listener->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0); /* closing the caller's descriptor then does no harm */
  if (listener->fd < 0) {
    free(listener);
    return ncclInvalidArgument;
  }
  listener->size = size;
  memcpy(listener->message, message, size);
  pthread_mutex_lock(&beat->mutex);
  listener->next = beat->listeners;
  beat->listeners = listener;
  pthread_mutex_unlock(&beat->mutex);
  return ncclSuccess;
}

ncclResult_t ncs_beat_destroy(ncs_beat* beat) {
  if (beat == NULL) return ncclSuccess;
  pthread_mutex_lock(&beat->mutex);
  beat->is_ending = 1;
  pthread_cond_signal(&beat->wake);
  pthread_mutex_unlock(&beat->mutex);
  pthread_join(beat->thread, NULL);
  while (beat->listeners != NULL) {
    struct ncs_listener* next = beat->listeners->next;
    discard(beat->listeners);
    beat->listeners = next;
  }
  pthread_cond_destroy(&beat->wake);
  pthread_mutex_destroy(&beat->mutex);
  free(beat);
  return ncclSuccess;
}
