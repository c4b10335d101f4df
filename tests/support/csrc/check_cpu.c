/* Runs csrc/cpu under a sanitizer: every dtype, operation and instruction set, several callers on one pool, pools made
 * and ended, several threads that record while another takes. Prints what is wrong and returns 1; silent and 0 if
 * nothing is. Built by tests/communicator/test_csrc.py. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu/arithmetic.h"

enum { MAX_RANKS = 5, CALLERS = 4, ROUNDS = 4 };

#define EXPECT(condition)                                                  \
  if (!(condition)) {                                                      \
    fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
    exit(1);                                                               \
  }

/* Small values, exact in every dtype: all dtypes must agree with integers. */
static void put(void* buffer, size_t i, int dtype, int value) {
  switch (dtype) {
    case ncclInt8: ((int8_t*)buffer)[i] = (int8_t)value; break;
    case ncclUint8: ((uint8_t*)buffer)[i] = (uint8_t)value; break;
    case ncclInt32: ((int32_t*)buffer)[i] = value; break;
    case ncclUint32: ((uint32_t*)buffer)[i] = (uint32_t)value; break;
    case ncclInt64: ((int64_t*)buffer)[i] = value; break;
    case ncclUint64: ((uint64_t*)buffer)[i] = (uint64_t)value; break;
    case ncclFloat32: ((float*)buffer)[i] = (float)value; break;
    case ncclFloat64: ((double*)buffer)[i] = value; break;
    default: { /* 16-bit floats, for 0 to 127: from the float's bits */
      float f = (float)value;
      uint32_t bits;
      memcpy(&bits, &f, sizeof(bits));
      if (dtype == ncclBfloat16)
        ((uint16_t*)buffer)[i] = (uint16_t)(bits >> 16);
      else
        ((uint16_t*)buffer)[i] = (uint16_t)(value == 0 ? 0 : (bits - 0x38000000u) >> 13);
    }
  }
}

static int expected(int op, int n, size_t i) {
  int sum = 0, prod = 1, max = 0, min = 127;
  for (int r = 0; r < n; ++r) {
    const int value = (int)((i + (size_t)r) % 3);
    sum += value;
    prod *= value;
    max = value > max ? value : max;
    min = value < min ? value : min;
  }
  return op == ncclSum ? sum : op == ncclProd ? prod : op == ncclMax ? max : min;
}

/* Without weights, of one tensor; `recvs` may all be one. */
static ncclResult_t all_reduce(ncs_pool* pool, const void* const* sends, void* const* recvs, int n, size_t count,
                               int dtype, int op) {
  const ncs_reduced tensor = {sends, recvs, n, count};
  return ncs_cpu_reduce(pool, &tensor, 1, NULL, n, dtype, op);
}

static void reduce_and_compare(ncs_pool* pool, int dtype, size_t size, int op, int n, size_t count, int in_place) {
  void *sends[MAX_RANKS], *recvs[MAX_RANKS];
  void* wanted = malloc(count * size + 1);
  for (int r = 0; r < n; ++r) {
    sends[r] = malloc(count * size + 1);
    recvs[r] = in_place ? sends[r] : malloc(count * size + 1);
    for (size_t i = 0; i < count; ++i) put(sends[r], i, dtype, (int)((i + (size_t)r) % 3));
  }
  for (size_t i = 0; i < count; ++i) put(wanted, i, dtype, expected(op, n, i));
  EXPECT(all_reduce(pool, (const void* const*)sends, recvs, n, count, dtype, op) == ncclSuccess);
  for (int r = 0; r < n; ++r) EXPECT(memcmp(recvs[r], wanted, count * size) == 0);

  put(recvs[n - 1], 0, dtype, count > 0 ? 77 : 0);
  const void* last = recvs[n - 1];
  const ncs_reduced copied = {&last, recvs, n, count};
  EXPECT(ncs_cpu_reduce(pool, &copied, 1, NULL, 1, dtype, ncclSum) == ncclSuccess);
  for (int r = 0; r < n; ++r) EXPECT(memcmp(recvs[r], recvs[n - 1], count * size) == 0);

  for (int r = 0; r < n; ++r) {
    free(sends[r]);
    if (!in_place) free(recvs[r]);
  }
  free(wanted);
}

static void all_dtypes(ncs_pool* pool, size_t count, int n) {
  for (int dtype = ncclInt8; dtype <= ncclBfloat16; ++dtype)
    for (int op = ncclSum; op <= ncclMin; ++op)
      reduce_and_compare(pool, dtype, ncs_size_of(dtype), op, n, count, op % 2);
}

