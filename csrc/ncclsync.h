/* The whole C surface of ncclsync: collectives over N ranks that this process owns.
 *
 * Every function that may fail returns a status (ncclSuccess is 0) or a pointer (NULL); outputs come last. Nothing
 * prints or exits. The only mutable statics are what csrc/tf/ keeps. Pointers to buffers are borrowed for the call
 * only, unless a comment says otherwise. Nothing here knows Python, and only csrc/tf/ knows TensorFlow.
 *
 * The part between the two "cdef" marks is also what the Python binding reads: keep it free of preprocessor lines.
 */
#ifndef NCCLSYNC_H_
#define NCCLSYNC_H_

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* NCCL 2.14 has added ncclCommInitRankConfig and ncclCommFinalize, which make aborting a communicator safe. */
#define NCS_OLDEST_NCCL 21400
/* CUDA 12.5 (R555) has added cuCtxRecordEvent and cuCtxWaitEvent, which take all streams of a GPU as one. */
#define NCS_DRIVER_WITH_CONTEXT_EVENTS 12050
/* NCCL 2.17 has added maxCTAs. */
#define NCS_NCCL_WITH_MAX_CTAS 21700

/* cdef begin */

/* NCCL's enums, declared here and nowhere else (nccl.h includes CUDA headers, which a plain machine lacks).
 * tests/communicator/test_nccl_header.py compares every value with the nccl.h of the installed nvidia-nccl wheel. The
 * binding makes its tables of them. */
typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8
} ncclResult_t;
typedef enum {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9
} ncclDataType_t;
typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 } ncclRedOp_t;

/* Bytes of an element; 0: no such dtype. */
size_t ncs_size_of(int dtype);

/* A failure, filled in by the functions below when they return a status other than ncclSuccess: the failed call (of
 * NCCL, CUDA, TensorFlow or the loader) and its message. Owned by the caller; NULL is allowed. */
typedef struct {
  char call[64];
  char message[960];
  int index; /* of the group's collective that failed; -1: none */
} ncs_failure;

/* ---- Host memory (cpu/) ---- */

/* Vector instructions of the kernels. All give equal bits except a NaN's payload; tests use others than the best. */
typedef enum {
  NCS_INSTRUCTION_SET_BEST = -1,
  NCS_INSTRUCTION_SET_BASELINE = 0,
  NCS_INSTRUCTION_SET_AVX2 = 1,
  NCS_INSTRUCTION_SET_AVX512 = 2
} ncs_instruction_set;

/* Worker threads, asleep between jobs. Any number of threads may run jobs on one pool at the same time: a caller
 * always works on its own job, and runs it alone if the workers are taken, so that no caller waits for another's job.
 * A pool does not survive fork(): the child must make its own.
 *
 * `threads` counts the calling thread: 1 starts no worker. ncclInvalidArgument: threads < 1, or an instruction set that
 * this machine cannot run. The end blocks until the workers have ended; no job may be running; NULL is allowed. */
typedef struct ncs_pool ncs_pool;
ncclResult_t ncs_pool_create(int threads, int instruction_set, /*outputs*/ ncs_pool** pool);
void ncs_pool_destroy(ncs_pool* pool);

/* A tensor to reduce: sends[r] of every rank r, and n_recvs buffers that all receive the result. */
typedef struct {
  const void* const* sends;
  void* const* recvs;
  int n_recvs;
  size_t count;
} ncs_reduced;

/* recvs[v][i] = op over all ranks r of weights[r] * sends[r][i], for every v, of each tensor. Blocks until done.
 *
 * Ranks are combined in the order 0..n-1 under the default floating-point environment, so a result depends neither
 * on the number of threads nor on the caller's rounding or flush-to-zero state. What one rank alone sends without
 * weights is copied.
 *   float16, bfloat16  accumulate over all ranks in float32, then round once to nearest even
 *   integers           sum and prod wrap; avg is the wrapped sum, divided truncating (as NCCL does)
 *   avg                the sum divided by n_ranks (NCCL multiplies floats by 1/n first: last bits may differ)
 *   max, min           a NaN on any rank gives NaN; of -0 and +0 the highest rank's
 *
 * A rank whose weight is 0 takes no part, and its buffers are not read. Weights other than 0 and 1 are for sums of
 * floats only; NULL: all 1, without which op is not avg. A recv may be exactly a send of its tensor.
 * ncclInvalidArgument: a bad weight, no rank that takes part, n_ranks < 1, or an unknown dtype or op; then nothing was
 * written. Buffers are not checked: each is aligned to its elements, and no two of them overlap partly. */
