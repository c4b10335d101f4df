/* How a collective waits for the GPUs' own work; see README.md. */
#define _POSIX_C_SOURCE 200809L

#include <time.h>

#include "nccl/api.h"

/* ---- Time ---- */

/* A collective of some kilobytes takes tens of microseconds: for this long polling is worthwhile. */
#define NCS_SPIN_S 200e-6
#define NCS_LONGEST_NAP_S 1e-3

double ncs_now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The longer the wait so far, the longer it may go on: nap for an eighth of it. */
void ncs_nap(double waited_s) {
  double length_s = waited_s / 8;
  struct timespec length = {0, 0};
  if (waited_s < NCS_SPIN_S) return;
  if (length_s > NCS_LONGEST_NAP_S) length_s = NCS_LONGEST_NAP_S;
  length.tv_nsec = (long)(length_s * 1e9);
  nanosleep(&length, NULL);
}

ncclResult_t ncs_poll(ncclResult_t (*look)(void*, ncs_failure*), void* of, double slice_s, ncs_failure* failure) {
  const double begin = ncs_now_s();
  for (;;) {
    const double waited_s = ncs_now_s() - begin;
    const ncclResult_t status = look(of, failure);
    if (status != ncclInProgress || waited_s >= slice_s) return status;
    ncs_nap(waited_s);
  }
}

ncclResult_t ncs_poll_comm(ncclResult_t (*look)(void*, ncs_failure*), ncs_nccl_comm* comm, double slice_s,
                           ncs_failure* failure) {
  ncclResult_t status;
  NCS_ENTER(&comm->cuda, comm->contexts[0], failure, &status);
  return status == ncclSuccess ? ncs_poll(look, comm, slice_s, failure) : status;
}

ncs_entered ncs_enter(const ncs_cuda* cuda, CUcontext context, ncs_failure* failure, ncclResult_t* status) {
  ncs_entered entered = {NULL, NULL};
  *status = NCS_CUDA(cuCtxGetCurrent, (&entered.before));
  if (*status == ncclSuccess) *status = NCS_CUDA(cuCtxSetCurrent, (context));
  if (*status == ncclSuccess) entered.cuda = cuda;
  return entered;
}

void ncs_leave(const ncs_entered* entered) {
  if (entered->cuda != NULL) entered->cuda->cuCtxSetCurrent(entered->before);
}

/* ---- Events ---- */

ncclResult_t ncs_make_event(const ncs_cuda* cuda, cudaEvent_t* event, ncs_failure* failure) {
  return NCS_CUDA(cudaEventCreateWithFlags, (event, NCS_CUDA_EVENT_DISABLE_TIMING));
}

static ncclResult_t fail_without_events(ncs_failure* failure) {
  return ncs_fail(failure, ncclInvalidUsage, "cuDriverGetVersion", -1,
                  "Expected an NVIDIA driver of CUDA 12.5 (R555) or newer, whose events take all streams of a GPU as one, "
                  "or TensorFlow's streams to be known. Received: an older driver, and an unknown stream");
}

ncclResult_t ncs_record(const ncs_cuda* cuda, CUcontext context, cudaStream_t stream, cudaEvent_t event,
                        ncs_failure* failure) {
  if (stream != NULL) return NCS_CUDA(cudaEventRecord, (event, stream));
  return cuda->cuCtxRecordEvent != NULL ? NCS_CUDA(cuCtxRecordEvent, (context, event)) : fail_without_events(failure);
}

ncclResult_t ncs_order(const ncs_cuda* cuda, CUcontext context, cudaStream_t stream, cudaEvent_t event,
                       ncs_failure* failure) {
  if (stream != NULL) return NCS_CUDA(cudaStreamWaitEvent, (stream, event, 0));
  return cuda->cuCtxWaitEvent != NULL ? NCS_CUDA(cuCtxWaitEvent, (context, event)) : fail_without_events(failure);
}

static ncclResult_t record_events(const ncs_nccl_comm* comm, ncs_failure* failure) {
  const ncs_cuda* cuda = &comm->cuda;
  ncclResult_t status = ncclSuccess;
  for (int r = 0; r < comm->n && status == ncclSuccess; ++r)
    status = ncs_record(cuda, comm->contexts[r], NULL, comm->events[r], failure);
  return status;
}

ncclResult_t ncs_look_at_events(const ncs_cuda* cuda, const cudaEvent_t* events, int n, ncs_failure* failure) {
  for (int r = 0; r < n; ++r) {
    const cudaError_t error = events[r] != NULL ? cuda->cudaEventQuery(events[r]) : 0;
    if (error == NCS_CUDA_NOT_READY) return ncclInProgress;
    if (error != 0) return ncs_check_cuda(cuda, error, "cudaEventQuery", failure);
  }
  return ncclSuccess;
}

static ncclResult_t look(void* comm_, ncs_failure* failure) {
  ncs_nccl_comm* comm = comm_;
  ncclResult_t status = comm->is_waiting ? ncclSuccess : record_events(comm, failure);
  if (status != ncclSuccess) return status;
  status = ncs_look_at_events(&comm->cuda, comm->events, comm->n, failure);
  comm->is_waiting = status == ncclInProgress;
  return status;
}

ncclResult_t ncs_nccl_wait_for_devices(ncs_nccl_comm* comm, double slice_s, ncs_failure* failure) {
  return ncs_poll_comm(look, comm, slice_s, failure);
}
