"""Wrap the interfaces that TensorFlow does not promise to keep.

`keras.py` and `keras_optimizers.py` wrap those of Keras. Nothing else
in the package touches such an interface. `tests/compat` has one test for each function of these modules, so
that an upgrade that breaks an assumption fails under that assumption's name.
"""

import contextlib
import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.autograph.core import ag_ctx as autograph_context
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import execute as eager_execute
from tensorflow.python.eager.polymorphic_function import attributes as function_attributes
from tensorflow.python.framework import auto_control_deps_utils, kernels, op_def_registry
from tensorflow.python.framework import config as framework_config
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph
from tensorflow.python.ops import cond_v2, handle_data_util
from tensorflow.python.profiler import trace as profiler_trace

from ncclsync import errors

# Sentences of ncclsync's ops that fail begin so, in C, too; of its Python functions TensorFlow tells the class.
OWN_WORDS = "ncclsync: "
_OWN_CLASSES = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
_OWN_SENTENCE = re.compile(rf"(?:{OWN_WORDS}|\b(?:{'|'.join(_OWN_CLASSES)}): )([^\n]+)")

# Every method by which Python writes a tf.Variable: the last two are `variable[1:2].assign` and how a
# checkpoint does.
VARIABLE_WRITERS = (
    "assign",
    "assign_add",
    "assign_sub",
    "batch_scatter_update",
    "count_up_to",
    "scatter_add",
    "scatter_div",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_nd_add",
    "scatter_nd_max",
    "scatter_nd_min",
    "scatter_nd_sub",
    "scatter_nd_update",
    "scatter_sub",
    "scatter_update",
    "_strided_slice_assign",
    "_restore_from_tensors",
)

# C++ that finds the stream on which TensorFlow computes, from a kernel's context; compiled by `ops/gpu_streams.py`.
# Of a GPU that a plug-in adds, TensorFlow's own handle is not CUDA's stream.
GPU_STREAM_SOURCE = """
#include "tensorflow/c/experimental/stream_executor/stream_executor_internal.h"
#include "tensorflow/core/framework/op_kernel.h"

extern "C" void* ncclsync_gpu_stream(void* context) {
  auto* device = reinterpret_cast<tensorflow::OpKernelContext*>(context)->op_device_context();
  if (device == nullptr || device->stream() == nullptr) return nullptr;
  if (device->IsPluggableDevice()) return static_cast<stream_executor::CStream*>(device->stream())->Handle();
  return device->stream()->platform_specific_handle().stream;
}
"""


def written_handles(op: tf.Operation) -> set[str]:
    """Return the names of the resource inputs that `op` may write to, by TensorFlow's own bookkeeping."""
    _, writes = auto_control_deps_utils.get_read_write_resource_inputs(op)
    return {tensor.name for tensor in writes}


def is_stateful(op: tf.Operation) -> bool:
    """Return whether TensorFlow declares `op` stateful: a variable's op, a random draw, an assertion."""
    return op.op_def.is_stateful


def calls_functions(op: tf.Operation) -> bool:
    """Return whether `op` runs functions."""
    return any(one.HasField("func") or one.list.func for one in op.node_def.attr.values())


class Memory(NamedTuple):
    """Say which inputs and outputs of an op lie in the host's memory, by their numbers."""

    inputs: frozenset[int]
    outputs: frozenset[int]


def gpu_memory(op: tf.Operation) -> Memory | None:
    """Return what lies in the host's memory where `op` runs on a GPU; None: TensorFlow has no kernel for that.

    Of resources, which always do, nothing is said.
    """
    node, definition = op.node_def, op.op_def
    found = _kernels_for(op, ("GPU", "DEFAULT"))
    if not found:
        return None
    kinds = [kernel for kernel in found if kernel.device_type == "GPU"] or found
    on_host = max(kinds, key=lambda kernel: kernel.priority).on_host
    calls = calls_functions(op)
    sides = []
    for arguments, tensors in ((definition.input_arg, op.inputs), (definition.output_arg, op.outputs)):
        names: list[str] = []
        for argument in arguments:
            count = node.attr[argument.number_attr].i if argument.number_attr else 1
            if argument.type_list_attr:
                count = len(node.attr[argument.type_list_attr].list.type)
            names += [argument.name] * count
        pairs = enumerate(zip(names, tensors, strict=True))
        # Functions take int32 from the host.
        sides.append(frozenset(i for i, (n, tensor) in pairs if n in on_host or (calls and tensor.dtype == tf.int32)))
    return Memory(*sides)


