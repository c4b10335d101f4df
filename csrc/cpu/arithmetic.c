/* Arithmetic on arrays, many operations in one pass over memory. An optimizer's update is a dozen operations on four
 * arrays, and waits for memory. A block of each array goes through all operations while it is in the first-level cache.
 * Every operation rounds as in a separate loop: the result is the same, bit for bit.
 *
 * An operand that is smaller than the result is repeated as far as a block needs it. */
#include "cpu/arithmetic.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "cpu/pool.h"

/* Elements of one block: with a dozen registers of floats, it fits a 32 KiB cache. */
#define NCS_BLOCK 512
/* Elements that a thread takes at a time. */
#define NCS_CHUNK (32 * NCS_BLOCK)
/* A chunk has at least this many times the elements of its sums, which are held until all chunks are done. */
#define NCS_LEAST_PER_SUM 8
/* Waking a worker takes tens of microseconds. */
#define NCS_SMALL_JOB (4 * NCS_CHUNK)

enum { NCS_FILL = NCS_RELU + 1 }; /* a loop that is no operation of an expression */

typedef void (*ncs_loop)(void* out, const void* a, const void* b, size_t count);

#define NCS_KERNEL(name) baseline_##name
#define NCS_TARGET
#include "cpu/arithmetic_kernels.h"
#if defined(__x86_64__)
#define NCS_KERNEL(name) avx2_##name
#define NCS_TARGET __attribute__((target("avx2")))
#include "cpu/arithmetic_kernels.h"
#endif

static int is_unary(int64_t operation) { return operation >= NCS_SQUARE; }

/* The three numbers of a sum. */
static const int64_t* sum_of(const ncs_expression* expression, int s) {
  return expression->code + 3 * (expression->n_steps + s) + expression->n_outputs;
}

int ncs_expression_is_valid(const ncs_expression* expression, int length) {
  const int n_registers = expression->n_inputs + expression->n_steps;
  if (expression->n_inputs < 1 || expression->n_steps < 0) return 0;
  if (expression->n_outputs < 0 || expression->n_sums < 0) return 0;
  if (expression->n_outputs + expression->n_sums < 1 || n_registers + expression->n_sums > NCS_MOST_REGISTERS) return 0;
  if (expression->n_outputs > NCS_MOST_REGISTERS - expression->n_sums) return 0;
  if (length != 3 * (expression->n_steps + expression->n_sums) + expression->n_outputs) return 0;
  for (int s = 0; s < expression->n_steps; ++s) {
    const int64_t* step = expression->code + 3 * s;
    if (step[0] < NCS_ADD || step[0] > NCS_RELU) return 0;
    for (int i = 1; i < 3; ++i)
      if (step[i] < 0 || step[i] >= expression->n_inputs + s) return 0;
  }
  for (int o = 0; o < expression->n_outputs; ++o) {
    const int64_t reg = expression->code[3 * expression->n_steps + o];
    if (reg < 0 || reg >= n_registers) return 0;
  }
  for (int s = 0; s < expression->n_sums; ++s) {
    const int64_t* sum = sum_of(expression, s);
    if (sum[0] < 0 || sum[0] >= n_registers || sum[1] < 1 || sum[1] > NCS_MOST_PERIOD) return 0;
  }
  return 1;
}

typedef struct {
  const ncs_expression* expression;
  const ncs_operand* inputs;
  void* const* outputs;
  const ncs_loop* loops;
  size_t count, size;   /* elements; bytes of an element */
  size_t chunk, chunks; /* elements of a chunk; the number of chunks */
  size_t width;         /* elements of all sums of one chunk */
  char* partials;       /* the sums of each chunk */
} ncs_run;

/* Repeats `filled` bytes until there are `bytes`. */
static void repeat_period(char* memory, size_t filled, size_t bytes) {
  for (size_t n; filled < bytes; filled += n) {
    n = bytes - filled < filled ? bytes - filled : filled;
    memcpy(memory + filled, memory, n);
  }
}

/* Writes an operand's values for n elements of the result, from `at` on. */
static void spread(ncs_loop fill, char* block, const ncs_operand* operand, size_t at, size_t n, size_t size) {
  const char* data = operand->data;
  const size_t repeat = operand->repeat, count = operand->count;
  size_t element = at / repeat % count, left = repeat == 1 ? count - element : repeat - at % repeat;
  for (size_t run; n > 0; n -= run, block += run * size) {
    run = left < n ? left : n;
    if (repeat == 1) memcpy(block, data + element * size, run * size);
    else fill(block, data + element * size, NULL, run);
    element = repeat == 1 || element + 1 == count ? 0 : element + 1;
    left = repeat == 1 ? count : repeat;
  }
}

