/* The whole C surface of ncclsync: collectives over N ranks that this process owns.
 *
 * Every function returns a status (ncclSuccess is 0); outputs come last. Nothing prints, exits or keeps mutable
 * statics. Pointers to buffers are borrowed for the call only. Nothing here knows Python or TensorFlow.
 *
 * The part between the two "cdef" marks is also what the Python binding reads: keep it free of preprocessor lines.
 */
#ifndef NCCLSYNC_H_
#define NCCLSYNC_H_

#include <stddef.h>
#include <stdint.h>

/* NCCL's enums, declared here and nowhere else (nccl.h includes CUDA headers, which a plain machine lacks).
 * tests/test_nccl_header.py compares every value with the nccl.h of the installed nvidia-nccl wheel. */
#define NCS_RESULTS(X)         \
  X(ncclSuccess, 0)            \
  X(ncclUnhandledCudaError, 1) \
  X(ncclSystemError, 2)        \
  X(ncclInternalError, 3)      \
  X(ncclInvalidArgument, 4)    \
  X(ncclInvalidUsage, 5)       \
  X(ncclRemoteError, 6)        \
  X(ncclInProgress, 7)         \
  X(ncclTimeout, 8)

/* NCCL's name, its value, our name, bytes per element. */
#define NCS_DTYPES(X)            \
  X(ncclInt8, 0, int8, 1)        \
  X(ncclUint8, 1, uint8, 1)      \
  X(ncclInt32, 2, int32, 4)      \
  X(ncclUint32, 3, uint32, 4)    \
  X(ncclInt64, 4, int64, 8)      \
  X(ncclUint64, 5, uint64, 8)    \
  X(ncclFloat16, 6, float16, 2)  \
  X(ncclFloat32, 7, float32, 4)  \
  X(ncclFloat64, 8, float64, 8)  \
  X(ncclBfloat16, 9, bfloat16, 2)

/* NCCL's name, its value, our name. */
#define NCS_OPS(X)    \
  X(ncclSum, 0, sum)  \
  X(ncclProd, 1, prod) \
  X(ncclMax, 2, max)  \
  X(ncclMin, 3, min)  \
  X(ncclAvg, 4, avg)

#define NCS_ENUM_RESULT(name, value) name = value,
#define NCS_ENUM_DTYPE(name, value, ours, size) name = value,
#define NCS_ENUM_OP(name, value, ours) name = value,
typedef enum { NCS_RESULTS(NCS_ENUM_RESULT) } ncclResult_t;
typedef enum { NCS_DTYPES(NCS_ENUM_DTYPE) } ncclDataType_t;
typedef enum { NCS_OPS(NCS_ENUM_OP) } ncclRedOp_t;

/* cdef begin */

/* ---- The tables above, for callers that cannot read macros. ----
 * Entry `index` (0, 1, ...) of each; ncclInvalidArgument behind the last one. Names are static strings. */
ncclResult_t ncs_result_describe(int index, /*outputs*/ const char** name, int* value);
ncclResult_t ncs_dtype_describe(int index, /*outputs*/ const char** name, int* value, size_t* size);
ncclResult_t ncs_op_describe(int index, /*outputs*/ const char** name, int* value);

/* ---- Host memory (pool.c, cpu.c) ---- */

/* Vector instructions the kernels are compiled for. All give bitwise the same results (only the payload of a NaN
 * may differ); a level other than the best one exists for tests. */
typedef enum {
  NCS_LEVEL_BEST = -1,
  NCS_LEVEL_BASELINE = 0,
  NCS_LEVEL_AVX2 = 1,
  NCS_LEVEL_AVX512 = 2
} ncs_level;

/* The best level this machine can run. */
ncclResult_t ncs_cpu_get_level(/*outputs*/ int* level);

/* Worker threads, asleep between jobs. Any number of threads may run jobs on one pool at the same time: a caller
 * always works on its own job, and a caller that finds the workers taken runs its job alone, so nobody waits for
 * somebody else's job. A pool does not survive fork(): the child must make its own. */
typedef struct ncs_pool ncs_pool;

/* `threads` counts the calling thread: 1 starts no worker. The caller owns *pool and ends it by ncs_pool_destroy.
 * ncclInvalidArgument: threads < 1, or a level this machine cannot run. */
ncclResult_t ncs_pool_create(int threads, int level, /*outputs*/ ncs_pool** pool);

/* Blocks until the workers have ended. No job may be running. NULL is allowed. */
ncclResult_t ncs_pool_destroy(ncs_pool* pool);

