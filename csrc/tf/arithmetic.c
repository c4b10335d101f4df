/* The kernel of fused arithmetic: the expressions of cpu/arithmetic.c. */
#include <stdlib.h>

#include "cpu/arithmetic.h"
#include "tf/api.h"

typedef struct {
  ncs_expression expression;
  int64_t* repeats; /* per input of the expression; 0: it has as many elements as the first one */
  int64_t instances, alone;
} arithmetic_kernel;

static void destroy_arithmetic(void* kernel_) {
  arithmetic_kernel* kernel = kernel_;
  if (kernel != NULL) {
    free(kernel->expression.code);
    free(kernel->repeats);
  }
  free(kernel);
}

/* A list of integers, to be freed by the caller; NULL on failure. */
static int64_t* read_list(TF_OpKernelConstruction* context, const char* name, int* length, TF_Status* status) {
  int32_t size = 0, ignored;
  int64_t* list;
  if (ncs_tf.TF_GetCode(status) != TF_OK) return NULL;
  ncs_tf.TF_OpKernelConstruction_GetAttrSize(context, name, &size, &ignored, status);
  if (ncs_tf.TF_GetCode(status) != TF_OK) return NULL;
  *length = size > 0 ? size : 0;
  list = malloc((size_t)(*length + 1) * sizeof(*list));
  if (list == NULL) ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  else ncs_tf.TF_OpKernelConstruction_GetAttrInt64List(context, name, list, *length, status);
  return list;
}

static void* create_arithmetic(TF_OpKernelConstruction* context) {
  TF_Status* status = ncs_tf.TF_NewStatus();
  arithmetic_kernel* kernel = calloc(1, sizeof(*kernel));
  int length = 0, dtype = 0, valid = 1;
  if (kernel == NULL) ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  else {
    ncs_expression* expression = &kernel->expression;
    kernel->instances = ncs_tf_read_attr(context, "instances", status);
    kernel->alone = ncs_tf_read_attr(context, "alone", status);
    expression->n_outputs = (int)ncs_tf_read_attr(context, "outputs", status);
    expression->n_sums = (int)ncs_tf_read_attr(context, "sums", status);
    if (ncs_tf.TF_GetCode(status) == TF_OK) ncs_tf.TF_OpKernelConstruction_GetAttrType(context, "T", &dtype, status);
    expression->is_double = dtype == 2;
    kernel->repeats = read_list(context, "repeats", &expression->n_inputs, status);
    expression->code = read_list(context, "code", &length, status);
    expression->n_steps = (length - expression->n_outputs) / 3 - expression->n_sums;
    for (int i = 0; ncs_tf.TF_GetCode(status) == TF_OK && i < expression->n_inputs; ++i)
      valid &= kernel->repeats[i] >= 0;
    if (ncs_tf.TF_GetCode(status) == TF_OK && !(valid && ncs_expression_is_valid(expression, length)))
      ncs_tf_fail(status, TF_INVALID_ARGUMENT, "Expected an expression of known operations on registers that exist");
  }
  if (ncs_tf.TF_GetCode(status) != TF_OK) ncs_tf.TF_OpKernelConstruction_Failure(context, status);
  ncs_tf.TF_DeleteStatus(status);
  return kernel;
}

/* The elements of input `index`, and of one of its rows; 0 on failure. */
static int read_sizes(TF_OpKernelContext* context, int index, size_t* count, size_t* row, TF_Status* status) {
  int64_t dims[NCS_MOST_DIMS];
  const int n_dims = ncs_tf_read_dims(context, index, dims, status);
  if (n_dims < 0) return 0;
  *row = 1;
  for (int d = 1; d < n_dims; ++d) *row *= (size_t)dims[d];
  *count = n_dims > 0 ? *row * (size_t)dims[0] : 1;
  return 1;
}

/* The inputs of an instance whose memory an output may take: its step is the last to read them. Returns their
 * number. */
static int find_candidates(const arithmetic_kernel* kernel, int output, int begin, int candidates[NCS_MOST_REGISTERS]) {
  const ncs_expression* expression = &kernel->expression;
  const int64_t *outputs = expression->code + 3 * expression->n_steps, *sums = outputs + expression->n_outputs;
  int found = 0;
  for (int i = 0; i < expression->n_inputs; ++i) {
    int wanted = kernel->repeats[i] != 0;
    for (int o = 0; o < expression->n_outputs; ++o) wanted |= outputs[o] == i;
    for (int s = 0; s < expression->n_sums; ++s) wanted |= sums[3 * s] == i;
    for (int s = (int)outputs[output] - expression->n_inputs + 1; s < expression->n_steps; ++s)
      wanted |= s < 0 || expression->code[3 * s + 1] == i || expression->code[3 * s + 2] == i;
    if (!wanted) candidates[found++] = begin + i;
  }
  return found;
}

