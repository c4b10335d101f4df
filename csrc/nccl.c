/* NCCL over the GPUs of this process. libnccl and libcudart are found at run time, so that this compiles, installs
 * and explains itself where neither exists. */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ncclsync.h"

typedef struct ncclComm* ncclComm_t;
typedef struct CUstream_st* cudaStream_t;
typedef int cudaError_t; /* an enum in CUDA's headers: the same in every ABI that CUDA has */

/* Every symbol in use: return type, name, parameters. tests/test_nccl_header.py compares NCCL's with nccl.h. */
#define NCS_NCCL_SYMBOLS(X)                                                                          \
  X(ncclResult_t, ncclGetVersion, (int* version))                                                    \
  X(const char*, ncclGetErrorString, (ncclResult_t result))                                          \
  X(const char*, ncclGetLastError, (ncclComm_t comm))                                                \
  X(ncclResult_t, ncclCommInitAll, (ncclComm_t* comm, int ndev, const int* devlist))                 \
  X(ncclResult_t, ncclCommDestroy, (ncclComm_t comm))                                                \
  X(ncclResult_t, ncclCommAbort, (ncclComm_t comm))                                                  \
  X(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t* asyncError))                \
  X(ncclResult_t, ncclGroupStart, (void))                                                            \
  X(ncclResult_t, ncclGroupEnd, (void))                                                              \
  X(ncclResult_t, ncclAllReduce, (const void* sendbuff, void* recvbuff, size_t count,                \
    ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream))                  \
  X(ncclResult_t, ncclBroadcast, (const void* sendbuff, void* recvbuff, size_t count,                \
    ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream))

#define NCS_CUDART_SYMBOLS(X)                                             \
  X(const char*, cudaGetErrorString, (cudaError_t error))                 \
  X(cudaError_t, cudaGetDevice, (int* device))                            \
  X(cudaError_t, cudaSetDevice, (int device))                             \
  X(cudaError_t, cudaDeviceSynchronize, (void))                           \
  X(cudaError_t, cudaStreamCreateWithFlags, (cudaStream_t* stream, unsigned int flags)) \
  X(cudaError_t, cudaStreamSynchronize, (cudaStream_t stream))            \
  X(cudaError_t, cudaStreamDestroy, (cudaStream_t stream))

#define NCS_CUDA_STREAM_NON_BLOCKING 1u /* cudaStreamNonBlocking */

#define NCS_DECLARE(type, name, parameters) type(*name) parameters;
typedef struct {
  void* handle;
  NCS_CUDART_SYMBOLS(NCS_DECLARE)
} ncs_cudart;

struct ncs_nccl {
  void* handle;
  NCS_NCCL_SYMBOLS(NCS_DECLARE)
};

struct ncs_nccl_comm {
  ncs_nccl* nccl; /* borrowed */
  ncs_cudart cuda;
  int n;
  int* devices;
  ncclComm_t* comms;     /* NULL where there is none */
  cudaStream_t* streams; /* NULL where there is none */
};

/* ---- Failures ---- */

static void set_failure(ncs_failure* failure, const char* call, const char* message) {
  if (failure == NULL) return;
  snprintf(failure->call, sizeof(failure->call), "%s", call);
  snprintf(failure->message, sizeof(failure->message), "%s", message != NULL ? message : "");
}

static ncclResult_t check_nccl(const ncs_nccl* nccl, ncclResult_t status, const char* call, ncs_failure* failure) {
  if (status != ncclSuccess) set_failure(failure, call, nccl->ncclGetLastError(NULL));
  return status;
}

/* A CUDA error is what NCCL would make of it. */
static ncclResult_t check_cuda(const ncs_cudart* cuda, cudaError_t error, const char* call, ncs_failure* failure) {
  if (error == 0) return ncclSuccess;
  set_failure(failure, call, cuda->cudaGetErrorString(error));
  return ncclUnhandledCudaError;
}

static ncclResult_t fail_loading(const char* call, ncs_failure* failure) {
  const char* message = dlerror();
  set_failure(failure, call, message);
  return ncclSystemError;
}

/* ---- Libraries ---- */

