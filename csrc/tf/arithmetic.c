/* The kernel of fused arithmetic: the expressions of cpu/arithmetic.c. */
#include <stdlib.h>

#include "cpu/arithmetic.h"
#include "tf/api.h"

typedef struct {
  ncs_expression expression;
  int64_t alone, n_whole; /* the inputs with rows of the result's size; others repeat in each row */
} arithmetic_kernel;

static void destroy_arithmetic(void* kernel_) {
  arithmetic_kernel* kernel = kernel_;
  if (kernel != NULL) free(kernel->expression.code);
  free(kernel);
}

static void read_arithmetic(TF_OpKernelConstruction* context, arithmetic_kernel* kernel, TF_Status* status) {
  int length = 0;
  kernel->alone = ncs_tf_read_attr(context, "alone", status);
  kernel->n_whole = ncs_tf_read_attr(context, "n_whole", status);
  kernel->expression.n_inputs = (int)ncs_tf_read_attr(context, "n_values", status);
  kernel->expression.code = ncs_tf_read_list(context, "code", &length, status);
  kernel->expression.n_steps = length / 3;
  if (!ncs_tf_is_ok(status)) return;
  if (kernel->n_whole > kernel->expression.n_inputs || !ncs_expression_is_valid(&kernel->expression, length))
    ncs_tf_fail(status, TF_INVALID_ARGUMENT, "Expected an expression of known operations on registers that exist");
}

/* How many rows the result has, by those of the inputs; -1 if TensorFlow's ops do not take operands of such sizes. */
static int64_t find_rows(const ncs_expression* expression, int64_t rows[NCS_MOST_REGISTERS]) {
  int64_t* row = rows + expression->n_inputs;
  for (const int64_t* step = expression->code; row < rows + expression->n_inputs + expression->n_steps; step += 3) {
    const int64_t a = rows[step[1]], b = rows[step[step[0] <= NCS_LIKE ? 2 : 1]];
    const int is_alike = step[0] == NCS_ADD_ALIKE || step[0] == NCS_RELU_GRADIENT;
    if (a != b && (is_alike || (a != 1 && (b != 1 || step[0] == NCS_LIKE)))) return -1;
    *row++ = a == 1 ? b : a;
  }
  return row[-1];
}

/* Elements of the result are computed from those of the inputs at the same place, or in the same place of a row. */
static void compute_arithmetic(const arithmetic_kernel* kernel, TF_OpKernelContext* context, TF_Status* status) {
  const ncs_expression* expression = &kernel->expression;
  ncs_operand inputs[NCS_MOST_REGISTERS];
  int64_t rows[NCS_MOST_REGISTERS], dims[NCS_MOST_DIMS], row = 1;
  int candidates[NCS_MOST_REGISTERS];
  const int n_dims = ncs_tf_read_dims(context, 0, dims, status);
  float* out;
  for (int d = 1; d < n_dims; ++d) row *= dims[d];
  for (int i = 0; i < expression->n_inputs && ncs_tf_is_ok(status); ++i) {
    const int is_whole = i < kernel->n_whole;
    ncs_tf_view seen;
    if (!ncs_tf_read_input(context, i, &seen, status)) return;
    inputs[i] = (ncs_operand){seen.data, (size_t)seen.count};
    rows[i] = is_whole && row > 0 ? seen.count / row : 1;
    candidates[i] = i;
    if (is_whole ? rows[i] * row != seen.count : seen.count < 1 || row % seen.count != 0)
      ncs_tf_fail(status, TF_INVALID_ARGUMENT, "Expected rows of one size, or that repeat in each. Received: others");
  }
  if (!ncs_tf_is_ok(status)) return;
  dims[0] = find_rows(expression, rows);
  if (dims[0] < 0) { /* as TensorFlow's own ops fail */
    ncs_tf.TF_SetStatus(status, TF_INVALID_ARGUMENT, "Incompatible shapes: not the same size, nor one row");
    return;
  }
  out = ncs_tf_allocate(context, 0, dims, n_dims, candidates, expression->n_inputs, status);
  if (out != NULL)
    ncs_expression_run(ncs_tf.pool, expression, inputs, out, (size_t)(dims[0] * row), kernel->alone != 0);
}

NCS_TF_KERNEL(arithmetic_kernel, arithmetic)

const ncs_tf_op ncs_tf_arithmetic = {
    "NcclsyncArithmetic",
    {"alone: int", "n_whole: int >= 1", "code: list(int)", "n_values: int >= 1", NULL},
    {"values: n_values * float", NULL},
    "result: float",
    create_arithmetic, run_arithmetic, destroy_arithmetic, 0, NULL};
