/* All-reduce and copies in host memory. Cuts the work into chunks for the pool, and combines the ranks block by block,
 * so that the running result stays in the first-level cache; or line by line, if the data do not fit any cache. */
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cpu/pool.h"

/* The running result of one block: with the ranks' blocks streaming through, it must stay in a 32 KiB cache. */
#define NCS_BLOCK_BYTES 8192
/* The bytes that a thread takes at a time, per rank. */
#define NCS_CHUNK_BYTES (128 * 1024)
/* Waking a worker takes tens of microseconds: smaller jobs run in the caller alone (measured on two cores: the pool is
 * slower below and faster above). */
#define NCS_SMALL_JOB_BYTES (1024 * 1024)
/* Results larger than this, all together, do not stay in a cache: write around it. */
#define NCS_STREAM_BYTES (8 * 1024 * 1024)
/* The bytes of a cache line. */
#define NCS_LINE_BYTES 64

typedef struct ncs_kernels ncs_kernels;

typedef struct {
  const ncs_reduced* tensors;
  size_t n_tensors;
  size_t* begins; /* per tensor: the chunks of all tensors before it */
  const double* weights; /* NULL: all 1 */
  int n_ranks, divides;
  size_t size, bytes; /* of an element, and of all tensors' results */
  const ncs_kernels* kernels;
  void (*combine)(void* acc, const void* a, const void* b, size_t count);
} ncs_reduction;

struct ncs_kernels {
  void (*combine[4])(void* acc, const void* a, const void* b, size_t count); /* acc = a op b */
  void (*divide)(void* acc, size_t count, int n_ranks);
  void (*scale)(void* acc, const void* a, double weight, size_t count); /* acc = a * weight; NULL for integers */
  void (*add_scaled)(void* acc, const void* a, const void* b, double weight, size_t count); /* acc = a + b * weight */
  /* The sum or mean, written around the cache: bytes [at, end), whole lines. NULL: none */
  void (*sum_lines)(const ncs_reduction* t, const ncs_reduced* tensor, size_t at, size_t end);
  void (*narrow)(void* out, const void* acc, size_t count); /* NULL: the accumulator has the buffers' own type */
};

static inline uint32_t ncs_float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float ncs_bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/* Writes a line around the cache; `to` is aligned to it. */
static inline void stream_line(void* to, const void* line) {
#if defined(__SSE2__)
  __m128i parts[NCS_LINE_BYTES / sizeof(__m128i)];
  memcpy(parts, line, sizeof(parts));
  for (size_t i = 0; i < NCS_LINE_BYTES / sizeof(__m128i); ++i) _mm_stream_si128((__m128i*)to + i, parts[i]);
#else
  memcpy(to, line, NCS_LINE_BYTES);
#endif
}

#define NCS_KERNEL(name) baseline_##name
#define NCS_TARGET
#include "cpu/collectives_kernels.h"
#if defined(__x86_64__)
#define NCS_KERNEL(name) avx2_##name
#define NCS_TARGET __attribute__((target("avx2")))
#include "cpu/collectives_kernels.h"
#define NCS_KERNEL(name) avx512_##name
#define NCS_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#include "cpu/collectives_kernels.h"
#endif

static const ncs_kernels* find_kernels(int instruction_set, int dtype) {
#if defined(__x86_64__)
  if (instruction_set == NCS_INSTRUCTION_SET_AVX512) return &avx512_table[dtype];
  if (instruction_set == NCS_INSTRUCTION_SET_AVX2) return &avx2_table[dtype];
#endif
  (void)instruction_set;
  return &baseline_table[dtype];
}

/* ---- Copies ---- */

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* Writes around the cache. The destination's partial lines at both ends are written as usual. */
static void copy_streaming(void* to, const void* from, size_t bytes) {
  char* out = to;
  const char* in = from;
  const size_t head = min_size((0 - (uintptr_t)out) % NCS_LINE_BYTES, bytes);
  memcpy(out, in, head);
  for (out += head, in += head, bytes -= head; bytes >= NCS_LINE_BYTES; bytes -= NCS_LINE_BYTES) {
    stream_line(out, in);
    out += NCS_LINE_BYTES;
    in += NCS_LINE_BYTES;
  }
  memcpy(out, in, bytes);
}

