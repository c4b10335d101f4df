/* The kernels by which towers meet without a waiting host thread: arrive, pass and deliver on each tower's device,
 * launch on the CPU; nccl/launcher.c does the work.
 *
 * A token between them is a tensor in the host's memory whose buffer owns an arrival, or a launched group. If a step
 * fails, TensorFlow releases its tensors, and so everything that the step had begun.
 *
 * They are stateful, so that Grappler neither merges them, nor computes them beforehand, nor removes those without
 * results. Their caller keeps automatic control dependencies from ordering them. */
#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>

#include "tf/api.h"

enum {
  NCS_ALIGNMENT = 64, /* of a tensor's buffer, else TensorFlow copies it */
  NCS_WHAT = 5        /* numbers about a tensor */
};

/* ---- Tokens ---- */

/* A tensor's buffer, of which TensorFlow knows the first member alone. */
typedef struct {
  int64_t owned;
  void (*release)(void*);
} token;

static void free_token(void* data, size_t size, void* unused) {
  const token* ended = data;
  (void)size;
  (void)unused;
  ended->release((void*)(intptr_t)ended->owned);
  free(data);
}

/* Makes output 0 the owner of an object; on failure the object is released. */
static void hand_over(TF_OpKernelContext* context, void* owned, void (*release)(void*), TF_Status* status) {
  TF_Tensor* tensor = NULL;
  void* data = NULL;
  if (posix_memalign(&data, NCS_ALIGNMENT, sizeof(token)) != 0) {
    release(owned);
    ncs_tf_fail(status, TF_RESOURCE_EXHAUSTED, "no memory");
    return;
  }
  *(token*)data = (token){(int64_t)(intptr_t)owned, release};
  tensor = ncs_tf.TF_NewTensor(TF_INT64, NULL, 0, data, sizeof(int64_t), free_token, NULL);
  ncs_tf.TF_SetOutput(context, 0, tensor, status);
  ncs_tf.TF_DeleteTensor(tensor);
}

/* The arrival or group that input `index` owns; NULL on failure. */
static void* read_token(TF_OpKernelContext* context, int index, TF_Status* status) {
  ncs_tf_view seen;
  if (!ncs_tf_read_input(context, index, &seen, status)) return NULL;
  return (void*)(intptr_t)*(const int64_t*)seen.data;
}

/* Memory and time run out without words; of the time the launcher keeps a report. */
static void fail_by(TF_Status* status, ncclResult_t result, const ncs_failure* failure) {
  const int code = result == ncclInvalidArgument ? TF_INVALID_ARGUMENT : TF_INTERNAL;
  const char* words = result == ncclSystemError ? "no memory" : "the group of collectives has failed";
  if (failure->message[0] != '\0') ncs_tf_fail(status, code, "%s: %s", failure->call, failure->message);
  else ncs_tf_fail(status, code, "%s", words);
}

/* NULL: not on a GPU, or not known. */
static void* find_stream(TF_OpKernelContext* context) {
  return ncs_tf.find_stream != NULL ? ncs_tf.find_stream(context) : NULL;
}

/* ---- All of them ---- */

typedef struct {
  int64_t launcher, label, waits, only_waits;
  int64_t rank;     /* among those here */
  int64_t ranks;    /* of an arrival those of all processes, of a launch those here */
  int64_t number;   /* of the rank, among those of all processes */
  int n;            /* tensors */
  int64_t* what;    /* [n][NCS_WHAT]: kind, operation, root and NCCL's dtype of each; 1 if a broadcast or an all-reduce
                       writes into what the ranks give, memory that no other op has */
} exchange_kernel;

static void destroy_exchange(void* kernel_) {
  exchange_kernel* kernel = kernel_;
  if (kernel != NULL) free(kernel->what);
  free(kernel);
}

/* ---- Arrive ---- */

/* Holds a rank's buffers. */
typedef struct {
  int n;
  TF_Tensor* tensors[]; /* [2 n]: each sent tensor, and the tensor to receive into; NULL: none */
} held;

static void let_go(void* held_) {
  held* tensors = held_;
  for (int i = 0; i < 2 * tensors->n; ++i)
    if (tensors->tensors[i] != NULL) ncs_tf.TF_DeleteTensor(tensors->tensors[i]);
  free(tensors);
}

static void read_arrive(TF_OpKernelConstruction* context, exchange_kernel* kernel, TF_Status* status) {
  kernel->launcher = ncs_tf_read_attr(context, "launcher", status);
  kernel->ranks = ncs_tf_read_attr(context, "ranks", status);
  kernel->what = ncs_tf_read_list(context, "what", &kernel->n, status);
  kernel->n /= NCS_WHAT;
  kernel->rank = ncs_tf_read_attr(context, "rank", status);
  kernel->number = ncs_tf_read_attr(context, "number", status);
}

