/* TensorFlow kernels for host memory, registered at run time by TensorFlow's C API: the all-reduce of cpu.c, the fused
 * arithmetic of arithmetic.c, and the notes of meter.c. The first two are functions of their inputs alone: TensorFlow
 * may merge or fold them; a note is stateful, so that it may not.
 *
 * The API is declared here as far as it is used, after tensorflow/c/{kernels,ops,tf_status,tf_tensor}.h, so that
 * neither TensorFlow's headers nor TensorFlow are needed to compile. tests/test_host_ops.py compares both. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arithmetic.h"
#include "nccl_api.h"
#include "pool.h"

enum { TF_OK = 0, TF_INVALID_ARGUMENT = 3, TF_RESOURCE_EXHAUSTED = 8 };

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;

#define NCS_TF_CALLS(X)                                                                                               \
  X(TF_Status*, TF_NewStatus, (void))                                                                                 \
  X(void, TF_DeleteStatus, (TF_Status*))                                                                              \
  X(void, TF_SetStatus, (TF_Status*, int code, const char* message))                                                  \
  X(int, TF_GetCode, (const TF_Status*))                                                                              \
  X(const char*, TF_Message, (const TF_Status*))                                                                      \
  X(void, TF_DeleteTensor, (TF_Tensor*))                                                                              \
  X(void*, TF_TensorData, (const TF_Tensor*))                                                                         \
  X(int64_t, TF_TensorElementCount, (const TF_Tensor*))                                                               \
  X(int, TF_NumDims, (const TF_Tensor*))                                                                              \
  X(int64_t, TF_Dim, (const TF_Tensor*, int index))                                                                   \
  X(TF_OpDefinitionBuilder*, TF_NewOpDefinitionBuilder, (const char* name))                                           \
  X(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char* spec))                                 \
  X(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char* spec))                                \
  X(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char* spec))                               \
  X(void, TF_OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool is_stateful))                           \
  X(void, TF_OpDefinitionBuilderSetShapeInferenceFunction,                                                            \
    (TF_OpDefinitionBuilder*, void (*infer)(TF_ShapeInferenceContext*, TF_Status*)))                                  \
  X(void, TF_ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*))                           \
  X(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                                             \
  X(TF_KernelBuilder*, TF_NewKernelBuilder,                                                                           \
    (const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),                                   \
     void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*)))                                            \
  X(void, TF_RegisterKernelBuilder, (const char* name, TF_KernelBuilder*, TF_Status*))                                \
  X(void, TF_OpKernelConstruction_GetAttrType, (TF_OpKernelConstruction*, const char*, int* value, TF_Status*))       \
  X(void, TF_OpKernelConstruction_GetAttrInt64, (TF_OpKernelConstruction*, const char*, int64_t* value, TF_Status*))  \
  X(void, TF_OpKernelConstruction_GetAttrSize,                                                                        \
    (TF_OpKernelConstruction*, const char*, int32_t* list_size, int32_t* total_size, TF_Status*))                     \
  X(void, TF_OpKernelConstruction_GetAttrInt64List,                                                                   \
    (TF_OpKernelConstruction*, const char*, int64_t* values, int most, TF_Status*))                                   \
  X(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                                    \
  X(void, TF_GetInput, (TF_OpKernelContext*, int index, TF_Tensor** tensor, TF_Status*))                              \
  X(TF_Tensor*, TF_ForwardInputOrAllocateOutput,                                                                      \
    (TF_OpKernelContext*, const int* candidates, int n_candidates, int output, const int64_t* dims, int n_dims,       \
     int* forwarded, TF_Status*))                                                                                     \
  X(void, TF_OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))

#define NCS_TF_DECLARE(result, name, arguments) result(*name) arguments;
/* Loaded once; kernels run for as long as the process does. */
static struct {
  NCS_TF_CALLS(NCS_TF_DECLARE)
  ncs_pool* pool;
} tf;
#undef NCS_TF_DECLARE

/* ---- Tensors ---- */

#define NCS_MOST_DIMS 254 /* TensorFlow's own limit */

typedef struct {
  const void* data;
  int64_t count;
} view;

