/* NCCL's library, found at run time like CUDA's, so that ncclsync compiles, installs and reports errors without them.
 * communicator.c has its communicators, group.c the collectives. */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "nccl/api.h"

/* ---- Failures ---- */

ncclResult_t ncs_check_nccl(const ncs_nccl* nccl, ncclResult_t status, const char* call, ncs_failure* failure) {
  const char* message;
  if (status == ncclSuccess) return status;
  message = nccl->ncclGetLastError(NULL);
  if (message == NULL || message[0] == '\0') message = nccl->ncclGetErrorString(status);
  return ncs_fail(failure, status, call, -1, "%s", message);
}

ncclResult_t ncs_check_begun(const ncs_nccl* nccl, ncclResult_t status, const char* call, ncs_failure* failure) {
  return status == ncclInProgress ? ncclSuccess : ncs_check_nccl(nccl, status, call, failure);
}

ncclResult_t ncs_check_cuda(const ncs_cuda* cuda, cudaError_t error, const char* call, ncs_failure* failure) {
  if (error == 0) return ncclSuccess;
  cuda->cudaGetLastError(); /* CUDA keeps it for this thread: whoever asks next would take it for their own. */
  return ncs_fail(failure, ncclUnhandledCudaError, call, -1, "%s", cuda->cudaGetErrorString(error));
}

static ncclResult_t fail_loading(const char* call, ncs_failure* failure) {
  const char* message = dlerror();
  return ncs_fail(failure, ncclSystemError, call, -1, "%s", message != NULL ? message : "");
}

ncclResult_t ncs_call_group(const ncs_nccl_comm* comm, int n, const void* of, ncs_call* call, ncs_failure* failure) {
  const ncs_nccl* nccl = comm->nccl;
  ncclResult_t ended, status = NCS_NCCL(ncclGroupStart, ());
  if (status != ncclSuccess) return status;
  for (int i = 0; i < n && status == ncclSuccess; ++i) status = call(comm, i, of, failure);
  ended = nccl->ncclGroupEnd();
  return status == ncclSuccess ? ncs_check_begun(nccl, ended, "ncclGroupEnd", failure) : status;
}

/* ---- Libraries ---- */

/* A function's address comes as a data pointer; memcpy is the conversion that C allows. */
#define NCS_LOAD(type, name, parameters)                    \
  symbol = dlsym(handle, #name);                            \
  if (symbol == NULL) return fail_loading("dlsym", failure); \
  memcpy(&library->name, &symbol, sizeof(symbol));

ncclResult_t ncs_load_cuda(const char* runtime_path, const char* driver_path, ncs_cuda* library, ncs_failure* failure) {
  void *symbol, *handle = dlopen(driver_path, RTLD_NOW | RTLD_LOCAL);
  int version = 0;
  memset(library, 0, sizeof(*library));
  if (handle == NULL) return fail_loading("dlopen of the driver", failure);
  NCS_DRIVER_SYMBOLS(NCS_LOAD)
  if (library->cuDriverGetVersion(&version) == 0 && version >= NCS_DRIVER_WITH_CONTEXT_EVENTS) {
    NCS_CONTEXT_EVENTS(NCS_LOAD)
  }
  handle = dlopen(runtime_path, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) return fail_loading("dlopen", failure);
  NCS_CUDART_SYMBOLS(NCS_LOAD)
  return ncclSuccess;
}

static ncclResult_t check_version(const ncs_nccl* nccl, ncs_failure* failure, int* found) {
  const ncclResult_t status = nccl->ncclGetVersion(found);
  const int version = *found;
  if (status != ncclSuccess) return ncs_fail(failure, status, "ncclGetVersion", -1, "%s", "");
  if (version >= NCS_OLDEST_NCCL) return ncclSuccess;
  /* Until 2.8 the minor version had one digit. */
  return ncs_fail(failure, ncclInvalidUsage, "ncclGetVersion", -1,
                  "Expected NCCL %d.%d or newer. Received: NCCL %d.%d.%d", NCS_OLDEST_NCCL / 10000,
                  NCS_OLDEST_NCCL % 10000 / 100, version / (version < 10000 ? 1000 : 10000),
                  version % (version < 10000 ? 1000 : 10000) / 100, version % 100);
}

/* The version first: the error for an old NCCL is its version, not a missing symbol. */
static ncclResult_t load_nccl(ncs_nccl* library, ncs_failure* failure, int* version) {
  void *handle = library->handle, *symbol;
  ncclResult_t status;
  NCS_LOAD(ncclResult_t, ncclGetVersion, (int* version))
  status = check_version(library, failure, version);
  if (status != ncclSuccess) return status;
  NCS_NCCL_SYMBOLS(NCS_LOAD)
  return ncclSuccess;
}

ncclResult_t ncs_nccl_open(const char* path, ncs_failure* failure, ncs_nccl** out, int* version) {
  ncclResult_t status;
  ncs_nccl* nccl;
  *out = NULL;
  *version = 0;
  nccl = calloc(1, sizeof(*nccl));
  if (nccl == NULL) return ncclSystemError;
  nccl->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  status = nccl->handle == NULL ? fail_loading("dlopen", failure) : load_nccl(nccl, failure, version);
  if (status == ncclSuccess) {
    nccl->version = *version;
    *out = nccl;
    return ncclSuccess;
  }
  if (nccl->handle != NULL) dlclose(nccl->handle);
  free(nccl);
  return status;
}

ncclResult_t ncs_nccl_get_unique_id(ncs_nccl* nccl, ncs_failure* failure, char* unique_id) {
  ncclUniqueId id;
  const ncclResult_t status = NCS_NCCL(ncclGetUniqueId, (&id));
  if (status == ncclSuccess) memcpy(unique_id, id.internal, sizeof(id.internal));
  return status;
}
