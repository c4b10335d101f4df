/* Inside csrc/tf only: the part of TensorFlow's C API that kernels use, and shared helpers.
 *
 * It is declared here after tensorflow/c/{kernels,ops,tf_status,tf_tensor}.h, so that neither TensorFlow's headers nor
 * TensorFlow are needed to compile. tests/ops/test_host_ops.py compares both. */
#ifndef NCCLSYNC_TF_API_H_
#define NCCLSYNC_TF_API_H_

#include <stdbool.h>
#include <stddef.h>

#include "ncclsync.h"

enum { TF_OK = 0, TF_INVALID_ARGUMENT = 3, TF_RESOURCE_EXHAUSTED = 8, TF_ABORTED = 10, TF_INTERNAL = 13 };
enum { TF_INT64 = 9 };

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;

typedef struct TF_AllocatorAttributes {
  size_t struct_size;
  unsigned char on_host;
} TF_AllocatorAttributes;
/* Without the padding after the last member, as TensorFlow counts. */
#define TF_ALLOCATOR_ATTRIBUTES_STRUCT_SIZE (offsetof(TF_AllocatorAttributes, on_host) + 1)

#define NCS_TF_CALLS(X)                                                                                               \
  X(TF_Status*, TF_NewStatus, (void))                                                                                 \
  X(void, TF_DeleteStatus, (TF_Status*))                                                                              \
  X(void, TF_SetStatus, (TF_Status*, int code, const char* message))                                                  \
  X(int, TF_GetCode, (const TF_Status*))                                                                              \
  X(const char*, TF_Message, (const TF_Status*))                                                                      \
  X(void, TF_DeleteTensor, (TF_Tensor*))                                                                              \
  X(void*, TF_TensorData, (const TF_Tensor*))                                                                         \
  X(int64_t, TF_TensorElementCount, (const TF_Tensor*))                                                               \
  X(TF_Tensor*, TF_NewTensor,                                                                                         \
    (int dtype, const int64_t* dims, int n_dims, void* data, size_t size,                                             \
     void (*deallocator)(void* data, size_t len, void* arg), void* deallocator_arg))                                 \
  X(int, TF_TensorType, (const TF_Tensor*))                                                                           \
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
  X(void, TF_KernelBuilder_HostMemory, (TF_KernelBuilder*, const char* argument))                                     \
  X(void, TF_RegisterKernelBuilder, (const char* name, TF_KernelBuilder*, TF_Status*))                                \
  X(void, TF_OpKernelConstruction_GetAttrInt64, (TF_OpKernelConstruction*, const char*, int64_t* value, TF_Status*))  \
  X(void, TF_OpKernelConstruction_GetAttrSize,                                                                        \
    (TF_OpKernelConstruction*, const char*, int32_t* list_size, int32_t* total_size, TF_Status*))                     \
  X(void, TF_OpKernelConstruction_GetAttrInt64List,                                                                   \
    (TF_OpKernelConstruction*, const char*, int64_t* values, int most, TF_Status*))                                   \
  X(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                                    \
  X(void, TF_GetInput, (TF_OpKernelContext*, int index, TF_Tensor** tensor, TF_Status*))                              \
  X(void, TF_SetOutput, (TF_OpKernelContext*, int index, const TF_Tensor* tensor, TF_Status*))                        \
  X(TF_Tensor*, TF_AllocateTemp,                                                                                      \
    (TF_OpKernelContext*, int dtype, const int64_t* dims, int n_dims, TF_AllocatorAttributes*, TF_Status*))           \
  X(TF_Tensor*, TF_ForwardInputOrAllocateOutput,                                                                      \
    (TF_OpKernelContext*, const int* candidates, int n_candidates, int output, const int64_t* dims, int n_dims,       \
     int* forwarded, TF_Status*))                                                                                     \
  X(void, TF_OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))

#define NCS_TF_DECLARE(result, name, arguments) result(*name) arguments;
/* Loaded once; kernels run for as long as the process does. */
typedef struct {
  NCS_TF_CALLS(NCS_TF_DECLARE)
  ncs_pool* pool;
  void* (*find_stream)(void* context); /* that a kernel's GPU computes on; NULL: not known */
} ncs_tf_library;
#undef NCS_TF_DECLARE