ncclResult_t ncs_cpu_reduce(ncs_pool* pool, const ncs_reduced* tensors, size_t n_tensors, const double* weights,
                            int n_ranks, int dtype, int op);

/* Operations of fused arithmetic (arithmetic.c); each rounds once, as in a separate loop. */
typedef enum {
  NCS_ADD = 0,
  NCS_SUBTRACT = 1,
  NCS_MULTIPLY = 2,
  NCS_DIVIDE = 3,
  NCS_SQUARED_DIFFERENCE = 4,
  NCS_ADD_ALIKE = 5,     /* of operands of one shape */
  NCS_RELU_GRADIENT = 6, /* of a gradient, and a feature of its shape */
  NCS_LIKE = 7,          /* the first operand, in the shape of the second; this and the following read one */
  NCS_SQUARE = 8,
  NCS_SQRT = 9,
  NCS_NEGATE = 10,
  NCS_RELU = 11
} ncs_arithmetic;

enum { NCS_MOST_REGISTERS = 48 }; /* inputs and operations of an expression together */

/* Registers the ops of tf/, which use `pool`, with this process' TensorFlow; once: later calls do nothing. `path`: of
 * libtensorflow_framework, which is loaded. The pool must live as long as the process.
 * ncclSystemError: it is not loaded, lacks a function, or refuses; then no op can be used. */
ncclResult_t ncs_tf_register(const char* path, ncs_pool* pool, /*outputs*/ ncs_failure* failure);

/* Tells the ops how to find the stream that TensorFlow computes on, by a kernel's context; NULL: it is not on a GPU. */
void ncs_tf_find_streams(void* (*find)(void* context));

/* ---- Timestamps (cpu/meter.c) ---- */

/* Timestamps of spans. Any number of threads may use a meter at the same time. The caller owns it, and ends it after
 * its last use; NULL is allowed there. */
typedef struct ncs_meter ncs_meter;

typedef struct {
  int64_t time_ns; /* of CLOCK_MONOTONIC */
  int64_t value;   /* from the recording thread */
  int32_t span;    /* the caller's number */
  int32_t ends;    /* 0: it began; 1: it ended */
} ncs_timestamp;

ncclResult_t ncs_meter_create(/*outputs*/ ncs_meter** meter);
void ncs_meter_destroy(ncs_meter* meter);

/* Records that a span begins or ends, now; timestamps are in the order of their times. ncclSystemError: no memory. */
ncclResult_t ncs_meter_record(ncs_meter* meter, int span, int ends, int64_t value);

/* Calls `listener` with `context` for every timestamp, on the thread that records it; NULL: no listener. A timestamp
 * that is being recorded may still go to the former listener. */
void ncs_meter_listen(ncs_meter* meter, void (*listener)(void* context, int span, int ends, int64_t value),
                      void* context);

/* Moves at most the first `most` timestamps to `timestamps`, in their order; returns their number. */
size_t ncs_meter_take(ncs_meter* meter, size_t most, /*outputs*/ ncs_timestamp* timestamps);

/* ---- What a step leaves (tf/held.c) ---- */

/* References to the values of TensorFlow variables, by numbers from 0. Any number of threads may use them at the same
 * time. The caller owns them, and ends them after the last use, when ops are registered. */
typedef struct ncs_held ncs_held;

ncclResult_t ncs_held_create(/*outputs*/ ncs_held** held);
void ncs_held_destroy(ncs_held* held);

/* Adds a variable, whose value is not known. ncclSystemError: no memory. */
ncclResult_t ncs_held_add(ncs_held* held, /*outputs*/ int* index);

