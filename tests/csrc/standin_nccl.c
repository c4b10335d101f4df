/* A libnccl for machines without a GPU: the calls nccl.c makes, with their real ABI, over host memory. Collectives are
 * queued until the group ends and then done at once. Every call is appended to the file named by STANDIN_LOG.
 * STANDIN_FAIL=<call>[:<n>] makes the n-th (default first) call of that name fail with ncclSystemError. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ncclComm {
  int rank, n, device;
};
typedef struct ncclComm* ncclComm_t;
typedef void* cudaStream_t;

enum { SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, FLOAT32 = 7, MAX_QUEUE = 64 };

typedef struct {
  const void* send;
  void* recv;
  size_t count;
  int op, root;
  ncclComm_t comm;
} collective;

static collective queue[MAX_QUEUE];
static int queued, depth, failed_inside;
static char last_error[128];

static void log_call(const char* call, const void* stream, int value) {
  const char* path = getenv("STANDIN_LOG");
  FILE* file = path != NULL ? fopen(path, "a") : NULL;
  if (file == NULL) return;
  fprintf(file, "%s %d%s\n", call, value, stream != NULL ? " on stream" : "");
  fclose(file);
}

/* Whether this call is the one that was told to fail. */
static int is_to_fail(const char* call) {
  static char counted[64];
  static int calls;
  const char* told = getenv("STANDIN_FAIL");
  const size_t length = strlen(call);
  int nth = 1;
  if (told == NULL || strncmp(told, call, length) != 0 || (told[length] != '\0' && told[length] != ':')) return 0;
  if (told[length] == ':') nth = atoi(told + length + 1);
  if (strcmp(counted, call) != 0) {
    snprintf(counted, sizeof(counted), "%s", call);
    calls = 0;
  }
  if (++calls != nth) return 0;
  snprintf(last_error, sizeof(last_error), "the stand-in was told to fail %s", call);
  return 1;
}

#define CALL(name, stream, value)               \
  log_call(name, stream, value);                \
  if (is_to_fail(name)) {                       \
    if (depth > 0) failed_inside = SYSTEM_ERROR; \
    return SYSTEM_ERROR;                        \
  }

int ncclGetVersion(int* version) {
  *version = 23203;
  return 0;
}

const char* ncclGetErrorString(int result) { return result == 0 ? "no error" : "stand-in error"; }

const char* ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  return last_error;
}

int ncclCommInitAll(ncclComm_t* comms, int n, const int* devices) {
  CALL("ncclCommInitAll", NULL, n)
  for (int r = 0; r < n; ++r) {
    comms[r] = malloc(sizeof(**comms));
    comms[r]->rank = r;
    comms[r]->n = n;
    comms[r]->device = devices[r];
  }
  return 0;
}

static int end(ncclComm_t comm) {
  free(comm);
  return 0;
}

int ncclCommDestroy(ncclComm_t comm) {
  CALL("ncclCommDestroy", NULL, comm->rank)
  return end(comm);
}

int ncclCommAbort(ncclComm_t comm) {
  CALL("ncclCommAbort", NULL, comm->rank)
  return end(comm);
}

int ncclCommGetAsyncError(ncclComm_t comm, int* error) {
  log_call("ncclCommGetAsyncError", NULL, comm->rank);
  *error = is_to_fail("ncclCommGetAsyncError") ? SYSTEM_ERROR : 0;
  return 0;
}

int ncclGroupStart(void) {
  CALL("ncclGroupStart", NULL, depth)
  ++depth;
  return 0;
}

static int enqueue(const void* send, void* recv, size_t count, int dtype, int op, int root, ncclComm_t comm,
                   cudaStream_t stream) {
  if (depth == 0 || queued == MAX_QUEUE || stream == NULL) return INVALID_USAGE;
  if (dtype != FLOAT32) return INVALID_ARGUMENT;
  queue[queued++] = (collective){send, recv, count, op, root, comm};
  return 0;
}

int ncclAllReduce(const void* send, void* recv, size_t count, int dtype, int op, ncclComm_t comm, cudaStream_t stream) {
  CALL("ncclAllReduce", stream, comm->rank)
  return enqueue(send, recv, count, dtype, op, -1, comm, stream);
}

int ncclBroadcast(const void* send, void* recv, size_t count, int dtype, int root, ncclComm_t comm,
                  cudaStream_t stream) {
  CALL("ncclBroadcast", stream, comm->rank)
  return enqueue(send, recv, count, dtype, -1, root, comm, stream);
}

static float combine(int op, float a, float b) {
  switch (op) {
    case 1: return a * b;
    case 2: return a > b ? a : b;
    case 3: return a < b ? a : b;
    default: return a + b;
  }
}

/* Does what is queued: one collective over all ranks, in rank order. */
static int launch(void) {
  const collective* first = queue;
  if (queued != first->comm->n) return INVALID_USAGE;
  for (size_t i = 0; i < first->count; ++i) {
    float result = ((const float*)first->send)[i];
    for (int r = 0; r < queued; ++r) {
      if (queue[r].comm->rank != r || queue[r].count != first->count || queue[r].op != first->op) return INVALID_USAGE;
      if (first->root == r) result = ((const float*)queue[r].send)[i];
      if (first->root < 0 && r > 0) result = combine(first->op, result, ((const float*)queue[r].send)[i]);
    }
    if (first->op == 4) result /= (float)queued;
    for (int r = 0; r < queued; ++r) ((float*)queue[r].recv)[i] = result;
  }
  return 0;
}

int ncclGroupEnd(void) {
  int status;
  log_call("ncclGroupEnd", NULL, queued);
  if (depth == 0) return INVALID_USAGE;
  if (--depth > 0) return 0;
  status = failed_inside != 0 ? failed_inside : is_to_fail("ncclGroupEnd") ? SYSTEM_ERROR : queued > 0 ? launch() : 0;
  queued = failed_inside = 0;
  return status;
}