/* Three tensors of three ranks; rank 1 counts double, or, where nothing can be scaled, takes no part. */
static void reduce_weighted(ncs_pool* pool, int dtype, size_t size, size_t count) {
  const int scales = dtype >= ncclFloat16;
  const double weights[] = {1, scales ? 2 : 0, 1};
  const size_t counts[] = {count, 0, 1};
  void *sends[3][3], *recvs[3];
  ncs_reduced tensors[3];
  for (int v = 0; v < 3; ++v) {
    for (int r = 0; r < 3; ++r) {
      sends[v][r] = malloc(counts[v] * size + 1);
      for (size_t i = 0; i < counts[v]; ++i) put(sends[v][r], i, dtype, (int)((i + (size_t)r) % 3));
    }
    tensors[v].sends = (const void* const*)sends[v];
    recvs[v] = v == 0 ? malloc(counts[v] * size + 1) : sends[v][2];
    tensors[v].recvs = &recvs[v];
    tensors[v].n_recvs = 1;
    tensors[v].count = counts[v];
  }
  EXPECT(ncs_cpu_reduce(pool, tensors, 3, weights, 3, dtype, ncclSum) == ncclSuccess);
  for (int v = 0; v < 3; ++v) {
    void* wanted = malloc(counts[v] * size + 1);
    for (size_t i = 0; i < counts[v]; ++i)
      put(wanted, i, dtype, (int)(i % 3 + (scales ? 2 : 0) * ((i + 1) % 3) + (i + 2) % 3));
    EXPECT(memcmp(recvs[v], wanted, counts[v] * size) == 0);
    free(wanted);
    for (int r = 0; r < 3; ++r) free(sends[v][r]);
  }
  free(recvs[0]);
}

static void all_dtypes_weighted(ncs_pool* pool, size_t count) {
  for (int dtype = ncclInt8; dtype <= ncclBfloat16; ++dtype)
    reduce_weighted(pool, dtype, ncs_size_of(dtype), count);
}

/* (a * b + a) / (b / b), of an array and an operand that repeats itself; `in_place`: in the array's memory. */
static void compute(ncs_pool* pool, size_t count, size_t period, int in_place) {
  int64_t code[] = {NCS_MULTIPLY, 0, 1, NCS_LIKE, 1, 0, NCS_DIVIDE, 3, 1, NCS_ADD, 2, 0, NCS_DIVIDE, 5, 4};
  const ncs_expression expression = {code, 2, 5};
  float *a = malloc(count * sizeof(float) + 1), *b = malloc(period * sizeof(float));
  float* out = in_place ? a : malloc(count * sizeof(float) + 1);
  const ncs_operand inputs[] = {{a, count}, {b, period}};
  EXPECT(ncs_expression_is_valid(&expression, 15) && !ncs_expression_is_valid(&expression, 14));
  for (size_t i = 0; i < count; ++i) a[i] = (float)(i % 1000);
  for (size_t i = 0; i < period; ++i) b[i] = (float)(i % 7 + 2);
  ncs_expression_run(pool, &expression, inputs, out, count, count % 2 == 0);
  for (size_t i = 0; i < count; ++i) EXPECT(out[i] == (float)(i % 1000) * b[i % period] + (float)(i % 1000));
  if (!in_place) free(out);
  free(a);
  free(b);
}

/* No elements; a scalar; rows that divide a block and that do not, larger than one; arrays smaller than a block. */
static void compute_all(ncs_pool* pool) {
  const size_t shapes[][2] = {{0, 3},     {70001, 1}, {70400, 16}, {70070, 7},  {70000, 7000}, {1, 1},
                              {2000, 20}, {48, 48},   {1000, 500}, {1536, 512}, {1539, 513},   {300000, 300}};
  for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); ++i)
    for (int in_place = 0; in_place < 2; ++in_place) compute(pool, shapes[i][0], shapes[i][1], in_place);
}

/* No more registers than there is memory for, and no operand that is not computed yet. */
static void refuse_bad_expressions(void) {
  int64_t code[] = {NCS_ADD, 0, 1};
  ncs_expression expression = {code, 2, 1};
  EXPECT(ncs_expression_is_valid(&expression, 3));
  code[2] = 2;
  EXPECT(!ncs_expression_is_valid(&expression, 3));
  code[2] = 1;
  code[0] = NCS_RELU + 1;
  EXPECT(!ncs_expression_is_valid(&expression, 3));
  code[0] = NCS_ADD;
  expression.n_inputs = NCS_MOST_REGISTERS;
  EXPECT(!ncs_expression_is_valid(&expression, 3));
}

static void* call_repeatedly(void* pool) {
  for (int round = 0; round < ROUNDS; ++round) {
    reduce_and_compare(pool, ncclFloat32, 4, ncclSum, 3, 200003, round % 2);
    reduce_and_compare(pool, ncclFloat16, 2, ncclMax, 2, 33, round % 2);
    reduce_weighted(pool, ncclFloat32, 4, 100003);
    compute_all(pool);
  }
  return NULL;
}

