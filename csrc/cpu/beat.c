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

/* MPI's handles are an int, as in MPICH, or a pointer, as in Open MPI. */
typedef int (*isend_of_ints)(const void*, int, int, int, int, int, int*);
typedef int (*isend_of_pointers)(const void*, int, void*, int, int, void*, void**);
typedef int (*test_of_ints)(int*, int*, void*);
typedef int (*test_of_pointers)(void**, int*, void*);

struct ncs_listener {
  struct ncs_listener* next;
  int fd; /* -1: a rank of MPI */
  ncs_mpi mpi;
  int rank, is_sending; /* is_sending: MPI may still read `sent` */
  union {
    int number;
    void* pointer;
  } request;
  size_t size;
  char message[NCS_MOST_BEAT], sent[NCS_MOST_BEAT];
};

struct ncs_beat {
  pthread_mutex_t mutex; /* guards what follows */
  pthread_cond_t wake;
  struct ncs_listener* listeners;
  double interval_s;
  int is_ending, has_news;
  pthread_t thread;
};

/* Returns whether to keep the listener. */
static int send_on_socket(struct ncs_listener* listener) {
  const ssize_t sent = send(listener->fd, listener->message, listener->size, MSG_DONTWAIT | MSG_NOSIGNAL);
  const int is_full = sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  return sent == (ssize_t)listener->size || is_full; /* otherwise closed, or cut off: the reader learns it by silence */
}

/* Checks whether MPI has sent the previous message; returns whether that is known. */
static int look(struct ncs_listener* listener) {
  const ncs_mpi* mpi = &listener->mpi;
  int failed = 0, is_done = 1;
  long long status[64]; /* larger than MPI's */
  if (!listener->is_sending) return 1;
  failed = mpi->handle_bytes == sizeof(int)
               ? ((test_of_ints)mpi->test)(&listener->request.number, &is_done, status)
               : ((test_of_pointers)mpi->test)(&listener->request.pointer, &is_done, status);
  listener->is_sending = failed || !is_done;
  return !failed;
}

static int send_by_mpi(struct ncs_listener* listener) {
  const ncs_mpi* mpi = &listener->mpi;
  int failed = 0;
  if (!look(listener)) return 0;
  if (listener->is_sending) return 1;
  memcpy(listener->sent, listener->message, listener->size);
  if (mpi->handle_bytes == sizeof(int))
    failed = ((isend_of_ints)mpi->isend)(listener->sent, (int)listener->size, (int)mpi->byte, listener->rank, 0,
                                         (int)mpi->comm, &listener->request.number);
  else
    failed = ((isend_of_pointers)mpi->isend)(listener->sent, (int)listener->size, (void*)(uintptr_t)mpi->byte,
                                             listener->rank, 0, (void*)(uintptr_t)mpi->comm, &listener->request.pointer);
  listener->is_sending = !failed;
  return !failed;
}

static void discard(struct ncs_listener* listener) {
  const struct timespec nap = {0, 1000000L};
  if (listener->fd >= 0) close(listener->fd);
  for (int naps = 0; naps < 100 && look(listener) && listener->is_sending; ++naps) nanosleep(&nap, NULL);
  if (!listener->is_sending) free(listener); /* otherwise MPI still reads the message */
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
      if (listener->fd >= 0 ? send_on_socket(listener) : send_by_mpi(listener)) {
        at = &listener->next;
      } else {
        *at = listener->next;
        discard(listener);
      }
    }
    beat->has_news = 0;
    while (!beat->is_ending && !beat->has_news && pthread_cond_timedwait(&beat->wake, &beat->mutex, &next) == 0) continue;
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

ncclResult_t ncs_beat_tell(ncs_beat* beat, const ncs_mpi* mpi, int rank, const void* message, size_t size, int at_once) {
  struct ncs_listener* listener;
  if (rank < 0 || size == 0 || size > NCS_MOST_BEAT) return ncclInvalidArgument;
  if (mpi->handle_bytes != sizeof(int) && mpi->handle_bytes != sizeof(void*)) return ncclInvalidArgument;
  pthread_mutex_lock(&beat->mutex);
  for (listener = beat->listeners; listener != NULL; listener = listener->next)
    if (listener->fd < 0 && listener->rank == rank) break;
  if (listener == NULL) {
    listener = calloc(1, sizeof(*listener));
    if (listener == NULL) {
      pthread_mutex_unlock(&beat->mutex);
      return ncclSystemError;
    }
    listener->fd = -1;
    listener->mpi = *mpi;
    listener->rank = rank;
    listener->next = beat->listeners;
    beat->listeners = listener;
  }
  listener->size = size;
  memcpy(listener->message, message, size);
  if (at_once) {
    beat->has_news = 1;
    pthread_cond_signal(&beat->wake);
  }
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