def runs_on_cpu(op: tf.Operation) -> bool:
    """Return whether TensorFlow has a kernel for `op` on the CPU."""
    return bool(_kernels_for(op, ("CPU",)))


class _Kernel(NamedTuple):
    device_type: str
    allowed: dict[str, frozenset[int]]  # dtypes, by the name of an attribute
    on_host: frozenset[str]
    priority: int


def _kernels_for(op: tf.Operation, device_types: tuple[str, ...]) -> list[_Kernel]:
    given = {name: {value.type, *value.list.type} - {0} for name, value in op.node_def.attr.items()}
    return [
        kernel
        for kernel in _kernels(op.type)
        if kernel.device_type in device_types
        and all(given.get(name, set()) <= allowed for name, allowed in kernel.allowed.items())
    ]


@functools.cache
def _kernels(op_type: str) -> list[_Kernel]:
    registered = kernels.get_registered_kernels_for_op(op_type).kernel
    return [
        _Kernel(
            kernel.device_type,
            {one.name: frozenset(one.allowed_values.list.type) for one in kernel.constraint},
            frozenset(kernel.host_memory_arg),
            kernel.priority,
        )
        for kernel in registered
        if not kernel.label
    ]


def has_host_results(op_type: str) -> bool:
    """Return whether some of TensorFlow's kernels of such an op for GPUs leave a result in the host's memory."""
    names = {argument.name for argument in op_def_registry.get(op_type).output_arg}
    return any(kernel.device_type != "CPU" and kernel.on_host & names for kernel in _kernels(op_type))


def hides_state(op_type: str, repeatable: frozenset[str]) -> bool:
    """Return whether ops of a type depend on a state that no variable holds, as far as TensorFlow declares
    it.

    Args:
        op_type: of a registered op; one that is not known hides nothing.
        repeatable: the stateful types that give equal results for equal inputs.
    """
    definition = op_def_registry.get(op_type)
    writers = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign")
    known = op_type in repeatable or op_type.startswith(writers)
    return definition is not None and definition.is_stateful and not known


def function_as_graph(definition: Any, shapes: Sequence[Any], outer: Any) -> Any:
    """Return a FunctionDef as a graph with `inputs`, of these shapes (None: unknown), and `outputs`."""
    with outer.as_default():
        return function_def_to_graph(definition, input_shapes=list(shapes))


def add_functions(definitions: Sequence[Any], owner: Any) -> None:
    """Let TensorFlow know FunctionDefs by their names for as long as `owner` lives."""
    context = eager_context.context()
    for definition in definitions:
        context.add_function_def(definition)
        weakref.finalize(owner, context.remove_function, definition.signature.name)