/* Lets go of a variable's value, which is not known from now on. */
void ncs_held_forget(ncs_held* held, int index);

/* Whether a variable's value is held, or is a step's that is under way. */
int ncs_held_knows(ncs_held* held, int index);

/* Whether steps begin although variables have other values; they are then disturbed. */
void ncs_held_tolerate(ncs_held* held, int tolerates);

/* Whether a variable has been written while a step ran, by others, since the last call. */
int ncs_held_take_disturbed(ncs_held* held);

/* ---- GPUs by NCCL (nccl/) ---- */

typedef struct ncs_nccl ncs_nccl;           /* a loaded libnccl */
typedef struct ncs_nccl_comm ncs_nccl_comm; /* N ranks: one NCCL communicator and one stream per GPU */

/* Loads libnccl from `path` (as dlopen takes it), for the process' life: NCCL leaves threads running, and so may an
 * abort. *version: 23203 is 2.32.3. Needs no GPU and no driver. ncclSystemError: not loadable, or a symbol is missing.
 * ncclInvalidUsage: older than NCS_OLDEST_NCCL; the message has both versions. */
ncclResult_t ncs_nccl_open(const char* path, /*outputs*/ ncs_failure* failure, ncs_nccl** nccl, int* version);

enum { NCS_UNIQUE_ID_BYTES = 128 };

/* Writes NCS_UNIQUE_ID_BYTES by which ranks in several processes meet. Opens a socket, starts a thread. */
ncclResult_t ncs_nccl_get_unique_id(ncs_nccl* nccl, /*outputs*/ ncs_failure* failure, char* unique_id);

/* The ranks that this process has in a communicator. */
typedef struct {
  const char* unique_id; /* NULL if all ranks are in this process */
  int world_size;        /* the number of ranks in all processes */
  int n;                 /* the number of ranks in this process, at least 1 */
  const int* ranks;      /* [n] their numbers */
  const int* devices;    /* [n] their GPUs, CUDA ordinals */
  int max_ctas;          /* the most blocks of threads, and so channels, that NCCL takes; 0: as many as it chooses */
} ncs_ranks;

/* Begins to join GPUs of this process as its ranks, with one stream on each; ncs_nccl_wait ends it. CUDA's libraries
 * are those at the two paths. The caller owns *comm and ends it by ncs_nccl_destroy or ncs_nccl_abort; `nccl` must
 * outlive it. On failure everything made so far is released and *comm is NULL. This and all following functions leave
 * the thread's current CUDA context as it was. */
ncclResult_t ncs_nccl_create(ncs_nccl* nccl, const char* cudart_path, const char* driver_path, const ncs_ranks* own,
                             /*outputs*/ ncs_failure* failure, ncs_nccl_comm** comm);

/* Whether the driver has events of all streams of a GPU: that of CUDA 12.5 (R555), or newer. */
int ncs_nccl_has_context_events(const ncs_nccl_comm* comm);

/* How much less memory each of the n devices has free than before they were joined: what NCCL has taken, if nobody else
 * takes or gives any meanwhile. */
ncclResult_t ncs_nccl_get_taken(const ncs_nccl_comm* comm, /*outputs*/ ncs_failure* failure, int64_t* bytes);

/* Waits for the call under way, at most slice_s seconds: ncclInProgress if it has not ended by then. Polls continuously
 * at first, then between naps of up to a millisecond. After any other failure, here and below, only ncs_nccl_abort may
 * be called on the communicator. Not for two threads at once on one communicator. */
ncclResult_t ncs_nccl_wait(ncs_nccl_comm* comm, double slice_s, /*outputs*/ ncs_failure* failure);

/* How far each rank of this process is with the call under way. NCCL reports nothing of other processes' ranks. During
 * ncs_nccl_wait_for_devices: NCS_ABSENT if its device's work is known not to have ended, else NCS_LAUNCHED. */
typedef enum {
  NCS_ABSENT = 0,   /* NCCL has not launched it yet */
  NCS_LAUNCHED = 1, /* queued on its GPU, or running and waiting for the other ranks */
  NCS_DONE = 2
} ncs_progress;
ncclResult_t ncs_nccl_get_progress(ncs_nccl_comm* comm, /*outputs*/ int* progress);

