// The virtual GPUs' kernels. TensorFlow's wheel has a definition of each CUDA kernel in its registry, which says what
// runs on a GPU, with which types, and which arguments stay in the host's memory. Each is registered again, with the
// kernel of the CPU for the work: what can be placed on a GPU, and only that, can be placed here.
//
// Normally a kernel is computed at once, and only its results come by the device's stream, later. With VIRTUAL_AHEAD=1
// the kernel itself is work on the stream, wherever the shapes of its outputs follow from those of its inputs. As on a
// GPU it then knows addresses only: nothing keeps a buffer but the order of the stream. Until its results are there,
// memory is NaN.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "device.h"
#include "kernels.h"
#include "tensorflow/c/kernels.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/device_factory.h"
#include "tensorflow/core/framework/kernel_def.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/public/session_options.h"

namespace virtual_gpus {
using namespace tensorflow;  // NOLINT

const bool kAhead = std::getenv("VIRTUAL_AHEAD") != nullptr;
const double kKernelS = std::getenv("VIRTUAL_KERNEL_MS") != nullptr ? 1e-3 * atof(std::getenv("VIRTUAL_KERNEL_MS")) : 0;
// The GPU whose heavy kernels compute wrong numbers, if it is not -1.
const int kWrong = std::getenv("VIRTUAL_WRONG") != nullptr ? atoi(std::getenv("VIRTUAL_WRONG")) : -1;

// What a heavy kernel takes for each element that it reads, by GPU; the last one's goes for those after it.
double ElementS(int ordinal) {
  static const std::vector<double>* seconds = [] {
    auto* read = new std::vector<double>;
    const char* given = std::getenv("VIRTUAL_ELEMENT_NS");
    for (std::stringstream numbers(given == nullptr ? "0" : given); numbers.good();) {
      std::string number;
      std::getline(numbers, number, ',');
      read->push_back(1e-9 * std::atof(number.c_str()));
    }
    return read;
  }();
  return (*seconds)[std::min<size_t>(ordinal, seconds->size() - 1)];
}

double LeastS(int ordinal, double elements) { return std::max(kKernelS, elements * ElementS(ordinal)); }

bool IsWrong(int ordinal) { return ordinal == kWrong; }

Device* Host() {
  static Device* host = DeviceFactory::NewDevice("CPU", SessionOptions(), "/job:localhost/replica:0/task:0").release();
  return host;
}

// What the CPU's kernels take for their device: the virtual one by name and resources, but with the host's memory
// and threads.
class Facade : public Device {
 public:
  explicit Facade(DeviceBase* real) : Device(Env::Default(), real->attributes()) {}
  absl::Status Sync() override { return absl::OkStatus(); }
  Allocator* GetAllocator(AllocatorAttributes) override { return cpu_allocator(); }
  const CpuWorkerThreads* tensorflow_cpu_worker_threads() const override {
    return Host()->tensorflow_cpu_worker_threads();
  }
  bool has_eigen_cpu_device() const override { return true; }
  const Eigen::ThreadPoolDevice* eigen_cpu_device() override { return Host()->eigen_cpu_device(); }
  absl::Status MakeTensorFromProto(const TensorProto& proto, const AllocatorAttributes attributes,
                                   Tensor* made) override {
    return Host()->MakeTensorFromProto(proto, attributes, made);
  }
};

// What is known of a device, never freed: its stream's thread may use it while the process ends.
struct Gpu {
  std::recursive_mutex entry;  // one kernel at a time enters the stream
  std::unique_ptr<Facade> facade;
  std::mutex lock;
  absl::Status failed;  // of a kernel that ran ahead: nobody was left to be told
};

Gpu* GpuOf(int ordinal) {
  static Gpu* gpus = new Gpu[STANDIN_DEVICES];
  return &gpus[ordinal];
}

std::recursive_mutex& EntryOf(int ordinal) { return GpuOf(ordinal)->entry; }

void Fail(int ordinal, const absl::Status& status) {
  std::lock_guard<std::mutex> locked(GpuOf(ordinal)->lock);
  GpuOf(ordinal)->failed.Update(status);
}

// An address with a shape, which keeps nothing alive.
class Borrowed : public TensorBuffer {
 public:
  Borrowed(const void* at, size_t size) : TensorBuffer(const_cast<void*>(at)), size_(size) {}
  size_t size() const override { return size_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(AllocationDescription*) const override {}

 private:
  size_t size_;
};

char* DataOf(const Tensor& tensor) { return const_cast<char*>(tensor.tensor_data().data()); }

Tensor Borrow(const Tensor& tensor) {
  return Tensor(tensor.dtype(), tensor.shape(),
                core::RefCountPtr<TensorBuffer>(new Borrowed(DataOf(tensor), tensor.TotalBytes())));
}

void Enqueue(cudaStream_t stream, void (*begin)(void*), void (*run)(void*), void* work) {
  standin_lock();
  standin_push_run(stream, begin, run, work);
  standin_unlock();
}

// A result that was computed at once, on its way to the device's memory.
struct Arrival {
  Tensor from;
  void* to;
  double least_s;
};

void EnqueueArrival(cudaStream_t stream, const Tensor& from, void* to, double least_s) {
  if (from.TotalBytes() == 0) return;
  Enqueue(
      stream,
      [](void* work) {
        auto* arrival = static_cast<Arrival*>(work);
        std::memset(arrival->to, 0xff, arrival->from.TotalBytes());
        if (arrival->least_s > 0) standin_nap(arrival->least_s);
      },
      [](void* work) {
        std::unique_ptr<Arrival> arrival(static_cast<Arrival*>(work));
        std::memcpy(arrival->to, DataOf(arrival->from), arrival->from.TotalBytes());
      },
      new Arrival{from, to, least_s});
}

void EnqueueCopy(cudaStream_t stream, const Tensor& from, const Tensor& to) {
  if (from.TotalBytes() == 0) return;
  virtual_copy(DataOf(to), DataOf(from), from.TotalBytes(), stream);
}

// What a kernel needs that runs when its op has long returned.
struct Launch {
  std::shared_ptr<OpKernel> kernel;
  std::shared_ptr<Pace> pace;
  OpKernelContext::Params params;
  Gpu* gpu;
  double least_s;
  std::vector<Tensor> inputs;
  std::vector<std::pair<core::RefCountPtr<Var>, void*>> variables;  // and where the true one's memory is
  std::vector<std::pair<void*, size_t>> outputs;