extern ncs_tf_library ncs_tf;

#define NCS_MOST_DIMS 254 /* TensorFlow's own limit */

typedef struct {
  const void* data;
  int64_t count;
} ncs_tf_view;

/* Input `index`; 0 on failure. TensorFlow holds it until the kernel returns; no reference is kept here, so that its
 * memory can be forwarded to an output if it has no other holder. */
int ncs_tf_read_input(TF_OpKernelContext* context, int index, ncs_tf_view* seen, TF_Status* status);

/* Shape of input `index`; returns its rank, -1 on failure. */
int ncs_tf_read_dims(TF_OpKernelContext* context, int index, int64_t dims[NCS_MOST_DIMS], TF_Status* status);

/* Output `index` of that shape, in the memory of the first candidate (an input of as many elements) without another
 * holder; NULL on failure. */
void* ncs_tf_allocate(TF_OpKernelContext* context, int index, const int64_t* dims, int n_dims, const int* candidates,
                      int n_candidates, TF_Status* status);

/* An integer attribute; 0 if there was a failure before. */
int64_t ncs_tf_read_attr(TF_OpKernelConstruction* context, const char* name, TF_Status* status);

/* An attribute that is a list of *length integers, to be freed by the caller; NULL on failure, here or before. */
int64_t* ncs_tf_read_list(TF_OpKernelConstruction* context, const char* name, int* length, TF_Status* status);

/* Whether nothing has failed so far. */
int ncs_tf_is_ok(const TF_Status* status);

/* As calloc, for at least one object; fails if memory is short. */
void* ncs_tf_calloc(size_t count, size_t size, TF_Status* status);

/* Fails with a sentence, as of printf, after the words by which Python knows it (compat/tensorflow.py); if memory is
 * short, as TensorFlow itself fails, without them. */
void ncs_tf_fail(TF_Status* status, int code, const char* format, ...) __attribute__((format(printf, 3, 4)));

/* An op and its kernel. */
typedef struct {
  const char *name, *attrs[10], *inputs[3], *output; /* NULL: it has none */
  void* (*create)(TF_OpKernelConstruction*);
  void (*compute)(void*, TF_OpKernelContext*);
  void (*destroy)(void*);
  int is_stateful;     /* it runs for its side effects */
  const char* on_host; /* not NULL: for GPUs, too, with this argument in the host's memory, if any */
} ncs_tf_op;

/* Defines a kernel's functions for TensorFlow: create_NAME returns a zeroed `type`, filled in by read_NAME from the
 * op's attributes; run_NAME calls compute_NAME. What these write into the status is the op's failure. */
#define NCS_TF_KERNEL(type, name)                                                                  \
  static void* create_##name(TF_OpKernelConstruction* context) {                                   \
    TF_Status* status = ncs_tf.TF_NewStatus();                                                     \
    type* kernel = ncs_tf_calloc(1, sizeof(type), status);                                         \
    if (kernel != NULL) read_##name(context, kernel, status);                                      \
    if (!ncs_tf_is_ok(status)) ncs_tf.TF_OpKernelConstruction_Failure(context, status);            \
    ncs_tf.TF_DeleteStatus(status);                                                                \
    return kernel;                                                                                 \
  }                                                                                                \
  static void run_##name(void* kernel, TF_OpKernelContext* context) {                              \
    TF_Status* status = ncs_tf.TF_NewStatus();                                                     \
    compute_##name(kernel, context, status);                                                       \
    if (!ncs_tf_is_ok(status)) ncs_tf.TF_OpKernelContext_Failure(context, status);                 \
    ncs_tf.TF_DeleteStatus(status);                                                                \
  }

extern const ncs_tf_op ncs_tf_all_reduce, ncs_tf_arithmetic, ncs_tf_timestamp;
extern const ncs_tf_op ncs_tf_arrive, ncs_tf_pass, ncs_tf_launch, ncs_tf_deliver, ncs_tf_hold;

#endif /* NCCLSYNC_TF_API_H_ */
