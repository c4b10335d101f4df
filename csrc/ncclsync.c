/* Shared by all folders: sizes of dtypes, failures, and the start of threads. */
#define _POSIX_C_SOURCE 200809L

#include "ncclsync.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>

size_t ncs_size_of(int dtype) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2}; /* by ncclDataType_t */
  return dtype >= 0 && (size_t)dtype < sizeof(sizes) / sizeof(sizes[0]) ? sizes[dtype] : 0;
}

ncclResult_t ncs_fail(ncs_failure* failure, ncclResult_t status, const char* call, int index, const char* format, ...) {
  va_list arguments;
  if (failure == NULL) return status;
  va_start(arguments, format);
  snprintf(failure->call, sizeof(failure->call), "%s", call);
  vsnprintf(failure->message, sizeof(failure->message), format, arguments);
  va_end(arguments);
  failure->index = index;
  return status;
}

int ncs_start_thread(pthread_t* thread, void* (*run)(void*), void* argument) {
  sigset_t all, callers;
  int failed;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &callers);
  failed = pthread_create(thread, NULL, run, argument);
  pthread_sigmask(SIG_SETMASK, &callers, NULL);
  return failed;
}