  void Begin() {
    for (const auto& output : outputs) std::memset(output.first, 0xff, output.second);
  }

  void Run() {
    absl::Status status;
    pace->Run(least_s, [&] { status = Compute(); });
    if (status.ok()) return;
    std::lock_guard<std::mutex> locked(gpu->lock);
    gpu->failed.Update(status);
  }

  absl::Status Compute() {
    std::vector<Tensor> held = inputs;  // what is held twice is not written in place
    std::vector<TensorValue> values;
    for (Tensor& input : inputs) values.emplace_back(&input);
    std::vector<AllocatorAttributes> input_attributes(inputs.size()), output_attributes(outputs.size());
    std::function<void(std::function<void()>)> runner = [](std::function<void()> what) { what(); };
    params.inputs = values;
    params.input_alloc_attrs = input_attributes;
    params.output_attr_array = output_attributes.data();
    params.runner = &runner;
    OpKernelContext context(&params, static_cast<int>(outputs.size()));
    kernel->Compute(&context);
    TF_RETURN_IF_ERROR(context.status());
    for (size_t o = 0; o < outputs.size(); ++o) {
      std::unique_ptr<Tensor> result(context.release_output(o).tensor);
      if (result == nullptr || result->TotalBytes() != outputs[o].second)
        return errors::Internal(kernel->def().op(), ": an output's shape is not what its shape function says");
      std::memcpy(outputs[o].first, DataOf(*result), outputs[o].second);
    }
    for (const auto& variable : variables) {
      const Tensor& now = *variable.first->tensor();
      if (DataOf(now) != variable.second) std::memcpy(variable.second, DataOf(now), now.TotalBytes());
    }
    return absl::OkStatus();
  }
};

bool Contains(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (text.find(part) != std::string::npos) return true;
  return false;
}

// The CPU has no kernels for images whose channels come first, as GPUs have: this gives one the images it knows. What
// has four axes is images, unless it is a filter; what has four numbers is their shape.
class ChannelsFirst : public OpKernel {
 public:
  ChannelsFirst(OpKernelConstruction* construction, const OpDef& op) : OpKernel(construction) {
    NodeDef node = construction->def();
    (*node.mutable_attr())["data_format"].set_s("NHWC");
    for (const char* name : {"strides", "dilations", "ksize", "explicit_paddings"}) {
      const auto found = node.mutable_attr()->find(name);
      if (found == node.mutable_attr()->end() || found->second.list().i_size() == 0) continue;
      auto* list = found->second.mutable_list();
      const std::vector<int64_t> old(list->i().begin(), list->i().end());
      const size_t each = old.size() / 4;  // of paddings there are two for an axis
      for (size_t i = 0; i < old.size(); ++i) list->set_i(i, old[kToLast[i / each] * each + i % each]);
    }
    std::shared_ptr<const NodeProperties> properties;
    OP_REQUIRES_OK(construction, NodeProperties::CreateFromNodeDef(node, OpRegistry::Global(), &properties));
    OpKernel* kernel = nullptr;
    OP_REQUIRES_OK(construction, CreateOpKernel(DEVICE_CPU, Host(), cpu_allocator(), nullptr, nullptr, properties,
                                                construction->graph_def_version(), &kernel));
    kernel_.reset(kernel);
    for (const auto& argument : op.input_arg()) is_image_.push_back(argument.name().rfind("filter", 0) != 0);
    gives_images_ = node.op().find("BackpropFilter") == std::string::npos;
  }

