/* ncclsync's ops for TensorFlow, registered at run time by its C API; their kernels are in collectives.c, arithmetic.c,
 * timestamp.c, exchange.c and held.c. The first two files' ops depend on their inputs alone, and TensorFlow may merge or fold
 * them; the others are stateful, so that it may not. */
#include <dlfcn.h>
#include <string.h>

#include "tf/api.h"

static void register_kernel(const ncs_tf_op* definition, const char* device, TF_Status* status) {
  TF_KernelBuilder* kernel = ncs_tf.TF_NewKernelBuilder(definition->name, device, definition->create,
                                                        definition->compute, definition->destroy);
  if (device[0] == 'G' && definition->on_host[0] != '\0')
    ncs_tf.TF_KernelBuilder_HostMemory(kernel, definition->on_host);
  ncs_tf.TF_RegisterKernelBuilder(definition->name, kernel, status);
}

static void register_op(const ncs_tf_op* definition, TF_Status* status) {
  TF_OpDefinitionBuilder* op = ncs_tf.TF_NewOpDefinitionBuilder(definition->name);
  for (int i = 0; definition->attrs[i] != NULL; ++i) ncs_tf.TF_OpDefinitionBuilderAddAttr(op, definition->attrs[i]);
  for (int i = 0; definition->inputs[i] != NULL; ++i)
    ncs_tf.TF_OpDefinitionBuilderAddInput(op, definition->inputs[i]);
  if (definition->output != NULL) ncs_tf.TF_OpDefinitionBuilderAddOutput(op, definition->output);
  /* TensorFlow 2.21 takes any argument as true. */
  if (definition->is_stateful) ncs_tf.TF_OpDefinitionBuilderSetIsStateful(op, true);
  ncs_tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(op, ncs_tf.TF_ShapeInferenceContextSetUnknownShape);
  ncs_tf.TF_RegisterOpDefinition(op, status);
  if (ncs_tf_is_ok(status)) register_kernel(definition, "CPU", status);
  if (ncs_tf_is_ok(status) && definition->on_host != NULL) register_kernel(definition, "GPU", status);
}

static const ncs_tf_op* const ops[] = {&ncs_tf_all_reduce, &ncs_tf_arithmetic, &ncs_tf_timestamp,
                                       &ncs_tf_arrive,     &ncs_tf_pass,       &ncs_tf_launch,
                                       &ncs_tf_deliver,    &ncs_tf_hold};

ncclResult_t ncs_tf_register(const char* path, ncs_pool* pool, /*outputs*/ ncs_failure* failure) {
  void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD), *found;
  ncclResult_t result = ncclSuccess;
  TF_Status* status;
  if (ncs_tf.pool != NULL) return ncclSuccess;
  if (library == NULL)
    return ncs_fail(failure, ncclSystemError, "dlopen", -1, "expected TensorFlow's library to be loaded");
  /* A function's address comes as a data pointer; memcpy is the conversion that C allows. */
#define NCS_FIND(result, name, arguments)                                                                             \
  found = dlsym(library, #name);                                                                                      \
  if (found == NULL) return ncs_fail(failure, ncclSystemError, "dlsym", -1, "TensorFlow has no function %s", #name); \
  memcpy(&ncs_tf.name, &found, sizeof(found));
  NCS_TF_CALLS(NCS_FIND)
#undef NCS_FIND
  status = ncs_tf.TF_NewStatus();
  for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]) && ncs_tf_is_ok(status); ++i) register_op(ops[i], status);
  if (ncs_tf_is_ok(status)) ncs_tf.pool = pool;
  else result = ncs_fail(failure, ncclSystemError, "TF_RegisterOpDefinition", -1, "%s", ncs_tf.TF_Message(status));
  ncs_tf.TF_DeleteStatus(status);
  return result;
}

void ncs_tf_find_streams(void* (*find)(void* context)) { ncs_tf.find_stream = find; }
