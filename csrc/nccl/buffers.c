/* Checks the buffers of a group before any call: with bad buffers NCCL would hang, give wrong numbers, or write into
 * memory that others read. Refusals are whole sentences, which the binding passes on. */
#define _POSIX_C_SOURCE 200809L

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "nccl/api.h"

/* A buffer: its place, and its name in messages. */
typedef struct {
  uintptr_t begin, end;
  const char* name;
  int rank, index, is_written;
} extent;

#define NCS_REFUSE(index, ...) ncs_fail(failure, ncclInvalidArgument, "ncs_nccl_check_group", index, __VA_ARGS__)

static ncclResult_t check_what(const ncs_nccl_comm* comm, const ncs_collective* what, int index, ncs_failure* failure) {
  if (ncs_size_of(what->dtype) == 0)
    return NCS_REFUSE(index, "Expected a dtype of NCCL's. Received: %d", what->dtype);
  if (what->kind == NCS_BROADCAST && (what->root < 0 || what->root >= comm->world_size))
    return NCS_REFUSE(index, "Expected a root below %d. Received: %d", comm->world_size, what->root);
  return ncclSuccess;
}

enum { NCS_MOST_EXTENTS = 3 }; /* of one rank in one collective */

/* Appends a collective's buffers. Memory that is sent and received in place is one written piece; the rest of the sent
 * memory lies before and after it. */
static extent* collect(const ncs_nccl_comm* comm, const ncs_collective* what, int index, extent* next) {
  const int kind = what->kind;
  const size_t block = what->count * ncs_size_of(what->dtype), whole = block * (size_t)comm->world_size;
  const size_t sent = kind == NCS_ALL_TO_ALL || kind == NCS_REDUCE_SCATTER ? whole : block;
  const size_t received = kind == NCS_ALL_TO_ALL || kind == NCS_ALL_GATHER ? whole : block;
  for (int r = 0; r < comm->n && block > 0; ++r) {
    const size_t own = block * (size_t)comm->ranks[r];
    const uintptr_t send = (uintptr_t)what->sends[r], recv = (uintptr_t)what->recvs[r];
    const int is_written = kind != NCS_BROADCAST || comm->ranks[r] != what->root;
    *next++ = (extent){recv, recv + received, kind == NCS_BROADCAST ? "buffers" : "recvs", r, index, is_written};
    if (kind == NCS_BROADCAST || (kind == NCS_ALL_REDUCE && send == recv) ||
        (kind == NCS_ALL_GATHER && send == recv + own))
      continue;
    if (kind != NCS_REDUCE_SCATTER || recv != send + own) {
      *next++ = (extent){send, send + sent, "sends", r, index, 0};
      continue;
    }
    if (own > 0) *next++ = (extent){send, recv, "sends", r, index, 0};
    if (own + block < sent) *next++ = (extent){recv + block, send + sent, "sends", r, index, 0};
  }
  return next;
}

static int compare(const void* one, const void* other) {
  const extent *a = one, *b = other;
  return a->begin < b->begin ? -1 : a->begin > b->begin;
}

static ncclResult_t refuse_overlap(const extent* one, const extent* other, ncs_failure* failure) {
  char where[48] = "";
  if (one->index != other->index) snprintf(where, sizeof(where), " of collective %d of the group", other->index + 1);
  return NCS_REFUSE(one->index,
                    "Expected %s[%d] to be apart from %s[%d]%s; only recvs[r] may be sends[r] (of several blocks "
                    "the r-th). Received: %zu and %zu bytes, %zu bytes apart",
                    one->name, one->rank, other->name, other->rank, where, (size_t)(one->end - one->begin),
                    (size_t)(other->end - other->begin), (size_t)(one->begin - other->begin));
}

/* In the order of addresses it is enough to compare with the buffer that reaches farthest so far. */
static ncclResult_t check_apart(extent* all, size_t n, ncs_failure* failure) {
  const extent *last = NULL, *last_written = NULL;
  qsort(all, n, sizeof(*all), compare);
  for (size_t i = 0; i < n; ++i) {
    const extent *one = &all[i], *before = one->is_written ? last : last_written;
    if (before != NULL && one->begin < before->end) return refuse_overlap(one, before, failure);
    if (last == NULL || one->end > last->end) last = one;
    if (one->is_written && (last_written == NULL || one->end > last_written->end)) last_written = one;
  }
  return ncclSuccess;
}

/* Asks the driver where a buffer lies, in about 100 ns. Managed memory is on all GPUs. */
static ncclResult_t check_place(const ncs_nccl_comm* comm, const extent* one, ncs_failure* failure) {
  int attributes[] = {NCS_CU_MEMORY_TYPE, NCS_CU_IS_MANAGED, NCS_CU_DEVICE_ORDINAL};
  int type = 0, is_managed = 0, device = -1;
  void* data[] = {&type, &is_managed, &device};
  const int expected = comm->devices[one->rank];
  const ncs_cuda* cuda = &comm->cuda;
  char where[64];
  const ncclResult_t status = NCS_CUDA(cuPointerGetAttributes, (3, attributes, data, one->begin));
  if (status != ncclSuccess || is_managed) return status;
  if (type != NCS_CU_NO_MEMORY && type != NCS_CU_HOST && device == expected) return ncclSuccess;
  if (type == NCS_CU_NO_MEMORY) snprintf(where, sizeof(where), "memory that CUDA does not know");
  else if (type == NCS_CU_HOST) snprintf(where, sizeof(where), "host memory");
  else snprintf(where, sizeof(where), "memory of GPU %d", device);
  return NCS_REFUSE(one->index, "Expected %s[%d] on GPU %d. Received: %s", one->name, one->rank, expected, where);
}

static ncclResult_t check_extent(const ncs_nccl_comm* comm, const extent* one, int dtype, ncs_failure* failure) {
  const size_t alignment = ncs_size_of(dtype);
  if (one->begin == 0 || one->begin % alignment != 0)
    return NCS_REFUSE(one->index, "Expected %s[%d] to begin at a multiple of %zu bytes. Received: address 0x%zx",
                      one->name, one->rank, alignment, (size_t)one->begin);
  return check_place(comm, one, failure);
}

ncclResult_t ncs_nccl_check_group(const ncs_nccl_comm* comm, const ncs_collective* collectives, int n_collectives,
                                  ncs_failure* failure) {
  CUcontext current = NULL;
  ncclResult_t status = ncclSuccess;
  extent *all, *next;
  for (int i = 0; i < n_collectives && status == ncclSuccess; ++i)
    status = check_what(comm, &collectives[i], i, failure);
  if (status != ncclSuccess) return status;
  all = next = malloc(((size_t)n_collectives * (size_t)comm->n * NCS_MOST_EXTENTS + 1) * sizeof(*all));
  if (all == NULL) return ncclSystemError;
  for (int i = 0; i < n_collectives; ++i) next = collect(comm, &collectives[i], i, next);
  status = ncs_enter(&comm->cuda, comm->contexts[0], failure, &current);
  if (status == ncclSuccess) {
    for (extent* one = all; one < next && status == ncclSuccess; ++one)
      status = check_extent(comm, one, collectives[one->index].dtype, failure);
    comm->cuda.cuCtxSetCurrent(current);
  }
  if (status == ncclSuccess) status = check_apart(all, (size_t)(next - all), failure);
  free(all);
  return status;
}
