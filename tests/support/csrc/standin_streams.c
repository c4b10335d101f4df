/* The stand-in's streams and events. A stream is a queue. Either whoever asks about a stream lets all of them go on, or
 * each stream has a thread; see standin.h. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "standin.h"

typedef struct work {
  double (*advance)(void* what);
  void (*begin)(void* what); /* or these two, outside the lock where streams have threads */
  void (*run)(void* what);
  void* what;
  long number; /* they count up over all streams */
  struct work* next;
} work;

/* Streams are never freed, so that a use after their end is told from a good one. */
struct CUstream_st {
  int device, alive;
  work *first, *last; /* work that is under way is still the first */
  pthread_cond_t moved; /* for its thread: there is work, or what its work waits for may have come */
  int is_stalled;       /* its thread waits within a piece of work */
  long n_held;          /* so many of its context's waits are before its work */
  unsigned random;
  int has_graph, is_spoilt; /* what it is given goes into a graph; whether that has failed */
  int* graphs_thread; /* the one that may end it; NULL: any */
  size_t n_nodes;
  struct CUstream_st* next;
};

/* What was queued up to a number, on one stream or on all of a device. That is a value: it needs no event to live on. */
typedef struct {
  cudaStream_t stream; /* NULL: all of the device */
  int device, was_working;
  long number;
} captured;

struct CUevent_st {
  int device;
  captured work;
};

/* What a context waits for. Streams come to it with their next work, so that idle ones cost nothing. */
typedef struct held {
  captured work;
  long nth;
  struct held* next;
} held;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed; /* for the host: work is done */
static cudaStream_t streams;
static held* held_by[STANDIN_DEVICES];
static long n_queued, n_held;
static int has_threads, max_delay_us, is_ending, n_threads, n_waiting;
static unsigned seed;

void standin_lock(void) { pthread_mutex_lock(&lock); }
void standin_unlock(void) { pthread_mutex_unlock(&lock); }

/* ---- Time ---- */

double standin_now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static struct timespec to_timespec(double seconds) {
  const time_t whole = (time_t)seconds;
  return (struct timespec){whole, (long)(1e9 * (seconds - (double)whole))};
}

void standin_nap(double seconds) {
  const struct timespec length = to_timespec(seconds);
  nanosleep(&length, NULL);
}

static void make_condition(pthread_cond_t* condition) {
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(condition, &monotonic);
}

static void sleep_at(pthread_cond_t* condition, double most_s) {
  const struct timespec until = to_timespec(standin_now_s() + most_s);
  pthread_cond_timedwait(condition, &lock, &until);
}

void standin_wait(double most_s) {
  if (has_threads) {
    ++n_waiting;
    sleep_at(&changed, most_s);
    --n_waiting;
  } else {
    standin_unlock();
    standin_nap(1e-3);
    standin_lock();
  }
}

/* ---- What was captured ---- */

static int is_behind(cudaStream_t stream, const captured* what) {
  return stream->first != NULL && stream->first->number <= what->number;
}

static int is_through(const captured* what) {
  if (is_ending || (what->number == 0 && !what->was_working)) return 1; /* never recorded */
  if (what->stream != NULL) return !is_behind(what->stream, what);
  for (cudaStream_t stream = streams; stream != NULL; stream = stream->next)
    if (stream->device == what->device && is_behind(stream, what)) return 0;
  return !(what->was_working && standin_is_working(what->device));
}

static double await(void* what) {
  if (!is_through(what)) return 1e-3;
  free(what);
  return 0;
}

/* ---- Queues ---- */

static void push_at_once(cudaStream_t stream, work new) {
  work* added = malloc(sizeof(*added));
  *added = new;
  added->number = ++n_queued;
  added->next = NULL;
  if (stream->first == NULL) stream->first = added;
  else stream->last->next = added;
  stream->last = added;
  if (stream->first == added) pthread_cond_signal(&stream->moved);
}

static void push_wait_at_once(cudaStream_t stream, const captured* what) {
  captured* own;
  if (is_through(what)) return; /* as it will be ever after */
  own = malloc(sizeof(*own));
  *own = *what;
  push_at_once(stream, (work){.advance = await, .what = own});
}

/* Queues what the stream's context waits for and the stream does not yet. */
static void take_held(cudaStream_t stream) {
  if (stream->n_held == n_held) return;
  for (const held* one = held_by[stream->device]; one != NULL; one = one->next)
    if (one->nth > stream->n_held) push_wait_at_once(stream, &one->work);
  stream->n_held = n_held;
}