/* Input `index`. TensorFlow holds it until the kernel returns: no reference of our own is kept, so that its memory
 * can be forwarded to an output if nobody else holds it. */
static int read_input(TF_OpKernelContext* context, int index, view* seen, TF_Status* status) {
  TF_Tensor* tensor = NULL;
  tf.TF_GetInput(context, index, &tensor, status);
  if (tf.TF_GetCode(status) != TF_OK) return 0;
  seen->data = tf.TF_TensorData(tensor);
  seen->count = tf.TF_TensorElementCount(tensor);
  tf.TF_DeleteTensor(tensor);
  return 1;
}

/* Shape of input `index`; returns its rank, -1 on failure. */
static int read_dims(TF_OpKernelContext* context, int index, int64_t dims[NCS_MOST_DIMS], TF_Status* status) {
  TF_Tensor* tensor = NULL;
  int n_dims;
  tf.TF_GetInput(context, index, &tensor, status);
  if (tf.TF_GetCode(status) != TF_OK) return -1;
  n_dims = tf.TF_NumDims(tensor);
  for (int d = 0; d < n_dims; ++d) dims[d] = tf.TF_Dim(tensor, d);
  tf.TF_DeleteTensor(tensor);
  return n_dims;
}

/* Output `index` with the shape of input `like`, in its memory if that is asked for and free, and of `rows` rows if
 * that is not negative; NULL on failure. */
static void* make_output(TF_OpKernelContext* context, int index, int like, int in_place, int64_t rows,
                         TF_Status* status) {
  int64_t dims[NCS_MOST_DIMS];
  const int n_dims = read_dims(context, like, dims, status);
  int forwarded;
  TF_Tensor* tensor;
  void* data;
  if (n_dims < 0) return NULL;
  if (rows >= 0) dims[0] = rows;
  tensor = tf.TF_ForwardInputOrAllocateOutput(context, &like, in_place, index, dims, n_dims, &forwarded, status);
  if (tf.TF_GetCode(status) != TF_OK) return NULL;
  data = tf.TF_TensorData(tensor);
  tf.TF_DeleteTensor(tensor);
  return data;
}

static void fail(TF_Status* status, int code, const char* message) { tf.TF_SetStatus(status, code, message); }

/* ---- The kernel of the all-reduce ---- */

/* Of the all-gather, too, which has no operation. */
typedef struct {
  int64_t ranks, tensors, op;
  int dtype; /* index in dtypes */
} collective_kernel;

static const struct {
  int tf, nccl;
  size_t size;
} dtypes[] = {{1, ncclFloat32, 4}, {2, ncclFloat64, 8},   {3, ncclInt32, 4},    {4, ncclUint8, 1},   {6, ncclInt8, 1},
              {9, ncclInt64, 8},   {14, ncclBfloat16, 2}, {19, ncclFloat16, 2}, {22, ncclUint32, 4}, {23, ncclUint64, 8}};

static int find_dtype(int dtype) {
  for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); ++i)
    if (dtypes[i].tf == dtype) return (int)i;
  return -1;
}

static int64_t read_attr(TF_OpKernelConstruction* context, const char* name, TF_Status* status) {
  int64_t value = 0;
  if (tf.TF_GetCode(status) == TF_OK) tf.TF_OpKernelConstruction_GetAttrInt64(context, name, &value, status);
  return value;
}

static void* create_collective(TF_OpKernelConstruction* context, int reduces) {
  TF_Status* status = tf.TF_NewStatus();
  collective_kernel* kernel = calloc(1, sizeof(*kernel));
  int dtype = 0;
  if (kernel == NULL) fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  else {
    kernel->ranks = read_attr(context, "ranks", status);
    kernel->tensors = read_attr(context, "tensors", status);
    if (reduces) kernel->op = read_attr(context, "op", status);
    if (tf.TF_GetCode(status) == TF_OK) tf.TF_OpKernelConstruction_GetAttrType(context, "T", &dtype, status);
    kernel->dtype = find_dtype(dtype);
    if (tf.TF_GetCode(status) == TF_OK && kernel->dtype < 0) fail(status, TF_INVALID_ARGUMENT, "unknown dtype");
  }
  if (tf.TF_GetCode(status) != TF_OK) tf.TF_OpKernelConstruction_Failure(context, status);
  tf.TF_DeleteStatus(status);
  return kernel;
}

