/* Kernels for host memory: the all-reduce of cpu/collectives.c, and an all-gather. */
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

static void read_all_gather(TF_OpKernelConstruction* context, collective_kernel* kernel, TF_Status* status) {
  kernel->ranks = ncs_tf_read_attr(context, "ranks", status);
  kernel->tensors = ncs_tf_read_attr(context, "tensors", status);
  kernel->dtype = ncs_tf_find_dtype(ncs_tf_read_dtype(context, status));
  if (ncs_tf_is_ok(status) && kernel->dtype < 0) ncs_tf_fail(status, TF_INVALID_ARGUMENT, "unknown dtype");
}

static void read_all_reduce(TF_OpKernelConstruction* context, collective_kernel* kernel, TF_Status* status) {
  read_all_gather(context, kernel, status);
  kernel->op = ncs_tf_read_attr(context, "op", status);
}

/* Reads all ranks' tensor v and makes its output. */
static void prepare_tensor(TF_OpKernelContext* context, const collective_kernel* kernel, int v, const double* weights,
                           ncs_reduced* reduced, const void** sends, TF_Status* status) {
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
      ncs_tf_fail(status, TF_INVALID_ARGUMENT,
                  "Expected the towers' tensors to be of one size. Received: %lld elements on tower %d, %lld on tower "
                  "%d", (long long)reduced->count, first, (long long)seen.count, r);
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

static void compute_all_reduce(const collective_kernel* kernel, TF_OpKernelContext* context, TF_Status* status) {
  const size_t n_ranks = (size_t)kernel->ranks, n_tensors = (size_t)kernel->tensors;
  double* weights = ncs_tf_calloc(n_ranks, sizeof(*weights), status);
  ncs_reduced* reduced = ncs_tf_calloc(n_tensors, sizeof(*reduced), status);
  const void** sends = ncs_tf_calloc(n_ranks * n_tensors, sizeof(*sends), status);
  ncs_tf_view seen;
  for (int r = 0; r < kernel->ranks && ncs_tf_is_ok(status); ++r)
    if (ncs_tf_read_input(context, r, &seen, status)) weights[r] = *(const double*)seen.data;
  for (int v = 0; v < kernel->tensors && ncs_tf_is_ok(status); ++v)
    prepare_tensor(context, kernel, v, weights, &reduced[v], sends + (size_t)v * n_ranks, status);
  if (ncs_tf_is_ok(status) && ncs_cpu_reduce(ncs_tf.pool, reduced, n_tensors, weights, (int)n_ranks, kernel->dtype,
                                             (int)kernel->op) != ncclSuccess)
    ncs_tf_fail(status, TF_INVALID_ARGUMENT,
                "Expected weights of 0 or 1 where nothing can be scaled. Received: others");
  free(sends);
  free(reduced);
  free(weights);
}

NCS_TF_KERNEL(collective_kernel, all_reduce)

const ncs_tf_op ncs_tf_all_reduce = {
    "NcclsyncAllReduce",
    {"T: {float, double, half, bfloat16, int8, uint8, int32, uint32, int64, uint64}", "op: int", "ranks: int >= 1",
     "tensors: int >= 1", "sent: int >= 1", NULL},
    {"weights: ranks * double", "sends: sent * T", NULL},
    "results: tensors * T",
    create_all_reduce,
    run_all_reduce,
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

static void compute_all_gather(const collective_kernel* kernel, TF_OpKernelContext* context, TF_Status* status) {
  const size_t n_ranks = (size_t)kernel->ranks, n_pieces = n_ranks * (size_t)kernel->tensors;
  piece* pieces = ncs_tf_calloc(n_pieces, sizeof(*pieces), status);
  size_t bytes = 0, *begins = ncs_tf_calloc(n_pieces + 1, sizeof(*begins), status);
  for (int v = 0; v < kernel->tensors && ncs_tf_is_ok(status); ++v)
    prepare_gathered(context, kernel, v, pieces + (size_t)v * n_ranks, status);
  for (size_t p = 0; p < n_pieces && ncs_tf_is_ok(status); ++p) {
    begins[p + 1] = begins[p] + (pieces[p].bytes + NCS_COPIED_AT_ONCE - 1) / NCS_COPIED_AT_ONCE;
    bytes += pieces[p].bytes;
  }
  if (ncs_tf_is_ok(status))
    ncs_pool_run_parts(ncs_tf.pool, copy_block, pieces, begins, n_pieces, bytes <= NCS_COPIED_AT_ONCE);
  free(begins);
  free(pieces);
}

NCS_TF_KERNEL(collective_kernel, all_gather)

const ncs_tf_op ncs_tf_all_gather = {
    "NcclsyncAllGather",
    {"T: {float, double, half, bfloat16, int8, uint8, int32, uint32, int64, uint64}", "ranks: int >= 1",
     "tensors: int >= 1", "sent: int >= 1", NULL},
    {"sends: sent * T", NULL},
    "results: tensors * T",
    create_all_gather,
    run_all_gather,
    free,
    0,
    {NULL},
};