/* Whether tensor i shares its memory with no other input: TensorFlow may merge two ops with equal results. */
static int is_alone(const held* all, int i) {
  const void* own = ncs_tf.TF_TensorData(all->tensors[2 * i]);
  for (int other = 0; other < all->n; ++other)
    if (other != i && ncs_tf.TF_TensorData(all->tensors[2 * other]) == own) return 0;
  return 1;
}

/* Allocates the result of tensor i; fills in the buffer. */
static void prepare_tensor(TF_OpKernelContext* context, const exchange_kernel* kernel, int i, held* all,
                        ncs_buffer* buffer, TF_Status* status) {
  TF_AllocatorAttributes attributes = {TF_ALLOCATOR_ATTRIBUTES_STRUCT_SIZE, 0};
  int64_t dims[NCS_MOST_DIMS];
  TF_Tensor *send = all->tensors[2 * i], *recv = NULL;
  const int64_t* what = kernel->what + NCS_WHAT * i;
  const int kind = (int)what[0], n_dims = ncs_tf.TF_NumDims(send);
  for (int d = 0; d < n_dims; ++d) dims[d] = ncs_tf.TF_Dim(send, d);
  buffer->kind = kind;
  buffer->op = (int)what[1];
  buffer->root = (int)what[2];
  buffer->dtype = (int)what[3];
  buffer->send = ncs_tf.TF_TensorData(send);
  buffer->count = (size_t)ncs_tf.TF_TensorElementCount(send);
  if (kind == NCS_REDUCE_SCATTER || kind == NCS_ALL_GATHER) {
    if (n_dims == 0 || (kind == NCS_REDUCE_SCATTER && dims[0] % kernel->ranks != 0)) {
      ncs_tf_fail(status, TF_INVALID_ARGUMENT, "Expected a tensor whose rows can be divided among the towers");
      return;
    }
    dims[0] = kind == NCS_ALL_GATHER ? dims[0] * kernel->ranks : dims[0] / kernel->ranks;
    if (kind == NCS_REDUCE_SCATTER) buffer->count /= (size_t)kernel->ranks;
  }
  if ((kind == NCS_BROADCAST && what[2] == kernel->number) ||
      (what[4] && (kind == NCS_BROADCAST || kind == NCS_ALL_REDUCE) && is_alone(all, i))) {
    buffer->recv = ncs_tf.TF_TensorData(send);
    return;
  }
  recv = ncs_tf.TF_AllocateTemp(context, ncs_tf.TF_TensorType(send), dims, n_dims, &attributes, status);
  if (!ncs_tf_is_ok(status)) return;
  all->tensors[2 * i + 1] = recv;
  buffer->recv = ncs_tf.TF_TensorData(recv);
}

static void release_arrival(void* arrival) { ncs_arrival_release(arrival); }

static void compute_arrive(const exchange_kernel* kernel, TF_OpKernelContext* context, TF_Status* status) {
  ncs_launcher* launcher = (ncs_launcher*)(intptr_t)kernel->launcher;
  held* all = ncs_tf_calloc(1, sizeof(*all) + 2 * (size_t)kernel->n * sizeof(*all->tensors), status);
  ncs_buffer* buffers = ncs_tf_calloc((size_t)kernel->n, sizeof(*buffers), status);
  ncs_arrival* arrival = NULL;
  ncs_failure failure = {"", "", -1};
  if (all != NULL) all->n = kernel->n;
  for (int i = 0; i < kernel->n && ncs_tf_is_ok(status); ++i)
    ncs_tf.TF_GetInput(context, i, &all->tensors[2 * i], status);
  for (int i = 0; i < kernel->n && ncs_tf_is_ok(status); ++i)
    prepare_tensor(context, kernel, i, all, &buffers[i], status);
  if (ncs_tf_is_ok(status)) {
    const ncs_buffers arriving = {buffers, kernel->n, all, let_go};
    const ncclResult_t result =
        ncs_arrive(launcher, (int)kernel->rank, find_stream(context), &arriving, &failure, &arrival);
    if (result != ncclSuccess) fail_by(status, result, &failure);
  }
  if (arrival != NULL) hand_over(context, arrival, release_arrival, status);
  else if (all != NULL) let_go(all);
  free(buffers);
}

NCS_TF_KERNEL(exchange_kernel, arrive)

/* ---- Pass ---- */