/* NCS_ALL_REDUCE works as ncs_cpu_all_reduce, over device memory; NCS_BROADCAST copies the root's buffer into those of
 * all other ranks. The other kinds have blocks of `count` elements, one for each rank p of the world:
 *   NCS_ALL_TO_ALL      each rank sends its p-th block to rank p, and receives its own p-th block from rank p
 *   NCS_REDUCE_SCATTER  each rank sends world_size blocks; rank p receives the reduction of all ranks' p-th blocks
 *   NCS_ALL_GATHER      each rank sends a block; all receive world_size blocks, the p-th from rank p */
typedef enum {
  NCS_ALL_REDUCE = 0,
  NCS_BROADCAST = 1,
  NCS_ALL_TO_ALL = 2,
  NCS_REDUCE_SCATTER = 3,
  NCS_ALL_GATHER = 4
} ncs_kind;

/* A rank's part of a collective, on the rank's device. */
typedef struct {
  int kind;
  int op;           /* of an all-reduce or a reduce-scatter */
  int root;         /* of a broadcast: a rank of the world, of any process */
  const void* send; /* not read of a broadcast, whose root sends what lies at recv */
  void* recv;
  size_t count;
  int dtype;
} ncs_buffer;

/* Finds out where memory at n addresses lies, as the driver says, in about 100 ns each: on the GPU of a CUDA ordinal,
 * or one of these. Launches and waits for nothing. */
enum { NCS_ON_ALL_GPUS = -1, NCS_ON_HOST = -2, NCS_NOWHERE = -3 };
ncclResult_t ncs_nccl_find_devices(const ncs_nccl_comm* comm, const uintptr_t* addresses, int n,
                                   /*outputs*/ ncs_failure* failure, int* devices);

/* Waits, at most slice_s seconds, for the GPUs' own work: all work queued on these devices, on any stream, when this
 * wait began; ncclInProgress if it has not ended: then call it again. Call it before ncs_nccl_launch_group, whose
 * streams do not wait for other streams. Afterwards sent buffers have been written, and received buffers are no longer
 * read (an allocator may have handed them out while earlier work of its stream was pending). Work queued during the
 * wait is not waited for. csrc/README.md says how; it fails while a stream of a device is captured into a graph. Without
 * context events: ncs_launcher_synchronize. */
ncclResult_t ncs_nccl_wait_for_devices(ncs_nccl_comm* comm, double slice_s, /*outputs*/ ncs_failure* failure);

/* Begins to run collectives on the communicator's own streams, as one group that is opened and closed here, also when a
 * call fails. buffers[r] has those of this process' r-th rank, one for each collective, in the same order on every rank.
 * ncs_nccl_wait ends it; the buffers must stay until then. They are not checked: with bad ones NCCL would hang, give
 * wrong numbers, or write into memory that others read. A buffer begins at a multiple of its elements' size, on its
 * rank's device or in managed memory; one that is written is apart from all others of the group (its collectives run at
 * once), except in place. In place, for rank p of the world: `recv` is `send` of an all-reduce, or the p-th block of a
 * reduce-scatter's `send`; an all-gather's `send` is the p-th block of `recv`. */
ncclResult_t ncs_nccl_launch_group(ncs_nccl_comm* comm, const ncs_buffer* const* buffers, int n_collectives,
                                   /*outputs*/ ncs_failure* failure);

/* Begins to end a healthy communicator, on all ranks of the world; ncs_nccl_wait ends it. Then ncs_nccl_destroy. */
ncclResult_t ncs_nccl_finalize(ncs_nccl_comm* comm, /*outputs*/ ncs_failure* failure);

/* Frees a finalized communicator, in any case; returns the first failure. NULL is allowed. May block, here and below,
 * until the GPUs' own work has ended: freeing memory waits for it. */
ncclResult_t ncs_nccl_destroy(ncs_nccl_comm* comm, /*outputs*/ ncs_failure* failure);