static void* create_all_reduce(TF_OpKernelConstruction* context) { return create_collective(context, 1); }

static void* create_all_gather(TF_OpKernelConstruction* context) { return create_collective(context, 0); }

/* Reads all ranks' tensor v and makes its output. */
static void prepare_tensor(TF_OpKernelContext* context, const collective_kernel* kernel, int v, const double* weights,
                           ncs_reduced* reduced, const void** sends, TF_Status* status) {
  char message[200];
  int first = -1;
  for (int r = 0; r < kernel->ranks; ++r) {
    view seen;
    if (!read_input(context, (int)(kernel->ranks + r * kernel->tensors + v), &seen, status)) return;
    sends[r] = seen.data;
    if (weights[r] == 0) continue;
    if (first < 0) {
      first = r;
      reduced->count = (size_t)seen.count;
    } else if ((size_t)seen.count != reduced->count) {
      snprintf(message, sizeof(message), "Expected the towers' tensors to be of one size. Received: %lld elements on "
               "tower %d, %lld on tower %d", (long long)reduced->count, first, (long long)seen.count, r);
      fail(status, TF_INVALID_ARGUMENT, message);
      return;
    }
  }
  if (first < 0) {
    fail(status, TF_INVALID_ARGUMENT, "Expected a tower with samples. Received: none");
    return;
  }
  reduced->sends = sends;
  reduced->recv = make_output(context, v, (int)(kernel->ranks + first * kernel->tensors + v), 1, -1, status);
}

static void compute_all_reduce(void* kernel_, TF_OpKernelContext* context) {
  const collective_kernel* kernel = kernel_;
  TF_Status* status = tf.TF_NewStatus();
  const size_t n_ranks = (size_t)kernel->ranks, n_tensors = (size_t)kernel->tensors;
  double* weights = malloc(n_ranks * sizeof(*weights));
  ncs_reduced* reduced = calloc(n_tensors, sizeof(*reduced));
  const void** sends = malloc(n_ranks * n_tensors * sizeof(*sends));
  view seen;
  if (weights == NULL || reduced == NULL || sends == NULL) fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  for (int r = 0; r < kernel->ranks && tf.TF_GetCode(status) == TF_OK; ++r)
    if (read_input(context, r, &seen, status)) weights[r] = *(const double*)seen.data;
  for (int v = 0; v < kernel->tensors && tf.TF_GetCode(status) == TF_OK; ++v)
    prepare_tensor(context, kernel, v, weights, &reduced[v], sends + (size_t)v * n_ranks, status);
  if (tf.TF_GetCode(status) == TF_OK &&
      ncs_cpu_reduce(tf.pool, reduced, n_tensors, weights, (int)n_ranks, dtypes[kernel->dtype].nccl, (int)kernel->op) != ncclSuccess)
    fail(status, TF_INVALID_ARGUMENT, "Expected weights of 0 or 1 where nothing can be scaled. Received: others");
  if (tf.TF_GetCode(status) != TF_OK) tf.TF_OpKernelContext_Failure(context, status);
  free(sends);
  free(reduced);
  free(weights);
  tf.TF_DeleteStatus(status);
}

/* ---- The kernel of the all-gather ---- */

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

/* Makes output v of all ranks' tensors v, one behind the other; `pieces` are what is to be copied. */
static void prepare_gathered(TF_OpKernelContext* context, const collective_kernel* kernel, int v, piece* pieces,
                             TF_Status* status) {
  int64_t dims[NCS_MOST_DIMS], rows = 0, row = 0;
  const size_t size = dtypes[kernel->dtype].size;
  char* to;
  for (int r = 0; r < kernel->ranks; ++r) {
    const int input = (int)(r * kernel->tensors + v), n_dims = read_dims(context, input, dims, status);
    int64_t elements = 1;
    view seen;
    if (n_dims < 0 || !read_input(context, input, &seen, status)) return;
    for (int d = 1; d < n_dims; ++d) elements *= dims[d];
    if (n_dims == 0 || (r > 0 && elements != row)) {
      fail(status, TF_INVALID_ARGUMENT, "Expected the towers' tensors to have rows of one size. Received: others");
      return;
    }
    row = elements;
    rows += dims[0];
    pieces[r].from = seen.data;
    pieces[r].bytes = (size_t)seen.count * size;
  }
  to = make_output(context, v, v, 0, rows, status);
  for (int r = 0; r < kernel->ranks; ++r) {
    pieces[r].to = to;
    to += pieces[r].bytes;
  }
}

