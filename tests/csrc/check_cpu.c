/* Runs cpu.c and pool.c under a sanitizer: every dtype, operation and level, several callers on one pool, pools made
 * and ended. Prints what is wrong and returns 1; silent and 0 if nothing is. Built by tests/test_csrc.py. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ncclsync.h"

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

static void reduce_and_compare(ncs_pool* pool, int dtype, size_t size, int op, int n, size_t count, int in_place) {
  void *sends[MAX_RANKS], *recvs[MAX_RANKS];
  void* wanted = malloc(count * size + 1);
  for (int r = 0; r < n; ++r) {
    sends[r] = malloc(count * size + 1);
    recvs[r] = in_place ? sends[r] : malloc(count * size + 1);
    for (size_t i = 0; i < count; ++i) put(sends[r], i, dtype, (int)((i + (size_t)r) % 3));
  }
  for (size_t i = 0; i < count; ++i) put(wanted, i, dtype, expected(op, n, i));
  EXPECT(ncs_cpu_all_reduce(pool, (const void* const*)sends, recvs, n, count, dtype, op) == ncclSuccess);
  for (int r = 0; r < n; ++r) EXPECT(memcmp(recvs[r], wanted, count * size) == 0);

  put(recvs[n - 1], 0, dtype, count > 0 ? 77 : 0);
  EXPECT(ncs_cpu_broadcast(pool, recvs, n, count, dtype, n - 1) == ncclSuccess);
  for (int r = 0; r < n; ++r) EXPECT(memcmp(recvs[r], recvs[n - 1], count * size) == 0);

  for (int r = 0; r < n; ++r) {
    free(sends[r]);
    if (!in_place) free(recvs[r]);
  }
  free(wanted);
}

static void all_dtypes(ncs_pool* pool, size_t count, int n) {
  const char* name;
  size_t size;
  int dtype;
  for (int d = 0; ncs_dtype_describe(d, &name, &dtype, &size) == ncclSuccess; ++d)
    for (int op = ncclSum; op <= ncclMin; ++op) reduce_and_compare(pool, dtype, size, op, n, count, op % 2);
}

static void* call_repeatedly(void* pool) {
  for (int round = 0; round < ROUNDS; ++round) {
    reduce_and_compare(pool, ncclFloat32, 4, ncclSum, 3, 200003, round % 2);
    reduce_and_compare(pool, ncclFloat16, 2, ncclMax, 2, 33, round % 2);
  }
  return NULL;
}

static void bad_arguments(ncs_pool* pool) {
  float a[8] = {0}, b[8] = {0};
  const void *sends[] = {a, b}, *missing[] = {a, NULL}, *skewed[] = {a, (char*)b + 1};
  void *recvs[] = {a, b}, *partly[] = {a + 1, b};
  EXPECT(ncs_cpu_all_reduce(pool, sends, recvs, 0, 4, ncclFloat32, ncclSum) == ncclInvalidArgument);
  EXPECT(ncs_cpu_all_reduce(pool, sends, recvs, 2, 4, 99, ncclSum) == ncclInvalidArgument);
  EXPECT(ncs_cpu_all_reduce(pool, sends, recvs, 2, 4, ncclFloat32, 5) == ncclInvalidArgument);
  EXPECT(ncs_cpu_all_reduce(pool, sends, recvs, 2, SIZE_MAX, ncclFloat32, ncclSum) == ncclInvalidArgument);
  EXPECT(ncs_cpu_all_reduce(pool, sends, partly, 2, 4, ncclFloat32, ncclSum) == ncclInvalidArgument);
  EXPECT(ncs_cpu_all_reduce(pool, missing, recvs, 2, 4, ncclFloat32, ncclSum) == ncclInvalidArgument);
  EXPECT(ncs_cpu_all_reduce(pool, missing, recvs, 2, 0, ncclFloat32, ncclSum) == ncclSuccess);
  EXPECT(ncs_cpu_all_reduce(pool, skewed, recvs, 2, 4, ncclFloat32, ncclSum) == ncclInvalidArgument);
  EXPECT(ncs_cpu_broadcast(pool, recvs, 2, 4, ncclFloat32, 2) == ncclInvalidArgument);
  EXPECT(ncs_cpu_broadcast(pool, recvs, 2, 4, ncclFloat32, -1) == ncclInvalidArgument);
}

int main(void) {
  ncs_pool* pool = NULL;
  pthread_t callers[CALLERS];
  int best;
  EXPECT(ncs_cpu_get_level(&best) == ncclSuccess);
  EXPECT(ncs_pool_create(0, NCS_LEVEL_BEST, &pool) == ncclInvalidArgument && pool == NULL);
  EXPECT(ncs_pool_create(1, best + 1, &pool) == ncclInvalidArgument && pool == NULL);
  EXPECT(ncs_pool_destroy(NULL) == ncclSuccess);

  for (int level = NCS_LEVEL_BASELINE; level <= best; ++level) {
    EXPECT(ncs_pool_create(3, level, &pool) == ncclSuccess);
    for (int n = 1; n <= MAX_RANKS; ++n)
      for (size_t count = 1; count < 100; count += 31) all_dtypes(pool, count, n);
    if (level == best) all_dtypes(pool, 180001, 3); /* large enough for the workers, also of one byte each */
    EXPECT(ncs_pool_destroy(pool) == ncclSuccess);
  }

  EXPECT(ncs_pool_create(3, NCS_LEVEL_BEST, &pool) == ncclSuccess);
  bad_arguments(pool);
  reduce_and_compare(pool, ncclFloat32, 4, ncclSum, 2, 3000001, 0); /* large enough to write around the cache */
  for (int i = 0; i < CALLERS; ++i) EXPECT(pthread_create(&callers[i], NULL, call_repeatedly, pool) == 0);
  for (int i = 0; i < CALLERS; ++i) EXPECT(pthread_join(callers[i], NULL) == 0);
  EXPECT(ncs_pool_destroy(pool) == ncclSuccess);

  for (int i = 0; i < 50; ++i) { /* ended before the workers have begun, as often as it happens */
    EXPECT(ncs_pool_create(1 + i % 4, NCS_LEVEL_BEST, &pool) == ncclSuccess);
    EXPECT(ncs_pool_destroy(pool) == ncclSuccess);
  }
  return 0;
}