def copied_op(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """Return a copy of `op`, in the default graph, with other inputs. It waits for nothing else."""
    node = op.node_def
    node.name, node.device = f"copy_of_{op.name.replace('/', '_')}", ""
    node.attr.pop("_class", None)
    del node.input[:]
    node.input.extend(f"given_{i}" for i in range(len(inputs)))
    definition = tf.compat.v1.GraphDef(node=[node])
    definition.versions.CopyFrom(op.graph.graph_def_versions)
    given = {f"given_{i}": tensor for i, tensor in enumerate(inputs)}
    return tf.graph_util.import_graph_def(definition, given, [node.name], name="")[0]


def describe_handle(handle: tf.Tensor, variable: tf.Variable) -> None:
    """Let a function's argument that stands for a variable's handle know the variable's shape."""
    handle_data_util.copy_handle_data(variable.handle, handle)


def shape_behind(handle: tf.Tensor) -> tf.TensorShape:
    """Return the shape of the variable behind a handle, as far as the graph knows it."""
    data = handle_data_util.get_resource_handle_data(handle)
    known = data is not None and data.is_set and len(data.shape_and_type) == 1
    return tf.TensorShape(data.shape_and_type[0].shape if known else None)


def list_element(tensor: tf.Tensor) -> tf.TensorSpec | None:
    """Return what the elements of a list of tensors are, as far as its graph knows; None if it is no such list."""
    data = handle_data_util.get_resource_handle_data(tensor) if tensor.dtype == tf.variant else None
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    (known,) = data.shape_and_type
    return tf.TensorSpec(tf.TensorShape(known.shape), tf.as_dtype(known.dtype))


def attributes_of(op: tf.Operation) -> dict[str, Any]:
    """Return an op's declared attributes, as `run_op` takes them."""
    return {one.name: op.get_attr(one.name) for one in op.op_def.attr}


def run_op(op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int) -> list[Any]:
    """Run an op of a type outside any graph; return its results.

    Args:
        op_type: of a registered op.
        inputs: tensors, those of lists one by one.
        attributes: all that the type declares, as `attributes_of` gives them, perhaps with other dtypes.
        outputs: how many results it has.
    """
    flat: list[Any] = []
    for name, value in attributes.items():
        flat += [name, [_plain(one) for one in value] if isinstance(value, list) else _plain(value)]
    return eager_execute.quick_execute(op_type, outputs, list(inputs), tuple(flat), eager_context.context())


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Let nobody observe the ops that are made within, as `tf.debugging.enable_check_numerics()` does.

    It would add checks to ops that are none of the user's, and name their lines in place of the user's.
    """
    thread = eager_context.context()._thread_local_data
    callbacks, thread.op_callbacks = thread.op_callbacks, []
    try:
        yield
    finally:
        thread.op_callbacks = callbacks


def uninitialized(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """Return memory that holds whatever it holds, on the current device.

    Not by `tf.raw_ops.Empty`: `tf.debugging.enable_check_numerics()` would take what that returns for a result.
    """
    (memory,) = run_op("Empty", [tf.constant(list(shape), tf.int32)], {"dtype": dtype, "init": False}, 1)
    return memory


def _plain(attribute: Any) -> Any:
    if isinstance(attribute, tf.DType):
        return attribute.as_datatype_enum
    return eager_execute.make_shape(attribute, "shape") if hasattr(attribute, "unknown_rank") else attribute


def run_independently(op: tf.Operation) -> None:
    """Let a stateful op of a `tf.function` wait for its inputs alone; it is run nevertheless.

    Where ops are not ordered by themselves, there is nothing to do; see `unordered_function`.
    """
    manager = getattr(op.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(op)


def unordered_function(body: Callable, signature: Sequence[Any]) -> Callable:
    """Return `body` as a function of a graph whose ops have the order that it gives them, and no other.

    `tf.function` adds control dependencies: between ops that use the same variable, and from all that must run
    to the results. From one device to another these go through a GPU's memory, and TensorFlow waits for the GPU.

    Args:
        body: a function of tensors, which is traced now. Its results must come after its side effects.
        signature: their specs.
    """

    def on_components(*components: tf.Tensor) -> Any:
        with tf.name_scope("caller"):  # of functions that share its rendezvous, see `shared_function`
            return body(*tf.nest.pack_sequence_as(signature, components, expand_composites=True))

    function = tf.compat.v1.wrap_function(on_components, tf.nest.flatten(signature, expand_composites=True))
    return lambda *given: function(*tf.nest.flatten(given, expand_composites=True))


def forget_custom_gradients(graph: tf.Graph) -> None:
    """Let go of the functions of `tf.custom_gradient` that a graph's ops have, by which no gradient is taken any more.

    TensorFlow registers them for good, and they hold the graph, with the memory of all variables in it. Branches
    and loops belong to it; functions that it calls do not, since somebody else may call these.
    """
    left = [op.node_def for op in graph.get_operations() if op.type == "IdentityN" or calls_functions(op)]
    entered = {""}
    while left:
        node = left.pop()
        registered = node.attr["_gradient_op_type"].s.decode()
        if node.op == "IdentityN" and registered.startswith("CustomGradient-"):
            framework_ops.gradient_registry._registry.pop(registered, None)
        for value in node.attr.values() if not node.op.endswith("PartitionedCall") else ():
            for function in (value.func, *value.list.func):
                if function.name not in entered and (called := graph._get_function(function.name)) is not None:
                    left += called.cached_definition.node_def
                entered.add(function.name)


def sync_devices() -> None:
    """Wait until all GPUs have done what this process has given them.

    `tf.test.experimental.sync_devices` passes over GPUs that a plug-in adds. A copy to the host comes after all else.
    """
    for gpu in tf.config.list_logical_devices("GPU"):
        with tf.device(gpu.name):
            (tf.zeros([]) + 1.0).numpy()  # computed there


def is_profiling() -> bool:
    """Return whether TensorFlow's profiler is recording."""
    enabled = profiler_trace.enabled  # a function since TensorFlow 2.21, a bool before
    return enabled() if callable(enabled) else enabled


def is_op_determinism_enabled() -> bool:
    """Return whether `tf.config.experimental.enable_op_determinism` was called, or TF_DETERMINISTIC_OPS is set."""
    return framework_config.is_op_determinism_enabled()


def is_seed(variable: tf.Variable) -> bool:
    """Return whether `variable` is random state, by the names that both libraries give it.

    Of a `keras.random.SeedGenerator` ([seed, counter]), or of a `tf.random.Generator` ([*counter, key]).
    """
    return variable.name.split("/")[-1].startswith(("seed_generator_state", "StateVar"))


def backend_variable(variable: Any) -> tf.Variable:
    """Return the `tf.Variable` inside a `keras.Variable`, whatever autocast scope is open."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def loaded_classes(base: type) -> list[type]:
    """Return `base`, what it derives from, and all loaded classes that derive from it."""
    classes: list[type] = []
    queue: list[type] = [*base.__mro__]
    while queue:
        cls = queue.pop()
        if cls not in classes and cls is not object:
            classes.append(cls)
            queue.extend(cls.__subclasses__() if issubclass(cls, base) else ())
    return classes


_wrap_lock = threading.RLock()


@contextlib.contextmanager
def methods_wrapped(
    classes: Sequence[type | ModuleType], name: str, wrap: Callable[[Callable], Callable]
) -> Iterator[None]:
    """Replace method `name` of those `classes` (or modules) that define it by `wrap(method)`, for a while.

    Of classes, since a step may use objects that nobody can enumerate. One thread at a time.
    """
    with _wrap_lock:
        wrapped = [(cls, cls.__dict__[name]) for cls in classes if name in cls.__dict__]
        for cls, method in wrapped:
            setattr(cls, name, wrap(method))
        try:
            yield
        finally:
            for cls, method in wrapped:
                setattr(cls, name, method)


def datasets_of(iterator: tf.data.Iterator) -> list[tf.data.Dataset]:
    """Return the datasets that an iterator's elements come from: its own, and all that this is made of."""
    found: list[tf.data.Dataset] = []
    left = [iterator._dataset]
    while left:
        dataset = left.pop()
        if dataset is not None:
            found.append(dataset)
            left += dataset._inputs()
    return found


def set_flag(variable: tf.Variable, flag: str, value: bool = True) -> None:
    """Mark a variable, or undo that.

    Args:
        variable: of tower 0.
        flag: "partial": each tower's copy is a part, and the sum is what one device would hold.
            "partitioned": each tower's copy holds something else, a part of a larger one. "shared": it is the
            same on all towers, whatever aggregation it declares. "written_by_graph": a `tf.function` of
            somebody's writes it at each call, without a report.
        value: whether it is so.
    """
    setattr(variable, f"_ncclsync_{flag}", value)


def has_flag(variable: tf.Variable, flag: str) -> bool:
    """Return whether `set_flag` has marked a variable so."""
    return getattr(variable, f"_ncclsync_{flag}", False)


def set_tracker(variable: tf.Variable, tracker: Any) -> None:
    """Keep with a variable the object by which `holders` tracks it, or None."""
    variable._ncclsync_tracker = tracker


def tracker_of(variable: tf.Variable) -> Any:
    """Return what `set_tracker` was given last, or None."""
    return getattr(variable, "_ncclsync_tracker", None)


def _method_of(variable: tf.Variable, name: str) -> Callable:
    """Return a variable's method as a function that does not hold the variable, which is to hold what wraps it.

    Else its memory on a GPU would wait until Python looks for cycles.
    """
    if name in vars(variable):
        return vars(variable)[name]
    held, method = weakref.ref(variable), getattr(type(variable), name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(held(), *args, **kwargs)

    return call


def track_reads(variable: tf.Variable, before: Callable[[], None]) -> None:
    """Call `before` whenever a variable's value is read, however that is done."""
    read = _method_of(variable, "_read_variable_op")

    @functools.wraps(read)
    def tracked(*args, **kwargs):
        before()
        return read(*args, **kwargs)

    variable._read_variable_op = tracked


def track_writes(variable: tf.Variable, wrap: Callable[[Callable], Callable]) -> None:
    """Replace each method by which Python writes a variable by `wrap(method)`; `wrap` must not hold the variable."""
    for name in VARIABLE_WRITERS:
        if hasattr(variable, name):
            setattr(variable, name, wrap(_method_of(variable, name)))


def untrack(variable: tf.Variable) -> None:
    """Undo `track_reads` and `track_writes`."""
    for name in ("_read_variable_op", *VARIABLE_WRITERS):
        vars(variable).pop(name, None)


def call_after_read(tensor: tf.Tensor, after: Callable[[], None]) -> None:
    """Call `after` whenever an eager tensor's numbers have come to the host; what it raises, the read raises.

    By any method of the tensor: `numpy()`, `float()`, `str()`. NumPy's own `np.asarray(tensor)` calls none, nor do ops.
    """
    held = weakref.ref(tensor)  # a tensor that held itself would keep its memory until Python looks for cycles

    def read() -> Any:
        own: Any = held()
        numbers = type(own)._numpy_internal(own)
        after()
        return numbers

    tensor._numpy_internal = read


def function_class() -> type:
    """Return the class of what `tf.function` returns."""
    return type(tf.function(lambda: None))


def shared_function(
    body: Callable, signature: Sequence[tf.TensorSpec], jit_compile: bool, *, meets_in_caller: bool = False
) -> Any:
    """Return `body` as a ConcreteFunction that TensorFlow optimises once, for all of its callers.

    If it inlined the function, or made it special for the constants that one caller passes and the results
    that it uses, then each caller's would be optimised anew, and be rounded differently: towers would drift
    apart by the last bit. `tf.function` does not offer "_nospecialize", which TensorFlow's optimiser reads.
    Source: tensorflow/core/grappler/optimizers/function_optimizer.cc.

    Where a function's ops are on several devices, its tensors go from one to another by a rendezvous of its own, which
    ends with it. If another call of the same graph fails at that moment, TensorFlow still uses that rendezvous: the
    process crashes, or hangs. The caller's ends with the whole graph.
    Source: tensorflow/core/framework/local_rendezvous.cc, RecvAsync: what is called at a cancellation owns nothing.

    Args:
        body: a function of tensors.
        signature: their specs.
        jit_compile: whether XLA compiles it.
        meets_in_caller: whether its tensors go from device to device by its caller's rendezvous. There a tensor is
            known by its devices and the op that makes it: two calls on the same devices must not run at once.
    """
    attributes = {"_noinline": True, "_nospecialize": True}
    if meets_in_caller:
        attributes["shared_rendezvous"] = True

    def allow(known: Any) -> Any:
        return known | attributes.keys()

    def named(*args: Any) -> Any:
        with tf.name_scope("called"):  # no tensor of the caller's is to have a name of this one's
            return body(*args)

    with contextlib.ExitStack() as stack:
        for name in [name for name in vars(function_attributes) if name.endswith("_ALLOWLIST")]:
            stack.enter_context(methods_wrapped([function_attributes], name, allow))
        return tf.function(
            named if meets_in_caller else body,
            input_signature=signature,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes=attributes,
        ).get_concrete_function()


@contextlib.contextmanager
def open_branches() -> Iterator[None]:
    """Let a trace for XLA leave open what a branch that is not taken would have left of the rows for its gradient.

    TensorFlow says 0 rows, since XLA takes no open length there; so does what is cut (`crossing.close_branches`).
    """
    with methods_wrapped([cond_v2], "_convert_dynamic_dimension_to_zero", lambda _: lambda shape: shape):
        yield


def padded(tensor: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Return a tensor as long along each of these axes as XLA knows that it may be, in a graph that XLA compiles."""
    for axis in axes:
        tensor = gen_xla_ops.xla_remove_dynamic_dimension_size(tensor, axis)
    return tensor


def unpadded(tensor: tf.Tensor, axes: Sequence[int], lengths: Any) -> tf.Tensor:
    """Return a tensor that `padded` has given, of its own `lengths` along these axes: one for each axis that it has."""
    for axis in axes:
        tensor = gen_xla_ops.xla_set_dynamic_dimension_size(tensor, axis, lengths[axis])
    return tensor


def own_sentence(error: tf.errors.OpError) -> str | None:
    """Return what an op, or a Python function, of ncclsync's has said when it failed, of all that TensorFlow tells."""
    found = _OWN_SENTENCE.search(error.message)
    # An assertion's message has each of its tensors in brackets.
    return None if found is None else re.sub(r"\]+ \[+", " ", found[1]).rstrip("]' ")


def autograph_converted(function: Callable) -> Callable:
    """Return `function` as `tf.function` would trace it: through autograph, if there is source to convert.

    Also where autograph is off, as it is in all that Keras calls.
    """

    @functools.wraps(function)
    def called(*args, **kwargs):
        with autograph_context.ControlStatusCtx(status=autograph_context.Status.ENABLED):
            context = tf.__internal__.autograph.control_status_ctx()
            return tf.__internal__.autograph.tf_convert(function, context, user_requested=True)(*args, **kwargs)

    return called


def is_jit_compiled(function: Callable) -> bool:
    """Return whether `function` is a `tf.function` that asks for XLA."""
    return bool(getattr(function, "_jit_compile", False))


class SameDataset(dataset_ops.UnaryUnchangedStructureDataset):
    """Give what another `tf.data.Dataset` gives: a base of classes that are datasets."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        """Give what `dataset` gives."""
        super().__init__(dataset, dataset._variant_tensor)