static void compute_all_gather(void* kernel_, TF_OpKernelContext* context) {
  const collective_kernel* kernel = kernel_;
  TF_Status* status = tf.TF_NewStatus();
  const size_t n_ranks = (size_t)kernel->ranks, n_pieces = n_ranks * (size_t)kernel->tensors;
  piece* pieces = calloc(n_pieces, sizeof(*pieces));
  size_t* begins = malloc((n_pieces + 1) * sizeof(*begins));
  if (pieces == NULL || begins == NULL) fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  for (int v = 0; v < kernel->tensors && tf.TF_GetCode(status) == TF_OK; ++v)
    prepare_gathered(context, kernel, v, pieces + (size_t)v * n_ranks, status);
  if (tf.TF_GetCode(status) == TF_OK) {
    size_t bytes = begins[0] = 0;
    for (size_t p = 0; p < n_pieces; ++p) {
      begins[p + 1] = begins[p] + (pieces[p].bytes + NCS_COPIED_AT_ONCE - 1) / NCS_COPIED_AT_ONCE;
      bytes += pieces[p].bytes;
    }
    ncs_pool_run_parts(tf.pool, copy_block, pieces, begins, n_pieces, bytes <= NCS_COPIED_AT_ONCE);
  }
  if (tf.TF_GetCode(status) != TF_OK) tf.TF_OpKernelContext_Failure(context, status);
  free(begins);
  free(pieces);
  tf.TF_DeleteStatus(status);
}

/* ---- The kernel of fused arithmetic ---- */

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
  TF_Status* status = tf.TF_NewStatus();
  arithmetic_kernel* kernel = calloc(1, sizeof(*kernel));
  int32_t length = 0, ignored;
  int dtype = 0;
  if (kernel == NULL) fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  else {
    ncs_program* program = &kernel->program;
    kernel->instances = read_attr(context, "instances", status);
    program->n_inputs = (int)read_attr(context, "inputs", status);
    program->n_outputs = (int)read_attr(context, "outputs", status);
    if (tf.TF_GetCode(status) == TF_OK) tf.TF_OpKernelConstruction_GetAttrType(context, "T", &dtype, status);
    program->is_double = dtype == 2;
    if (tf.TF_GetCode(status) == TF_OK)
      tf.TF_OpKernelConstruction_GetAttrSize(context, "program", &length, &ignored, status);
    program->code = malloc((size_t)(length > 0 ? length : 1) * sizeof(*program->code));
    if (program->code == NULL) fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
    if (tf.TF_GetCode(status) == TF_OK)
      tf.TF_OpKernelConstruction_GetAttrInt64List(context, "program", program->code, length, status);
    program->n_steps = (length - program->n_outputs) / 3;
    if (tf.TF_GetCode(status) == TF_OK && !ncs_program_is_valid(program, length))
      fail(status, TF_INVALID_ARGUMENT, "Expected a program of known operations on registers that exist");
  }
  if (tf.TF_GetCode(status) != TF_OK) tf.TF_OpKernelConstruction_Failure(context, status);
  tf.TF_DeleteStatus(status);
  return kernel;
}

