/* Inside csrc only: what cpu.c needs of the worker pool. */
#ifndef NCCLSYNC_POOL_H_
#define NCCLSYNC_POOL_H_

#include "ncclsync.h"

/* Runs run(task, 0..chunks-1), each exactly once, in any order, on the caller and the pool's workers; returns when
 * all are done. Every thread runs under the default floating-point environment and gets its own back. */
void ncs_pool_run(ncs_pool* pool, void (*run)(const void* task, size_t chunk), const void* task, size_t chunks);

/* The level the pool was made with (never NCS_LEVEL_BEST). */
int ncs_pool_level(const ncs_pool* pool);

#endif /* NCCLSYNC_POOL_H_ */