/* Frees any other communicator, without waiting for collectives under way or for other processes. */
ncclResult_t ncs_nccl_abort(ncs_nccl_comm* comm, /*outputs*/ ncs_failure* failure);

/* Allocates memory on the communicator's index-th device, and frees its earlier piece; it is freed with the
 * communicator, or by size 0. Copies to and from it block. */
ncclResult_t ncs_nccl_scratch(ncs_nccl_comm* comm, int index, size_t size, /*outputs*/ ncs_failure* failure,
                              void** pointer);
ncclResult_t ncs_nccl_copy(ncs_nccl_comm* comm, int index, void* to, const void* from, size_t size,
                           /*outputs*/ ncs_failure* failure);

/* ---- Groups that are only enqueued (nccl/launcher.c) ----
 *
 * Collectives over buffers that other streams write and read, such as TensorFlow's, without a host thread that waits
 * for a GPU or for another rank: ncs_arrive per rank, ncs_launch once with all ranks' arrivals, ncs_deliver per rank;
 * csrc/README.md has the three steps. If a stream is not known (NULL), all streams of the GPU count.
 *
 * A thread polls launched groups. A group that fails, or does not end in time, fails the launcher. The thread then
 * aborts the communicator, so that the GPUs' streams go on; their results are invalid from group `group` on. */
typedef struct ncs_launcher ncs_launcher;
typedef struct ncs_arrival ncs_arrival;
typedef struct ncs_launched ncs_launched;

enum { NCS_MOST_RANKS = 64, NCS_MOST_NAMED = 64 };

/* The stage in which a group failed. */
typedef enum {
  NCS_OWN_WORK = 0,  /* waiting for the GPUs' earlier work */
  NCS_LAUNCHING = 1, /* inside NCCL's calls */
  NCS_RUNNING = 2    /* on the GPUs */
} ncs_stage;

typedef struct {
  ncs_failure failure;
  int status;       /* ncclSuccess: none has failed; ncclTimeout: it did not end in time; ncclInProgress: interrupted */
  int stage;        /* ncs_stage */
  double waited_s;
  int64_t group;    /* the number of the first group that failed, from 1; all later ones have failed with it */
  int64_t label;    /* from ncs_launch */
  int64_t first;    /* the number of its first collective, from 1 */
  int n_collectives;
  int was_delivered; /* whether a failed group had been delivered to a rank before it failed */
  int progress[NCS_MOST_RANKS];    /* ncs_progress of each rank; in NCS_OWN_WORK: NCS_ABSENT if its GPU is busy */
  int64_t counts[NCS_MOST_NAMED];  /* elements and dtypes of the first collectives */
  int dtypes[NCS_MOST_NAMED];
} ncs_launch_failure;

/* A rank's buffers, one for each collective of a group, and the object that holds their memory. let_go(kept) is called
 * once, when work under way no longer uses them, or is ordered before all later work of the GPU. */
typedef struct {
  const ncs_buffer* buffers;
  int n;
  void* kept;
  void (*let_go)(void* kept);
} ncs_buffers;

/* Makes a launcher for communicators of n_ranks. It is never freed: a graph may hold its address for as long as the
 * process lives. timeout_s: the most that the GPUs' own work before a group, NCCL's launch, and the group may each
 * take; 0: no limit. */
ncclResult_t ncs_launcher_create(int n_ranks, double timeout_s, /*outputs*/ ncs_launcher** launcher);

/* Tells it the GPUs, of the first communicator that it will be lent. */
void ncs_launcher_know(ncs_launcher* launcher, const ncs_nccl_comm* comm);

/* Blocks until the GPUs' own work has ended, which may be never, whatever becomes of the communicator. */
ncclResult_t ncs_launcher_synchronize(const ncs_launcher* launcher, /*outputs*/ ncs_failure* failure);

/* Lends it a communicator, and clears an earlier failure. */
void ncs_launcher_open(ncs_launcher* launcher, ncs_nccl_comm* comm);

