/* Arithmetic on arrays, many operations in one pass over memory. A normalisation is a dozen operations on a few arrays,
 * and waits for memory. A block of each array goes through all operations while it is in the first-level cache. Every
 * operation rounds as in a separate loop: the result is the same, bit for bit. */
#include "cpu/arithmetic.h"

#include <math.h>
#include <string.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "cpu/pool.h"

/* Elements of one block, at most: with a dozen registers, it fits a 32 KiB cache. */
#define NCS_BLOCK 512
/* Blocks that a thread takes at a time. */
#define NCS_CHUNK 32
/* Chunks that are not worth waking a worker for: that takes tens of microseconds. */
#define NCS_SMALL_JOB 4

typedef void (*ncs_loop)(void* out, const void* a, const void* b, size_t count);

#define NCS_KERNEL(name) baseline_##name
#define NCS_TARGET
#include "cpu/arithmetic_kernels.h"
#if defined(__x86_64__)
#define NCS_KERNEL(name) avx2_##name
#define NCS_TARGET __attribute__((target("avx2")))
#include "cpu/arithmetic_kernels.h"
#endif

int ncs_expression_is_valid(const ncs_expression* expression, int length) {
  if (expression->n_inputs < 1 || expression->n_steps < 1 || length != 3 * expression->n_steps) return 0;
  if (expression->n_inputs > NCS_MOST_REGISTERS - expression->n_steps) return 0;
  for (int s = 0; s < expression->n_steps; ++s) {
    const int64_t* step = expression->code + 3 * s;
    if (step[0] < NCS_ADD || step[0] > NCS_RELU) return 0;
    for (int i = 1; i < 3; ++i)
      if (step[i] < 0 || step[i] >= expression->n_inputs + s) return 0;
  }
  return 1;
}

typedef struct {
  const ncs_expression* expression;
  const ncs_operand* inputs;
  float* out;
  const ncs_loop* loops;
  size_t count, block; /* elements; of a block: whole periods of short inputs */
} ncs_run;

/* Runs a step on n elements, into `out`. */
static void run_step(const ncs_run* run, const int64_t* step, float* out, const float* const* registers, size_t n) {
  run->loops[step[0]](out, registers[step[1]], registers[step[step[0] < NCS_LIKE ? 2 : 1]], n);
}

/* Writes n elements of an operand that repeats itself. */
static void repeat(float* out, const ncs_operand* operand, size_t n) {
  size_t filled = operand->count;
  memcpy(out, operand->data, filled * sizeof(float));
  for (size_t some; filled < n; filled += some) {
    some = n - filled < filled ? n - filled : filled;
    memcpy(out + filled, out, some * sizeof(float));
  }
}

static void run_chunk(const void* task, size_t chunk) {
  const ncs_run* run = task;
  const ncs_expression* expression = run->expression;
  const int n_inputs = expression->n_inputs, last = n_inputs + expression->n_steps - 1;
  const size_t block = run->block, begin = chunk * NCS_CHUNK * block;
  const size_t end = run->count - begin < NCS_CHUNK * block ? run->count : begin + NCS_CHUNK * block;
  /* 16 more, so that not all begin at the same place of a page. */
  float memory[NCS_MOST_REGISTERS][2 * NCS_BLOCK + 16] __attribute__((aligned(64)));
  const float *registers[NCS_MOST_REGISTERS], *same[NCS_MOST_REGISTERS]; /* what is the same for each block, or NULL */
#if defined(__SSE2__)
  _mm_setcsr(_mm_getcsr() | 0x8040); /* flush to zero, denormals are zero; the pool restores the state */
#endif
  for (int r = 0; r < last; ++r) { /* two blocks of it, to be read from any element of the first */
    const int64_t* step = r < n_inputs ? NULL : expression->code + 3 * (r - n_inputs);
    const int is_same = r < n_inputs ? block % run->inputs[r].count == 0
                                     : same[step[1]] != NULL && same[step[step[0] < NCS_LIKE ? 2 : 1]] != NULL;
    same[r] = is_same ? memory[r] : NULL;
    if (!is_same) continue;
    if (step != NULL) run_step(run, step, memory[r], same, 2 * block);
    else repeat(memory[r], &run->inputs[r], 2 * block);
  }
  for (size_t at = begin, n; at < end; at += n) {
    n = end - at < block ? end - at : block;
    for (int i = 0; i < n_inputs; ++i) {
      const size_t element = at % run->inputs[i].count, left = run->inputs[i].count - element;
      registers[i] = same[i] ? same[i] + at % block : run->inputs[i].data + element;
      if (!same[i] && left < n) n = left;
    }
    for (int r = n_inputs; r < last; ++r) {
      registers[r] = same[r] ? same[r] + at % block : memory[r];
      if (!same[r]) run_step(run, expression->code + 3 * (r - n_inputs), memory[r], registers, n);
    }
    run_step(run, expression->code + 3 * (last - n_inputs), run->out + at, registers, n);
  }
}

static const ncs_loop* find_loops(int instruction_set) {
#if defined(__x86_64__)
  if (instruction_set >= NCS_INSTRUCTION_SET_AVX2) return avx2_loops;
#endif
  (void)instruction_set;
  return baseline_loops;
}

void ncs_expression_run(ncs_pool* pool, const ncs_expression* expression, const ncs_operand* inputs, float* out,
                        size_t count, int alone) {
  ncs_run run = {expression, inputs, out, find_loops(ncs_pool_instruction_set(pool)), count, NCS_BLOCK};
  size_t chunks;
  if (count == 0) return;
  for (int i = 0; i < expression->n_inputs; ++i)
    if (inputs[i].count <= run.block) run.block = run.block / inputs[i].count * inputs[i].count;
  chunks = (count - 1) / (NCS_CHUNK * run.block) + 1;
  ncs_pool_run(pool, run_chunk, &run, chunks, alone || chunks <= NCS_SMALL_JOB);
}