static void bad_arguments(ncs_pool* pool) {
  float a[8] = {0}, b[8] = {0};
  const void *sends[] = {a, b}, *missing[] = {a, NULL};
  void* recvs[] = {a, b};
  EXPECT(all_reduce(pool, sends, recvs, 0, 4, ncclFloat32, ncclSum) == ncclInvalidArgument);
  EXPECT(all_reduce(pool, sends, recvs, 2, 4, 99, ncclSum) == ncclInvalidArgument);
  EXPECT(all_reduce(pool, sends, recvs, 2, 4, ncclFloat32, 5) == ncclInvalidArgument);
  EXPECT(all_reduce(pool, missing, recvs, 2, 0, ncclFloat32, ncclSum) == ncclSuccess);
  const ncs_reduced tensor = {sends, recvs, 1, 4};
  const double none[] = {0, 0}, half[] = {1, 0.5};
  EXPECT(ncs_cpu_reduce(pool, &tensor, 1, none, 2, ncclFloat32, ncclSum) == ncclInvalidArgument);
  EXPECT(ncs_cpu_reduce(pool, &tensor, 1, half, 2, ncclFloat32, ncclMax) == ncclInvalidArgument);
  EXPECT(ncs_cpu_reduce(pool, &tensor, 1, half, 2, ncclInt32, ncclSum) == ncclInvalidArgument);
  EXPECT(ncs_cpu_reduce(pool, &tensor, 1, half, 2, ncclFloat32, ncclAvg) == ncclInvalidArgument);
}

enum { TIMESTAMPS = 2000 };

static void* record_repeatedly(void* meter) {
  for (int i = 0; i < TIMESTAMPS; ++i) EXPECT(ncs_meter_record(meter, i, i % 2, i) == ncclSuccess);
  return NULL;
}

static void hear(void* heard, int span, int ends, int64_t value) {
  EXPECT(ends == span % 2 && value == span);
  __atomic_fetch_add((int*)heard, 1, __ATOMIC_RELAXED);
}

static void record_from_several_threads(void) {
  static ncs_timestamp timestamps[100];
  ncs_meter* meter = NULL;
  pthread_t threads[CALLERS];
  size_t taken, total = 0;
  int64_t last_ns = 0;
  int heard = 0;
  EXPECT(ncs_meter_create(&meter) == ncclSuccess);
  ncs_meter_listen(meter, hear, &heard);
  for (int i = 0; i < CALLERS; ++i) EXPECT(pthread_create(&threads[i], NULL, record_repeatedly, meter) == 0);
  while (total < CALLERS * TIMESTAMPS) {
    taken = ncs_meter_take(meter, 100, timestamps);
    EXPECT(taken <= 100);
    for (size_t i = 0; i < taken; ++i) {
      EXPECT(timestamps[i].time_ns >= last_ns && timestamps[i].value == timestamps[i].span);
      last_ns = timestamps[i].time_ns;
    }
    total += taken;
  }
  for (int i = 0; i < CALLERS; ++i) EXPECT(pthread_join(threads[i], NULL) == 0);
  EXPECT(heard == CALLERS * TIMESTAMPS);
  EXPECT(ncs_meter_take(meter, 100, timestamps) == 0);
  ncs_meter_destroy(meter);
  ncs_meter_destroy(NULL);
}

int main(void) {
  ncs_pool* pool = NULL;
  pthread_t callers[CALLERS];
  EXPECT(ncs_pool_create(0, NCS_INSTRUCTION_SET_BEST, &pool) == ncclInvalidArgument && pool == NULL);
  EXPECT(ncs_pool_create(1, NCS_INSTRUCTION_SET_AVX512 + 1, &pool) == ncclInvalidArgument && pool == NULL);
  ncs_pool_destroy(NULL);
  refuse_bad_expressions();

  for (int set = NCS_INSTRUCTION_SET_BASELINE; ncs_pool_create(3, set, &pool) == ncclSuccess; ++set) {
    for (int n = 1; n <= MAX_RANKS; ++n)
      for (size_t count = 1; count < 100; count += 31) all_dtypes(pool, count, n);
    all_dtypes_weighted(pool, 33);
    compute_all(pool);
    ncs_pool_destroy(pool);
  }

  EXPECT(ncs_pool_create(3, NCS_INSTRUCTION_SET_BEST, &pool) == ncclSuccess);
  all_dtypes_weighted(pool, 180001);
  all_dtypes(pool, 180001, 3); /* large enough for the workers, also of one byte each */
  bad_arguments(pool);
  reduce_and_compare(pool, ncclFloat32, 4, ncclSum, 2, 1100001, 0); /* large enough to write around the cache */
  reduce_and_compare(pool, ncclBfloat16, 2, ncclSum, 2, 2200001, 0);
  for (int i = 0; i < CALLERS; ++i) EXPECT(pthread_create(&callers[i], NULL, call_repeatedly, pool) == 0);
  for (int i = 0; i < CALLERS; ++i) EXPECT(pthread_join(callers[i], NULL) == 0);
  ncs_pool_destroy(pool);

  record_from_several_threads();

  for (int i = 0; i < 50; ++i) { /* ended before the workers have begun, as often as it happens */
    EXPECT(ncs_pool_create(1 + i % 4, NCS_INSTRUCTION_SET_BEST, &pool) == ncclSuccess);
    ncs_pool_destroy(pool);
  }
  return 0;
}