/* Instance k's inputs and outputs; the first input tells the size, any other has that size or one element. */
static void prepare_instance(TF_OpKernelContext* context, const ncs_program* program, int k, ncs_instance* instance,
                             TF_Status* status) {
  const int begin = k * program->n_inputs;
  for (int i = 0; i < program->n_inputs; ++i) {
    view seen;
    if (!read_input(context, begin + i, &seen, status)) return;
    if (i == 0) instance->count = (size_t)seen.count;
    if ((size_t)seen.count != instance->count && seen.count != 1) {
      fail(status, TF_INVALID_ARGUMENT, "Expected inputs of one size, or of one element. Received: others");
      return;
    }
    instance->inputs[i] = seen.data;
    instance->is_scalar[i] = seen.count == 1;
  }
  for (int o = 0; o < program->n_outputs && tf.TF_GetCode(status) == TF_OK; ++o)
    instance->outputs[o] = make_output(context, k * program->n_outputs + o, begin, 0, -1, status);
}

static void compute_arithmetic(void* kernel_, TF_OpKernelContext* context) {
  const arithmetic_kernel* kernel = kernel_;
  const ncs_program* program = &kernel->program;
  TF_Status* status = tf.TF_NewStatus();
  const size_t n = (size_t)kernel->instances, n_in = (size_t)program->n_inputs, n_out = (size_t)program->n_outputs;
  ncs_instance* instances = calloc(n, sizeof(*instances));
  const void** inputs = malloc(n * n_in * sizeof(*inputs));
  void** outputs = malloc(n * n_out * sizeof(*outputs));
  char* is_scalar = malloc(n * n_in);
  if (instances == NULL || inputs == NULL || outputs == NULL || is_scalar == NULL)
    fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  for (size_t k = 0; k < n && tf.TF_GetCode(status) == TF_OK; ++k) {
    instances[k].inputs = inputs + k * n_in;
    instances[k].outputs = outputs + k * n_out;
    instances[k].is_scalar = is_scalar + k * n_in;
    prepare_instance(context, program, (int)k, &instances[k], status);
  }
  if (tf.TF_GetCode(status) == TF_OK && ncs_program_run(tf.pool, program, instances, n) != ncclSuccess)
    fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  if (tf.TF_GetCode(status) != TF_OK) tf.TF_OpKernelContext_Failure(context, status);
  free(is_scalar);
  free(outputs);
  free(inputs);
  free(instances);
  tf.TF_DeleteStatus(status);
}

/* ---- The kernel of a note ---- */

typedef struct {
  ncs_meter* meter;
  int64_t span, ends, tokens, values;
} note_kernel;

static void* create_note(TF_OpKernelConstruction* context) {
  TF_Status* status = tf.TF_NewStatus();
  note_kernel* kernel = calloc(1, sizeof(*kernel));
  if (kernel == NULL) fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  else {
    kernel->meter = (ncs_meter*)(intptr_t)read_attr(context, "meter", status);
    kernel->span = read_attr(context, "span", status);
    kernel->ends = read_attr(context, "ends", status);
    kernel->tokens = read_attr(context, "n_tokens", status);
    kernel->values = read_attr(context, "n_values", status);
  }
  if (tf.TF_GetCode(status) != TF_OK) tf.TF_OpKernelConstruction_Failure(context, status);
  tf.TF_DeleteStatus(status);
  return kernel;
}

static void compute_note(void* kernel_, TF_OpKernelContext* context) {
  const note_kernel* kernel = kernel_;
  TF_Status* status = tf.TF_NewStatus();
  int64_t value = 0;
  view seen;
  if (kernel->values > 0 && read_input(context, (int)kernel->tokens, &seen, status)) value = *(const int64_t*)seen.data;
  if (tf.TF_GetCode(status) == TF_OK &&
      ncs_meter_note(kernel->meter, (int)kernel->span, (int)kernel->ends, value) != ncclSuccess)
    fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  if (tf.TF_GetCode(status) != TF_OK) tf.TF_OpKernelContext_Failure(context, status);
  tf.TF_DeleteStatus(status);
}

/* ---- Registration ---- */

static void infer_nothing(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.TF_ShapeInferenceContextSetUnknownShape(context, status);
}

typedef struct {
  const char *name, *attrs[8], *inputs[3], *output; /* NULL: it has none, and is run for what it does */
  void* (*create)(TF_OpKernelConstruction*);
  void (*compute)(void*, TF_OpKernelContext*);
  void (*destroy)(void*);
} op_definition;

