/* NCCL's library, found at run time like CUDA's, so that ncclsync compiles, installs and reports errors without them.
 * communicator.c has its communicators, group.c the collectives. */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <stdio.h>
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

ncclResult_t ncs_check_cuda(const ncs_cuda* cuda, cudaError_t error, const char* call, ncs_failure* failure) {
  if (error == 0) return ncclSuccess;
  return ncs_fail(failure, ncclUnhandledCudaError, call, -1, "%s", cuda->cudaGetErrorString(error));
}

static ncclResult_t fail_loading(const char* call, ncs_failure* failure) {
  const char* message = dlerror();
  return ncs_fail(failure, ncclSystemError, call, -1, "%s", message != NULL ? message : "");
}

/* ---- Libraries ---- */

/* A function's address comes as a data pointer; memcpy is the conversion that C allows. */
#define NCS_LOAD(type, name, parameters)                    \
  symbol = dlsym(handle, #name);                            \
  if (symbol == NULL) return fail_loading("dlsym", failure); \
  memcpy(&library->name, &symbol, sizeof(symbol));

#define NCS_LOAD_IF_ANY(type, name, parameters) \
  symbol = dlsym(handle, #name);                \
  memcpy(&library->name, &symbol, sizeof(symbol));

static ncclResult_t load_version(ncs_nccl* library, ncs_failure* failure) {
  void *handle = library->handle, *symbol;
  NCS_LOAD(ncclResult_t, ncclGetVersion, (int* version))
  return ncclSuccess;
}

static ncclResult_t load_nccl_symbols(ncs_nccl* library, ncs_failure* failure) {
  void *handle = library->handle, *symbol;
  NCS_NCCL_SYMBOLS(NCS_LOAD)
  return ncclSuccess;
}

static ncclResult_t load_cudart_symbols(void* handle, ncs_cuda* library, ncs_failure* failure) {
  void* symbol;
  NCS_CUDART_SYMBOLS(NCS_LOAD)
  return ncclSuccess;
}

static ncclResult_t load_driver_symbols(void* handle, ncs_cuda* library, ncs_failure* failure) {
  void* symbol;
  NCS_DRIVER_SYMBOLS(NCS_LOAD)
  NCS_NEW_DRIVER_SYMBOLS(NCS_LOAD_IF_ANY)
  return ncclSuccess;
}

ncclResult_t ncs_load_cuda(const char* runtime_path, const char* driver_path, ncs_cuda* cuda, ncs_failure* failure) {
  ncclResult_t status;
  void* handle = dlopen(runtime_path, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) return fail_loading("dlopen", failure);
  status = load_cudart_symbols(handle, cuda, failure);
  if (status != ncclSuccess) return status;
  handle = dlopen(driver_path, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) return fail_loading("dlopen of the driver", failure);
  return load_driver_symbols(handle, cuda, failure);
}

/* Before the other symbols are looked up: the error for an old NCCL is its version, not a missing symbol. */
static ncclResult_t check_version(ncs_nccl* nccl, ncs_failure* failure) {
  int version = 0;
  ncclResult_t status = nccl->ncclGetVersion(&version);
  if (status != ncclSuccess) return ncs_fail(failure, status, "ncclGetVersion", -1, "%s", "");
  if (version >= NCS_OLDEST_NCCL) return ncclSuccess;
  /* Until 2.8 the minor version had one digit. */
  return ncs_fail(failure, ncclInvalidUsage, "ncclGetVersion", -1,
                  "Expected NCCL %d.%d or newer. Received: NCCL %d.%d.%d", NCS_OLDEST_NCCL / 10000,
                  NCS_OLDEST_NCCL % 10000 / 100, version / (version < 10000 ? 1000 : 10000),
                  version % (version < 10000 ? 1000 : 10000) / 100, version % 100);
}

ncclResult_t ncs_nccl_open(const char* path, ncs_failure* failure, ncs_nccl** out) {
  ncclResult_t status;
  ncs_nccl* nccl;
  *out = NULL;
  nccl = calloc(1, sizeof(*nccl));
  if (nccl == NULL) return ncclSystemError;
  nccl->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (nccl->handle == NULL) {
    status = fail_loading("dlopen", failure);
    goto fail;
  }
  status = load_version(nccl, failure);
  if (status == ncclSuccess) status = check_version(nccl, failure);
  if (status == ncclSuccess) status = load_nccl_symbols(nccl, failure);
  if (status != ncclSuccess) goto fail;
  *out = nccl;
  return ncclSuccess;

fail:
  if (nccl->handle != NULL) dlclose(nccl->handle);
  free(nccl);
  return status;
}

ncclResult_t ncs_nccl_get_version(ncs_nccl* nccl, ncs_failure* failure, int* version) {
  return ncs_check_nccl(nccl, nccl->ncclGetVersion(version), "ncclGetVersion", failure);
}

ncclResult_t ncs_nccl_get_unique_id(ncs_nccl* nccl, ncs_failure* failure, char* unique_id) {
  ncclUniqueId id;
  ncclResult_t status = ncs_check_nccl(nccl, nccl->ncclGetUniqueId(&id), "ncclGetUniqueId", failure);
  if (status == ncclSuccess) memcpy(unique_id, id.internal, sizeof(id.internal));
  return status;
}

ncclResult_t ncs_nccl_probe(ncs_nccl* nccl, int device, ncs_failure* failure) {
  ncclComm_t comm = NULL;
  ncclResult_t status = ncs_check_nccl(nccl, nccl->ncclCommInitAll(&comm, 1, &device), "ncclCommInitAll", failure);
  if (comm != NULL) nccl->ncclCommAbort(comm);
  return status;
}