  // Whether an op is such a one, as `node` has it.
  static bool Knows(const NodeDef& node) {
    std::string format;
    return TryGetNodeAttr(node, "data_format", &format) && format == "NCHW" &&
           node.op().find("BiasAdd") == std::string::npos;
  }

  void Compute(OpKernelContext* context) override {
    std::vector<Tensor> inputs;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const Tensor& input = context->input(i);
      inputs.push_back(is_image_[i] ? Permute(input, kToLast) : input);
    }
    std::vector<TensorValue> values;
    for (Tensor& input : inputs) values.emplace_back(&input);
    OpKernelContext::Params params = *context->params();
    params.op_kernel = kernel_.get();
    params.eigen_gpu_device = nullptr;
    params.inputs = values;
    params.forward_from_array = nullptr;
    OpKernelContext inner(&params, num_outputs());
    kernel_->Compute(&inner);
    OP_REQUIRES_OK(context, inner.status());
    for (int o = 0; o < num_outputs(); ++o) {
      std::unique_ptr<Tensor> result(inner.release_output(o).tensor);
      if (result != nullptr) context->set_output(o, gives_images_ ? Permute(*result, kToFirst) : *result);
    }
  }

 private:
  static constexpr int kToLast[4] = {0, 2, 3, 1}, kToFirst[4] = {0, 3, 1, 2};

  static Tensor Permute(const Tensor& tensor, const int* axes) {
    const size_t size = DataTypeSize(tensor.dtype());
    Tensor made(cpu_allocator(), tensor.dtype(), tensor.shape());
    if (tensor.dims() == 1 && tensor.dim_size(0) == 4) {
      for (int d = 0; d < 4; ++d) std::memcpy(DataOf(made) + d * size, DataOf(tensor) + axes[d] * size, size);
      return made;
    }
    if (tensor.dims() != 4) return tensor;
    int64_t n[4], step[4];
    TensorShape shape;
    for (int d = 0; d < 4; ++d) {
      shape.AddDim(n[d] = tensor.dim_size(axes[d]));
      step[d] = 1;
      for (int other = axes[d] + 1; other < 4; ++other) step[d] *= tensor.dim_size(other);
    }
    made = Tensor(cpu_allocator(), tensor.dtype(), shape);
    char* to = DataOf(made);
    for (int64_t a = 0; a < n[0]; ++a)
      for (int64_t b = 0; b < n[1]; ++b)
        for (int64_t c = 0; c < n[2]; ++c)
          for (int64_t d = 0; d < n[3]; ++d, to += size)
            std::memcpy(to, DataOf(tensor) + size * (a * step[0] + b * step[1] + c * step[2] + d * step[3]), size);
    return made;
  }

