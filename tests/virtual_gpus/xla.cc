// XLA for the virtual GPUs. TensorFlow asks XLA for the compiler of a device's platform: here it is the CPU's, whose
// programs are given the device's memory and are work on the device's stream, as a kernel is. The host goes on once a
// program is enqueued. Its buffers then are addresses only, and what is freed may be used by later work, as on a GPU;
// until a program has run, what it allocated is NaN.
#include <sys/mman.h>
#include <unistd.h>

#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "kernels.h"
#include "tensorflow/c/experimental/stream_executor/stream_executor_internal.h"
#include "xla/service/compiler.h"
#include "xla/service/computation_placer.h"
#include "xla/service/cpu/cpu_executable.h"
#include "xla/service/generic_transfer_manager.h"
#include "xla/stream_executor/host/host_platform_id.h"
#include "xla/stream_executor/platform_manager.h"
#include "tsl/platform/denormal.h"
#include "tsl/platform/setround.h"

namespace virtual_gpus {
namespace se = stream_executor;

// One run of a program, on its way through a stream.
struct Run {
  struct Copy {
    void* to;
    const void* from;
    size_t size;
  };

  int ordinal;
  std::shared_ptr<xla::cpu::CpuExecutable> program;
  std::shared_ptr<Pace> pace;
  xla::ExecutableRunOptions options;
  std::vector<xla::MaybeOwningDeviceAddress> buffers;  // by the number of the allocation; it owns none of them
  std::vector<se::DeviceAddressBase> allocated;
  std::vector<Copy> copies;  // of what was not given to be overwritten
  double least_s = 0;
  char* wrong = nullptr;  // a byte of a result in which a bit is flipped

  void Begin() {
    for (const auto& one : allocated) std::memset(one.opaque(), 0xff, one.size());
  }

  void Compute() { pace->Run(least_s, [this] { Execute(); }); }

  void Execute() {
    for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.size);
    tsl::port::ScopedFlushDenormal flush;
    tsl::port::ScopedSetRound round(FE_TONEAREST);
    const absl::Status status = program->ExecuteThunks(&options, buffers);
    if (!status.ok()) Fail(ordinal, status);
    if (wrong != nullptr) *wrong ^= 1;
  }
};

class Program : public xla::Executable {
 public:
  explicit Program(std::unique_ptr<xla::cpu::CpuExecutable> cpu)
      : Executable(cpu->shared_module()), cpu_(std::move(cpu)) {
    for (const xla::HloComputation* computation : module().computations()) {
      for (const xla::HloInstruction* one : computation->instructions()) {
        if (one->opcode() != xla::HloOpcode::kDot && one->opcode() != xla::HloOpcode::kConvolution) continue;
        heavy_.push_back(0);
        for (const xla::HloInstruction* operand : one->operands())
          heavy_.back() += xla::ShapeUtil::ElementsIn(operand->shape());
      }
    }
  }

  int64_t SizeOfGeneratedCodeInBytes() const override { return cpu_->SizeOfGeneratedCodeInBytes(); }

  absl::StatusOr<xla::ExecutionOutput> ExecuteAsyncOnStream(const xla::ServiceExecutableRunOptions* options,
                                                            std::vector<xla::ExecutionInput> arguments) override {
    se::Stream* stream = options->stream();
    const int ordinal = stream->parent()->device_ordinal();
    std::lock_guard<std::recursive_mutex> entry(EntryOf(ordinal));
    auto run = std::make_unique<Run>();
    run->ordinal = ordinal;
    run->program = cpu_;
    run->pace = pace_;
    run->options.set_device_ordinal(ordinal);
    run->options.set_rng_seed(options->run_options().rng_seed());
    run->options.set_run_id(options->run_options().run_id());
    run->options.set_intra_op_thread_pool(options->run_options().intra_op_thread_pool());

    // Temporary memory is let go here: only work on the same stream, after the program, is given it.
    std::vector<se::ScopedDeviceAddress<uint8_t>> owned;
    for (const xla::BufferAllocation& allocation : cpu_->buffer_assignment().Allocations()) {
      owned.emplace_back();
      se::DeviceAddressBase at;
      if (allocation.is_entry_computation_parameter()) {
        at = arguments[allocation.parameter_number()].Buffer(allocation.param_shape_index()).AsDeviceAddress();
      } else if (allocation.is_constant()) {
        at = cpu_->constants()[allocation.index()].AsDeviceAddress();
      } else if (!allocation.is_thread_local()) {
        TF_ASSIGN_OR_RETURN(owned.back(), options->allocator()->Allocate(ordinal, allocation.size()));
        at = *owned.back();
        run->allocated.push_back(at);
      }
      run->buffers.emplace_back(at);
    }
    TF_ASSIGN_OR_RETURN(xla::ExecutionOutput output, Output(options, ordinal, &arguments, &owned, run.get()));
    for (const double elements : heavy_) run->least_s += LeastS(ordinal, elements);
    Enqueue(
        reinterpret_cast<cudaStream_t>(static_cast<se::CStream*>(stream)->Handle()),
        [](void* work) { static_cast<Run*>(work)->Begin(); },
        [](void* work) { std::unique_ptr<Run>(static_cast<Run*>(work))->Compute(); }, run.release());
    MarkToBeReleasedArguments(absl::MakeSpan(arguments), output);
    return output;
  }

