/* The kernel of fused arithmetic: the expressions of cpu/arithmetic.c. */
#include <stdlib.h>

#include "cpu/arithmetic.h"
#include "tf/api.h"

typedef struct {
  ncs_expression expression;
  int64_t* repeats; /* per input of the expression; 0: it has as many elements as the first one */
  int64_t alone;
} arithmetic_kernel;

static void destroy_arithmetic(void* kernel_) {
  arithmetic_kernel* kernel = kernel_;
  if (kernel != NULL) {
    free(kernel->expression.code);
    free(kernel->repeats);
  }
  free(kernel);
}

static void read_arithmetic(TF_OpKernelConstruction* context, arithmetic_kernel* kernel, TF_Status* status) {
  ncs_expression* expression = &kernel->expression;
  int length = 0, valid = 1;
  kernel->alone = ncs_tf_read_attr(context, "alone", status);
  expression->n_outputs = (int)ncs_tf_read_attr(context, "outputs", status);
  expression->n_sums = (int)ncs_tf_read_attr(context, "sums", status);
  expression->is_double = ncs_tf_read_dtype(context, status) == 2;
  kernel->repeats = ncs_tf_read_list(context, "repeats", &expression->n_inputs, status);
  expression->code = ncs_tf_read_list(context, "code", &length, status);
  expression->n_steps = (length - expression->n_outputs) / 3 - expression->n_sums;
  if (!ncs_tf_is_ok(status)) return;
  for (int i = 0; i < expression->n_inputs; ++i) valid &= kernel->repeats[i] >= 0;
  if (!valid || !ncs_expression_is_valid(expression, length))
    ncs_tf_fail(status, TF_INVALID_ARGUMENT, "Expected an expression of known operations on registers that exist");
}

/* The elements of input 0, and of one of its rows; 0 on failure. */
static int read_sizes(TF_OpKernelContext* context, size_t* count, size_t* row, TF_Status* status) {
  int64_t dims[NCS_MOST_DIMS];
  const int n_dims = ncs_tf_read_dims(context, 0, dims, status);
  if (n_dims < 0) return 0;
  *row = 1;
  for (int d = 1; d < n_dims; ++d) *row *= (size_t)dims[d];
  *count = n_dims > 0 ? *row * (size_t)dims[0] : 1;
  return 1;
}

/* The inputs whose memory an output may take: its step is the last to read them. Returns their number. */
static int find_candidates(const arithmetic_kernel* kernel, int output, int candidates[NCS_MOST_REGISTERS]) {
  const ncs_expression* expression = &kernel->expression;
  const int64_t *outputs = expression->code + 3 * expression->n_steps, *sums = outputs + expression->n_outputs;
  int found = 0;
  for (int i = 0; i < expression->n_inputs; ++i) {
    int wanted = kernel->repeats[i] != 0;
    for (int o = 0; o < expression->n_outputs; ++o) wanted |= outputs[o] == i;
    for (int s = 0; s < expression->n_sums; ++s) wanted |= sums[3 * s] == i;
    for (int s = (int)outputs[output] - expression->n_inputs + 1; s < expression->n_steps; ++s)
      wanted |= s < 0 || expression->code[3 * s + 1] == i || expression->code[3 * s + 2] == i;
    if (!wanted) candidates[found++] = i;
  }
  return found;
}

/* Allocates the result of sum s, of one dimension. */
static void* make_sum(TF_OpKernelContext* context, const ncs_expression* expression, int s, size_t count,
                      TF_Status* status) {
  const int64_t period = expression->code[3 * (expression->n_steps + s) + expression->n_outputs + 1];
  if (count % (size_t)period == 0)
    return ncs_tf_allocate(context, expression->n_outputs + s, &period, 1, NULL, 0, status);
  ncs_tf_fail(status, TF_INVALID_ARGUMENT, "Expected inputs of whole periods of each sum. Received: others");
  return NULL;
}

/* The first input gives the size. Any other input has as many elements, or repeats in each row, as TensorFlow
 * broadcasts a row, or a part of it. */
static void compute_arithmetic(const arithmetic_kernel* kernel, TF_OpKernelContext* context, TF_Status* status) {
  const ncs_expression* expression = &kernel->expression;
  ncs_operand inputs[NCS_MOST_REGISTERS];
  void* outputs[NCS_MOST_REGISTERS];
  size_t elements, row;
  if (!read_sizes(context, &elements, &row, status)) return;
  for (int i = 0; i < expression->n_inputs; ++i) {
    ncs_tf_view seen;
    size_t count, repeat = (size_t)kernel->repeats[i];
    if (!ncs_tf_read_input(context, i, &seen, status)) return;
    count = (size_t)seen.count;
    if (repeat == 0 ? count != elements
                    : count != 1 && count * repeat != elements && (count == 0 || row % (count * repeat) != 0)) {
      ncs_tf_fail(status, TF_INVALID_ARGUMENT,
                  "Expected inputs of one size, or that repeat themselves in each row. Received: others");
      return;
    }
    inputs[i] = (ncs_operand){seen.data, count, count == 1 || repeat == 0 ? 1 : repeat};
  }
  for (int o = 0; o < expression->n_outputs && ncs_tf_is_ok(status); ++o) {
    int candidates[NCS_MOST_REGISTERS];
    const int n = elements < NCS_FEW ? 0 : find_candidates(kernel, o, candidates);
    outputs[o] = ncs_tf_make_output(context, o, 0, candidates, n, status);
  }
  for (int s = 0; s < expression->n_sums && ncs_tf_is_ok(status); ++s)
    outputs[expression->n_outputs + s] = make_sum(context, expression, s, elements, status);
  if (ncs_tf_is_ok(status) &&
      ncs_expression_run(ncs_tf.pool, expression, inputs, outputs, elements, kernel->alone != 0) != ncclSuccess)
    ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
}

NCS_TF_KERNEL(arithmetic_kernel, arithmetic)

const ncs_tf_op ncs_tf_arithmetic = {
    "NcclsyncArithmetic",
    {"T: {float, double}", "alone: int", "repeats: list(int)", "outputs: int >= 0", "sums: int >= 0", "code: list(int)",
     "n_values: int >= 1", "n_results: int >= 1", NULL},
    {"values: n_values * T", NULL},
    "results: n_results * T",
    create_arithmetic, run_arithmetic, destroy_arithmetic, 0, NULL};