/* recvs[r][i] = op over all ranks s of sends[s][i], for every rank r. Blocks until done.
 *
 * Ranks are combined in the order 0..n-1 under the default floating-point environment, so a result depends neither
 * on the number of threads nor on the caller's rounding or flush-to-zero state.
 *   float16, bfloat16  accumulate over all ranks in float32, then round once to nearest even
 *   integers           sum and prod wrap; avg is the wrapped sum, divided truncating (as NCCL does)
 *   avg                the sum divided by n_ranks (NCCL multiplies floats by 1/n first: last bits may differ)
 *   max, min           a NaN on any rank gives NaN; of -0 and +0 the one of the highest rank
 *
 * A recv may be exactly a send (in place), and recvs may be equal to one another (all equal: written once). A recv
 * that overlaps another buffer partly, a NULL or misaligned buffer (when count > 0), n_ranks < 1, or an unknown
 * dtype or op is ncclInvalidArgument; then nothing was written. */
ncclResult_t ncs_cpu_all_reduce(ncs_pool* pool, const void* const* sends, void* const* recvs, int n_ranks,
                                size_t count, int dtype, int op);

/* buffers[r][:] = buffers[root][:] for every rank r. Blocks until done. Buffers equal to the root's are left alone.
 * ncclInvalidArgument as above; then nothing was written. */
ncclResult_t ncs_cpu_broadcast(ncs_pool* pool, void* const* buffers, int n_ranks, size_t count, int dtype, int root);

/* ---- GPUs by NCCL (nccl.c) ---- */

/* What failed, filled in by the functions below when they return a status other than ncclSuccess: the failed call
 * (of NCCL, CUDA or the loader) and its own words. Owned by the caller; NULL is allowed. */
typedef struct {
  char call[64];
  char message[960];
} ncs_failure;

typedef struct ncs_nccl ncs_nccl;           /* a loaded libnccl */
typedef struct ncs_nccl_comm ncs_nccl_comm; /* N ranks: one NCCL communicator and one stream per GPU */

/* Loads libnccl from `path` (as dlopen takes it). The caller owns *nccl. ncclSystemError: not loadable, or a symbol
 * is missing. */
ncclResult_t ncs_nccl_open(const char* path, /*outputs*/ ncs_failure* failure, ncs_nccl** nccl);

/* Frees the handle. The library itself stays loaded: NCCL leaves threads running. No communicator may be alive. */
ncclResult_t ncs_nccl_close(ncs_nccl* nccl);

/* NCCL's version as one number (23203 is 2.32.3). Needs no GPU and no driver. */
ncclResult_t ncs_nccl_get_version(ncs_nccl* nccl, /*outputs*/ ncs_failure* failure, int* version);

/* One rank per entry of devices (CUDA ordinals); one non-blocking stream on each. Blocks until all are up. The
 * caller owns *comm and ends it by ncs_nccl_destroy or ncs_nccl_abort; `nccl` must outlive it. `cudart_path` is
 * loaded after NCCL has succeeded, so that without a driver the failure is NCCL's own. On failure everything made
 * so far is released and *comm is NULL. The thread's current CUDA device is the same afterwards. */
ncclResult_t ncs_nccl_create(ncs_nccl* nccl, const char* cudart_path, const int* devices, int n_devices,
                             /*outputs*/ ncs_failure* failure, ncs_nccl_comm** comm);

/* As ncs_cpu_all_reduce, over device memory: sends[r] and recvs[r] lie on the r-th device; recvs[r] may be sends[r].
 * First waits for all work queued on these devices (whoever produced the buffers need not be waited for), then
 * blocks until the collective is done on every device. The group of calls is opened and closed here, also when a
 * call inside fails. After a failure the communicator is good for ncs_nccl_abort only. Not for two threads at once
 * on one communicator. */
ncclResult_t ncs_nccl_all_reduce(ncs_nccl_comm* comm, const void* const* sends, void* const* recvs, size_t count,
                                 int dtype, int op, /*outputs*/ ncs_failure* failure);

/* buffers[r][:] = buffers[root][:]; otherwise as ncs_nccl_all_reduce. */
ncclResult_t ncs_nccl_broadcast(ncs_nccl_comm* comm, void* const* buffers, size_t count, int dtype, int root,
                                /*outputs*/ ncs_failure* failure);

/* Ends a healthy communicator and frees it, whatever is returned (the first failure). Blocks. NULL is allowed. */
ncclResult_t ncs_nccl_destroy(ncs_nccl_comm* comm, /*outputs*/ ncs_failure* failure);

/* The same for a communicator that has failed: does not wait for what is still queued. */
ncclResult_t ncs_nccl_abort(ncs_nccl_comm* comm, /*outputs*/ ncs_failure* failure);

/* ---- DLPack (only its layout: https://github.com/dmlc/dlpack, dlpack.h, the ABI without a version field) ---- */

typedef struct {
  void* data;
  struct {
    int32_t device_type;
    int32_t device_id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides; /* in elements; NULL: contiguous */
  uint64_t byte_offset;
} ncs_dlpack_tensor;

/* cdef end */

#endif /* NCCLSYNC_H_ */
