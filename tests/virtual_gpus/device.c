/* TensorFlow's view of the virtual GPUs, by its StreamExecutor C API. There is nothing here but calls of the stand-in
 * libcudart: its streams, events and memory are TensorFlow's, so that ncclsync meets the same ones. */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

enum { BY_POINTERS = 4, NON_BLOCKING = 1, WITHOUT_TIMING = 2 };

/* Found by hand: TensorFlow has functions of these names too, which the loader would take. */
#define CALLS(X)                                                                          \
  X(const char*, cudaGetErrorString, (cudaError_t))                                       \
  X(int, cuCtxGetCurrent, (void**))                                                       \
  X(int, cuCtxSetCurrent, (void*))                                                        \
  X(cudaError_t, cudaGetDeviceCount, (int*))                                              \
  X(cudaError_t, cudaMalloc, (void**, size_t))                                            \
  X(cudaError_t, cudaFree, (void*))                                                       \
  X(cudaError_t, cudaMallocHost, (void**, size_t))                                        \
  X(cudaError_t, cudaFreeHost, (void*))                                                   \
  X(cudaError_t, cudaMemGetInfo, (size_t*, size_t*))                                      \
  X(cudaError_t, cudaMemcpy, (void*, const void*, size_t, int))                           \
  X(cudaError_t, cudaMemcpyAsync, (void*, const void*, size_t, int, cudaStream_t))        \
  X(cudaError_t, cudaMemsetAsync, (void*, int, size_t, cudaStream_t))                     \
  X(cudaError_t, cudaStreamCreateWithPriority, (cudaStream_t*, unsigned int, int))        \
  X(cudaError_t, cudaStreamDestroy, (cudaStream_t))                                       \
  X(cudaError_t, cudaStreamSynchronize, (cudaStream_t))                                   \
  X(cudaError_t, cudaStreamWaitEvent, (cudaStream_t, cudaEvent_t, unsigned int))          \
  X(cudaError_t, cudaEventCreateWithFlags, (cudaEvent_t*, unsigned int))                  \
  X(cudaError_t, cudaEventDestroy, (cudaEvent_t))                                         \
  X(cudaError_t, cudaEventRecord, (cudaEvent_t, cudaStream_t))                            \
  X(cudaError_t, cudaEventQuery, (cudaEvent_t))                                           \
  X(cudaError_t, cudaEventSynchronize, (cudaEvent_t))                                     \
  X(cudaError_t, cudaDeviceSynchronize, (void))                                           \
  X(cudaError_t, cudaLaunchHostFunc, (cudaStream_t, void (*)(void*), void*))

#define DECLARE(type, name, parameters) static type(*name) parameters;
CALLS(DECLARE)

