/* Kernels for host memory: the all-reduce of cpu/collectives.c, and an all-gather. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/pool.h"
#include "tf/api.h"

/* ---- The all-reduce ---- */

/* Of the all-gather, too, which has no operation. */
typedef struct {
  int64_t ranks, tensors, op;
  int dtype; /* NCCL's; -1: unknown */
} collective_kernel;

static void* create_collective(TF_OpKernelConstruction* context, int reduces) {
  TF_Status* status = ncs_tf.TF_NewStatus();
  collective_kernel* kernel = calloc(1, sizeof(*kernel));
  int dtype = 0;
  if (kernel == NULL) ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  else {
    kernel->ranks = ncs_tf_read_attr(context, "ranks", status);
    kernel->tensors = ncs_tf_read_attr(context, "tensors", status);
    if (reduces) kernel->op = ncs_tf_read_attr(context, "op", status);
    if (ncs_tf.TF_GetCode(status) == TF_OK) ncs_tf.TF_OpKernelConstruction_GetAttrType(context, "T", &dtype, status);
    kernel->dtype = ncs_tf_find_dtype(dtype);
    if (ncs_tf.TF_GetCode(status) == TF_OK && kernel->dtype < 0)
      ncs_tf_fail(status, TF_INVALID_ARGUMENT, "unknown dtype");
  }
  if (ncs_tf.TF_GetCode(status) != TF_OK) ncs_tf.TF_OpKernelConstruction_Failure(context, status);
  ncs_tf.TF_DeleteStatus(status);
  return kernel;
}

static void* create_all_reduce(TF_OpKernelConstruction* context) { return create_collective(context, 1); }

static void* create_all_gather(TF_OpKernelConstruction* context) { return create_collective(context, 0); }

/* Reads all ranks' tensor v and makes its output. */
static void prepare_tensor(TF_OpKernelContext* context, const collective_kernel* kernel, int v, const double* weights,
                           ncs_reduced* reduced, const void** sends, TF_Status* status) {
  char message[200];
  int first = -1, own;
  for (int r = 0; r < kernel->ranks; ++r) {
    ncs_tf_view seen;
    if (!ncs_tf_read_input(context, (int)(kernel->ranks + r * kernel->tensors + v), &seen, status)) return;
    sends[r] = seen.data;
    if (weights[r] == 0) continue;
    if (first < 0) {
      first = r;
      reduced->count = (size_t)seen.count;
    } else if ((size_t)seen.count != reduced->count) {
      snprintf(message, sizeof(message), "Expected the towers' tensors to be of one size. Received: %lld elements on "
               "tower %d, %lld on tower %d", (long long)reduced->count, first, (long long)seen.count, r);
      ncs_tf_fail(status, TF_INVALID_ARGUMENT, message);
      return;
    }
  }
  if (first < 0) {
    ncs_tf_fail(status, TF_INVALID_ARGUMENT, "Expected a tower with samples. Received: none");
    return;
  }
  reduced->sends = sends;
  own = (int)(kernel->ranks + first * kernel->tensors + v);
  reduced->recv = ncs_tf_make_output(context, v, own, &own, reduced->count >= NCS_FEW, -1, status);
}

static void compute_all_reduce(void* kernel_, TF_OpKernelContext* context) {
  const collective_kernel* kernel = kernel_;
  TF_Status* status = ncs_tf.TF_NewStatus();
  const size_t n_ranks = (size_t)kernel->ranks, n_tensors = (size_t)kernel->tensors;
  double* weights = malloc(n_ranks * sizeof(*weights));
  ncs_reduced* reduced = calloc(n_tensors, sizeof(*reduced));
  const void** sends = malloc(n_ranks * n_tensors * sizeof(*sends));
  ncs_tf_view seen;
  if (weights == NULL || reduced == NULL || sends == NULL) ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  for (int r = 0; r < kernel->ranks && ncs_tf.TF_GetCode(status) == TF_OK; ++r)
    if (ncs_tf_read_input(context, r, &seen, status)) weights[r] = *(const double*)seen.data;
  for (int v = 0; v < kernel->tensors && ncs_tf.TF_GetCode(status) == TF_OK; ++v)
    prepare_tensor(context, kernel, v, weights, &reduced[v], sends + (size_t)v * n_ranks, status);
  if (ncs_tf.TF_GetCode(status) == TF_OK &&
      ncs_cpu_reduce(ncs_tf.pool, reduced, n_tensors, weights, (int)n_ranks, kernel->dtype, (int)kernel->op) !=
          ncclSuccess)
    ncs_tf_fail(status, TF_INVALID_ARGUMENT,
                "Expected weights of 0 or 1 where nothing can be scaled. Received: others");
  if (ncs_tf.TF_GetCode(status) != TF_OK) ncs_tf.TF_OpKernelContext_Failure(context, status);
  free(sends);
  free(reduced);
  free(weights);
  ncs_tf.TF_DeleteStatus(status);
}

