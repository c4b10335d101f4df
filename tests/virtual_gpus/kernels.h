// What the kernels of TensorFlow and the programs of XLA share.
#ifndef VIRTUAL_GPUS_KERNELS_H_
#define VIRTUAL_GPUS_KERNELS_H_

#include <atomic>
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

// Runs one kernel's work again and again. What it computes is late, so that it is wrong to take it early: but not so late
// that the machine's own time adds up.
class Pace {
 public:
  template <typename Compute>
  void Run(double least_s, Compute compute) {
    const double end_s = standin_now_s() + least_s;
    if (least_s > took_s_) standin_nap(least_s - took_s_);
    const double begin_s = standin_now_s();
    compute();
    const double now_s = standin_now_s();
    took_s_ = took_s_ + 0.2 * (now_s - begin_s - took_s_);
    if (end_s > now_s) standin_nap(end_s - now_s);
  }

 private:
  std::atomic<double> took_s_{0};
};

// Gives XLA a compiler for these GPUs.
void RegisterXla();

}  // namespace virtual_gpus
#endif
