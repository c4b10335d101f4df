/* Inside csrc only: the worker pool, and definitions for loops that run on it. */
#ifndef NCCLSYNC_POOL_H_
#define NCCLSYNC_POOL_H_

#include "ncclsync.h"

/* Runs run(task, 0..chunks-1), each exactly once, in any order, on the caller and, unless `alone`, the pool's workers;
 * returns when all are done. Every thread runs under the default floating-point environment and gets its own back. */
void ncs_pool_run(ncs_pool* pool, void (*run)(const void* task, size_t chunk), const void* task, size_t chunks,
                  int alone);

/* Denies dependencies between a loop's iterations, so that it is vectorised. */
#if defined(__clang__)
#define NCS_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define NCS_INDEPENDENT _Pragma("GCC ivdep")
#endif

/* A loop over elements x of a and y of b, in a file that is included once per instruction set, with NCS_KERNEL(name)
 * giving each set its own names and NCS_TARGET its instructions; the compiler vectorises. Not function multiversioning
 * (target_clones): its resolvers run before a sanitizer's runtime is up.
 * T: the type of b; W: that of the others; LOAD: from the one to the other.
 *
 * out may be a or b, exactly: hence no `restrict` but NCS_INDEPENDENT. */
#define NCS_LOOP(name, T, W, LOAD, expression)                                                        \
  NCS_TARGET static void NCS_KERNEL(name)(void* out_, const void* a_, const void* b_, size_t count) { \
    W* out = out_;                                                                                    \
    const W* a = a_;                                                                                  \
    const T* b = b_;                                                                                  \
    NCS_INDEPENDENT for (size_t i = 0; i < count; ++i) {                                              \
      const W x = a[i], y = LOAD(b[i]);                                                               \
      (void)y;                                                                                        \
      out[i] = (W)(expression);                                                                       \
    }                                                                                                 \
  }
#define NCS_AS_IS(x) (x)

/* The instruction set the pool was made with (never NCS_INSTRUCTION_SET_BEST). */
int ncs_pool_instruction_set(const ncs_pool* pool);

#endif /* NCCLSYNC_POOL_H_ */
