/* What the stand-in libcudart gives the stand-in libnccl, and tests: one lock around everything, streams that take
 * work, instructions to fail, and counts of what is alive.
 *
 * Nothing runs in the background. Work that is queued on streams goes on whenever somebody asks about a stream, so
 * that tests are deterministic and no thread is left behind. */
#ifndef STANDIN_H_
#define STANDIN_H_

#include <stddef.h>

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef int cudaError_t;

enum { STANDIN_DEVICES = 8 };
enum {
  INVALID_VALUE = 1,
  NO_MEMORY = 2,
  NO_SUCH_DEVICE = 101,
  NO_CONTEXT = 201,
  BAD_HANDLE = 400,
  NOT_READY = 600,
  OPEN_GROUP = 998,
  FAILURE = 999
};

/* All state of both libraries is under this one lock. */
void standin_lock(void);
void standin_unlock(void);

/* Every call of CUDA's begins by the one, which takes the lock, logs, does what it was told, and ends by the other. */
cudaError_t standin_enter_cuda(const char* name, int value);
cudaError_t standin_leave_cuda(cudaError_t error);

/* Queues work: `advance` is called, under the lock, while the work is first in its stream, until it returns 1. */
void standin_push(cudaStream_t stream, int (*advance)(void* what), void* what);
/* Lets all streams go on as far as they can. Under the lock. */
void standin_progress(void);
int standin_stream_device(cudaStream_t stream); /* -1: destroyed */
int standin_current_device(void);
double standin_now_s(void);

/* How many groups of NCCL calls this thread has open. */
int* standin_depth(void);

/* Instructions to fail, comma-separated; they replace all earlier ones. Also read from STANDIN_FAIL at the start.
 *   ncclAllReduce:2=6    the 2nd call of that name returns 6 (default: the 1st; its library's usual error)
 *   stuck:1:3            rank 1 never launches its 3rd collective from now (default: the 1st; 0: any)
 *   slow:1:3=50          its stream reaches it 50 ms late
 *   async:1:3=6          an asynchronous error 6 on rank 1 after the launch; the collective never ends
 *   late:1=6             the collective ends, and its end brings the error
 *   working:4=50         what is queued on device 4 now ends 50 ms later (default: never, until told otherwise)
 *   stuck_init:1         rank 1's creation never ends; async_init:1=1 ends it with an error
 *   corrupt:0:2          what goes from rank 0 to rank 2 is changed */
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
/* Appends a line to the file named by STANDIN_LOG. */
void standin_log(const char* call, const char* value);
/* How many "stream", "event", "memory" or "comm" there are. */
int standin_alive(const char* kind);
void standin_count(const char* kind, int change);

#endif