const ncs_tf_op ncs_tf_all_reduce = {
    "NcclsyncAllReduce",
    {"T: {float, double, half, bfloat16, int8, uint8, int32, uint32, int64, uint64}", "op: int", "ranks: int >= 1",
     "tensors: int >= 1", "sent: int >= 1", NULL},
    {"weights: ranks * double", "sends: sent * T", NULL},
    "results: tensors * T",
    create_all_reduce,
    compute_all_reduce,
    free,
    0,
    {NULL},
};

/* ---- The all-gather ---- */

#define NCS_COPIED_AT_ONCE (256 * 1024)

typedef struct {
  const char* from;
  char* to;
  size_t bytes;
} piece;

static void copy_block(const void* pieces, size_t part, size_t block) {
  const piece* copied = (const piece*)pieces + part;
  const size_t begin = block * NCS_COPIED_AT_ONCE, left = copied->bytes - begin;
  memcpy(copied->to + begin, copied->from + begin, left < NCS_COPIED_AT_ONCE ? left : NCS_COPIED_AT_ONCE);
}

/* Makes output v of all ranks' tensors v, one after the other; `pieces` are to be copied. */
static void prepare_gathered(TF_OpKernelContext* context, const collective_kernel* kernel, int v, piece* pieces,
                             TF_Status* status) {
  int64_t dims[NCS_MOST_DIMS], rows = 0, row = 0;
  const size_t size = ncs_size_of(kernel->dtype);
  char* to;
  for (int r = 0; r < kernel->ranks; ++r) {
    const int input = (int)(r * kernel->tensors + v), n_dims = ncs_tf_read_dims(context, input, dims, status);
    int64_t elements = 1;
    ncs_tf_view seen;
    if (n_dims < 0 || !ncs_tf_read_input(context, input, &seen, status)) return;
    for (int d = 1; d < n_dims; ++d) elements *= dims[d];
    if (n_dims == 0 || (r > 0 && elements != row)) {
      ncs_tf_fail(status, TF_INVALID_ARGUMENT,
                  "Expected the towers' tensors to have rows of one size. Received: others");
      return;
    }
    row = elements;
    rows += dims[0];
    pieces[r].from = seen.data;
    pieces[r].bytes = (size_t)seen.count * size;
  }
  to = ncs_tf_make_output(context, v, v, &v, 0, rows, status);
  for (int r = 0; r < kernel->ranks; ++r) {
    pieces[r].to = to;
    to += pieces[r].bytes;
  }
}

static void compute_all_gather(void* kernel_, TF_OpKernelContext* context) {
  const collective_kernel* kernel = kernel_;
  TF_Status* status = ncs_tf.TF_NewStatus();
  const size_t n_ranks = (size_t)kernel->ranks, n_pieces = n_ranks * (size_t)kernel->tensors;
  piece* pieces = calloc(n_pieces, sizeof(*pieces));
  size_t* begins = malloc((n_pieces + 1) * sizeof(*begins));
  if (pieces == NULL || begins == NULL) ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  for (int v = 0; v < kernel->tensors && ncs_tf.TF_GetCode(status) == TF_OK; ++v)
    prepare_gathered(context, kernel, v, pieces + (size_t)v * n_ranks, status);
  if (ncs_tf.TF_GetCode(status) == TF_OK) {
    size_t bytes = begins[0] = 0;
    for (size_t p = 0; p < n_pieces; ++p) {
      begins[p + 1] = begins[p] + (pieces[p].bytes + NCS_COPIED_AT_ONCE - 1) / NCS_COPIED_AT_ONCE;
      bytes += pieces[p].bytes;
    }
    ncs_pool_run_parts(ncs_tf.pool, copy_block, pieces, begins, n_pieces, bytes <= NCS_COPIED_AT_ONCE);
  }
  if (ncs_tf.TF_GetCode(status) != TF_OK) ncs_tf.TF_OpKernelContext_Failure(context, status);
  free(begins);
  free(pieces);
  ncs_tf.TF_DeleteStatus(status);
}

const ncs_tf_op ncs_tf_all_gather = {
    "NcclsyncAllGather",
    {"T: {float, double, half, bfloat16, int8, uint8, int32, uint32, int64, uint64}", "ranks: int >= 1",
     "tensors: int >= 1", "sent: int >= 1", NULL},
    {"sends: sent * T", NULL},
    "results: tensors * T",
    create_all_gather,
    compute_all_gather,
    free,
    0,
    {NULL},
};