  std::unique_ptr<OpKernel> kernel_;
  std::vector<bool> is_image_;
  bool gives_images_;
};

class Delegate : public OpKernel {
 public:
  explicit Delegate(OpKernelConstruction* construction) : OpKernel(construction) {
    graph_def_version_ = construction->graph_def_version();
    op_ = construction->def().op();
    OP_REQUIRES_OK(construction, OpRegistry::Global()->LookUp(op_, &registered_));
    if (ChannelsFirst::Knows(construction->def())) {
      kernel_.reset(new ChannelsFirst(construction, registered_->op_def));
      if (!construction->status().ok()) return;
    } else {
      std::shared_ptr<const NodeProperties> properties;
      OP_REQUIRES_OK(construction,
                     NodeProperties::CreateFromNodeDef(construction->def(), OpRegistry::Global(), &properties));
      OpKernel* kernel = nullptr;
      OP_REQUIRES_OK(construction,
                     CreateOpKernel(DEVICE_CPU, Host(), cpu_allocator(), construction->function_library(),
                                    construction->resource_manager(), properties, graph_def_version_, &kernel));
      kernel_.reset(kernel);
    }
    changes_ = Contains(op_, {"Assign", "Apply", "Scatter", "Update", "Rng", "Stateful"});
    is_sparse_ = Contains(op_, {"Scatter", "Sparse", "ResourceGather"});
    is_heavy_ = Contains(op_, {"MatMul", "Conv", "Einsum"});
    // CheckNumerics is asked whether its input is good: not later.
    can_run_ahead_ = kAhead && kernel_->AsAsync() == nullptr && registered_->shape_inference_fn != nullptr &&
                     !Contains(op_, {"CheckNumerics"});
    for (int o = 0; o < num_outputs(); ++o)
      can_run_ahead_ &= output_memory_types()[o] == DEVICE_MEMORY && DataTypeCanUseMemcpy(output_type(o));
  }

  void Compute(OpKernelContext* context) override {
    TF_Status* status = TF_NewStatus();
    cudaStream_t stream =
        reinterpret_cast<cudaStream_t>(TF_GetStream(reinterpret_cast<TF_OpKernelContext*>(context), status));
    TF_DeleteStatus(status);
    OP_REQUIRES(context, stream != nullptr, errors::Internal("Expected a virtual GPU"));
    standin_lock();
    const int ordinal = standin_stream_device(stream);
    standin_unlock();
    Gpu* gpu = GpuOf(ordinal);
    const double least_s = LeastS(context, ordinal);
    // It only enqueues. XLA enters the stream while it holds the variables of a program.
    if (op_ == "AssignVariableOp" && DataTypeCanUseMemcpy(context->input_dtype(1))) {
      OP_REQUIRES_OK(context, Assign(context, stream));
      return;
    }
    std::unique_lock<std::recursive_mutex> entry(gpu->entry);
    if (gpu->facade == nullptr) gpu->facade.reset(new Facade(context->device()));
    if (!can_run_ahead_ || !RunAhead(context, stream, gpu, least_s)) {
      standin_lock();
      standin_drain(stream);
      standin_unlock();
      RunAtOnce(context, stream, gpu, least_s);
    }
    std::lock_guard<std::mutex> locked(gpu->lock);
    if (context->status().ok()) context->SetStatus(gpu->failed);
    gpu->failed = absl::OkStatus();
  }

