/* Inside csrc/nccl only: NCCL's and CUDA's calls, found at run time, and declarations that the files here share. */
#ifndef NCCLSYNC_NCCL_API_H_
#define NCCLSYNC_NCCL_API_H_

#include <limits.h>

#include "ncclsync.h"

typedef struct ncclComm* ncclComm_t;
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t; /* the driver's CUevent is the same */
typedef struct CUctx_st* CUcontext;
typedef int cudaError_t; /* an enum in CUDA's headers: the same in every ABI that CUDA has */
typedef int CUresult;
typedef int cudaMemcpyKind_t;

typedef struct {
  char internal[NCS_UNIQUE_ID_BYTES];
} ncclUniqueId;

/* The first fields of ncclConfig_t. `version` names the NCCL of which they are, and `size` how many: a later NCCL takes
 * the other fields as unset. Those up to `blocking` are of 2.14, the others of 2.17. */
typedef struct {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cgaClusterSize;
  int minCTAs;
  int maxCTAs;
  const char* netName;
} ncclConfig_t;
#define NCS_NCCL_API_MAGIC 0xcafebeefu
#define NCS_CONFIG_UNDEF_INT INT_MIN

/* Every symbol in use: return type, name, parameters. test_nccl_header.py compares NCCL's with nccl.h. */
#define NCS_NCCL_SYMBOLS(X)                                                                          \
  X(ncclResult_t, ncclGetVersion, (int* version))                                                    \
  X(const char*, ncclGetErrorString, (ncclResult_t result))                                          \
  X(const char*, ncclGetLastError, (ncclComm_t comm))                                                \
  X(ncclResult_t, ncclGetUniqueId, (ncclUniqueId* uniqueId))                                         \
  X(ncclResult_t, ncclCommInitRankConfig, (ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, \
    ncclConfig_t* config))                                                                           \
  X(ncclResult_t, ncclCommFinalize, (ncclComm_t comm))                                               \
  X(ncclResult_t, ncclCommDestroy, (ncclComm_t comm))                                                \
  X(ncclResult_t, ncclCommAbort, (ncclComm_t comm))                                                  \
  X(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t* asyncError))                \
  X(ncclResult_t, ncclGroupStart, (void))                                                            \
  X(ncclResult_t, ncclGroupEnd, (void))                                                              \
  X(ncclResult_t, ncclAllReduce, (const void* sendbuff, void* recvbuff, size_t count,                \
    ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream))                  \
  X(ncclResult_t, ncclBroadcast, (const void* sendbuff, void* recvbuff, size_t count,                \
    ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream))                        \
  X(ncclResult_t, ncclReduceScatter, (const void* sendbuff, void* recvbuff, size_t recvcount,        \
    ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream))                  \
  X(ncclResult_t, ncclAllGather, (const void* sendbuff, void* recvbuff, size_t sendcount,            \
    ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream))                                  \
  X(ncclResult_t, ncclSend, (const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,  \
    ncclComm_t comm, cudaStream_t stream))                                                           \
  X(ncclResult_t, ncclRecv, (void* recvbuff, size_t count, ncclDataType_t datatype, int peer,        \
    ncclComm_t comm, cudaStream_t stream))