static void push(cudaStream_t stream, work new) {
  take_held(stream);
  push_at_once(stream, new);
}

void standin_push(cudaStream_t stream, double (*advance)(void* what), void* what) {
  push(stream, (work){.advance = advance, .what = what});
}

void standin_push_run(cudaStream_t stream, void (*begin)(void* what), void (*run)(void* what), void* what) {
  push(stream, (work){.begin = begin, .run = run, .what = what});
}

/* By one stream or, if that is NULL, by all of a device. */
static captured capture(cudaStream_t stream, int device) {
  cudaStream_t any = stream != NULL ? stream : streams;
  while (any != NULL && (!any->alive || any->device != device)) any = any->next;
  if (any != NULL) take_held(any); /* a context's wait is before what it records */
  return (captured){stream, device, stream == NULL && standin_is_working(device), n_queued};
}

/* Threads that wait within work: those that wait for other work, if it is done, or those that wait for anything else. */
static void wake_stalled(int for_work) {
  for (cudaStream_t stream = streams; stream != NULL; stream = stream->next)
    if (stream->is_stalled && (stream->first->advance == await) == for_work &&
        (!for_work || is_through(stream->first->what)))
      pthread_cond_signal(&stream->moved);
}

static void pop(cudaStream_t stream) {
  work* done = stream->first;
  stream->first = done->next;
  free(done);
  wake_stalled(1);
  if (n_waiting > 0) pthread_cond_broadcast(&changed);
}

void standin_progress(void) {
  if (has_threads) return;
  for (int moved = 1; moved;) {
    moved = 0;
    for (cudaStream_t stream = streams; stream != NULL; stream = stream->next) {
      for (; stream->first != NULL; pop(stream), moved = 1) {
        const work* now = stream->first;
        if (now->begin != NULL) now->begin(now->what);
        if (now->run != NULL) now->run(now->what);
        else if (now->advance(now->what) > 0) break;
      }
    }
  }
}

void standin_run_apart(void (*run)(void* what), void* what) {
  if (has_threads) standin_unlock();
  run(what);
  if (has_threads) standin_lock();
  standin_stir();
}

void standin_stir(void) {
  if (has_threads) wake_stalled(0);
}

/* ---- Threads ---- */

static void do_first(cudaStream_t stream) {
  const work* now = stream->first;
  double later_s;
  standin_unlock();
  if (now->begin != NULL) now->begin(now->what);
  if (max_delay_us > 0) standin_nap(1e-6 * (double)(rand_r(&stream->random) % (unsigned)max_delay_us));
  if (now->run != NULL) now->run(now->what);
  standin_lock();
  while (now->run == NULL && !is_ending && (later_s = now->advance(now->what)) > 0) {
    stream->is_stalled = 1;
    sleep_at(&stream->moved, later_s);
    stream->is_stalled = 0;
  }
}

static void* work_off(void* of) {
  cudaStream_t stream = of;
  standin_lock();
  while (!is_ending && (stream->alive || stream->first != NULL)) {
    if (stream->first == NULL) {
      pthread_cond_wait(&stream->moved, &lock);
    } else {
      do_first(stream);
      pop(stream);
    }
  }
  --n_threads;
  standin_unlock();
  return NULL;
}

/* At the process' end, before other libraries end that work on streams may use. A thread that does not come is left. */
static void end_threads(void) {
  const double until = standin_now_s() + 5.0;
  standin_lock();
  is_ending = 1;
  for (cudaStream_t stream = streams; stream != NULL; stream = stream->next) pthread_cond_signal(&stream->moved);
  while (n_threads > 0 && standin_now_s() < until) standin_wait(1e-3);
  standin_unlock();
}

static void start_thread(cudaStream_t stream) {
  pthread_t thread;
  sigset_t all, callers;
  if (streams->next == NULL) atexit(end_threads);
  ++n_threads;
  /* Signals stay with the program's own threads. */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &callers);
  if (pthread_create(&thread, NULL, work_off, stream) != 0) abort();
  pthread_sigmask(SIG_SETMASK, &callers, NULL);
  pthread_detach(thread);
}

cudaError_t standin_use_threads(int delay_us, int with_seed) {
  standin_lock();
  if (streams != NULL) return standin_leave_cuda(INVALID_VALUE); /* nobody would work them off */
  has_threads = 1;
  max_delay_us = delay_us;
  seed = (unsigned)with_seed;
  return standin_leave_cuda(0);
}

__attribute__((constructor)) static void begin(void) {
  const char *delay_us = getenv("STANDIN_DELAY_US"), *with_seed = getenv("STANDIN_SEED");
  make_condition(&changed);
  if (delay_us != NULL) standin_use_threads(atoi(delay_us), with_seed != NULL ? atoi(with_seed) : 1);
}

