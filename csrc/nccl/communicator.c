/* The begin and the end of NCCL's communicators over the GPUs of this process. They are non-blocking, since NCCL can
 * abort only such safely: creation and finalization begin here, and ncs_nccl_wait (group.c) ends them. */
#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>
#include <string.h>

#include "nccl/api.h"

/* Ends every NCCL communicator by `end`, then frees the streams (which NCCL may touch while it winds down) and the
 * rest. Returns the first failure and goes on after it. Any thread may call it, so each context is made current: in a
 * thread without a context CUDA's runtime would make one on the first GPU. */
static ncclResult_t release(ncs_nccl_comm* comm, ncclResult_t (*end)(ncclComm_t), const char* call,
                            ncs_failure* failure) {
  const ncs_cuda* cuda = &comm->cuda;
  ncclResult_t first = ncclSuccess, status;
  CUcontext current = NULL;
  cuda->cuCtxGetCurrent(&current);
  for (int r = comm->n - 1; r >= 0; --r) {
    if (comm->comms[r] == NULL) continue;
    cuda->cuCtxSetCurrent(comm->contexts[r]);
    status = end(comm->comms[r]);
    if (status != ncclSuccess && first == ncclSuccess) first = ncs_check_nccl(comm->nccl, status, call, failure);
  }
  for (int r = comm->n - 1; r >= 0; --r) {
    cudaError_t error = 0;
    if (comm->streams[r] == NULL) continue;
    cuda->cuCtxSetCurrent(comm->contexts[r]);
    if (comm->events[r] != NULL) error = cuda->cudaEventDestroy(comm->events[r]);
    if (error != 0 && first == ncclSuccess) first = ncs_check_cuda(cuda, error, "cudaEventDestroy", failure);
    error = cuda->cudaStreamDestroy(comm->streams[r]);
    if (error != 0 && first == ncclSuccess) first = ncs_check_cuda(cuda, error, "cudaStreamDestroy", failure);
    /* Only now: earlier, cudaFree would wait for running work. */
    if (comm->scratch[r] != NULL) cuda->cudaFree(comm->scratch[r]);
  }
  cuda->cuCtxSetCurrent(current);
  free(comm);
  return first;
}

/* Of the highest priority: communication, for which other ranks wait, must not queue behind computation. */
static ncclResult_t create_stream(ncs_nccl_comm* comm, int r, ncs_failure* failure) {
  const ncs_cuda* cuda = &comm->cuda;
  int least = 0, greatest = 0;
  size_t all;
  ncclResult_t status = NCS_CUDA(cudaSetDevice, (comm->devices[r]));
  if (status == ncclSuccess) status = NCS_CUDA(cudaDeviceGetStreamPriorityRange, (&least, &greatest));
  if (status == ncclSuccess)
    status = NCS_CUDA(cudaStreamCreateWithPriority, (&comm->streams[r], NCS_CUDA_STREAM_NON_BLOCKING, greatest));
  if (status == ncclSuccess) status = NCS_CUDA(cuCtxGetCurrent, (&comm->contexts[r]));
  if (status == ncclSuccess) status = ncs_make_event(cuda, &comm->events[r], failure);
  if (status == ncclSuccess) status = NCS_CUDA(cudaMemGetInfo, (&comm->left[r], &all));
  return status;
}

/* NCCL takes the rank's GPU from what is current. */
static ncclResult_t join(const ncs_nccl_comm* comm, int r, const void* id, ncs_failure* failure) {
  ncclConfig_t config = {offsetof(ncclConfig_t, minCTAs), NCS_NCCL_API_MAGIC, NCS_OLDEST_NCCL, 0,
                         NCS_CONFIG_UNDEF_INT, NCS_CONFIG_UNDEF_INT, comm->max_ctas, NULL};
  const ncs_cuda* cuda = &comm->cuda;
  ncclResult_t status = NCS_CUDA(cudaSetDevice, (comm->devices[r]));
  if (status != ncclSuccess) return status;
  if (comm->max_ctas > 0 && comm->nccl->version >= NCS_NCCL_WITH_MAX_CTAS) {
    config.size = sizeof(config);
    config.version = NCS_NCCL_WITH_MAX_CTAS;
  }
  status = comm->nccl->ncclCommInitRankConfig(&comm->comms[r], comm->world_size, *(const ncclUniqueId*)id,
                                              comm->ranks[r], &config);
  return ncs_check_begun(comm->nccl, status, "ncclCommInitRankConfig", failure);
}

static ncclResult_t finalize(const ncs_nccl_comm* comm, int r, const void* unused, ncs_failure* failure) {
  (void)unused;
  return ncs_check_begun(comm->nccl, comm->nccl->ncclCommFinalize(comm->comms[r]), "ncclCommFinalize", failure);
}

/* A communicator and its arrays, in one piece of memory; NULL if there is none. */
static ncs_nccl_comm* make(ncs_nccl* nccl, const ncs_cuda* cuda, const ncs_ranks* own) {
  const size_t n = (size_t)own->n, per_rank = 5 * sizeof(void*) + sizeof(size_t) + 2 * sizeof(int);
  ncs_nccl_comm* comm = calloc(1, sizeof(*comm) + n * per_rank);
  if (comm == NULL) return NULL;
  comm->nccl = nccl;
  comm->cuda = *cuda;
  comm->n = own->n;
  comm->world_size = own->world_size;
  comm->max_ctas = own->max_ctas;
  comm->comms = (ncclComm_t*)(comm + 1);
  comm->streams = (cudaStream_t*)(comm->comms + n);
  comm->contexts = (CUcontext*)(comm->streams + n);
  comm->events = (cudaEvent_t*)(comm->contexts + n);
  comm->scratch = (void**)(comm->events + n);
  comm->left = (size_t*)(comm->scratch + n);
  comm->ranks = (int*)(comm->left + n);
  comm->devices = comm->ranks + n;
  memcpy(comm->ranks, own->ranks, n * sizeof(int));
  memcpy(comm->devices, own->devices, n * sizeof(int));
  return comm;
}

