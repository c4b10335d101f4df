/* The kernel of fused arithmetic: the programs of arithmetic.c. */
#include <stdlib.h>

#include "arithmetic.h"
#include "tf_api.h"

typedef struct {
  ncs_program program;
  int64_t instances;
} arithmetic_kernel;

static void destroy_arithmetic(void* kernel_) {
  arithmetic_kernel* kernel = kernel_;
  if (kernel != NULL) free(kernel->program.code);
  free(kernel);
}

static void* create_arithmetic(TF_OpKernelConstruction* context) {
  TF_Status* status = ncs_tf.TF_NewStatus();
  arithmetic_kernel* kernel = calloc(1, sizeof(*kernel));
  int32_t length = 0, ignored;
  int dtype = 0;
  if (kernel == NULL) ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  else {
    ncs_program* program = &kernel->program;
    kernel->instances = ncs_tf_read_attr(context, "instances", status);
    program->n_inputs = (int)ncs_tf_read_attr(context, "inputs", status);
    program->n_outputs = (int)ncs_tf_read_attr(context, "outputs", status);
    if (ncs_tf.TF_GetCode(status) == TF_OK) ncs_tf.TF_OpKernelConstruction_GetAttrType(context, "T", &dtype, status);
    program->is_double = dtype == 2;
    if (ncs_tf.TF_GetCode(status) == TF_OK)
      ncs_tf.TF_OpKernelConstruction_GetAttrSize(context, "program", &length, &ignored, status);
    program->code = malloc((size_t)(length > 0 ? length : 1) * sizeof(*program->code));
    if (program->code == NULL) ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
    if (ncs_tf.TF_GetCode(status) == TF_OK)
      ncs_tf.TF_OpKernelConstruction_GetAttrInt64List(context, "program", program->code, length, status);
    program->n_steps = (length - program->n_outputs) / 3;
    if (ncs_tf.TF_GetCode(status) == TF_OK && !ncs_program_is_valid(program, length))
      ncs_tf_fail(status, TF_INVALID_ARGUMENT, "Expected a program of known operations on registers that exist");
  }
  if (ncs_tf.TF_GetCode(status) != TF_OK) ncs_tf.TF_OpKernelConstruction_Failure(context, status);
  ncs_tf.TF_DeleteStatus(status);
  return kernel;
}

/* Instance k's inputs and outputs; the first input tells the size, any other has that size or one element. */
static void prepare_instance(TF_OpKernelContext* context, const ncs_program* program, int k, ncs_instance* instance,
                             TF_Status* status) {
  const int begin = k * program->n_inputs;
  for (int i = 0; i < program->n_inputs; ++i) {
    ncs_tf_view seen;
    if (!ncs_tf_read_input(context, begin + i, &seen, status)) return;
    if (i == 0) instance->count = (size_t)seen.count;
    if ((size_t)seen.count != instance->count && seen.count != 1) {
      ncs_tf_fail(status, TF_INVALID_ARGUMENT, "Expected inputs of one size, or of one element. Received: others");
      return;
    }
    instance->inputs[i] = seen.data;
    instance->is_scalar[i] = seen.count == 1;
  }
  for (int o = 0; o < program->n_outputs && ncs_tf.TF_GetCode(status) == TF_OK; ++o)
    instance->outputs[o] = ncs_tf_make_output(context, k * program->n_outputs + o, begin, 0, -1, status);
}

static void compute_arithmetic(void* kernel_, TF_OpKernelContext* context) {
  const arithmetic_kernel* kernel = kernel_;
  const ncs_program* program = &kernel->program;
  TF_Status* status = ncs_tf.TF_NewStatus();
  const size_t n = (size_t)kernel->instances, n_in = (size_t)program->n_inputs, n_out = (size_t)program->n_outputs;
  ncs_instance* instances = calloc(n, sizeof(*instances));
  const void** inputs = malloc(n * n_in * sizeof(*inputs));
  void** outputs = malloc(n * n_out * sizeof(*outputs));
  char* is_scalar = malloc(n * n_in);
  if (instances == NULL || inputs == NULL || outputs == NULL || is_scalar == NULL)
    ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  for (size_t k = 0; k < n && ncs_tf.TF_GetCode(status) == TF_OK; ++k) {
    instances[k].inputs = inputs + k * n_in;
    instances[k].outputs = outputs + k * n_out;
    instances[k].is_scalar = is_scalar + k * n_in;
    prepare_instance(context, program, (int)k, &instances[k], status);
  }
  if (ncs_tf.TF_GetCode(status) == TF_OK && ncs_program_run(ncs_tf.pool, program, instances, n) != ncclSuccess)
    ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  if (ncs_tf.TF_GetCode(status) != TF_OK) ncs_tf.TF_OpKernelContext_Failure(context, status);
  free(is_scalar);
  free(outputs);
  free(inputs);
  free(instances);
  ncs_tf.TF_DeleteStatus(status);
}

const ncs_tf_op ncs_tf_arithmetic = {
    "NcclsyncArithmetic",
    {"T: {float, double}", "instances: int >= 1", "inputs: int >= 1", "outputs: int >= 1", "program: list(int)",
     "n_values: int >= 1", "n_results: int >= 1", NULL},
    {"values: n_values * T", NULL},
    "results: n_results * T",
    create_arithmetic,
    compute_arithmetic,
    destroy_arithmetic,
};