/* ---- Streams ---- */

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}

static cudaError_t create_stream(const char* name, cudaStream_t* stream, int value) {
  cudaError_t error = standin_enter_cuda(name, value);
  if (error != 0) return standin_leave_cuda(error);
  *stream = malloc(sizeof(**stream));
  **stream = (struct CUstream_st){.device = standin_current_device(), .alive = 1, .next = streams};
  (*stream)->random = seed++ * 2654435761u;
  make_condition(&(*stream)->moved);
  streams = *stream;
  standin_count("stream", 1);
  if (has_threads) start_thread(*stream);
  return standin_leave_cuda(0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return create_stream("cudaStreamCreateWithFlags", stream, (int)flags);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority) {
  if (flags != 1) return BAD_HANDLE; /* one that waits for the legacy stream would be a mistake of ours */
  return create_stream("cudaStreamCreateWithPriority", stream, priority);
}

int standin_stream_device(cudaStream_t stream) { return stream->alive ? stream->device : -1; }

/* ---- Graphs, into which a stream's work goes ---- */

struct CUgraph_st {
  size_t n_nodes;
};

int standin_adds_node(cudaStream_t stream) {
  if (stream->has_graph) ++stream->n_nodes;
  return stream->has_graph;
}

/* What a stream may not do meanwhile, or none of a device where that is NULL, spoils its graph. */
static cudaError_t spoil_graphs(cudaStream_t only, int device) {
  cudaError_t error = 0;
  for (cudaStream_t stream = streams; stream != NULL; stream = stream->next) {
    if (!stream->has_graph || (only != NULL ? stream != only : stream->device != device)) continue;
    stream->is_spoilt = 1;
    error = UNSUPPORTED_IN_CAPTURE;
  }
  return error;
}

/* Thread-local and relaxed; the global mode keeps other threads from calls, and nothing here does. */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode) {
  cudaError_t error = standin_enter_cuda("cudaStreamBeginCapture", mode);
  if (error == 0 && (!stream->alive || stream->has_graph || (mode != 1 && mode != 2))) error = INVALID_VALUE;
  if (error != 0) return standin_leave_cuda(error);
  stream->has_graph = 1;
  stream->is_spoilt = 0;
  stream->graphs_thread = mode == 1 ? standin_depth() : NULL;
  stream->n_nodes = 0;
  return standin_leave_cuda(0);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, struct CUgraph_st** graph) {
  cudaError_t error = standin_enter_cuda("cudaStreamEndCapture", stream->device);
  *graph = NULL;
  if (error == 0 && !stream->has_graph) error = INVALID_VALUE;
  if (error == 0 && stream->graphs_thread != NULL && stream->graphs_thread != standin_depth()) error = WRONG_THREAD;
  if (error != 0) return standin_leave_cuda(error);
  stream->has_graph = 0;
  if (stream->is_spoilt) return standin_leave_cuda(INVALID_CAPTURE);
  *graph = malloc(sizeof(**graph));
  (*graph)->n_nodes = stream->n_nodes;
  return standin_leave_cuda(0);
}

cudaError_t cudaGraphGetNodes(struct CUgraph_st* graph, void* nodes, size_t* n_nodes) {
  *n_nodes = graph->n_nodes;
  return nodes == NULL ? 0 : INVALID_VALUE;
}

cudaError_t cudaGraphDestroy(struct CUgraph_st* graph) {
  free(graph);
  return 0;
}

/* ---- Streams, asked and waited for ---- */

/* Lets everything go on; whether this stream is through. */
static cudaError_t ask(cudaStream_t stream) {
  if (*standin_depth() > 0) return OPEN_GROUP;
  if (!stream->alive) return BAD_HANDLE;
  if (spoil_graphs(stream, -1) != 0) return UNSUPPORTED_IN_CAPTURE;
  take_held(stream);
  standin_progress();
  return stream->first == NULL || is_ending ? 0 : NOT_READY;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  cudaError_t error = standin_ask_cuda("cudaStreamQuery");
  return standin_leave_cuda(error != 0 ? error : ask(stream));
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  cudaError_t error = standin_enter_cuda("cudaStreamDestroy", stream->device);
  if (!stream->alive) return standin_leave_cuda(BAD_HANDLE);
  standin_progress();
  /* CUDA lets the work end by itself; without threads nobody would be left to wait for it. */
  if (error == 0 && stream->first != NULL && !has_threads) error = NOT_READY;
  stream->alive = 0;
  pthread_cond_signal(&stream->moved);
  standin_count("stream", -1);
  return standin_leave_cuda(error);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*run)(void* what), void* what) {
  cudaError_t error = standin_enter_cuda("cudaLaunchHostFunc", stream->device);
  if (error == 0 && !stream->alive) error = BAD_HANDLE;
  if (error == 0 && !standin_adds_node(stream)) standin_push_run(stream, NULL, run, what);
  return standin_leave_cuda(error);
}