 private:
  double LeastS(OpKernelContext* context, int ordinal) const {
    if (!is_heavy_) return 0;
    double elements = 0;
    for (int i = 0; i < context->num_inputs(); ++i)
      if (context->has_input(i)) elements += context->input(i).NumElements();
    return virtual_gpus::LeastS(ordinal, elements);
  }

  OpKernelContext::Params ParamsOf(Gpu* gpu) const {
    OpKernelContext::Params params;
    params.op_kernel = kernel_.get();
    params.device = gpu->facade.get();
    return params;
  }

  // As TensorFlow's own does on a GPU: the variable takes the value's memory.
  absl::Status Assign(OpKernelContext* context, cudaStream_t stream) {
    const Tensor& value = context->input(1);
    core::RefCountPtr<Var> variable;
    TF_RETURN_IF_ERROR(LookupOrCreateResource<Var>(context, HandleFromInput(context, 0), &variable, [&](Var** made) {
      *made = new Var(value.dtype());
      return absl::OkStatus();
    }));
    mutex_lock locked(*variable->mu());
    bool validates = false;
    if (TryGetNodeAttr(def(), "validate_shape", &validates) && validates && variable->is_initialized &&
        !variable->tensor()->shape().IsSameSize(value.shape()))
      return errors::InvalidArgument("Trying to assign to variable with tensor with wrong shape. Expected ",
                                     variable->tensor()->shape().DebugString(), " got ", value.shape().DebugString());
    if (variable->copy_on_read_mode.load()) TF_RETURN_IF_ERROR(Own(context, stream, value, variable->tensor()));
    else *variable->tensor() = value;
    variable->is_initialized = true;
    return absl::OkStatus();
  }

  // Memory of its own for a variable, with what `from` has.
  static absl::Status Own(OpKernelContext* context, cudaStream_t stream, const Tensor& from, Tensor* variable) {
    Tensor made;
    TF_RETURN_IF_ERROR(context->allocate_temp(from.dtype(), from.shape(), &made));
    EnqueueCopy(stream, from, made);
    *variable = made;
    return absl::OkStatus();
  }

  // Enqueues the kernel; false: it cannot be known what it will need.
  bool RunAhead(OpKernelContext* context, cudaStream_t stream, Gpu* gpu, double least_s) {
    const int n_inputs = context->num_inputs();
    std::vector<core::RefCountPtr<Var>> variables(n_inputs);
    std::vector<PartialTensorShape> shapes(n_inputs);
    std::vector<const Tensor*> on_host(n_inputs, nullptr);
    std::vector<std::unique_ptr<std::vector<std::pair<PartialTensorShape, DataType>>>> behind_handles(n_inputs);
    for (int i = 0; i < n_inputs; ++i) {
      if (!context->has_input(i) || IsRefType(context->input_dtype(i))) return false;
      const Tensor& input = context->input(i);
      shapes[i] = input.shape();
      if (input.dtype() == DT_RESOURCE) {
        if (!LookupResource(context, HandleFromInput(context, i), &variables[i]).ok()) return false;
        tf_shared_lock locked(*variables[i]->mu());
        const Tensor& value = *variables[i]->tensor();
        if (!variables[i]->is_initialized || !DataTypeCanUseMemcpy(value.dtype())) return false;
        behind_handles[i].reset(new std::vector<std::pair<PartialTensorShape, DataType>>{{value.shape(), value.dtype()}});
      } else if (input_memory_types()[i] == HOST_MEMORY) {
        on_host[i] = &input;
      } else if (!DataTypeCanUseMemcpy(input.dtype())) {
        return false;
      }
    }
    shape_inference::InferenceContext inferred(graph_def_version_, def(), registered_->op_def, shapes, on_host, {},
                                               behind_handles);
    if (!inferred.construction_status().ok()) return false;
    const absl::Status status = inferred.Run(registered_->shape_inference_fn);
    if (!status.ok()) return context->SetStatus(status), true;
    std::vector<TensorShape> output_shapes(num_outputs());
    for (int o = 0; o < num_outputs(); ++o) {
      shape_inference::ShapeHandle shape = inferred.output(o);
      if (!inferred.FullyDefined(shape)) return false;
      for (int d = 0; d < inferred.Rank(shape); ++d) output_shapes[o].AddDim(inferred.Value(inferred.Dim(shape, d)));
    }
    const absl::Status prepared = Prepare(context, stream, gpu, least_s, variables, on_host, output_shapes);
    if (!prepared.ok()) context->SetStatus(prepared);
    return true;
  }