#define LOAD(type, name, parameters)       \
  symbol = dlsym(library, #name);          \
  if (symbol == NULL) abort();             \
  memcpy(&name, &symbol, sizeof(symbol));

__attribute__((constructor)) static void load(void) {
  void *library = dlopen(getenv("NCCLSYNC_CUDART_LIBRARY"), RTLD_NOW | RTLD_LOCAL), *symbol;
  CALLS(LOAD)
}

static cudaStream_t to_stream(SP_Stream stream) { return (cudaStream_t)stream; }
static cudaEvent_t to_event(SP_Event event) { return (cudaEvent_t)event; }

/* As the calling thread's: CUDA's calls find their device there. */
static void* enter(const SP_Device* device) {
  void* before = NULL;
  cuCtxGetCurrent(&before);
  cuCtxSetCurrent((void*)(intptr_t)(1 + device->ordinal));
  return before;
}

static void set_status(TF_Status* status, cudaError_t error) {
  TF_SetStatus(status, error == 0 ? TF_OK : TF_INTERNAL, error == 0 ? "" : cudaGetErrorString(error));
}

#define DO(call)                       \
  {                                    \
    void* before = enter(device);      \
    const cudaError_t error = (call);  \
    cuCtxSetCurrent(before);           \
    set_status(status, error);         \
  }

/* ---- Memory ---- */

static void allocate(const SP_Device* device, uint64_t size, int64_t space, SP_DeviceMemoryBase* made) {
  void *before = enter(device), *memory = NULL;
  (void)space;
  if (cudaMalloc(&memory, size) != 0) memory = NULL;
  cuCtxSetCurrent(before);
  *made = (SP_DeviceMemoryBase){SP_DEVICE_MEMORY_BASE_STRUCT_SIZE, NULL, memory, memory == NULL ? 0 : size, 0};
}

static void deallocate(const SP_Device* device, SP_DeviceMemoryBase* freed) {
  void* before = enter(device);
  cudaFree(freed->opaque);
  cuCtxSetCurrent(before);
  freed->opaque = NULL;
  freed->size = 0;
}

static void* allocate_on_host(const SP_Device* device, uint64_t size) {
  void* made = NULL;
  (void)device;
  return cudaMallocHost(&made, size) == 0 ? made : NULL;
}

static void deallocate_on_host(const SP_Device* device, void* freed) {
  (void)device;
  cudaFreeHost(freed);
}

static TF_Bool get_stats(const SP_Device* device, SP_AllocatorStats* stats) {
  (void)device;
  (void)stats;
  return 0;
}

/* As on a GPU (VIRTUAL_WHOLE): TensorFlow takes what is free, by one request, but for 225 MiB, or 5% and 300 MiB, which
 * it leaves to the system; where that fails it asks for 10% less, and so on. Otherwise it takes memory as it needs it,
 * and the stand-in keeps to the limit. */
static int is_whole(void) { return getenv("VIRTUAL_WHOLE") != NULL; }

static TF_Bool get_usage(const SP_Device* device, int64_t* left, int64_t* total) {
  size_t free_bytes, all;
  void* before = enter(device);
  cudaMemGetInfo(&free_bytes, &all);
  cuCtxSetCurrent(before);
  *left = *total = (int64_t)(all + all / 8 + ((size_t)512 << 20));
  if (is_whole()) *left = (int64_t)free_bytes, *total = (int64_t)all;
  return 1;
}

/* ---- Streams and events ---- */

/* The first that TensorFlow makes on a GPU is the one that its kernels run on. */
static SP_Stream computes[STANDIN_DEVICES];

static void create_stream(const SP_Device* device, SP_Stream* stream, TF_Status* status) {
  DO(cudaStreamCreateWithPriority((cudaStream_t*)stream, NON_BLOCKING, 0))
  if (TF_GetCode(status) == TF_OK && computes[device->ordinal] == NULL) computes[device->ordinal] = *stream;
}

static void destroy_stream(const SP_Device* device, SP_Stream stream) {
  (void)device;
  cudaStreamDestroy(to_stream(stream));
}

static void create_event(const SP_Device* device, SP_Event* event, TF_Status* status) {
  DO(cudaEventCreateWithFlags((cudaEvent_t*)event, WITHOUT_TIMING))
}

static void destroy_event(const SP_Device* device, SP_Event event) {
  (void)device;
  cudaEventDestroy(to_event(event));
}

static SE_EventStatus get_event_status(const SP_Device* device, SP_Event event) {
  const cudaError_t error = cudaEventQuery(to_event(event));
  (void)device;
  return error == 0 ? SE_EVENT_COMPLETE : error == NOT_READY ? SE_EVENT_PENDING : SE_EVENT_ERROR;
}

static void record_event(const SP_Device* device, SP_Stream stream, SP_Event event, TF_Status* status) {
  DO(cudaEventRecord(to_event(event), to_stream(stream)))
}

static void wait_for_event(const SP_Device* device, SP_Stream stream, SP_Event event, TF_Status* status) {
  DO(cudaStreamWaitEvent(to_stream(stream), to_event(event), 0))
}

/* The other stream may be of another device, whose event it takes. */
static void depend(const SP_Device* device, SP_Stream dependent, SP_Stream other, TF_Status* status) {
  SP_Device of = *device;
  SP_Event event;
  standin_lock();
  of.ordinal = standin_stream_device(to_stream(other));
  standin_unlock();
  create_event(&of, &event, status);
  if (TF_GetCode(status) == TF_OK) record_event(&of, other, event, status);
  if (TF_GetCode(status) == TF_OK) wait_for_event(device, dependent, event, status);
  destroy_event(&of, event);
}

static void get_stream_status(const SP_Device* device, SP_Stream stream, TF_Status* status) {
  (void)device;
  (void)stream;
  set_status(status, 0);
}

static void block_for_event(const SP_Device* device, SP_Event event, TF_Status* status) {
  DO(cudaEventSynchronize(to_event(event)))
}

static void block_until_done(const SP_Device* device, SP_Stream stream, TF_Status* status) {
  DO(cudaStreamSynchronize(to_stream(stream)))
}

/* As TensorFlow waits for a GPU: for what computes. Copies between it and the host are waited for by who asks for them.
 * Source: tensorflow/core/common_runtime/gpu/gpu_device.cc, BaseGPUDevice::Sync. */
static void synchronize(const SP_Device* device, TF_Status* status) {
  const cudaStream_t computes_on = to_stream(computes[device->ordinal]);
  DO(computes[device->ordinal] == NULL ? 0 : cudaStreamSynchronize(computes_on))
}

/* ---- Timers: of no use to what is tested, but asked for ---- */

struct SP_Timer_st {
  double begin_s, end_s;
};

static void create_timer(const SP_Device* device, SP_Timer* timer, TF_Status* status) {
  (void)device;
  *timer = calloc(1, sizeof(**timer));
  set_status(status, 0);
}

static void destroy_timer(const SP_Device* device, SP_Timer timer) {
  (void)device;
  free(timer);
}

static void start_timer(const SP_Device* device, SP_Stream stream, SP_Timer timer, TF_Status* status) {
  (void)device;
  (void)stream;
  timer->begin_s = standin_now_s();
  set_status(status, 0);
}

static void stop_timer(const SP_Device* device, SP_Stream stream, SP_Timer timer, TF_Status* status) {
  (void)device;
  (void)stream;
  timer->end_s = standin_now_s();
  set_status(status, 0);
}

static uint64_t get_nanoseconds(SP_Timer timer) { return (uint64_t)(1e9 * (timer->end_s - timer->begin_s)); }

/* ---- Copies ---- */

static void copy_to_host(const SP_Device* device, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from,
                         uint64_t size, TF_Status* status) {
  DO(cudaMemcpyAsync(to, from->opaque, size, BY_POINTERS, to_stream(stream)))
}

/* After the kernels so far: where TensorFlow makes a constant on a device like this one it does not see to that, as it
 * does on a GPU, and a kernel before may yet write into memory that was let go and is now the constant's. */
static void copy_to_device(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from,
                           uint64_t size, TF_Status* status) {
  if (computes[device->ordinal] != NULL && computes[device->ordinal] != stream)
    depend(device, stream, computes[device->ordinal], status);
  DO(cudaMemcpyAsync(to->opaque, from, size, BY_POINTERS, to_stream(stream)))
}

static void copy_on_device(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* to,
                           const SP_DeviceMemoryBase* from, uint64_t size, TF_Status* status) {
  DO(cudaMemcpyAsync(to->opaque, from->opaque, size, BY_POINTERS, to_stream(stream)))
}

static void copy_to_host_now(const SP_Device* device, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
                             TF_Status* status) {
  DO(cudaMemcpy(to, from->opaque, size, BY_POINTERS))
}

static void copy_to_device_now(const SP_Device* device, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
                               TF_Status* status) {
  DO(cudaMemcpy(to->opaque, from, size, BY_POINTERS))
}

static void copy_on_device_now(const SP_Device* device, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                               uint64_t size, TF_Status* status) {
  DO(cudaMemcpy(to->opaque, from->opaque, size, BY_POINTERS))
}

void virtual_copy(void* to, const void* from, size_t size, cudaStream_t stream) {
  cudaMemcpyAsync(to, from, size, BY_POINTERS, stream);
}

static void set_zero(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* at, uint64_t size,
                     TF_Status* status) {
  DO(cudaMemsetAsync(at->opaque, 0, size, to_stream(stream)))
}

static void set_bytes(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* at, uint8_t pattern,
                      uint64_t size, TF_Status* status) {
  DO(cudaMemsetAsync(at->opaque, pattern, size, to_stream(stream)))
}

typedef struct {
  uint32_t *at, pattern;
  uint64_t count;
} fill;

static void run_fill(void* what) {
  const fill* asked = what;
  for (uint64_t i = 0; i < asked->count; ++i) asked->at[i] = asked->pattern;
  free(what);
}

static void set_words(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* at, uint32_t pattern,
                      uint64_t size, TF_Status* status) {
  fill* asked = malloc(sizeof(*asked));
  *asked = (fill){at->opaque, pattern, size / 4};
  DO(cudaLaunchHostFunc(to_stream(stream), run_fill, asked))
}

typedef struct {
  SE_StatusCallbackFn function;
  void* argument;
} callback;

static void call_back(void* what) {
  const callback asked = *(callback*)what;
  TF_Status* status = TF_NewStatus();
  free(what);
  asked.function(asked.argument, status);
  TF_DeleteStatus(status);
}

static TF_Bool call_host(const SP_Device* device, SP_Stream stream, SE_StatusCallbackFn function, void* argument) {
  callback* asked = malloc(sizeof(*asked));
  (void)device;
  *asked = (callback){function, argument};
  return cudaLaunchHostFunc(to_stream(stream), call_back, asked) == 0;
}

/* ---- The platform ---- */

static void get_device_count(const SP_Platform* platform, int* count, TF_Status* status) {
  (void)platform;
  *count = virtual_gpu_count();
  set_status(status, 0);
}

static void create_device(const SP_Platform* platform, SE_CreateDeviceParams* params, TF_Status* status) {
  (void)platform;
  params->device->ordinal = params->ordinal;
  params->device->hardware_name = "virtual GPU in host memory";
  params->device->device_vendor = "ncclsync";
  params->device->pci_bus_id = "";
  set_status(status, 0);
}

static void destroy_device(const SP_Platform* platform, SP_Device* device) {
  (void)platform;
  (void)device;
}

static void create_device_fns(const SP_Platform* platform, SE_CreateDeviceFnsParams* params, TF_Status* status) {
  (void)platform;
  params->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
  set_status(status, 0);
}

static void destroy_device_fns(const SP_Platform* platform, SP_DeviceFns* fns) {
  (void)platform;
  (void)fns;
}

static void create_executor(const SP_Platform* platform, SE_CreateStreamExecutorParams* params, TF_Status* status) {
  (void)platform;
  *params->stream_executor = (SP_StreamExecutor){
      .struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE,
      .allocate = allocate,
      .deallocate = deallocate,
      .host_memory_allocate = allocate_on_host,
      .host_memory_deallocate = deallocate_on_host,
      .get_allocator_stats = get_stats,
      .device_memory_usage = get_usage,
      .create_stream = create_stream,
      .destroy_stream = destroy_stream,
      .create_stream_dependency = depend,
      .get_stream_status = get_stream_status,
      .create_event = create_event,
      .destroy_event = destroy_event,
      .get_event_status = get_event_status,
      .record_event = record_event,
      .wait_for_event = wait_for_event,
      .create_timer = create_timer,
      .destroy_timer = destroy_timer,
      .start_timer = start_timer,
      .stop_timer = stop_timer,
      .memcpy_dtoh = copy_to_host,
      .memcpy_htod = copy_to_device,
      .memcpy_dtod = copy_on_device,
      .sync_memcpy_dtoh = copy_to_host_now,
      .sync_memcpy_htod = copy_to_device_now,
      .sync_memcpy_dtod = copy_on_device_now,
      .block_host_for_event = block_for_event,
      .block_host_until_done = block_until_done,
      .synchronize_all_activity = synchronize,
      .mem_zero = set_zero,
      .memset = set_bytes,
      .memset32 = set_words,
      .host_callback = call_host,
  };
  set_status(status, 0);
}

static void destroy_executor(const SP_Platform* platform, SP_StreamExecutor* executor) {
  (void)platform;
  (void)executor;
}

static void create_timer_fns(const SP_Platform* platform, SP_TimerFns* fns, TF_Status* status) {
  (void)platform;
  *fns = (SP_TimerFns){SP_TIMER_FNS_STRUCT_SIZE, NULL, get_nanoseconds};
  set_status(status, 0);
}

static void destroy_timer_fns(const SP_Platform* platform, SP_TimerFns* fns) {
  (void)platform;
  (void)fns;
}

static void destroy_platform(SP_Platform* platform) { (void)platform; }
static void destroy_platform_fns(SP_PlatformFns* fns) { (void)fns; }

/* A device that is called GPU: TensorFlow, Keras and ncclsync take it for one. */
void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status* status) {
  params->major_version = SE_MAJOR;
  params->minor_version = SE_MINOR;
  params->patch_version = SE_PATCH;
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "VIRTUAL";
  params->platform->type = "GPU";
  params->platform->supports_unified_memory = 0;
  params->platform->use_bfc_allocator = 1;
  params->platform->force_memory_growth = !is_whole();
  *params->platform_fns = (SP_PlatformFns){
      .struct_size = SP_PLATFORM_FNS_STRUCT_SIZE,
      .get_device_count = get_device_count,
      .create_device = create_device,
      .destroy_device = destroy_device,
      .create_device_fns = create_device_fns,
      .destroy_device_fns = destroy_device_fns,
      .create_stream_executor = create_executor,
      .destroy_stream_executor = destroy_executor,
      .create_timer_fns = create_timer_fns,
      .destroy_timer_fns = destroy_timer_fns,
  };
  params->destroy_platform = destroy_platform;
  params->destroy_platform_fns = destroy_platform_fns;
  set_status(status, 0);
}

int virtual_gpu_count(void) {
  const char* given = getenv("VIRTUAL_GPUS");
  const int most = given == NULL ? 4 : atoi(given);
  int count = 0;
  cudaGetDeviceCount(&count);
  return count < most ? count : most;
}