/* Takes the communicator back, and ends its reservation; no group is launched any more. Groups under way fail with
 * `status`. The caller has reserved the communicator, and must end it even if it has failed meanwhile; or nothing is
 * being launched. Blocks until the polling thread does not use it. */
void ncs_launcher_close(ncs_launcher* launcher, int status);

/* Returns the communicator, and keeps launches and the polling thread away from it until it is released. A failure
 * meanwhile is aborted only then. NULL: it has failed, or is closed. */
ncs_nccl_comm* ncs_launcher_reserve(ncs_launcher* launcher);
void ncs_launcher_release(ncs_launcher* launcher);

/* Counts collectives that the caller runs without the launcher; returns the first one's number. */
int64_t ncs_launcher_count(ncs_launcher* launcher, int n_collectives);

/* The numbers of groups that were launched, and that have ended well. Never blocks. */
void ncs_launcher_get_groups(const ncs_launcher* launcher, /*outputs*/ int64_t* launched, int64_t* ended);

/* Waits, at most slice_s seconds, until all launched groups have ended: ncclInProgress if they have not. */
ncclResult_t ncs_launcher_wait(ncs_launcher* launcher, double slice_s);

/* The first failure; its status is ncclSuccess if there is none. */
ncs_launch_failure ncs_launcher_get_failure(ncs_launcher* launcher);

/* The group that NCCL is launching, or the first that has not ended, and how long it has been in its stage; status 0:
 * there is none. */
ncs_launch_failure ncs_launcher_get_pending(ncs_launcher* launcher);

/* Requests cancellation: fails the launcher unless a group ends within a second, or none is under way. */
void ncs_launcher_interrupt(ncs_launcher* launcher);

/* Waits, at most slice_s, for the end of a failure's abort, which may wait for the GPUs' own work. */
ncclResult_t ncs_launcher_wait_for_abort(ncs_launcher* launcher, double slice_s);

/* Captures the work queued on a stream of the rank's GPU; the stream must live as long as the process. If CUDA refuses,
 * or the stream is NULL and there are no context events, the launcher fails. After success let_go is called later. */
ncclResult_t ncs_arrive(ncs_launcher* launcher, int rank, void* stream, const ncs_buffers* buffers,
                        /*outputs*/ ncs_failure* failure, ncs_arrival** arrival);

/* Launches one group of all ranks' buffers: arrivals of each rank, in their order, with as many buffers, of the same
 * kinds, operations and roots. Without buffers nothing is launched. Buffers that do not fit each other leave the
 * communicator usable; any other failure fails the launcher. */
ncclResult_t ncs_launch(ncs_launcher* launcher, int64_t label, ncs_arrival* const* arrivals,
                        /*outputs*/ ncs_failure* failure, ncs_launched** launched);

/* Orders the group before the stream's later work, and lets go of the rank's buffers; once for a rank. waits: the host
 * waits for the group's end, too. A group that has failed keeps the buffers until it is aborted. */
ncclResult_t ncs_deliver(ncs_launched* launched, int rank, void* stream, int waits, /*outputs*/ ncs_failure* failure);

/* Blocks until the group has ended; ncclRemoteError: it has failed. */
ncclResult_t ncs_launched_wait(ncs_launched* launched);

/* The `kept` of the rank's arrival; NULL after its delivery. */
void* ncs_launched_get_kept(const ncs_launched* launched, int rank);

/* Drops a reference. A launched group that was not delivered is first ordered as by ncs_deliver. NULL is allowed. */
void ncs_arrival_release(ncs_arrival* arrival);
void ncs_launched_release(ncs_launched* launched);

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

/* ---- Inside csrc only (ncclsync.c): shared by all folders ---- */

/* As pthread_create; signals stay with the process' own threads. */
int ncs_start_thread(pthread_t* thread, void* (*run)(void* argument), void* argument);
/* Fills in *failure, which may be NULL, with the failed call, a collective's index or -1, and a message as of printf;
 * returns the status. */
ncclResult_t ncs_fail(ncs_failure* failure, ncclResult_t status, const char* call, int index, const char* format, ...)
    __attribute__((format(printf, 5, 6)));

#endif /* NCCLSYNC_H_ */