/* Its device goes on when the tokens are there. */
static void read_pass(TF_OpKernelConstruction* context, exchange_kernel* kernel, TF_Status* status) {
  kernel->ranks = ncs_tf_read_attr(context, "ranks", status);
}

static void compute_pass(const exchange_kernel* kernel, TF_OpKernelContext* context, TF_Status* status) {
  (void)kernel;
  (void)context;
  (void)status;
}

NCS_TF_KERNEL(exchange_kernel, pass)

/* ---- Launch ---- */

static void read_launch(TF_OpKernelConstruction* context, exchange_kernel* kernel, TF_Status* status) {
  kernel->launcher = ncs_tf_read_attr(context, "launcher", status);
  kernel->ranks = ncs_tf_read_attr(context, "ranks", status);
  kernel->label = ncs_tf_read_attr(context, "label", status);
}

static void release_launched(void* launched) { ncs_launched_release(launched); }

static void compute_launch(const exchange_kernel* kernel, TF_OpKernelContext* context, TF_Status* status) {
  ncs_launcher* launcher = (ncs_launcher*)(intptr_t)kernel->launcher;
  ncs_arrival** arrivals = ncs_tf_calloc((size_t)kernel->ranks, sizeof(*arrivals), status);
  ncs_launched* launched = NULL;
  ncs_failure failure = {"", "", -1};
  for (int r = 0; r < kernel->ranks && ncs_tf_is_ok(status); ++r) arrivals[r] = read_token(context, r, status);
  if (ncs_tf_is_ok(status)) {
    const ncclResult_t result = ncs_launch(launcher, kernel->label, arrivals, &failure, &launched);
    if (result != ncclSuccess) fail_by(status, result, &failure);
  }
  if (launched != NULL) hand_over(context, launched, release_launched, status);
  free(arrivals);
}

NCS_TF_KERNEL(exchange_kernel, launch)

/* ---- Deliver ---- */

static void read_deliver(TF_OpKernelConstruction* context, exchange_kernel* kernel, TF_Status* status) {
  kernel->rank = ncs_tf_read_attr(context, "rank", status);
  kernel->waits = ncs_tf_read_attr(context, "waits", status);
  kernel->only_waits = ncs_tf_read_attr(context, "only_waits", status);
}

static void compute_deliver(const exchange_kernel* kernel, TF_OpKernelContext* context, TF_Status* status) {
  ncs_launched* launched = read_token(context, 0, status);
  ncs_failure failure = {"", "", -1};
  const held* all;
  ncclResult_t result;
  if (launched == NULL) return;
  if (kernel->only_waits) {
    ncs_launched_wait(launched); /* the delivery reports a failure */
    return;
  }
  all = ncs_launched_get_kept(launched, (int)kernel->rank);
  for (int i = 0; all != NULL && i < all->n && ncs_tf_is_ok(status); ++i) {
    const TF_Tensor* recv = all->tensors[2 * i + 1];
    ncs_tf.TF_SetOutput(context, i, recv != NULL ? recv : all->tensors[2 * i], status);
  }
  result = ncs_deliver(launched, (int)kernel->rank, find_stream(context), (int)kernel->waits, &failure);
  if (result != ncclSuccess && ncs_tf_is_ok(status)) fail_by(status, result, &failure);
}

NCS_TF_KERNEL(exchange_kernel, deliver)

/* ---- Ops ---- */

const ncs_tf_op ncs_tf_arrive = {
    "NcclsyncArrive",
    {"launcher: int", "rank: int", "number: int", "ranks: int >= 1", "what: list(int)", "T: list(type) >= 0", NULL},
    {"sends: T", NULL},
    "token: int64",
    create_arrive, run_arrive, destroy_exchange, 1, "token"};

const ncs_tf_op ncs_tf_launch = {
    "NcclsyncLaunch",
    {"launcher: int", "ranks: int >= 1", "label: int", NULL},
    {"tokens: ranks * int64", NULL},
    "launched: int64",
    create_launch, run_launch, destroy_exchange, 1, NULL};

const ncs_tf_op ncs_tf_pass = {
    "NcclsyncPass",
    {"ranks: int >= 1", NULL},
    {"tokens: ranks * int64", NULL},
    NULL,
    create_pass, run_pass, destroy_exchange, 1, "tokens"};

/* `only_waits`: for the group's end; it is delivered by another op. */
const ncs_tf_op ncs_tf_deliver = {
    "NcclsyncDeliver",
    {"rank: int", "waits: int", "only_waits: int", "T: list(type) >= 0", NULL},
    {"launched: int64", NULL},
    "results: T",
    create_deliver, run_deliver, destroy_exchange, 1, "launched"};