static const op_definition all_reduce_op = {
    "NcclsyncAllReduce",
    {"T: {float, double, half, bfloat16, int8, uint8, int32, uint32, int64, uint64}", "op: int", "ranks: int >= 1",
     "tensors: int >= 1", "sent: int >= 1", NULL},
    {"weights: ranks * double", "sends: sent * T", NULL},
    "results: tensors * T",
    create_all_reduce,
    compute_all_reduce,
    free,
};

static const op_definition all_gather_op = {
    "NcclsyncAllGather",
    {"T: {float, double, half, bfloat16, int8, uint8, int32, uint32, int64, uint64}", "ranks: int >= 1",
     "tensors: int >= 1", "sent: int >= 1", NULL},
    {"sends: sent * T", NULL},
    "results: tensors * T",
    create_all_gather,
    compute_all_gather,
    free,
};

static const op_definition arithmetic_op = {
    "NcclsyncArithmetic",
    {"T: {float, double}", "instances: int >= 1", "inputs: int >= 1", "outputs: int >= 1", "program: list(int)",
     "n_values: int >= 1", "n_results: int >= 1", NULL},
    {"values: n_values * T", NULL},
    "results: n_results * T",
    create_arithmetic,
    compute_arithmetic,
    destroy_arithmetic,
};

static const op_definition note_op = {
    "NcclsyncNote",
    {"meter: int", "span: int", "ends: int", "n_tokens: int >= 0", "n_values: int >= 0", NULL},
    {"tokens: n_tokens * float", "values: n_values * int64", NULL},
    NULL,
    create_note,
    compute_note,
    free,
};

static void register_op(const op_definition* definition, TF_Status* status) {
  TF_OpDefinitionBuilder* op = tf.TF_NewOpDefinitionBuilder(definition->name);
  for (int i = 0; definition->attrs[i] != NULL; ++i) tf.TF_OpDefinitionBuilderAddAttr(op, definition->attrs[i]);
  for (int i = 0; definition->inputs[i] != NULL; ++i) tf.TF_OpDefinitionBuilderAddInput(op, definition->inputs[i]);
  if (definition->output != NULL) tf.TF_OpDefinitionBuilderAddOutput(op, definition->output);
  else tf.TF_OpDefinitionBuilderSetIsStateful(op, true); /* whatever it is given, TensorFlow 2.21 takes it as true */
  tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(op, infer_nothing);
  tf.TF_RegisterOpDefinition(op, status);
  if (tf.TF_GetCode(status) != TF_OK) return;
  tf.TF_RegisterKernelBuilder(
      definition->name,
      tf.TF_NewKernelBuilder(definition->name, "CPU", definition->create, definition->compute, definition->destroy),
      status);
}

ncclResult_t ncs_tf_register(const char* path, ncs_pool* pool, /*outputs*/ ncs_failure* failure) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  ncclResult_t result = ncclSuccess;
  TF_Status* status;
  if (tf.pool != NULL) return ncclSuccess;
  if (library == NULL) {
    ncs_set_failure(failure, "dlopen", "expected TensorFlow's library to be loaded");
    return ncclSystemError;
  }
#define NCS_FIND(result, name, arguments)                                   \
  *(void**)&tf.name = dlsym(library, #name);                                \
  if (tf.name == NULL) {                                                    \
    ncs_set_failure(failure, "dlsym", "TensorFlow has no function " #name); \
    return ncclSystemError;                                                 \
  }
  NCS_TF_CALLS(NCS_FIND)
#undef NCS_FIND
  status = tf.TF_NewStatus();
  register_op(&all_reduce_op, status);
  if (tf.TF_GetCode(status) == TF_OK) register_op(&all_gather_op, status);
  if (tf.TF_GetCode(status) == TF_OK) register_op(&arithmetic_op, status);
  if (tf.TF_GetCode(status) == TF_OK) register_op(&note_op, status);
  if (tf.TF_GetCode(status) == TF_OK) tf.pool = pool;
  else {
    ncs_set_failure(failure, "TF_RegisterOpDefinition", tf.TF_Message(status));
    result = ncclSystemError;
  }
  tf.TF_DeleteStatus(status);
  return result;
}
