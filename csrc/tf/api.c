/* Shared by kernels: TensorFlow's functions, and helpers to read inputs and make outputs. */
#include "tf/api.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

ncs_tf_library ncs_tf;

int ncs_tf_read_input(TF_OpKernelContext* context, int index, ncs_tf_view* seen, TF_Status* status) {
  TF_Tensor* tensor = NULL;
  ncs_tf.TF_GetInput(context, index, &tensor, status);
  if (!ncs_tf_is_ok(status)) return 0;
  seen->data = ncs_tf.TF_TensorData(tensor);
  seen->count = ncs_tf.TF_TensorElementCount(tensor);
  ncs_tf.TF_DeleteTensor(tensor);
  return 1;
}

int ncs_tf_read_dims(TF_OpKernelContext* context, int index, int64_t dims[NCS_MOST_DIMS], TF_Status* status) {
  TF_Tensor* tensor = NULL;
  int n_dims;
  ncs_tf.TF_GetInput(context, index, &tensor, status);
  if (!ncs_tf_is_ok(status)) return -1;
  n_dims = ncs_tf.TF_NumDims(tensor);
  for (int d = 0; d < n_dims; ++d) dims[d] = ncs_tf.TF_Dim(tensor, d);
  ncs_tf.TF_DeleteTensor(tensor);
  return n_dims;
}

void* ncs_tf_allocate(TF_OpKernelContext* context, int index, const int64_t* dims, int n_dims, const int* candidates,
                      int n_candidates, TF_Status* status) {
  int forwarded;
  TF_Tensor* tensor = ncs_tf.TF_ForwardInputOrAllocateOutput(context, candidates, n_candidates, index, dims, n_dims,
                                                             &forwarded, status);
  void* data;
  if (!ncs_tf_is_ok(status)) return NULL;
  data = ncs_tf.TF_TensorData(tensor);
  ncs_tf.TF_DeleteTensor(tensor);
  return data;
}

void ncs_tf_fail(TF_Status* status, int code, const char* format, ...) {
  char words[1200] = "ncclsync: ";
  const size_t known = code == TF_RESOURCE_EXHAUSTED ? 0 : sizeof("ncclsync: ") - 1;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(words + known, sizeof(words) - known, format, arguments);
  va_end(arguments);
  ncs_tf.TF_SetStatus(status, code, words);
}

int ncs_tf_is_ok(const TF_Status* status) { return ncs_tf.TF_GetCode(status) == TF_OK; }

void* ncs_tf_calloc(size_t count, size_t size, TF_Status* status) {
  void* made = calloc(count > 0 ? count : 1, size);
  if (made == NULL) ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
  return made;
}

int64_t ncs_tf_read_attr(TF_OpKernelConstruction* context, const char* name, TF_Status* status) {
  int64_t value = 0;
  if (ncs_tf_is_ok(status)) ncs_tf.TF_OpKernelConstruction_GetAttrInt64(context, name, &value, status);
  return value;
}

int64_t* ncs_tf_read_list(TF_OpKernelConstruction* context, const char* name, int* length, TF_Status* status) {
  int32_t size = 0, ignored;
  int64_t* list = NULL;
  if (ncs_tf_is_ok(status)) ncs_tf.TF_OpKernelConstruction_GetAttrSize(context, name, &size, &ignored, status);
  *length = size > 0 ? size : 0;
  if (ncs_tf_is_ok(status)) list = ncs_tf_calloc((size_t)*length, sizeof(*list), status);
  if (list != NULL && *length > 0)
    ncs_tf.TF_OpKernelConstruction_GetAttrInt64List(context, name, list, *length, status);
  return list;
}
