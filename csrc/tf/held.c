/* References to the buffers that a step leaves in tower 0's variables, and the op that compares and replaces them.
 *
 * TensorFlow writes a buffer in place only if nobody else refers to it. So whoever writes a variable whose buffer is
 * held, by whatever op, gives it another buffer: its address tells that it was written. Only addresses are compared, in
 * the host's memory; nothing waits for a GPU. */
#include <pthread.h>
#include <stdlib.h>

#include "tf/api.h"

typedef struct {
  TF_Tensor* value; /* NULL: not known */
  int taken;        /* by a step that is under way, which writes the variable in place */
} slot;

struct ncs_held {
  pthread_mutex_t mutex; /* guards what follows */
  slot* slots;
  int count, tolerates, disturbed;
};

ncclResult_t ncs_held_create(/*outputs*/ ncs_held** held) {
  ncs_held* made = calloc(1, sizeof(*made));
  *held = NULL;
  if (made == NULL) return ncclSystemError;
  pthread_mutex_init(&made->mutex, NULL);
  *held = made;
  return ncclSuccess;
}

/* Replaces what a slot holds, which TensorFlow may free now. */
static void put(slot* at, TF_Tensor* value, int taken) {
  if (at->value != NULL) ncs_tf.TF_DeleteTensor(at->value);
  *at = (slot){value, taken};
}

void ncs_held_destroy(ncs_held* held) {
  for (int i = 0; i < held->count; ++i) put(&held->slots[i], NULL, 0);
  pthread_mutex_destroy(&held->mutex);
  free(held->slots);
  free(held);
}

ncclResult_t ncs_held_add(ncs_held* held, /*outputs*/ int* index) {
  slot* more;
  pthread_mutex_lock(&held->mutex);
  more = realloc(held->slots, ((size_t)held->count + 1) * sizeof(*more));
  if (more != NULL) {
    held->slots = more;
    *index = held->count++;
    more[*index] = (slot){NULL, 0};
  }
  pthread_mutex_unlock(&held->mutex);
  return more != NULL ? ncclSuccess : ncclSystemError;
}

void ncs_held_forget(ncs_held* held, int index) {
  pthread_mutex_lock(&held->mutex);
  put(&held->slots[index], NULL, 0);
  pthread_mutex_unlock(&held->mutex);
}

int ncs_held_knows(ncs_held* held, int index) {
  int knows;
  pthread_mutex_lock(&held->mutex);
  knows = held->slots[index].value != NULL || held->slots[index].taken;
  pthread_mutex_unlock(&held->mutex);
  return knows;
}

void ncs_held_tolerate(ncs_held* held, int tolerates) {
  pthread_mutex_lock(&held->mutex);
  held->tolerates = tolerates;
  pthread_mutex_unlock(&held->mutex);
}

int ncs_held_take_disturbed(ncs_held* held) {
  int disturbed;
  pthread_mutex_lock(&held->mutex);
  disturbed = held->disturbed;
  held->disturbed = 0;
  pthread_mutex_unlock(&held->mutex);
  return disturbed;
}

/* ---- The op ---- */

typedef struct {
  ncs_held* held;
  int64_t begins;
  int n;
  int64_t *slots, *writes; /* [n] each: the slot of an input; whether the step writes the variable */
} hold_kernel;

static void destroy_hold(void* kernel_) {
  hold_kernel* kernel = kernel_;
  if (kernel == NULL) return;
  free(kernel->slots);
  free(kernel->writes);
  free(kernel);
}

static void read_hold(TF_OpKernelConstruction* context, hold_kernel* kernel, TF_Status* status) {
  kernel->held = (ncs_held*)(intptr_t)ncs_tf_read_attr(context, "held", status);
  kernel->begins = ncs_tf_read_attr(context, "begins", status);
  kernel->slots = ncs_tf_read_list(context, "slots", &kernel->n, status);
  kernel->writes = ncs_tf_read_list(context, "writes", &kernel->n, status);
}

/* Whether both are one buffer. Buffers without elements may be equal: then only the shape tells. */
static int is_same(const TF_Tensor* one, const TF_Tensor* other) {
  int n_dims;
  if (one == NULL) return 0;
  n_dims = ncs_tf.TF_NumDims(one);
  if (n_dims != ncs_tf.TF_NumDims(other)) return 0;
  for (int d = 0; d < n_dims; ++d)
    if (ncs_tf.TF_Dim(one, d) != ncs_tf.TF_Dim(other, d)) return 0;
  return ncs_tf.TF_TensorElementCount(one) == 0 || ncs_tf.TF_TensorData(one) == ncs_tf.TF_TensorData(other);
}

/* Where a step begins: compares all, and lets go of those that it writes; fails if one was written by somebody else.
 * Where it ends: holds what it has written, and compares the others, which somebody may have written meanwhile. */
static void compute_hold(const hold_kernel* kernel, TF_OpKernelContext* context, TF_Status* status) {
  ncs_held* held = kernel->held;
  TF_Tensor** now = ncs_tf_calloc((size_t)kernel->n, sizeof(*now), status);
  int differing = 0;
  for (int i = 0; i < kernel->n && ncs_tf_is_ok(status); ++i) ncs_tf.TF_GetInput(context, i, &now[i], status);
  if (ncs_tf_is_ok(status)) {
    pthread_mutex_lock(&held->mutex);
    for (int i = 0; i < kernel->n; ++i) {
      slot* at = &held->slots[kernel->slots[i]];
      if (!kernel->begins && kernel->writes[i]) {
        put(at, now[i], 0);
        now[i] = NULL;
      } else if (!at->taken && !is_same(at->value, now[i])) {
        put(at, NULL, 0);
        ++differing;
      }
    }
    if (differing > 0 && kernel->begins && !held->tolerates) {
      /* TensorFlow logs this text as a warning. */
      ncs_tf_fail(status, TF_ABORTED,
                  "%d of the step's variables were written by other ops; nothing is wrong: all towers get what they are "
                  "now",
                  differing);
    } else {
      held->disturbed |= differing > 0;
      for (int i = 0; i < kernel->n && kernel->begins; ++i)
        if (kernel->writes[i]) put(&held->slots[kernel->slots[i]], NULL, 1);
    }
    pthread_mutex_unlock(&held->mutex);
  }
  for (int i = 0; now != NULL && i < kernel->n; ++i)
    if (now[i] != NULL) ncs_tf.TF_DeleteTensor(now[i]);
  free(now);
}

NCS_TF_KERNEL(hold_kernel, hold)

const ncs_tf_op ncs_tf_hold = {
    "NcclsyncHold",
    {"held: int", "begins: int", "slots: list(int)", "writes: list(int)", "T: list(type)", NULL},
    {"values: T", NULL},
    NULL,
    create_hold, run_hold, destroy_hold, 1, ""};
