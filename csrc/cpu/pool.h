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

/* The instruction set the pool was made with (never NCS_INSTRUCTION_SET_BEST). */
int ncs_pool_instruction_set(const ncs_pool* pool);

#endif /* NCCLSYNC_POOL_H_ */
