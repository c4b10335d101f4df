/* Inside csrc only: arithmetic on arrays, many operations in one pass over memory. */
#ifndef NCCLSYNC_ARITHMETIC_H_
#define NCCLSYNC_ARITHMETIC_H_

#include "ncclsync.h"

/* An expression is computed for each element, and added up. Registers 0 … n_inputs - 1 are the inputs; step s computes
 * register n_inputs + s. `code` holds three numbers per step, an ncs_arithmetic and the registers of its operands (the
 * second is unused for operations of one operand), then the registers of the outputs, then three numbers per sum: a
 * register, a period of at most NCS_MOST_PERIOD, and whether it is a mean. Element i of a sum adds up the register's
 * elements i, i + period, i + 2 * period, …: the columns of an array of rows. */
typedef struct {
  int64_t* code;
  int n_inputs, n_outputs, n_sums, n_steps, is_double;
} ncs_expression;

/* An input: element i of the result is computed from its element (i / repeat) % count. So a whole array has a repeat of
 * 1 and as many elements as the result, and a scalar has one element; a row repeats for every row, a column for every
 * column. */
typedef struct {
  const void* data;
  size_t count, repeat;
} ncs_operand;

/* Whether a code of that length is valid. */
int ncs_expression_is_valid(const ncs_expression* expression, int length);

/* Computes `count` elements of each output, a multiple of each sum's period; the sums' destinations come after the
 * outputs. An output may be exactly an input that is a whole array, if no step after the output's step reads the input,
 * and no output or sum takes it; otherwise it must not overlap an input. `alone`: on the caller's thread only. The
 * order in which a sum adds does not depend on the threads. Denormals are flushed to zero, as by TensorFlow's threads.
 * Blocks until done. ncclSystemError: no memory; nothing was written. */
ncclResult_t ncs_expression_run(ncs_pool* pool, const ncs_expression* expression, const ncs_operand* inputs,
                                void* const* outputs, size_t count, int alone);

#endif /* NCCLSYNC_ARITHMETIC_H_ */