/* ---- Waits ---- */

/* The host waits. */
static cudaError_t wait_for(captured what) {
  standin_count("wait", 1);
  for (standin_progress(); !is_through(&what); standin_progress()) standin_wait(1e-3);
  return 0;
}

void standin_drain(cudaStream_t stream) {
  take_held(stream);
  while (stream->first != NULL && !is_ending) standin_wait(1e-3);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  cudaError_t error = standin_enter_cuda("cudaStreamSynchronize", stream->device);
  if (error == 0) error = ask(stream);
  if (error == 0 || error == NOT_READY) error = wait_for(capture(stream, stream->device));
  return standin_leave_cuda(error);
}

cudaError_t cudaDeviceSynchronize(void) {
  cudaError_t error = standin_enter_cuda("cudaDeviceSynchronize", standin_current_device());
  if (error == 0 && *standin_depth() > 0) error = OPEN_GROUP;
  return standin_leave_cuda(error != 0 ? error : wait_for(capture(NULL, standin_current_device())));
}

/* ---- Events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  cudaError_t error = standin_enter_cuda("cudaEventCreateWithFlags", (int)flags);
  if (error != 0) return standin_leave_cuda(error);
  *event = malloc(sizeof(**event));
  **event = (struct CUevent_st){.device = standin_current_device()};
  standin_count("event", 1);
  return standin_leave_cuda(0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  cudaError_t error = standin_enter_cuda("cudaEventDestroy", event->device);
  free(event);
  standin_count("event", -1);
  return standin_leave_cuda(error);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  cudaError_t error = standin_enter_cuda("cudaEventRecord", stream->device);
  if (error == 0 && (!stream->alive || event->device != stream->device)) error = BAD_HANDLE;
  if (error == 0) error = spoil_graphs(stream, -1); /* CUDA would take it into the graph */
  if (error == 0) event->work = capture(stream, stream->device);
  return standin_leave_cuda(error);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  cudaError_t error = standin_ask_cuda("cudaEventQuery");
  if (error != 0) return standin_leave_cuda(error);
  standin_progress();
  return standin_leave_cuda(is_through(&event->work) ? 0 : NOT_READY);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  cudaError_t error = standin_enter_cuda("cudaEventSynchronize", event->device);
  return standin_leave_cuda(error != 0 ? error : wait_for(event->work));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  cudaError_t error = standin_enter_cuda("cudaStreamWaitEvent", stream->device);
  if (error == 0 && (!stream->alive || flags != 0)) error = BAD_HANDLE;
  if (error == 0) error = spoil_graphs(stream, -1);
  if (error == 0) take_held(stream);
  if (error == 0) push_wait_at_once(stream, &event->work);
  return standin_leave_cuda(error);
}

int cuCtxRecordEvent(void* recorded, cudaEvent_t event) {
  const int device = (int)(size_t)recorded - 1;
  cudaError_t error = standin_enter_cuda("cuCtxRecordEvent", device);
  if (error == 0 && (!standin_has_context() || event->device != device)) error = BAD_HANDLE;
  if (error == 0) error = spoil_graphs(NULL, device);
  if (error == 0) event->work = capture(NULL, device);
  return standin_leave_cuda(error);
}

static void hold(int device, const captured* what) {
  held** link = &held_by[device];
  while (*link != NULL) {
    held* one = *link;
    if (!is_through(&one->work)) {
      link = &one->next;
      continue;
    }
    *link = one->next;
    free(one);
  }
  if (is_through(what)) return;
  *link = malloc(sizeof(**link));
  **link = (held){*what, ++n_held, NULL};
}

int cuCtxWaitEvent(void* waiting, cudaEvent_t event) {
  const int device = (int)(size_t)waiting - 1;
  cudaError_t error = standin_enter_cuda("cuCtxWaitEvent", device);
  if (error == 0 && (!standin_has_context() || device < 0 || device >= STANDIN_DEVICES)) error = BAD_HANDLE;
  if (error == 0) error = spoil_graphs(NULL, device);
  if (error == 0) hold(device, &event->work);
  return standin_leave_cuda(error);
}
