/* Inside csrc only: arithmetic on arrays, many operations in one pass over memory. */
#ifndef NCCLSYNC_ARITHMETIC_H_
#define NCCLSYNC_ARITHMETIC_H_

#include "ncclsync.h"

/* An expression is computed for each element. Registers 0 … n_inputs - 1 are the inputs; step s computes register
 * n_inputs + s, the last one the result. `code` holds three numbers per step: an ncs_arithmetic and the registers of its
 * operands, the second of which is not read by operations of one operand. */
typedef struct {
  int64_t* code;
  int n_inputs, n_steps;
} ncs_expression;

/* An input: element i of the result is computed from its element i % count. */
typedef struct {
  const float* data;
  size_t count;
} ncs_operand;

/* Whether a code of that length is valid. */
int ncs_expression_is_valid(const ncs_expression* expression, int length);

/* Computes `count` elements, into `out`: exactly an input of as many elements, or apart from all inputs. `alone`: on the
 * caller's thread only. Denormals are flushed to zero, as by TensorFlow's threads. Blocks until done. */
void ncs_expression_run(ncs_pool* pool, const ncs_expression* expression, const ncs_operand* inputs, float* out,
                        size_t count, int alone);

#endif /* NCCLSYNC_ARITHMETIC_H_ */
