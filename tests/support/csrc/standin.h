/* What the stand-in libcudart gives the stand-in libnccl, and tests: one lock around everything, streams that take
 * work, instructions to fail, and counts of what is alive.
 *
 * There are two ways in which work that is queued on streams goes on:
 *   when asked   whenever somebody asks about a stream, so that tests are deterministic and no thread is left behind;
 *   by threads   as on a GPU: each stream has a thread, which sleeps for a random time before each piece of work. */
#ifndef STANDIN_H_
#define STANDIN_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef int cudaError_t;

enum { STANDIN_DEVICES = 8 };
#define STANDIN_UUID "GPU-00000000-0000-0000-0000-00000000000" /* and the device's number */
enum {
  INVALID_VALUE = 1,
  NO_MEMORY = 2,
  NOT_BEGUN = 3, /* CUDA_ERROR_NOT_INITIALIZED: before cuInit, or a call of the runtime's */
  NO_DEVICE = 100,
  NO_SUCH_DEVICE = 101,
  NO_CONTEXT = 201,
  BAD_HANDLE = 400,
  NOT_READY = 600,
  LOST_DEVICE = 719,
  UNSUPPORTED_IN_CAPTURE = 900,
  INVALID_CAPTURE = 901,
  WRONG_THREAD = 908,
  OPEN_GROUP = 998,
  FAILURE = 999
};

/* All state of both libraries is under this one lock. */
void standin_lock(void);
void standin_unlock(void);

/* Every call of CUDA's begins by the one, which takes the lock, logs, does what it was told, and ends by the other. */
cudaError_t standin_enter_cuda(const char* name, int value);
cudaError_t standin_leave_cuda(cudaError_t error);
/* The first of these for a call that is not logged, as it may be made any number of times, and that needs a context. */
cudaError_t standin_ask_cuda(const char* name);

/* From now on streams have threads. The delays, of at most so many microseconds, follow from the seed. Refused once
 * there was a stream. Also by STANDIN_DELAY_US and STANDIN_SEED at the start. */
cudaError_t standin_use_threads(int delay_us, int seed);

/* How long things take: a collective a latency, plus its bytes by the bandwidth that nccl-tests calls busbw; a copy
 * between host and device a latency, plus its bytes by a bandwidth. 0 GB/s: no time of its own. Also by STANDIN_LINK and
 * STANDIN_COPY_LINK at the start, as "GB/s,us". Each device has STANDIN_MEMORY_MB of memory, or any. */
void standin_link(double gb_per_s, double us); /* libnccl's */
void standin_copy_link(double gb_per_s, double us);

/* Queues work: `advance` is called, under the lock, while the work is first in its stream, until it returns 0. What it
 * returns before is how soon it wants to be called again, in seconds. It is called earlier when something happens. */
void standin_push(cudaStream_t stream, double (*advance)(void* what), void* what);
/* The same for work that needs nothing but its turn; outside the lock where streams have threads. `begin`, or NULL, is
 * called before the random delay. */
void standin_push_run(cudaStream_t stream, void (*begin)(void* what), void (*run)(void* what), void* what);
/* Within `advance`: runs what takes long, outside the lock where streams have threads. */
void standin_run_apart(void (*run)(void* what), void* what);
/* Something has happened that other streams' work may wait for. Only the work of streams with threads needs it. */
void standin_stir(void);
/* Lets all streams go on as far as they can, where they have no threads. All these are under the lock. */
void standin_progress(void);
/* Waits until work is done somewhere, or for so long; gives up the lock meanwhile. */
void standin_wait(double most_s);
/* Whether what a stream is given goes into a graph, which is never launched. Counts it then; it is not to be queued. */
int standin_adds_node(cudaStream_t stream);
/* Waits until a stream with a thread is through; that is no wait of the host's. */
void standin_drain(cudaStream_t stream);
int standin_stream_device(cudaStream_t stream); /* -1: destroyed */
int standin_current_device(void);
int standin_has_context(void);
double standin_now_s(void);
void standin_nap(double seconds);

/* How many groups of NCCL calls this thread has open. */
int* standin_depth(void);

/* Instructions to fail, comma-separated; they replace all earlier ones. Also read from STANDIN_FAIL at the start.
 *   ncclAllReduce:2=6    the 2nd call of that name returns 6 (default: the 1st; its library's usual error)
 *   stuck:1:3            rank 1 never launches its 3rd collective from now (default: the 1st; 0: any)
 *   slow:1:3=50          its stream reaches it 50 ms late
 *   launching:1:0        NCCL's own part of rank 1's launch goes on, until told otherwise
 *   async:1:3=6          an asynchronous error 6 on rank 1 after the launch; the collective never ends
 *   late:1=6             the collective ends, and its end brings the error
 *   working:4=50         what is queued on device 4 now ends 50 ms later (default: never, until told otherwise)
 *   stuck_init:1         rank 1's creation never ends; async_init:1=1 ends it with an error
 *   corrupt:0:2          what goes from rank 0 to rank 2 is changed
 * A device is lost, to this process and to those that start later, when its number, without CUDA_VISIBLE_DEVICES, is in
 * the file that STANDIN_LOST names. */
void standin_fail(const char* instructions);
/* How often the index-th instruction was asked for: so a call is counted that is told to fail, but never will. */
int standin_seen(int index);
/* Whether an instruction of that name fires now; rank -1 for a call. Counts. Under the lock. */
int standin_is_told(const char* name, int rank, int* value);
/* Whether the device has work of its own; waits, outside the lock, until it has not, as what frees memory does. */
int standin_is_working(int device);
void standin_outwait(int device);
/* Whether what goes between these ranks is changed. */
int standin_is_corrupt(int from, int to);
/* Whose memory it is; -1: not a device's. Not under the lock. */
int standin_device_of(const void* pointer);
/* Takes memory of a device that nobody touches, or gives it back; NO_MEMORY if it has none left. Under the lock. */
cudaError_t standin_take(int device, long long bytes);
/* Appends a line to the file named by STANDIN_LOG. */
void standin_log(const char* call, const char* value);
/* How many "stream", "event", "memory", "comm" or "thread" (of NCCL's) there are. */
int standin_alive(const char* kind);
/* The same, or since the start: "wait", how often the host waited for a stream, a device or an event; "to_device" and
 * "to_host", copies from the host and to it; "bytes_to_device" and "bytes_to_host". */
long long standin_total(const char* kind);
void standin_count(const char* kind, long long change);

#ifdef __cplusplus
}
#endif
#endif
