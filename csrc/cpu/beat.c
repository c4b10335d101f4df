/* The beat: a thread that tells another process that this one is alive. It does not need Python's lock, which a call
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

typedef struct {
  int fd;
  struct timespec interval;
  size_t size;
  char message[];
} beat;

static void* run(void* argument) {
  beat* own = argument;
  for (;;) {
    const ssize_t sent = send(own->fd, own->message, own->size, MSG_DONTWAIT | MSG_NOSIGNAL);
    const int is_full = sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    if (sent != (ssize_t)own->size && !is_full) break; /* closed, or cut off: the reader learns it by silence */
    nanosleep(&own->interval, NULL);
  }
  close(own->fd);
  free(own);
  return NULL;
}

ncclResult_t ncs_beat(int fd, const void* message, size_t size, double interval_s) {
  pthread_t thread;
  beat* made = NULL;
  if (fd < 0 || size == 0 || !(interval_s > 0 && interval_s < 1e6)) return ncclInvalidArgument;
  made = malloc(sizeof(*made) + size);
  if (made == NULL) return ncclSystemError;
  made->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0); /* closing the caller's descriptor then does no harm */
  if (made->fd < 0) {
    free(made);
    return ncclInvalidArgument;
  }
  made->interval.tv_sec = (time_t)interval_s;
  made->interval.tv_nsec = (long)(1e9 * (interval_s - (double)made->interval.tv_sec));
  made->size = size;
  memcpy(made->message, message, size);
  if (ncs_start_thread(&thread, run, made) != 0) {
    close(made->fd);
    free(made);
    return ncclSystemError;
  }
  pthread_detach(thread);
  return ncclSuccess;
}