/* Whether an operand's period is so short that it is written out once for all blocks of a chunk. */
static int is_short(const ncs_operand* operand) { return operand->repeat == 1 && operand->count <= NCS_BLOCK; }

/* Returns the operand's values for n elements from `at` on; `memory`: the operand's, of two blocks. */
static const char* find_values(ncs_loop fill, char* memory, const ncs_operand* operand, size_t at, size_t n,
                               size_t size) {
  const size_t element = at % operand->count;
  if (is_short(operand)) return memory + element * size;
  if (operand->repeat == 1 && element + n <= operand->count) return (const char*)operand->data + element * size;
  spread(fill, memory, operand, at, n, size);
  return memory;
}

/* The number of lanes in which a chunk's sum is collected: as many periods as fit a block, or one. */
static size_t lanes_of(size_t period) { return period < NCS_BLOCK ? NCS_BLOCK / period * period : period; }

/* Adds n elements of a register, from `at` on, to the lanes of a sum. */
static void add_up(ncs_loop add, char* lanes, size_t n_lanes, const char* values, size_t at, size_t n, size_t size) {
  for (size_t some; n > 0; n -= some, at += some, values += some * size) {
    char* to = lanes + at % n_lanes * size;
    some = n_lanes - at % n_lanes < n ? n_lanes - at % n_lanes : n;
    add(to, to, values, some);
  }
}

/* Adds up the lanes, halves to halves, until one period is left. */
static void add_lanes(ncs_loop add, char* lanes, size_t n_lanes, size_t period, size_t size) {
  for (size_t left = n_lanes / period, half; left > 1; left -= half) {
    half = left / 2;
    add(lanes, lanes, lanes + (left - half) * period * size, half * period);
  }
}

/* Runs a step on n elements, into `out`. */
static void run_step(const ncs_run* run, int s, void* out, const void* const* registers, size_t n) {
  const int64_t* step = run->expression->code + 3 * s;
  run->loops[step[0]](out, registers[step[1]], registers[is_unary(step[0]) ? step[1] : step[2]], n);
}

static void run_chunk(const void* task, size_t chunk) {
  const ncs_run* run = task;
  const ncs_expression* expression = run->expression;
  const int64_t* outputs = expression->code + 3 * expression->n_steps;
  const size_t size = run->size, block_bytes = NCS_BLOCK * size, begin = chunk * run->chunk;
  const size_t end = run->count - begin < run->chunk ? run->count : begin + run->chunk;
  char memory[2 * NCS_MOST_REGISTERS * NCS_BLOCK * sizeof(double)] __attribute__((aligned(64)));
  /* Inputs have two blocks each, so that a short input is found from any of its elements on. */
  char* results = memory + 2 * (size_t)expression->n_inputs * block_bytes;
  const size_t most = end - begin < NCS_BLOCK ? end - begin : NCS_BLOCK;
  const void* registers[NCS_MOST_REGISTERS];
  char* targets[NCS_MOST_REGISTERS] = {NULL}; /* where a step's result is an output: there it is written */
  char is_same[NCS_MOST_REGISTERS]; /* per register: whether it holds the same for each block */
  char* lanes[NCS_MOST_REGISTERS];  /* per sum: in a block of its own, or where the chunk's sum goes */
  char* partial = run->partials + chunk * run->width * size;
#if defined(__SSE2__)
  _mm_setcsr(_mm_getcsr() | 0x8040); /* flush to zero, denormals are zero; the pool restores the state */
#endif
  for (int s = 0; s < expression->n_sums; ++s) {
    const size_t period = (size_t)sum_of(expression, s)[1];
    lanes[s] = period < NCS_BLOCK ? results + (size_t)(expression->n_steps + s) * block_bytes : partial;
    memset(lanes[s], 0, lanes_of(period) * size);
    partial += period * size;
  }
  for (int o = 0; o < expression->n_outputs; ++o)
    if (outputs[o] >= expression->n_inputs) targets[outputs[o]] = run->outputs[o];
  for (int i = 0; i < expression->n_inputs; ++i) {
    const ncs_operand* input = &run->inputs[i];
    char* own = memory + 2 * (size_t)i * block_bytes;
    is_same[i] = is_short(input) && NCS_BLOCK % input->count == 0;
    registers[i] = own;
    if (!is_short(input)) continue;
    memcpy(own, input->data, input->count * size);
    repeat_period(own, input->count * size, (input->count + most) * size);
  }
  for (int s = 0; s < expression->n_steps; ++s) {
    const int64_t* step = expression->code + 3 * s;
    const int reg = expression->n_inputs + s;
    is_same[reg] = is_same[step[1]] && (is_unary(step[0]) || is_same[step[2]]);
    if (!is_same[reg]) continue;
    registers[reg] = results + (size_t)s * block_bytes;
    run_step(run, s, results + (size_t)s * block_bytes, registers, most);
  }
  for (size_t at = begin, n; at < end; at += n) {
    n = end - at < NCS_BLOCK ? end - at : NCS_BLOCK;
    for (int i = 0; i < expression->n_inputs; ++i)
      if (!is_same[i])
        registers[i] = find_values(run->loops[NCS_FILL], memory + 2 * (size_t)i * block_bytes, &run->inputs[i], at,
                                   n, size);
    for (int s = 0; s < expression->n_steps; ++s) {
      const int reg = expression->n_inputs + s;
      char* out = targets[reg] != NULL ? targets[reg] + at * size : results + (size_t)s * block_bytes;
      if (is_same[reg]) continue;
      run_step(run, s, out, registers, n);
      registers[reg] = out;
    }
    for (int o = 0; o < expression->n_outputs; ++o) {
      char* out = (char*)run->outputs[o] + at * size;
      if (out != registers[outputs[o]]) memcpy(out, registers[outputs[o]], n * size);
    }
    for (int s = 0; s < expression->n_sums; ++s) {
      const int64_t* sum = sum_of(expression, s);
      add_up(run->loops[NCS_ADD], lanes[s], lanes_of((size_t)sum[1]), registers[sum[0]], at, n, size);
    }
  }
  for (int s = expression->n_sums; s-- > 0;) {
    const size_t period = (size_t)sum_of(expression, s)[1];
    partial -= period * size;
    add_lanes(run->loops[NCS_ADD], lanes[s], lanes_of(period), period, size);
    if (lanes[s] != partial) memcpy(partial, lanes[s], period * size);
  }
}