/* Allocates the result of instance k's sum s, of one dimension. */
static void* make_sum(TF_OpKernelContext* context, const ncs_expression* expression, int k, int s, size_t count,
                      TF_Status* status) {
  const int64_t period = expression->code[3 * (expression->n_steps + s) + expression->n_outputs + 1];
  const int index = k * (expression->n_outputs + expression->n_sums) + expression->n_outputs + s;
  if (count % (size_t)period == 0) return ncs_tf_allocate(context, index, &period, 1, NULL, 0, status);
  ncs_tf_fail(status, TF_INVALID_ARGUMENT, "Expected inputs of whole periods of each sum. Received: others");
  return NULL;
}

/* Instance k's inputs and outputs. The first input gives the size. Any other input has as many elements, or repeats in
 * each row, as TensorFlow broadcasts a row, or a part of it. */
static void prepare_instance(TF_OpKernelContext* context, const arithmetic_kernel* kernel, int k,
                             ncs_instance* instance, TF_Status* status) {
  const ncs_expression* expression = &kernel->expression;
  const int begin = k * expression->n_inputs;
  size_t row;
  if (!read_sizes(context, begin, &instance->count, &row, status)) return;
  for (int i = 0; i < expression->n_inputs; ++i) {
    ncs_tf_view seen;
    size_t count, repeat = (size_t)kernel->repeats[i];
    if (!ncs_tf_read_input(context, begin + i, &seen, status)) return;
    count = (size_t)seen.count;
    if (repeat == 0 ? count != instance->count
                    : count != 1 && count * repeat != instance->count && (count == 0 || row % (count * repeat) != 0)) {
      ncs_tf_fail(status, TF_INVALID_ARGUMENT,
                  "Expected inputs of one size, or that repeat themselves in each row. Received: others");
      return;
    }
    instance->inputs[i] = (ncs_operand){seen.data, count, count == 1 || repeat == 0 ? 1 : repeat};
  }
  for (int o = 0; o < expression->n_outputs && ncs_tf.TF_GetCode(status) == TF_OK; ++o) {
    int candidates[NCS_MOST_REGISTERS];
    const int n = instance->count < NCS_FEW ? 0 : find_candidates(kernel, o, begin, candidates);
    const int index = k * (expression->n_outputs + expression->n_sums) + o;
    instance->outputs[o] = ncs_tf_make_output(context, index, begin, candidates, n, -1, status);
  }
  for (int s = 0; s < expression->n_sums && ncs_tf.TF_GetCode(status) == TF_OK; ++s)
    instance->outputs[expression->n_outputs + s] = make_sum(context, expression, k, s, instance->count, status);
}

static void compute_arithmetic(void* kernel_, TF_OpKernelContext* context) {
  const arithmetic_kernel* kernel = kernel_;
  const ncs_expression* expression = &kernel->expression;
  TF_Status* status = ncs_tf.TF_NewStatus();
  const size_t n = (size_t)kernel->instances, n_in = (size_t)expression->n_inputs;
  const size_t n_out = (size_t)(expression->n_outputs + expression->n_sums);
  ncs_instance* instances = calloc(n, sizeof(*instances));
  ncs_operand* inputs = malloc(n * n_in * sizeof(*inputs));
  void** outputs = malloc(n * n_out * sizeof(*outputs));
  if (instances == NULL || inputs == NULL || outputs == NULL)
    ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  for (size_t k = 0; k < n && ncs_tf.TF_GetCode(status) == TF_OK; ++k) {
    instances[k].inputs = inputs + k * n_in;
    instances[k].outputs = outputs + k * n_out;
    prepare_instance(context, kernel, (int)k, &instances[k], status);
  }
  if (ncs_tf.TF_GetCode(status) == TF_OK &&
      ncs_expression_run(ncs_tf.pool, expression, instances, n, kernel->alone != 0) != ncclSuccess)
    ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  if (ncs_tf.TF_GetCode(status) != TF_OK) ncs_tf.TF_OpKernelContext_Failure(context, status);
  free(outputs);
  free(inputs);
  free(instances);
  ncs_tf.TF_DeleteStatus(status);
}

const ncs_tf_op ncs_tf_arithmetic = {
    "NcclsyncArithmetic",
    {"T: {float, double}", "instances: int >= 1", "alone: int", "repeats: list(int)", "outputs: int >= 0",
     "sums: int >= 0", "code: list(int)", "n_values: int >= 1", "n_results: int >= 1", NULL},
    {"values: n_values * T", NULL},
    "results: n_results * T",
    create_arithmetic,
    compute_arithmetic,
    destroy_arithmetic,
    0,
    {NULL},
};