#define NCS_CUDART_SYMBOLS(X)                                             \
  X(const char*, cudaGetErrorString, (cudaError_t error))                 \
  X(cudaError_t, cudaGetLastError, (void))                                \
  X(cudaError_t, cudaSetDevice, (int device))                             \
  X(cudaError_t, cudaEventCreateWithFlags, (cudaEvent_t* event, unsigned int flags)) \
  X(cudaError_t, cudaEventQuery, (cudaEvent_t event))                     \
  X(cudaError_t, cudaEventRecord, (cudaEvent_t event, cudaStream_t stream)) \
  X(cudaError_t, cudaEventDestroy, (cudaEvent_t event))                   \
  X(cudaError_t, cudaDeviceGetStreamPriorityRange, (int* least, int* greatest)) \
  X(cudaError_t, cudaStreamCreateWithPriority, (cudaStream_t* stream, unsigned int flags, int priority)) \
  X(cudaError_t, cudaStreamQuery, (cudaStream_t stream))                  \
  X(cudaError_t, cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned int flags)) \
  X(cudaError_t, cudaStreamDestroy, (cudaStream_t stream))                \
  X(cudaError_t, cudaMalloc, (void** pointer, size_t size))               \
  X(cudaError_t, cudaMemcpy, (void* to, const void* from, size_t size, cudaMemcpyKind_t kind)) \
  X(cudaError_t, cudaFree, (void* pointer))                               \
  X(cudaError_t, cudaMemGetInfo, (size_t* left, size_t* all))             \
  X(cudaError_t, cudaDeviceSynchronize, (void))

/* Of the driver's own library. */
#define NCS_DRIVER_SYMBOLS(X)                                           \
  X(CUresult, cuDriverGetVersion, (int* version))                       \
  X(CUresult, cuInit, (unsigned int flags))                             \
  X(CUresult, cuCtxGetCurrent, (CUcontext* current))                    \
  X(CUresult, cuCtxSetCurrent, (CUcontext context))                     \
  X(CUresult, cuPointerGetAttributes,                                   \
    (unsigned int n, int* attributes, void** data, unsigned long long pointer))

/* Those that an older driver lacks: NULL there. */
#define NCS_CONTEXT_EVENTS(X)                                           \
  X(CUresult, cuCtxRecordEvent, (CUcontext context, cudaEvent_t event)) \
  X(CUresult, cuCtxWaitEvent, (CUcontext context, cudaEvent_t event))

/* Of CUpointer_attribute and CUmemorytype. */
enum { NCS_CU_MEMORY_TYPE = 2, NCS_CU_IS_MANAGED = 8, NCS_CU_DEVICE_ORDINAL = 9 };
enum { NCS_CU_NO_MEMORY = 0, NCS_CU_HOST = 1 };

#define NCS_CUDA_EVENT_DISABLE_TIMING 2u /* cudaEventDisableTiming */
#define NCS_CUDA_STREAM_NON_BLOCKING 1u /* cudaStreamNonBlocking */
#define NCS_CUDA_NOT_READY 600          /* cudaErrorNotReady */
#define NCS_CUDA_MEMCPY_DEFAULT 4       /* cudaMemcpyDefault: the pointers give the direction */

#define NCS_DECLARE(type, name, parameters) type(*name) parameters;
typedef struct {
  NCS_CUDART_SYMBOLS(NCS_DECLARE)
  NCS_DRIVER_SYMBOLS(NCS_DECLARE)
  NCS_CONTEXT_EVENTS(NCS_DECLARE)
} ncs_cuda;

struct ncs_nccl {
  void* handle;
  int version;
  NCS_NCCL_SYMBOLS(NCS_DECLARE)
};

struct ncs_nccl_comm {
  ncs_nccl* nccl; /* borrowed */
  ncs_cuda cuda;
  int n, world_size, max_ctas;
  int *ranks, *devices;
  ncclComm_t* comms;     /* NULL where there is none */
  cudaStream_t* streams; /* NULL where there is none */
  CUcontext* contexts;   /* each device's primary one */
  cudaEvent_t* events;   /* NULL where there is none */
  void** scratch;        /* device memory; NULL where there is none */
  size_t* left;          /* the device's free memory before the ranks were joined */
  int is_waiting;   /* for the devices' own work */
  int is_launching; /* NCCL has not reported yet that it has launched the call under way */
};

/* Makes the i-th call of a group. */
typedef ncclResult_t ncs_call(const ncs_nccl_comm* comm, int i, const void* of, ncs_failure* failure);