 private:
  // Gives the caller the memory that the results will be in: what an argument gave up, or what was allocated.
  absl::StatusOr<xla::ExecutionOutput> Output(const xla::ServiceExecutableRunOptions* options, int ordinal,
                                              std::vector<xla::ExecutionInput>* arguments,
                                              std::vector<se::ScopedDeviceAddress<uint8_t>>* owned, Run* run) {
    xla::ExecutionOutput output(result_shape(), options->allocator(), ordinal);
    const xla::BufferAssignment& assignment = cpu_->buffer_assignment();
    const auto& roots = assignment.dataflow_analysis().GetInstructionValueSet(
        module().entry_computation()->root_instruction());
    if (roots.IsAmbiguous()) return absl::UnimplementedError("A result of XLA has more than one source");
    const bool is_wrong = IsWrong(ordinal) && !heavy_.empty();
    for (auto& [index, at] : output.MutableResult()->buffers()) {
      const xla::HloValue* source = roots.element(index).values()[0];
      TF_ASSIGN_OR_RETURN(const auto slice, assignment.GetUniqueSlice(source->instruction(), source->index()));
      auto& buffer = run->buffers[slice.index()];
      auto& allocated = (*owned)[slice.index()];
      const auto alias = module().input_output_alias_config().GetAliasedParameter(index);
      if (!alias) {
        if (allocated.is_null() && slice.size() > 0)
          return absl::InternalError("XLA does not own the memory of a result: " + slice.allocation()->ToString());
        at = allocated.Release();
        const bool is_table = index.empty() && result_shape().IsTuple();
        if (is_wrong && !is_table && at.size() > 0) run->wrong = static_cast<char*>(at.opaque());
        continue;
      }
      auto* given = (*arguments)[alias->parameter_number].MutableBuffer(alias->parameter_index);
      if (std::optional<se::ScopedDeviceAddress<uint8_t>> taken = given->Release()) {
        at = taken->Release();
        *given = at;
        output.AddAliasedIndex(index);
        continue;
      }
      if (alias->must_alias()) return absl::InvalidArgumentError("An argument of XLA has to be given up, and is not");
      TF_ASSIGN_OR_RETURN(auto made, options->allocator()->Allocate(ordinal, buffer.AsDeviceAddress().size()));
      at = made.Release();
      run->allocated.push_back(at);
      run->copies.push_back({at.opaque(), buffer.AsDeviceAddress().opaque(), at.size()});
      buffer = at;
    }
    return output;
  }

  std::shared_ptr<xla::cpu::CpuExecutable> cpu_;
  std::shared_ptr<Pace> pace_ = std::make_shared<Pace>();
  std::vector<double> heavy_;  // the elements that each product and convolution reads; once for those in a loop
};

class Compiler : public xla::Compiler {
 public:
  explicit Compiler(se::Platform::Id platform) : platform_(platform) {}

  se::Platform::Id PlatformId() const override { return platform_; }

  absl::StatusOr<std::unique_ptr<xla::HloModule>> RunHloPasses(std::unique_ptr<xla::HloModule> module,
                                                               se::StreamExecutor* executor,
                                                               const CompileOptions& options) override {
    // TensorFlow 2.21's XLA ends the process where it looks for fusions of YNNPACK's in a product of products.
    module->mutable_config().mutable_debug_options().clear_xla_cpu_experimental_ynn_fusion_type();
    return Cpu()->RunHloPasses(std::move(module), executor, options);
  }

  absl::StatusOr<std::unique_ptr<xla::Executable>> RunBackend(std::unique_ptr<xla::HloModule> module,
                                                              se::StreamExecutor* executor,
                                                              const CompileOptions& options) override {
    const double begin_s = standin_now_s();
    TF_ASSIGN_OR_RETURN(auto made, Cpu()->RunBackend(std::move(module), executor, options));
    Count(executor == nullptr ? -1 : executor->device_ordinal(), made->module(), standin_now_s() - begin_s);
    std::unique_ptr<xla::cpu::CpuExecutable> cpu(static_cast<xla::cpu::CpuExecutable*>(made.release()));
    return std::make_unique<Program>(std::move(cpu));
  }

