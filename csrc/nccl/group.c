/* Collectives over the GPUs of this process: all ranks' calls in one group, and the wait for them. */
#define _POSIX_C_SOURCE 200809L

#include "nccl/api.h"

/* ---- Waiting ---- */

ncclResult_t ncs_ask_nccl(const ncs_nccl_comm* comm, ncs_failure* failure) {
  const ncs_nccl* nccl = comm->nccl;
  ncclResult_t status, state, all = ncclSuccess;
  for (int r = 0; r < comm->n; ++r) {
    status = nccl->ncclCommGetAsyncError(comm->comms[r], &state);
    if (status == ncclSuccess) status = state;
    if (status == ncclInProgress) all = status;
    else if (status != ncclSuccess) return ncs_check_nccl(nccl, status, "ncclCommGetAsyncError", failure);
  }
  return all;
}

/* Looks once at the call under way. The order matters: until NCCL has launched its work, the streams may be empty and
 * would seem to have finished. */
static ncclResult_t look(void* comm_, ncs_failure* failure) {
  ncs_nccl_comm* comm = comm_;
  const ncs_cuda* cuda = &comm->cuda;
  ncclResult_t status = ncs_ask_nccl(comm, failure);
  if (status != ncclSuccess) return status;
  comm->is_launching = 0;
  for (int r = 0; r < comm->n; ++r) {
    cudaError_t error = cuda->cudaStreamQuery(comm->streams[r]);
    if (error == NCS_CUDA_NOT_READY) return ncclInProgress;
    if (error != 0) return ncs_check_cuda(cuda, error, "cudaStreamQuery", failure);
  }
  /* An error may have ended the streams' work since the last look. */
  return ncs_ask_nccl(comm, failure);
}

ncclResult_t ncs_nccl_wait(ncs_nccl_comm* comm, double slice_s, ncs_failure* failure) {
  return ncs_poll_comm(look, comm, slice_s, failure);
}

ncclResult_t ncs_nccl_get_progress(ncs_nccl_comm* comm, int* progress) {
  ncclResult_t status;
  NCS_ENTER(&comm->cuda, comm->contexts[0], NULL, &status);
  for (int r = 0; r < comm->n && status == ncclSuccess; ++r) {
    ncclResult_t state = ncclSuccess;
    if (comm->is_waiting) {
      progress[r] = comm->cuda.cudaEventQuery(comm->events[r]) == NCS_CUDA_NOT_READY ? NCS_ABSENT : NCS_LAUNCHED;
      continue;
    }
    comm->nccl->ncclCommGetAsyncError(comm->comms[r], &state);
    if (comm->is_launching) progress[r] = state == ncclSuccess ? NCS_LAUNCHED : NCS_ABSENT;
    else progress[r] = comm->cuda.cudaStreamQuery(comm->streams[r]) == 0 ? NCS_DONE : NCS_LAUNCHED;
  }
  return status;
}

/* ---- Groups ---- */

/* Rank r's part of an all-to-all: it sends its block p to rank p, and receives its block p from rank p. */
static ncclResult_t send_to_all(const ncs_nccl_comm* comm, const ncs_buffer* what, int r) {
  const ncs_nccl* nccl = comm->nccl;
  const ncclDataType_t dtype = (ncclDataType_t)what->dtype;
  const size_t block = what->count * ncs_size_of(what->dtype);
  ncclResult_t status = ncclSuccess;
  for (int peer = 0; peer < comm->world_size; ++peer) {
    const char* send = (const char*)what->send + (size_t)peer * block;
    char* recv = (char*)what->recv + (size_t)peer * block;
    status = nccl->ncclSend(send, what->count, dtype, peer, comm->comms[r], comm->streams[r]);
    if (status != ncclSuccess && status != ncclInProgress) break;
    status = nccl->ncclRecv(recv, what->count, dtype, peer, comm->comms[r], comm->streams[r]);
    if (status != ncclSuccess && status != ncclInProgress) break;
  }
  return status;
}

static ncclResult_t call_rank(const ncs_nccl_comm* comm, const ncs_buffer* what, int r) {
  const ncs_nccl* nccl = comm->nccl;
  const ncclDataType_t dtype = (ncclDataType_t)what->dtype;
  switch (what->kind) {
    case NCS_ALL_REDUCE:
      return nccl->ncclAllReduce(what->send, what->recv, what->count, dtype, (ncclRedOp_t)what->op,
                                 comm->comms[r], comm->streams[r]);
    case NCS_BROADCAST:
      return nccl->ncclBroadcast(what->recv, what->recv, what->count, dtype, what->root, comm->comms[r],
                                 comm->streams[r]);
    case NCS_REDUCE_SCATTER:
      return nccl->ncclReduceScatter(what->send, what->recv, what->count, dtype, (ncclRedOp_t)what->op,
                                     comm->comms[r], comm->streams[r]);
    case NCS_ALL_GATHER:
      return nccl->ncclAllGather(what->send, what->recv, what->count, dtype, comm->comms[r],
                                 comm->streams[r]);
    default:
      return send_to_all(comm, what, r);
  }
}

/* Collective by collective, so that every rank makes its calls in the same order: NCCL matches them by it. */
static ncclResult_t call_next(const ncs_nccl_comm* comm, int i, const void* buffers, ncs_failure* failure) {
  static const char* const names[] = {"ncclAllReduce", "ncclBroadcast", "ncclSend", "ncclReduceScatter",
                                      "ncclAllGather"}; /* by ncs_kind */
  const ncs_buffer* what = ((const ncs_buffer* const*)buffers)[i % comm->n] + i / comm->n;
  const ncclResult_t status = call_rank(comm, what, i % comm->n);
  const ncclResult_t checked = ncs_check_begun(comm->nccl, status, names[what->kind], failure);
  if (checked != ncclSuccess && failure != NULL) failure->index = i / comm->n;
  return checked;
}

ncclResult_t ncs_nccl_launch_group(ncs_nccl_comm* comm, const ncs_buffer* const* buffers, int n_collectives,
                                   ncs_failure* failure) {
  ncclResult_t status;
  NCS_ENTER(&comm->cuda, comm->contexts[0], failure, &status);
  if (status != ncclSuccess) return status;
  comm->is_launching = 1;
  return ncs_call_group(comm, comm->n * n_collectives, buffers, call_next, failure);
}