ncclResult_t ncs_check_nccl(const ncs_nccl* nccl, ncclResult_t status, const char* call, ncs_failure* failure);
/* The same of a call that may go on: ncclInProgress is success. */
ncclResult_t ncs_check_begun(const ncs_nccl* nccl, ncclResult_t status, const char* call, ncs_failure* failure);
/* A CUDA error is what NCCL would make of it. */
ncclResult_t ncs_check_cuda(const ncs_cuda* cuda, cudaError_t error, const char* call, ncs_failure* failure);
/* Make a call, whose arguments are in parentheses, and check it, by the caller's `cuda` or `nccl`, and `failure`. */
#define NCS_CUDA(call, arguments) ncs_check_cuda(cuda, cuda->call arguments, #call, failure)
#define NCS_NCCL(call, arguments) ncs_check_nccl(nccl, nccl->call arguments, #call, failure)
/* Loads CUDA's calls from its driver, first, and its runtime. They stay loaded, like NCCL: TensorFlow uses the same
 * libraries. */
ncclResult_t ncs_load_cuda(const char* runtime_path, const char* driver_path, ncs_cuda* library, ncs_failure* failure);

double ncs_now_s(void);
/* Sleeps between two looks, the longer the longer the wait has been. */
void ncs_nap(double waited_s);
/* Calls look(of, failure) until it returns another status than ncclInProgress, at most for slice_s; returns the last
 * one. */
ncclResult_t ncs_poll(ncclResult_t (*look)(void* of, ncs_failure* failure), void* of, double slice_s,
                      ncs_failure* failure);
/* The same of a communicator, with the context of one of its GPUs current. */
ncclResult_t ncs_poll_comm(ncclResult_t (*look)(void* comm, ncs_failure* failure), ncs_nccl_comm* comm, double slice_s,
                           ncs_failure* failure);
/* Makes a context current, as *status says, and the one before again where the block ends. All calls of CUDA's runtime
 * are made so: in a thread without a context the runtime would make one on the first GPU, which takes memory. */
#define NCS_ENTER(cuda, context, failure, status) \
  const ncs_entered entered __attribute__((cleanup(ncs_leave))) = ncs_enter(cuda, context, failure, status)
typedef struct {
  const ncs_cuda* cuda; /* NULL: there is nothing to restore */
  CUcontext before;
} ncs_entered;
ncs_entered ncs_enter(const ncs_cuda* cuda, CUcontext context, ncs_failure* failure, ncclResult_t* status);
void ncs_leave(const ncs_entered* entered);
/* Record an event of a stream of the context, or let the stream's later work wait for one. NULL: of all its streams. The
 * context is current. */
ncclResult_t ncs_record(const ncs_cuda* cuda, CUcontext context, cudaStream_t stream, cudaEvent_t event,
                        ncs_failure* failure);
ncclResult_t ncs_order(const ncs_cuda* cuda, CUcontext context, cudaStream_t stream, cudaEvent_t event,
                       ncs_failure* failure);
/* Makes an event in the current context. */
ncclResult_t ncs_make_event(const ncs_cuda* cuda, cudaEvent_t* event, ncs_failure* failure);
/* ncclInProgress where one of n events has not come; NULL stands for none. */
ncclResult_t ncs_look_at_events(const ncs_cuda* cuda, const cudaEvent_t* events, int n, ncs_failure* failure);
/* Makes the calls 0 to n - 1 of a group. The group is closed in any case: an open one would swallow every later call of
 * this thread. After a failure inside NCCL launches nothing, and returns that failure again. */
ncclResult_t ncs_call_group(const ncs_nccl_comm* comm, int n, const void* of, ncs_call* call, ncs_failure* failure);
/* Asks NCCL for the state of every rank: ncclInProgress until it has launched the call under way; the first error. */
ncclResult_t ncs_ask_nccl(const ncs_nccl_comm* comm, ncs_failure* failure);

#endif /* NCCLSYNC_NCCL_API_H_ */
