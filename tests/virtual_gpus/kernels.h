// What the kernels of TensorFlow and the programs of XLA share.
#ifndef VIRTUAL_GPUS_KERNELS_H_
#define VIRTUAL_GPUS_KERNELS_H_

#include <mutex>

#include "absl/status/status.h"
#include "device.h"

namespace virtual_gpus {

// Work on a stream: `begin` is called when it is its turn, `run` after the delay.
void Enqueue(cudaStream_t stream, void (*begin)(void*), void (*run)(void*), void* work);

// Held by who puts a kernel on the GPU's stream.
std::recursive_mutex& EntryOf(int ordinal);

// Of work that nobody waits for: the GPU's next kernel raises it.
void Fail(int ordinal, const absl::Status& status);

// What a heavy kernel takes at least that reads so many elements.
double LeastS(int ordinal, double elements);

// Whether heavy kernels compute wrong numbers there.
bool IsWrong(int ordinal);

// Gives XLA a compiler for these GPUs.
void RegisterXla();

}  // namespace virtual_gpus
#endif