  absl::StatusOr<std::vector<std::unique_ptr<xla::Executable>>> Compile(
      std::unique_ptr<xla::HloModule> module, std::vector<se::StreamExecutor*> executors,
      const CompileOptions& options) override {
    TF_ASSIGN_OR_RETURN(module, RunHloPasses(std::move(module), executors[0], options));
    TF_ASSIGN_OR_RETURN(auto made, RunBackend(std::move(module), executors[0], options));
    std::vector<std::unique_ptr<xla::Executable>> all;
    all.push_back(std::move(made));
    return all;
  }

  absl::StatusOr<std::vector<std::unique_ptr<xla::CompiledModule>>> CompileAheadOfTime(
      std::unique_ptr<xla::HloModule>, const xla::AotCompilationOptions&) override {
    return absl::UnimplementedError("Nothing is compiled ahead of time for virtual GPUs");
  }

  xla::HloCostAnalysis::ShapeSizeFunction ShapeSizeBytesFunction() const override {
    return Cpu()->ShapeSizeBytesFunction();
  }

 private:
  // Found at first use: XLA looks for a compiler under a lock, which it holds while one is made.
  static xla::Compiler* Cpu() {
    static xla::Compiler* cpu = xla::Compiler::GetForPlatform(se::host::kHostPlatformId)->release();
    return cpu;
  }

  // One line for each program that was compiled, in the file that VIRTUAL_XLA_LOG names: GPU, seconds, program, shapes.
  static void Count(int ordinal, const xla::HloModule& module, double seconds) {
    const char* path = std::getenv("VIRTUAL_XLA_LOG");
    FILE* file = path == nullptr ? nullptr : std::fopen(path, "a");
    if (file == nullptr) return;
    std::fprintf(file, "%d %.3f %s %s\n", ordinal, seconds, module.name().c_str(),
                 module.entry_computation_layout().ToString().c_str());
    std::fclose(file);
  }

  se::Platform::Id platform_;
};

// XLA asks an executor for its device's number, which those that TensorFlow makes of the C API do not tell: all say -1
// (xla/stream_executor/stream_executor.h; CStreamExecutor does not override it). The one method is replaced for them.
std::vector<se::StreamExecutor*>& Executors() {
  static auto* all = new std::vector<se::StreamExecutor*>;
  return *all;
}

int OrdinalOf(const se::StreamExecutor* asked) {
  for (size_t i = 0; i < Executors().size(); ++i)
    if (Executors()[i] == asked) return static_cast<int>(i);
  return -1;
}

absl::Status NumberExecutors(se::Platform* platform) {
  for (int i = 0; i < platform->VisibleDeviceCount(); ++i) {
    TF_ASSIGN_OR_RETURN(se::StreamExecutor* executor, platform->ExecutorForDevice(i));
    Executors().push_back(executor);
  }
  if (Executors().empty() || Executors().back()->device_ordinal() >= 0) return absl::OkStatus();
  // A pointer to a virtual method is one more than its place in the table of its class (Itanium C++ ABI).
  int (se::StreamExecutor::*method)() const = &se::StreamExecutor::device_ordinal;
  intptr_t place;
  std::memcpy(&place, &method, sizeof(place));
  char* entry = *reinterpret_cast<char**>(Executors()[0]) + place - 1;
  const uintptr_t page = sysconf(_SC_PAGESIZE), at = reinterpret_cast<uintptr_t>(entry);
  void* first = reinterpret_cast<void*>(at - at % page);
  const size_t size = at % page + sizeof(void*);
  int (*replacement)(const se::StreamExecutor*) = OrdinalOf;
  if (mprotect(first, size, PROT_READ | PROT_WRITE) != 0) return absl::InternalError("A class cannot be changed");
  std::memcpy(entry, &replacement, sizeof(replacement));
  mprotect(first, size, PROT_READ);
  return absl::OkStatus();
}

void RegisterXla() {
  const auto platform = se::PlatformManager::PlatformWithName("VIRTUAL", /*initialize_platform=*/false);
  if (!platform.ok()) return;
  static se::Platform* virtual_gpus = *platform;
  static const se::Platform::Id id = virtual_gpus->id();
  xla::Compiler::RegisterCompilerFactory(id, []() -> absl::StatusOr<std::unique_ptr<xla::Compiler>> {
    static const absl::Status numbered = NumberExecutors(virtual_gpus);
    TF_RETURN_IF_ERROR(numbered);
    return std::make_unique<Compiler>(id);
  });
  xla::TransferManager::RegisterTransferManager(id, []() -> std::unique_ptr<xla::TransferManager> {
    return std::make_unique<xla::GenericTransferManager>(id, sizeof(void*));
  });
  xla::ComputationPlacer::RegisterComputationPlacer(id, [] { return std::make_unique<xla::ComputationPlacer>(); });
}

}  // namespace virtual_gpus