/* A function's address comes as a data pointer; memcpy is the conversion that C allows. */
#define NCS_LOAD(type, name, parameters)                    \
  symbol = dlsym(library->handle, #name);                   \
  if (symbol == NULL) return fail_loading("dlsym", failure); \
  memcpy(&library->name, &symbol, sizeof(symbol));

static ncclResult_t load_nccl_symbols(ncs_nccl* library, ncs_failure* failure) {
  void* symbol;
  NCS_NCCL_SYMBOLS(NCS_LOAD)
  return ncclSuccess;
}

static ncclResult_t load_cudart_symbols(ncs_cudart* library, ncs_failure* failure) {
  void* symbol;
  NCS_CUDART_SYMBOLS(NCS_LOAD)
  return ncclSuccess;
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
  status = load_nccl_symbols(nccl, failure);
  if (status != ncclSuccess) goto fail;
  *out = nccl;
  return ncclSuccess;

fail:
  if (nccl->handle != NULL) dlclose(nccl->handle);
  free(nccl);
  return status;
}

ncclResult_t ncs_nccl_close(ncs_nccl* nccl) {
  free(nccl);
  return ncclSuccess;
}

ncclResult_t ncs_nccl_get_version(ncs_nccl* nccl, ncs_failure* failure, int* version) {
  return check_nccl(nccl, nccl->ncclGetVersion(version), "ncclGetVersion", failure);
}

/* ---- Communicators ---- */

/* Ends every NCCL communicator by `end`, then frees the streams (which NCCL may touch while it winds down) and the
 * rest. Returns the first failure and goes on behind it. */
static ncclResult_t release(ncs_nccl_comm* comm, ncclResult_t (*end)(ncclComm_t), const char* call,
                            ncs_failure* failure) {
  ncclResult_t first = ncclSuccess, status;
  for (int r = comm->n - 1; r >= 0; --r) {
    if (comm->comms == NULL || comm->comms[r] == NULL) continue;
    status = end(comm->comms[r]);
    if (status != ncclSuccess && first == ncclSuccess) first = check_nccl(comm->nccl, status, call, failure);
  }
  for (int r = comm->n - 1; r >= 0; --r) {
    cudaError_t error;
    if (comm->streams == NULL || comm->streams[r] == NULL) continue;
    error = comm->cuda.cudaStreamDestroy(comm->streams[r]);
    if (error != 0 && first == ncclSuccess) first = check_cuda(&comm->cuda, error, "cudaStreamDestroy", failure);
  }
  /* libcudart stays loaded, like NCCL: TensorFlow uses the same one. */
  free(comm->streams);
  free(comm->comms);
  free(comm->devices);
  free(comm);
  return first;
}

static ncclResult_t create_streams(ncs_nccl_comm* comm, ncs_failure* failure) {
  const ncs_cudart* cuda = &comm->cuda;
  int current;
  ncclResult_t status = check_cuda(cuda, cuda->cudaGetDevice(&current), "cudaGetDevice", failure);
  if (status != ncclSuccess) return status;
  for (int r = 0; r < comm->n && status == ncclSuccess; ++r) {
    status = check_cuda(cuda, cuda->cudaSetDevice(comm->devices[r]), "cudaSetDevice", failure);
    if (status != ncclSuccess) break;
    status = check_cuda(cuda, cuda->cudaStreamCreateWithFlags(&comm->streams[r], NCS_CUDA_STREAM_NON_BLOCKING),
                        "cudaStreamCreateWithFlags", failure);
  }
  if (status == ncclSuccess)
    return check_cuda(cuda, cuda->cudaSetDevice(current), "cudaSetDevice", failure);
  cuda->cudaSetDevice(current); /* the first failure is the one to report */
  return status;
}

ncclResult_t ncs_nccl_create(ncs_nccl* nccl, const char* cudart_path, const int* devices, int n_devices,
                             ncs_failure* failure, ncs_nccl_comm** out) {
  ncclResult_t status = ncclSystemError;
  ncs_nccl_comm* comm;
  *out = NULL;
  if (n_devices < 1) {
    set_failure(failure, "ncs_nccl_create", "expected at least one device");
    return ncclInvalidArgument;
  }
  comm = calloc(1, sizeof(*comm));
  if (comm == NULL) return ncclSystemError;
  comm->nccl = nccl;
  comm->n = n_devices;
  comm->devices = calloc((size_t)n_devices, sizeof(*comm->devices));
  comm->comms = calloc((size_t)n_devices, sizeof(*comm->comms));
  comm->streams = calloc((size_t)n_devices, sizeof(*comm->streams));
  if (comm->devices == NULL || comm->comms == NULL || comm->streams == NULL) goto fail;
  memcpy(comm->devices, devices, (size_t)n_devices * sizeof(*devices));

  status = check_nccl(nccl, nccl->ncclCommInitAll(comm->comms, n_devices, devices), "ncclCommInitAll", failure);
  if (status != ncclSuccess) goto fail;
  comm->cuda.handle = dlopen(cudart_path, RTLD_NOW | RTLD_LOCAL);
  if (comm->cuda.handle == NULL) {
    status = fail_loading("dlopen", failure);
    goto fail;
  }
  status = load_cudart_symbols(&comm->cuda, failure);
  if (status != ncclSuccess) goto fail;
  status = create_streams(comm, failure);
  if (status != ncclSuccess) goto fail;
  *out = comm;
  return ncclSuccess;

fail:
  release(comm, nccl->ncclCommAbort, "ncclCommAbort", NULL);
  return status;
}

ncclResult_t ncs_nccl_destroy(ncs_nccl_comm* comm, ncs_failure* failure) {
  return comm == NULL ? ncclSuccess : release(comm, comm->nccl->ncclCommDestroy, "ncclCommDestroy", failure);
}

ncclResult_t ncs_nccl_abort(ncs_nccl_comm* comm, ncs_failure* failure) {
  return comm == NULL ? ncclSuccess : release(comm, comm->nccl->ncclCommAbort, "ncclCommAbort", failure);
}

/* ---- Collectives ---- */

/* Waits for whatever is queued on the devices: the buffers may still be written or read by somebody's stream. */
static ncclResult_t wait_for_devices(const ncs_nccl_comm* comm, ncs_failure* failure) {
  const ncs_cudart* cuda = &comm->cuda;
  ncclResult_t status = ncclSuccess;
  for (int r = 0; r < comm->n && status == ncclSuccess; ++r) {
    status = check_cuda(cuda, cuda->cudaSetDevice(comm->devices[r]), "cudaSetDevice", failure);
    if (status == ncclSuccess)
      status = check_cuda(cuda, cuda->cudaDeviceSynchronize(), "cudaDeviceSynchronize", failure);
  }
  return status;
}

static ncclResult_t wait_for_streams(const ncs_nccl_comm* comm, ncs_failure* failure) {
  const ncs_nccl* nccl = comm->nccl;
  const ncs_cudart* cuda = &comm->cuda;
  ncclResult_t status = ncclSuccess, late = ncclSuccess;
  for (int r = 0; r < comm->n && status == ncclSuccess; ++r)
    status = check_cuda(cuda, cuda->cudaStreamSynchronize(comm->streams[r]), "cudaStreamSynchronize", failure);
  for (int r = 0; r < comm->n && status == ncclSuccess; ++r) {
    status = check_nccl(nccl, nccl->ncclCommGetAsyncError(comm->comms[r], &late), "ncclCommGetAsyncError", failure);
    if (status == ncclSuccess) status = check_nccl(nccl, late, "ncclCommGetAsyncError", failure);
  }
  return status;
}

/* One collective over all ranks: op < 0 means a broadcast from root. */
static ncclResult_t run_group(const ncs_nccl_comm* comm, const void* const* sends, void* const* recvs, size_t count,
                              int dtype, int op, int root, ncs_failure* failure) {
  const ncs_nccl* nccl = comm->nccl;
  const char* call = op < 0 ? "ncclBroadcast" : "ncclAllReduce";
  ncclResult_t status, ended;
  status = check_nccl(nccl, nccl->ncclGroupStart(), "ncclGroupStart", failure);
  if (status != ncclSuccess) return status;
  for (int r = 0; r < comm->n && status == ncclSuccess; ++r) {
    if (op < 0)
      status = nccl->ncclBroadcast(sends[r], recvs[r], count, (ncclDataType_t)dtype, root, comm->comms[r],
                                   comm->streams[r]);
    else
      status = nccl->ncclAllReduce(sends[r], recvs[r], count, (ncclDataType_t)dtype, (ncclRedOp_t)op,
                                   comm->comms[r], comm->streams[r]);
    check_nccl(nccl, status, call, failure);
  }
  /* Closed in any case: an open group would swallow every later call of this thread. After a failure inside, NCCL
   * launches nothing and returns that failure again. */
  ended = nccl->ncclGroupEnd();
  if (status == ncclSuccess) status = check_nccl(nccl, ended, "ncclGroupEnd", failure);
  return status;
}

static ncclResult_t run_collective(ncs_nccl_comm* comm, const void* const* sends, void* const* recvs, size_t count,
                                   int dtype, int op, int root, ncs_failure* failure) {
  const ncs_cudart* cuda = &comm->cuda;
  int current;
  ncclResult_t status = check_cuda(cuda, cuda->cudaGetDevice(&current), "cudaGetDevice", failure);
  if (status != ncclSuccess) return status;
  status = wait_for_devices(comm, failure);
  if (status == ncclSuccess) status = run_group(comm, sends, recvs, count, dtype, op, root, failure);
  if (status == ncclSuccess) status = wait_for_streams(comm, failure);
  if (status == ncclSuccess)
    return check_cuda(cuda, cuda->cudaSetDevice(current), "cudaSetDevice", failure);
  cuda->cudaSetDevice(current); /* the first failure is the one to report */
  return status;
}

ncclResult_t ncs_nccl_all_reduce(ncs_nccl_comm* comm, const void* const* sends, void* const* recvs, size_t count,
                                 int dtype, int op, ncs_failure* failure) {
  if (comm == NULL || op < ncclSum || op > ncclAvg) {
    set_failure(failure, "ncs_nccl_all_reduce", "expected a communicator and an operation of NCCL's");
    return ncclInvalidArgument;
  }
  return run_collective(comm, sends, recvs, count, dtype, op, 0, failure);
}

ncclResult_t ncs_nccl_broadcast(ncs_nccl_comm* comm, void* const* buffers, size_t count, int dtype, int root,
                                ncs_failure* failure) {
  if (comm == NULL || root < 0 || root >= comm->n) {
    set_failure(failure, "ncs_nccl_broadcast", "expected a communicator and one of its ranks as root");
    return ncclInvalidArgument;
  }
  return run_collective(comm, (const void* const*)buffers, buffers, count, dtype, -1, root, failure);
}