/* Orders streaming stores, which other stores do not: each thread calls it before it reports its chunk done. */
static void finish_streaming(void) {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

/* ---- Reductions ---- */

/* Combines bytes [at, at + n) of all ranks; returns where the result lies: acc, narrowed, or the only send. */
static const void* reduce_block(const ncs_reduction* t, const ncs_reduced* tensor, size_t at, size_t n, void* acc,
                                void* narrowed) {
  const size_t count = n / t->size;
  const void* sum = NULL;
  for (int r = 0; r < t->n_ranks; ++r) {
    const double weight = t->weights != NULL ? t->weights[r] : 1;
    const void* send = (const char*)tensor->sends[r] + at;
    if (weight == 0) continue;
    if (sum == NULL && weight == 1 && t->kernels->narrow == NULL) {
      sum = send;
      continue;
    }
    if (sum == NULL) t->kernels->scale(acc, send, weight, count);
    else if (weight == 1) t->combine(acc, sum, send, count);
    else t->kernels->add_scaled(acc, sum, send, weight, count);
    sum = acc;
  }
  if (t->divides) t->kernels->divide(acc, count, t->n_ranks);
  if (t->kernels->narrow == NULL) return sum;
  t->kernels->narrow(narrowed, acc, count);
  return narrowed;
}

/* In place, the line to be written has just been read: it is in the cache. (A copy in place is not written.) */
static int is_streaming(const ncs_reduction* t, const ncs_reduced* tensor) {
  if (t->bytes <= NCS_STREAM_BYTES) return 0;
  for (int r = 0; r < t->n_ranks && t->n_ranks > 1; ++r)
    for (int o = 0; o < tensor->n_recvs; ++o)
      if (tensor->sends[r] == tensor->recvs[o]) return 0;
  return 1;
}

/* Combines bytes [at, end) of all ranks block by block. */
static void reduce_blocks(const ncs_reduction* t, const ncs_reduced* tensor, int streaming, size_t at, size_t end) {
  /* Twice: a block of 16-bit floats is half as large as its float32 accumulator. */
  char blocks[NCS_BLOCK_BYTES + NCS_BLOCK_BYTES / 2] __attribute__((aligned(64)));
  const size_t block = t->kernels->narrow != NULL ? NCS_BLOCK_BYTES / 2 : NCS_BLOCK_BYTES;
  for (size_t n; at < end; at += n) {
    n = min_size(block, end - at);
    const void* result = reduce_block(t, tensor, at, n, blocks, blocks + NCS_BLOCK_BYTES);
    for (int o = 0; o < tensor->n_recvs; ++o) {
      char* out = (char*)tensor->recvs[o] + at;
      if (out == result) continue;
      if (streaming) copy_streaming(out, result, n);
      else memcpy(out, result, n);
    }
  }
}

/* Whether all outputs' lines begin at the same places. */
static int are_aligned_alike(void* const* outs, int n_outs) {
  for (int o = 1; o < n_outs; ++o)
    if (((uintptr_t)outs[o] - (uintptr_t)outs[0]) % NCS_LINE_BYTES != 0) return 0;
  return 1;
}

static void reduce_chunk(const void* task, size_t chunk) {
  const ncs_reduction* t = task;
  size_t part = 0;
  for (size_t after = t->n_tensors; after - part > 1;) {
    const size_t middle = (part + after) / 2;
    if (t->begins[middle] <= chunk) part = middle;
    else after = middle;
  }
  const ncs_reduced* tensor = &t->tensors[part];
  const size_t begin = (chunk - t->begins[part]) * NCS_CHUNK_BYTES;
  const size_t end = min_size(begin + NCS_CHUNK_BYTES, tensor->count * t->size);
  const int streaming = is_streaming(t, tensor), sums = t->combine == t->kernels->combine[ncclSum];
  /* Line by line, memory is read and written at the same time: two thirds of the blocks' time. */
  if (streaming && sums && t->kernels->sum_lines != NULL && are_aligned_alike(tensor->recvs, tensor->n_recvs)) {
    const size_t first = min_size(begin + (0 - (uintptr_t)tensor->recvs[0] - begin) % NCS_LINE_BYTES, end);
    const size_t last = end - (end - first) % NCS_LINE_BYTES;
    reduce_blocks(t, tensor, 0, begin, first);
    t->kernels->sum_lines(t, tensor, first, last);
    reduce_blocks(t, tensor, 0, last, end);
  } else {
    reduce_blocks(t, tensor, streaming, begin, end);
  }
  if (streaming) finish_streaming();
}

static int are_weights_usable(const double* weights, int n_ranks, int may_scale) {
  int taking_part = 0;
  for (int r = 0; r < n_ranks; ++r) {
    if (weights[r] != 0) taking_part = 1;
    if (weights[r] != 0 && weights[r] != 1 && !may_scale) return 0;
  }
  return taking_part;
}

ncclResult_t ncs_cpu_reduce(ncs_pool* pool, const ncs_reduced* tensors, size_t n_tensors, const double* weights,
                            int n_ranks, int dtype, int op) {
  const size_t size = ncs_size_of(dtype);
  const int is_copy = n_ranks == 1 && weights == NULL; /* of bytes: no NaN is converted */
  const ncs_kernels* kernels;
  size_t read_bytes = 0, written_bytes = 0, chunks = 0, *begins;
  if (pool == NULL || tensors == NULL || n_ranks < 1 || op < ncclSum || op > (weights != NULL ? ncclMin : ncclAvg) ||
      size == 0)
    return ncclInvalidArgument;
  kernels = find_kernels(ncs_pool_instruction_set(pool), is_copy ? ncclUint8 : dtype);
  if (weights != NULL && !are_weights_usable(weights, n_ranks, op == ncclSum && kernels->scale != NULL))
    return ncclInvalidArgument;
  begins = malloc(n_tensors * sizeof(*begins) + 1);
  if (begins == NULL) return ncclSystemError;
  for (size_t v = 0; v < n_tensors; ++v) {
    const size_t bytes = tensors[v].count * size;
    begins[v] = chunks;
    chunks += (bytes + NCS_CHUNK_BYTES - 1) / NCS_CHUNK_BYTES;
    read_bytes += bytes * (size_t)n_ranks;
    written_bytes += bytes * (size_t)tensors[v].n_recvs;
  }
  const ncs_reduction task = {
      tensors, n_tensors, begins, weights, n_ranks, op == ncclAvg && !is_copy, size, written_bytes, kernels,
      kernels->combine[op == ncclAvg ? ncclSum : op]};
  ncs_pool_run(pool, reduce_chunk, &task, chunks, read_bytes + written_bytes < NCS_SMALL_JOB_BYTES);
  free(begins);
  return ncclSuccess;
}