  absl::Status Prepare(OpKernelContext* context, cudaStream_t stream, Gpu* gpu, double least_s,
                       const std::vector<core::RefCountPtr<Var>>& variables, const std::vector<const Tensor*>& on_host,
                       const std::vector<TensorShape>& output_shapes) {
    std::unique_ptr<Launch> launch(new Launch{kernel_, pace_, ParamsOf(gpu), gpu, least_s});
    launch->params.resource_manager = context->resource_manager();
    for (size_t i = 0; i < variables.size(); ++i) {
      const Tensor& input = context->input(i);
      if (variables[i] == nullptr) {
        launch->inputs.push_back(on_host[i] != nullptr ? input : Borrow(input));
        continue;
      }
      Var* variable = variables[i].get();
      mutex_lock locked(*variable->mu());
      Tensor* value = variable->tensor();
      const bool is_written = changes_ && !variable->copy_on_read_mode.load();
      if ((is_written || is_sparse_) && !value->RefCountIsOne()) TF_RETURN_IF_ERROR(Own(context, stream, Tensor(*value), value));
      if (is_sparse_) variable->copy_on_read_mode.store(true);
      auto* shadow = new Var(value->dtype());
      *shadow->tensor() = Borrow(*value);
      shadow->is_initialized = true;
      Tensor handle(DT_RESOURCE, TensorShape({}));
      handle.scalar<ResourceHandle>()() = ResourceHandle::MakeRefCountingHandle(shadow, gpu->facade->name());
      launch->inputs.push_back(handle);
      if (changes_) launch->variables.emplace_back(tsl::core::GetNewRef(shadow), DataOf(*value));
    }
    for (size_t o = 0; o < output_shapes.size(); ++o) {
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(o, output_shapes[o], &output));
      launch->outputs.emplace_back(DataOf(*output), output->TotalBytes());
    }
    Enqueue(
        stream, [](void* work) { static_cast<Launch*>(work)->Begin(); },
        [](void* work) { std::unique_ptr<Launch>(static_cast<Launch*>(work))->Run(); }, launch.release());
    return absl::OkStatus();
  }