ncclResult_t ncs_nccl_create(ncs_nccl* nccl, const char* cudart_path, const char* driver_path, const ncs_ranks* own,
                             ncs_failure* failure, ncs_nccl_comm** out) {
  CUcontext current = NULL;
  ncclUniqueId id;
  ncs_cuda loaded;
  const ncs_cuda* cuda = &loaded;
  ncs_nccl_comm* comm;
  ncclResult_t status = ncs_load_cuda(cudart_path, driver_path, &loaded, failure);
  *out = NULL;
  /* The driver answers nothing before, unless some other call of this process has begun it. */
  if (status == ncclSuccess) status = NCS_CUDA(cuInit, (0));
  if (status == ncclSuccess) status = NCS_CUDA(cuCtxGetCurrent, (&current));
  if (status != ncclSuccess) return status;
  comm = make(nccl, cuda, own);
  if (comm == NULL) return ncclSystemError;
  for (int r = 0; r < own->n && status == ncclSuccess; ++r) status = create_stream(comm, r, failure);
  if (status == ncclSuccess && own->unique_id == NULL) status = NCS_NCCL(ncclGetUniqueId, (&id));
  else if (status == ncclSuccess) memcpy(id.internal, own->unique_id, sizeof(id.internal));
  if (status == ncclSuccess) status = ncs_call_group(comm, comm->n, &id, join, failure);
  comm->is_launching = 1;
  cuda->cuCtxSetCurrent(current);
  if (status == ncclSuccess) *out = comm;
  else release(comm, nccl->ncclCommAbort, "ncclCommAbort", NULL);
  return status;
}

ncclResult_t ncs_nccl_finalize(ncs_nccl_comm* comm, ncs_failure* failure) {
  const ncclResult_t status = ncs_call_group(comm, comm->n, NULL, finalize, failure);
  comm->is_launching = 1;
  return status;
}

ncclResult_t ncs_nccl_destroy(ncs_nccl_comm* comm, ncs_failure* failure) {
  return comm == NULL ? ncclSuccess : release(comm, comm->nccl->ncclCommDestroy, "ncclCommDestroy", failure);
}

ncclResult_t ncs_nccl_abort(ncs_nccl_comm* comm, ncs_failure* failure) {
  return comm == NULL ? ncclSuccess : release(comm, comm->nccl->ncclCommAbort, "ncclCommAbort", failure);
}

/* ---- Memory ---- */

ncclResult_t ncs_nccl_get_taken(const ncs_nccl_comm* comm, ncs_failure* failure, int64_t* bytes) {
  const ncs_cuda* cuda = &comm->cuda;
  ncclResult_t status = ncclSuccess;
  for (int r = 0; r < comm->n && status == ncclSuccess; ++r) {
    size_t left = 0, all;
    NCS_ENTER(cuda, comm->contexts[r], failure, &status);
    if (status == ncclSuccess) status = NCS_CUDA(cudaMemGetInfo, (&left, &all));
    bytes[r] = left < comm->left[r] ? (int64_t)(comm->left[r] - left) : 0;
  }
  return status;
}

int ncs_nccl_has_context_events(const ncs_nccl_comm* comm) { return comm->cuda.cuCtxRecordEvent != NULL; }

ncclResult_t ncs_nccl_scratch(ncs_nccl_comm* comm, int index, size_t size, ncs_failure* failure, void** pointer) {
  const ncs_cuda* cuda = &comm->cuda;
  ncclResult_t status;
  NCS_ENTER(cuda, comm->contexts[index], failure, &status);
  *pointer = NULL;
  if (status != ncclSuccess) return status;
  status = NCS_CUDA(cudaFree, (comm->scratch[index]));
  comm->scratch[index] = NULL;
  if (status == ncclSuccess && size > 0) status = NCS_CUDA(cudaMalloc, (&comm->scratch[index], size));
  *pointer = comm->scratch[index];
  return status;
}

ncclResult_t ncs_nccl_copy(ncs_nccl_comm* comm, int index, void* to, const void* from, size_t size,
                           ncs_failure* failure) {
  const ncs_cuda* cuda = &comm->cuda;
  ncclResult_t status;
  NCS_ENTER(cuda, comm->contexts[index], failure, &status);
  return status == ncclSuccess ? NCS_CUDA(cudaMemcpy, (to, from, size, NCS_CUDA_MEMCPY_DEFAULT)) : status;
}

ncclResult_t ncs_nccl_find_devices(const ncs_nccl_comm* comm, const uintptr_t* addresses, int n, ncs_failure* failure,
                                   int* devices) {
  int attributes[] = {NCS_CU_MEMORY_TYPE, NCS_CU_IS_MANAGED, NCS_CU_DEVICE_ORDINAL};
  const ncs_cuda* cuda = &comm->cuda;
  ncclResult_t status;
  NCS_ENTER(cuda, comm->contexts[0], failure, &status);
  for (int i = 0; i < n && status == ncclSuccess; ++i) {
    int type = NCS_CU_NO_MEMORY, is_managed = 0;
    void* data[] = {&type, &is_managed, &devices[i]};
    status = NCS_CUDA(cuPointerGetAttributes, (3, attributes, data, addresses[i]));
    if (is_managed) devices[i] = NCS_ON_ALL_GPUS;
    else if (type == NCS_CU_NO_MEMORY) devices[i] = NCS_NOWHERE;
    else if (type == NCS_CU_HOST) devices[i] = NCS_ON_HOST;
  }
  return status;
}
