/* The kernel of the all-reduce in host memory, by cpu/collectives.c. */
#include <stdlib.h>

#include "cpu/pool.h"
#include "tf/api.h"

/* Results of fewer elements are not made in an input's memory: TensorFlow looks at all outputs of an op to find out
 * whether they can be, which takes longer than to write them elsewhere. */
#define NCS_FEW 256

typedef struct {
  int64_t ranks, tensors, op, dtype;
} collective_kernel;

static void read_all_reduce(TF_OpKernelConstruction* context, collective_kernel* kernel, TF_Status* status) {
  kernel->ranks = ncs_tf_read_attr(context, "ranks", status);
  kernel->tensors = ncs_tf_read_attr(context, "tensors", status);
  kernel->dtype = ncs_tf_read_attr(context, "dtype", status);
  kernel->op = ncs_tf_read_attr(context, "op", status);
}

/* Reads all ranks' tensor v and makes its output; NULL on failure. */
static void* prepare_tensor(TF_OpKernelContext* context, const collective_kernel* kernel, int v, const double* weights,
                            ncs_reduced* reduced, const void** sends, TF_Status* status) {
  int64_t dims[NCS_MOST_DIMS];
  int first = -1, own, n_dims;
  for (int r = 0; r < kernel->ranks; ++r) {
    ncs_tf_view seen;
    if (!ncs_tf_read_input(context, (int)(kernel->ranks + r * kernel->tensors + v), &seen, status)) return NULL;
    sends[r] = seen.data;
    if (weights[r] == 0) continue;
    if (first < 0) {
      first = r;
      reduced->count = (size_t)seen.count;
    } else if ((size_t)seen.count != reduced->count) {
      ncs_tf_fail(status, TF_INVALID_ARGUMENT,
                  "Expected the towers' tensors to be of one size. Received: %lld elements on tower %d, %lld on tower "
                  "%d", (long long)reduced->count, first, (long long)seen.count, r);
      return NULL;
    }
  }
  if (first < 0) {
    ncs_tf_fail(status, TF_INVALID_ARGUMENT, "Expected a tower with samples. Received: none");
    return NULL;
  }
  own = (int)(kernel->ranks + first * kernel->tensors + v);
  n_dims = ncs_tf_read_dims(context, own, dims, status);
  if (n_dims < 0) return NULL;
  return ncs_tf_allocate(context, v, dims, n_dims, &own, reduced->count >= NCS_FEW, status);
}

static void compute_all_reduce(const collective_kernel* kernel, TF_OpKernelContext* context, TF_Status* status) {
  const size_t n_ranks = (size_t)kernel->ranks, n_tensors = (size_t)kernel->tensors;
  double* weights = ncs_tf_calloc(n_ranks, sizeof(*weights), status);
  ncs_reduced* reduced = ncs_tf_calloc(n_tensors, sizeof(*reduced), status);
  const void** sends = ncs_tf_calloc(n_ranks * n_tensors, sizeof(*sends), status);
  void** recvs = ncs_tf_calloc(n_tensors, sizeof(*recvs), status);
  ncs_tf_view seen;
  for (int r = 0; r < kernel->ranks && ncs_tf_is_ok(status); ++r)
    if (ncs_tf_read_input(context, r, &seen, status)) weights[r] = *(const double*)seen.data;
  for (int v = 0; v < kernel->tensors && ncs_tf_is_ok(status); ++v) {
    const void** sent = sends + (size_t)v * n_ranks;
    reduced[v] = (ncs_reduced){sent, &recvs[v], 1, 0};
    recvs[v] = prepare_tensor(context, kernel, v, weights, &reduced[v], sent, status);
  }
  if (ncs_tf_is_ok(status) && ncs_cpu_reduce(ncs_tf.pool, reduced, n_tensors, weights, (int)n_ranks,
                                             (int)kernel->dtype, (int)kernel->op) != ncclSuccess)
    ncs_tf_fail(status, TF_INVALID_ARGUMENT,
                "Expected weights of 0 or 1 where nothing can be scaled. Received: others");
  free(recvs);
  free(sends);
  free(reduced);
  free(weights);
}

NCS_TF_KERNEL(collective_kernel, all_reduce)

const ncs_tf_op ncs_tf_all_reduce = {
    "NcclsyncAllReduce",
    {"T: {float, double, half, bfloat16, int8, uint8, int32, uint32, int64, uint64}", "dtype: int", "op: int",
     "ranks: int >= 1", "tensors: int >= 1", "sent: int >= 1", NULL},
    {"weights: ranks * double", "sends: sent * T", NULL},
    "results: tensors * T",
    create_all_reduce, run_all_reduce, free, 0, NULL};