  void RunAtOnce(OpKernelContext* context, cudaStream_t stream, Gpu* gpu, double least_s) {
    const int n_inputs = context->num_inputs(), n_outputs = context->num_outputs();
    std::vector<Tensor> held(n_inputs);  // what is held twice is not written in place
    for (int i = 0; i < n_inputs; ++i)
      if (context->has_input(i) && !IsRefType(context->input_dtype(i))) held[i] = context->input(i);
    std::vector<AllocatorAttributes> input_attributes(n_inputs), output_attributes(n_outputs);
    OpKernelContext::Params params = *context->params();
    params.op_kernel = kernel_.get();
    params.device = gpu->facade.get();
    params.op_device_context = nullptr;
    params.eigen_gpu_device = nullptr;
    params.input_alloc_attrs = input_attributes;
    params.output_attr_array = output_attributes.data();
    params.forward_from_array = nullptr;
    OpKernelContext inner(&params, n_outputs);
    if (AsyncOpKernel* async = kernel_->AsAsync()) {
      absl::Notification done;
      async->ComputeAsync(&inner, [&done] { done.Notify(); });
      done.WaitForNotification();
    } else {
      kernel_->Compute(&inner);
    }
    OP_REQUIRES_OK(context, inner.status());
    for (int o = 0; o < n_outputs; ++o) {
      std::unique_ptr<Tensor> result(inner.release_output(o).tensor);
      if (result == nullptr) continue;
      if (output_memory_types()[o] == HOST_MEMORY || !DataTypeCanUseMemcpy(result->dtype()) || IsOnDevice(*result)) {
        context->set_output(o, *result);
        continue;
      }
      Tensor* output = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(o, result->shape(), &output));
      if (is_heavy_ && kWrong >= 0 && gpu == GpuOf(kWrong) && result->TotalBytes() > 0) DataOf(*result)[0] ^= 1;
      EnqueueArrival(stream, *result, DataOf(*output), least_s);
    }
    for (int i = 0; i < n_inputs && changes_; ++i) {
      core::RefCountPtr<Var> variable;
      if (context->input_dtype(i) != DT_RESOURCE || !LookupResource(context, HandleFromInput(context, i), &variable).ok())
        continue;
      mutex_lock locked(*variable->mu());
      Tensor* value = variable->tensor();
      if (!value->IsInitialized() || !DataTypeCanUseMemcpy(value->dtype()) || value->TotalBytes() == 0) continue;
      Tensor computed(*value), on_device(*value);
      if (IsOnDevice(*value)) {
        computed = Tensor(cpu_allocator(), value->dtype(), value->shape());
        std::memcpy(DataOf(computed), DataOf(*value), value->TotalBytes());
      } else {
        OP_REQUIRES_OK(context, context->allocate_temp(value->dtype(), value->shape(), &on_device));
      }
      EnqueueArrival(stream, computed, DataOf(on_device), least_s);
      *value = on_device;
    }
  }

  static bool IsOnDevice(const Tensor& tensor) {
    return tensor.TotalBytes() > 0 && standin_device_of(DataOf(tensor)) >= 0;
  }

  std::shared_ptr<OpKernel> kernel_;
  std::shared_ptr<Pace> pace_ = std::make_shared<Pace>();
  std::string op_;
  const OpRegistrationData* registered_ = nullptr;
  int graph_def_version_;
  bool is_heavy_, changes_, is_sparse_, can_run_ahead_;
};

OpKernel* MakeDelegate(OpKernelConstruction* construction) { return new Delegate(construction); }

// The class of the kernel that a device has for what `def` is for, or "".
std::string ClassOf(const KernelDef& def, const char* device) {
  NodeDef node;
  node.set_name("asked");
  node.set_op(def.op());
  const OpDef* op = nullptr;
  if (!OpRegistry::Global()->LookUpOpDef(def.op(), &op).ok()) return "";
  for (const auto& constraint : def.constraint()) {
    if (constraint.allowed_values().list().type_size() == 0) continue;
    const DataType allowed = constraint.allowed_values().list().type(0);
    AttrValue& value = (*node.mutable_attr())[constraint.name()];
    for (const auto& attr : op->attr())
      if (attr.name() == constraint.name() && attr.type() == "type") value.set_type(allowed);
      else if (attr.name() == constraint.name()) value.mutable_list()->add_type(allowed);
  }
  if (!def.label().empty()) (*node.mutable_attr())["_kernel"].set_s(def.label());
  const KernelDef* found = nullptr;
  std::string name;
  return FindKernelDef(DeviceType(device), node, &found, &name).ok() ? name : "";
}

}  // namespace virtual_gpus

extern "C" void TF_InitKernel() {
  using namespace virtual_gpus;  // NOLINT
  RegisterXla();
  const KernelList kernels = GetAllRegisteredKernels();
  for (const KernelDef& def : kernels.kernel()) {
    if (def.device_type() != "GPU") continue;
    const std::string name = ClassOf(def, "GPU");
    if (!name.empty() && name == ClassOf(def, "CPU")) continue;  // a kernel that is the same on all devices
    auto* copy = new KernelDef(def);
    copy->set_priority(def.priority() + 1);  // over CUDA's own
    kernel_factory::OpKernelRegistrar(copy, "VirtualDelegate", MakeDelegate);
  }
}