/* Adds up the sums of the chunks, in their order, in double precision. */
static void finish_sums(const ncs_run* run) {
  const ncs_expression* expression = run->expression;
  size_t before = 0; /* elements of the sums before this one */
  for (int s = 0; s < expression->n_sums; ++s) {
    const int64_t* sum = sum_of(expression, s);
    const size_t period = (size_t)sum[1];
    const double parts = sum[2] ? (double)(run->count / period) : 1;
    void* out = run->outputs[expression->n_outputs + s];
    double totals[NCS_MOST_PERIOD] = {0};
    for (size_t c = 0; c < run->chunks; ++c) {
      const char* partial = run->partials + (c * run->width + before) * run->size;
      for (size_t i = 0; i < period; ++i)
        totals[i] += expression->is_double ? ((const double*)partial)[i] : ((const float*)partial)[i];
    }
    for (size_t i = 0; i < period; ++i) {
      if (expression->is_double) ((double*)out)[i] = totals[i] / parts;
      else ((float*)out)[i] = (float)(totals[i] / parts);
    }
    before += period;
  }
}

static const ncs_loop* find_loops(int instruction_set, int is_double) {
#if defined(__x86_64__)
  if (instruction_set >= NCS_INSTRUCTION_SET_AVX2) return is_double ? avx2_double_loops : avx2_float_loops;
#endif
  (void)instruction_set;
  return is_double ? baseline_double_loops : baseline_float_loops;
}

ncclResult_t ncs_expression_run(ncs_pool* pool, const ncs_expression* expression, const ncs_operand* inputs,
                                void* const* outputs, size_t count, int alone) {
  const ncs_loop* loops = find_loops(ncs_pool_instruction_set(pool), expression->is_double);
  const size_t size = expression->is_double ? sizeof(double) : sizeof(float);
  ncs_run run = {expression, inputs, outputs, loops, count, size, NCS_CHUNK, 0, 0, NULL};
  for (int s = 0; s < expression->n_sums; ++s) run.width += (size_t)sum_of(expression, s)[1];
  while (run.chunk < NCS_LEAST_PER_SUM * run.width) run.chunk *= 2;
  run.chunks = (count + run.chunk - 1) / run.chunk;
  run.partials = malloc(run.chunks * run.width * run.size + 1);
  if (run.partials == NULL) return ncclSystemError;
  ncs_pool_run(pool, run_chunk, &run, run.chunks, alone || count < NCS_SMALL_JOB);
  finish_sums(&run);
  free(run.partials);
  return ncclSuccess;
}
