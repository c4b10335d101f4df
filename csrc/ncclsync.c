/* Shared by all folders: the tables of ncclsync.h, failures, and the start of threads. */
#define _POSIX_C_SOURCE 200809L

#include "ncclsync.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>

#define NCS_LENGTH(rows) (sizeof(rows) / sizeof((rows)[0]))

typedef struct {
  const char* name;
  int value;
  size_t size;
} row;

#define NCS_RESULT_ROW(nccl, value) {#nccl, value, 0},
#define NCS_DTYPE_ROW(nccl, value, ours, size) {#ours, value, size},
#define NCS_OP_ROW(nccl, value, ours) {#ours, value, 0},
static const row results[] = {NCS_RESULTS(NCS_RESULT_ROW)};
static const row dtypes[] = {NCS_DTYPES(NCS_DTYPE_ROW)};
static const row ops[] = {NCS_OPS(NCS_OP_ROW)};

static ncclResult_t describe(const row* rows, size_t n_rows, int index, const char** name, int* value, size_t* size) {
  if (index < 0 || (size_t)index >= n_rows) return ncclInvalidArgument;
  *name = rows[index].name;
  *value = rows[index].value;
  if (size != NULL) *size = rows[index].size;
  return ncclSuccess;
}

ncclResult_t ncs_result_describe(int index, const char** name, int* value) {
  return describe(results, NCS_LENGTH(results), index, name, value, NULL);
}

ncclResult_t ncs_dtype_describe(int index, const char** name, int* value, size_t* size) {
  return describe(dtypes, NCS_LENGTH(dtypes), index, name, value, size);
}

ncclResult_t ncs_op_describe(int index, const char** name, int* value) {
  return describe(ops, NCS_LENGTH(ops), index, name, value, NULL);
}

size_t ncs_size_of(int dtype) {
  for (size_t i = 0; i < NCS_LENGTH(dtypes); ++i)
    if (dtypes[i].value == dtype) return dtypes[i].size;
  return 0;
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
