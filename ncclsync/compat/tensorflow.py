"""Wrap the interfaces that TensorFlow does not promise to keep."""

import collections
import contextlib
import copy
import ctypes
import functools
import gc
import inspect
import itertools
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.utils import traceback_utils as keras_traceback_utils
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.autograph.core import ag_ctx as autograph_context
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import execute as eager_execute
from tensorflow.python.eager.polymorphic_function import attributes as function_attributes
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import (
    auto_control_deps,
    auto_control_deps_utils,
    c_api_util,
    kernels,
    op_callbacks,
    op_def_registry,
    tensor_util,
)
from tensorflow.python.framework import config as framework_config
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph
from tensorflow.python.ops import cond_v2, handle_data_util
from tensorflow.python.profiler import trace as profiler_trace
from tensorflow.python.util import traceback_utils

from ncclsync import errors
from ncclsync.compat.names import OpName, TensorName
from ncclsync.compat.source_lines import is_pythons

# Errors of ncclsync's ops begin so, also in C; for its Python functions TensorFlow tells the class.
OWN_WORDS = "ncclsync: "
_OWN_CLASSES = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_OWN_SENTENCE = re.compile(rf"(?:{OWN_WORDS}|\b(?:{'|'.join(_OWN_CLASSES)}): )([^\n]+)")

# Every method by which Python writes a tf.Variable; the last two are for `variable[1:2].assign` and for checkpoints.
VARIABLE_WRITERS = (
    *("assign", "assign_add", "assign_sub", "batch_scatter_update", "count_up_to"),
    *("scatter_add", "scatter_div", "scatter_max", "scatter_min", "scatter_mul", "scatter_sub", "scatter_update"),
    *("scatter_nd_add", "scatter_nd_max", "scatter_nd_min", "scatter_nd_sub", "scatter_nd_update"),
    *("_strided_slice_assign", "_restore_from_tensors"),
)
REPLACING_WRITERS = ("assign", "_restore_from_tensors")  # of these, those that write all of it, and read nothing

# C++ that finds the stream on which TensorFlow computes, from a kernel's context; compiled by `ops/gpu_streams.py`.
# For a GPU that a plug-in adds, TensorFlow's own handle is not CUDA's stream.
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

# C++ by which devices share one compiler, and so all that it has compiled (tensorflow/compiler/jit/kernels/xla_ops.cc
# looks it up under this name and type; not all headers of that type are installed). `ops/xla_programs.py` compiles it.
XLA_PROGRAMS_SOURCE = """
#include "tensorflow/c/eager/tfe_context_internal.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "xla/stream_executor/stream_executor.h"

namespace xla { class LocalClient; class LocalExecutable; }
namespace tensorflow {
template <typename Executable, typename Client> class DeviceCompiler : public ResourceBase {};
using Compiler = DeviceCompiler<xla::LocalExecutable, xla::LocalClient>;

static std::string KindOf(DeviceBase* device) {  // as XLA compares (xla/service/backend.cc, devices_equivalent)
  auto* found = device->tensorflow_accelerator_device_info();
  if (found == nullptr || found->stream == nullptr) return device->device_type();
  return found->stream->parent()->GetDeviceDescription().name();
}

static Compiler* CompilerOf(DeviceBase* device) {
  Compiler* found = nullptr;
  auto* all = static_cast<Device*>(device)->resource_manager();
  return all->Lookup<Compiler, false>(all->default_container(), "xla_device_compiler", &found).ok() ? found : nullptr;
}
}  // namespace tensorflow

extern "C" int ncclsync_share_compiler(void* context, const char* from, const char* to) {
  tensorflow::Device *first = nullptr, *other = nullptr;
  for (auto* device : tensorflow::unwrap(static_cast<TFE_Context*>(context))->ListLocalTfDevices()) {
    if (device->name() == from) first = device;
    if (device->name() == to) other = device;
  }
  if (first == nullptr || other == nullptr) return 1;
  if (tensorflow::KindOf(first) != tensorflow::KindOf(other)) return 2;
  tensorflow::core::RefCountPtr<tensorflow::Compiler> given(tensorflow::CompilerOf(first));
  if (given == nullptr) return 3;
  tensorflow::core::RefCountPtr<tensorflow::Compiler> own(tensorflow::CompilerOf(other));
  if (own != nullptr) return own == given ? 0 : 4;
  auto* all = other->resource_manager();
  return all->Create(all->default_container(), "xla_device_compiler", given.release()).ok() ? 0 : 4;
}
"""


def context_address() -> int:
    """Return the address of the TFE_Context in which ops run eagerly, and whose devices all functions use."""
    eager_context.ensure_initialized()
    return _capsule_pointer(eager_context.context()._handle, None)


def written_handles(op: tf.Operation) -> set[TensorName]:
    """Return the names of the resource inputs that `op` may write to, as TensorFlow records them."""
    if all(tensor.dtype != tf.resource for tensor in op.inputs):
        return set()  # TensorFlow makes five sets to find that out
    _, writes = auto_control_deps_utils.get_read_write_resource_inputs(op)
    return {tensor.name for tensor in writes}


def is_stateful(op: tf.Operation) -> bool:
    """Return whether TensorFlow declares `op` stateful: a variable's op, a random draw, an assertion."""
    return op.op_def.is_stateful


def calls_functions(op: tf.Operation) -> bool:
    """Return whether `op` runs functions."""
    return any(one.HasField("func") or one.list.func for one in op.node_def.attr.values())


class Memory(NamedTuple):
    """Hold the numbers of an op's inputs and outputs that lie in the host's memory."""

    inputs: frozenset[int]
    outputs: frozenset[int]


def gpu_memory(op: tf.Operation) -> Memory | None:
    """Return which inputs and outputs of `op` lie in the host's memory on a GPU; None without a kernel for GPUs.

    Resources always lie there, and are not listed.
    """
    node, definition = op.node_def, op.op_def
    found = _kernels_for(op, ("GPU", "DEFAULT"))
    if not found:
        return None
    kinds = [kernel for kernel in found if kernel.device_type == "GPU"] or found
    on_host = max(kinds, key=lambda kernel: kernel.priority).host_memory_arg
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
        # Functions take int32 in the host's memory.
        sides.append(frozenset(i for i, (n, tensor) in pairs if n in on_host or (calls and tensor.dtype == tf.int32)))
    return Memory(*sides)


def runs_on_cpu(op: tf.Operation) -> bool:
    """Return whether TensorFlow has a kernel for `op` on the CPU."""
    return bool(_kernels_for(op, ("CPU",)))


def _kernels_for(op: tf.Operation, device_types: tuple[str, ...]) -> list[Any]:
    given = {name: {value.type, *value.list.type} - {0} for name, value in op.node_def.attr.items()}
    return [
        kernel
        for kernel in _kernels(op.type)
        if kernel.device_type in device_types
        and all(given.get(one.name, set()).issubset(one.allowed_values.list.type) for one in kernel.constraint)
    ]


@functools.cache
def _kernels(op_type: str) -> list[Any]:
    return [kernel for kernel in kernels.get_registered_kernels_for_op(op_type).kernel if not kernel.label]


def has_host_results(op_type: str) -> bool:
    """Return whether some of TensorFlow's GPU kernels of such an op leave a result in the host's memory."""
    names = {argument.name for argument in op_def_registry.get(op_type).output_arg}
    on_host = (kernel.host_memory_arg for kernel in _kernels(op_type) if kernel.device_type != "CPU")
    return not all(map(names.isdisjoint, on_host))


def hides_state(op_type: str, repeatable: frozenset[str]) -> bool:
    """Return whether ops of a type depend on a state outside variables, as far as TensorFlow declares it.

    `repeatable` are the stateful types that give equal results for equal inputs.
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
    """Register FunctionDefs with TensorFlow by their names, for as long as `owner` lives."""
    context = eager_context.context()
    for definition in definitions:
        context.add_function_def(definition)
        weakref.finalize(owner, context.remove_function, definition.signature.name)


def copied_op(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """Return a copy of `op`, with its lines, in the default graph, with other inputs and no control inputs."""
    node = op.node_def
    node.name, node.device = f"copy_of_{op.name.replace('/', '_')}", ""
    node.attr.pop("_class", None)
    del node.input[:]
    node.input.extend(f"given_{i}" for i in range(len(inputs)))
    definition = tf.compat.v1.GraphDef(node=[node])
    definition.versions.CopyFrom(op.graph.graph_def_versions)
    given = {f"given_{i}": tensor for i, tensor in enumerate(inputs)}
    (made,) = tf.graph_util.import_graph_def(definition, given, [node.name], name="")
    set_traceback(made, op)
    return made


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Let an op of a graph that has not run take another tensor."""
    op._update_input(index, tensor)


def set_control_inputs(op: tf.Operation, controls: Iterable[tf.Operation]) -> None:
    """Let an op of a graph that has not run wait for these ops alone."""
    after = sorted(controls, key=lambda one: one.name)
    op._remove_all_control_inputs()
    op._add_control_inputs(after)


def set_attributes(op: tf.Operation, attributes: Mapping[str, Any]) -> None:
    """Give an op of a graph that has not run other AttrValues."""
    for name, value in attributes.items():
        op._set_attr(name, value)


def set_traceback(op: tf.Operation, like: tf.Operation) -> None:
    """Give an imported op, which has none, the traceback of another op, if that has one."""
    if like.traceback is not None:
        c_api.TF_SetOpStackTrace(op._c_op, like.traceback[:])  # a copy: TensorFlow keeps the other one


def new_op(
    op_type: str,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    attributes: Mapping[str, Any],
    graph: tf.Graph | None = None,
) -> tf.Operation:
    """Make an op in a graph, or in the default one, of inputs, dtypes of the results, and AttrValues by name.

    `Graph.create_op` inspects its own signature each time.
    """
    graph = graph or tf.compat.v1.get_default_graph()
    return graph._create_op_internal(op_type, list(inputs), list(dtypes), attrs=dict(attributes))


def new_placeholder(dtype: tf.DType, shape: Sequence[int | None] | None, graph: tf.Graph) -> tf.Tensor:
    """Make a placeholder in a graph. `tf.compat.v1.placeholder` takes twice the time."""
    types = tf.compat.v1.AttrValue(type=dtype.as_datatype_enum)
    shapes = tf.compat.v1.AttrValue(shape=tf.TensorShape(shape).as_proto())
    return new_op("Placeholder", [], [dtype], {"dtype": types, "shape": shapes}, graph).outputs[0]


def infer_shapes(definition: tf.compat.v1.GraphDef) -> None:
    """Let TensorFlow infer all shapes of a GraphDef without functions, and compare them with its `_output_shapes`.

    `tf.graph_util.import_graph_def` takes four times as long, since it makes Python objects of all ops.

    Raises:
        tf.errors.OpError: inputs of an op do not go together, or a shape is another one; see `node_named`.
    """
    options = c_api_util.ScopedTFImportGraphDefOptions()
    buffer = c_api.TF_NewBufferFromString(definition.SerializeToString())
    try:
        with tf.Graph()._c_graph.get() as graph:
            results = c_api.TF_GraphImportGraphDefWithResults(graph, buffer, options.options)
            c_api_util.ScopedTFImportGraphDefResults(results)
    finally:
        c_api.TF_DeleteBuffer(buffer)


def node_named(error: tf.errors.OpError) -> OpName:
    """Return the name of the node that an error of `infer_shapes` is about; "" if its message has none."""
    named = re.search(r"\{\{node (\S+?)\}\}|Node '(\S+?)' has", error.message)
    return OpName(named[1] or named[2] if named else "")


def variables_behind(handles: Sequence[tf.Tensor]) -> list[tf.Variable]:
    """Return the variables that have these handles; others may be handles of tables, and the like.

    A graph does not know which variable a handle is of if raw ops alone take it. All of Python's objects are searched.
    """
    wanted = {id(one) for one in handles if one.dtype == tf.resource and getattr(one._handle_data, "is_set", False)}
    found = (one for one in gc.get_objects() if issubclass(type(one), tf.Variable)) if wanted else ()
    # What an assignment returns in a graph has the variable's handle, too.
    return [one for one in found if id(vars(one).get("_handle")) in wanted and "_parent_op" not in vars(one)]


# Of a variable's start value that a function's arguments decide: TensorFlow would compute it before the function.
UnliftableError = polymorphic_function.lift_to_graph.UnliftableError


def not_lifted(error: Exception, graph: tf.Graph) -> tf.Operation | None:
    """Return the op whose value is not there before a function, by an `UnliftableError`; None if it names none."""
    named = {name for name in re.findall(r"'([^']+):\d+'", str(error))}
    return next((op for op in graph.get_operations() if op.name in named), None)


def is_made_in_a_function(variable: tf.Variable) -> bool:
    """Return whether a variable was created while a function was traced, which takes its handle to initialise it."""
    return isinstance(variable, polymorphic_function.UnliftedInitializerVariable)


def captured_by_graphs() -> list[tf.Tensor]:
    """Return what the function that is being traced, and those around it, have taken from outside so far."""
    graph, found = tf.compat.v1.get_default_graph(), []
    while graph is not None:
        found += [outside for outside, _ in getattr(graph, "captures", ())]
        graph = getattr(graph, "outer_graph", None)
    return found


def describe_handle(handle: tf.Tensor, variable: tf.Variable) -> None:
    """Give a function's argument that stands for a variable's handle the variable's shape."""
    handle_data_util.copy_handle_data(handle_of(variable), handle)


@contextlib.contextmanager
def open_rows(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Let graphs that are traced meanwhile not know how long the first axis of these variables is."""
    known = [(handle := handle_of(variable), handle._handle_data) for variable in variables]
    try:
        for handle, data in known:
            opened = copy.deepcopy(data)
            opened.shape_and_type[0].shape.dim[0].size = -1
            handle._handle_data = opened
        yield
    finally:
        for handle, data in known:
            handle._handle_data = data


Line = tuple[str, int]  # a file, and the number of a line in it

# What Keras has of an open length is something else, without an error: `tests/compat` finds all such functions.
_GOING_BY_LENGTHS = frozenset({"array_split", "associative_scan", "elastic_transform"})
_TO_TENSOR = "_tensor_shape_tensor_conversion_function"  # of a shape, which fails if a length is open
_KERAS = os.path.join(os.path.dirname(keras.__file__), "")
# Functions that are asked for a shape, and answer with that of a tensor; that tell a tensor's shape; that
# tf.get_static_value calls.
_PASSING_ON = frozenset({"get_shape", "shape"})
_IN_WORDS = frozenset({"_shape_as_list", "__repr__", "__str__", "__format__"})
_FOLDING = frozenset({"constant_value", "_ConstantValue"})
_TENSORFLOW = os.path.join(os.path.dirname(tf.__file__), "python", "")
_CONVERTED = f"{_TENSORFLOW}autograph/impl/api.py"  # calls what a line that autograph has converted calls
# What stands between a line and the public function that it calls, whose error the line may handle.
_WRAPPERS = (
    *(_CONVERTED, f"{_TENSORFLOW}util/", f"{_TENSORFLOW}ops/weak_tensor_ops.py"),
    *(f"{_KERAS}src/{folder}/" for folder in ("backend", "ops", "random")),
)
_WITH_ERRORS = traceback_utils, keras_traceback_utils  # modules by which errors leave public functions
_BUILDING = "_maybe_build"  # Keras' method that gives the shape of a layer's first input to its `build`
# Members of a shape that tell no length.
_OF_RANK = frozenset({"__bool__", "__init__", "__len__", "__nonzero__", "assert_has_rank", "ndims", "rank"})


class TraceEnded(BaseException):
    """End a trace that will be made otherwise; libraries do not catch it."""


class OpenLengthAsked(TraceEnded):
    """A line has asked for a length that is open."""


class Questions(list[Line]):
    """Hold the lines that have asked for an open length, in turn.

    Attributes:
        builds: whether the last line has called a layer that has a `build` of the user's, and is not built.
    """

    builds = False


@contextlib.contextmanager
def open_lengths_asked(
    is_library: Callable[[str], bool], *, ends: bool = False, builds: bool = False, passes_on: bool = True
) -> Iterator[Questions]:
    """Note who asks meanwhile for a length of a shape, and hears that it is open: lines of files that are no library.

    With `ends`, whoever asks is not answered: an OpenLengthAsked is raised. With `builds`, a layer that is not built,
    and whose `build` is the user's, asks, too. Without `passes_on`, who asks keras.ops.shape is not heard: it gives an
    open length as a tensor, which is that length.

    What keras.ops.shape asks counts as its caller's question, and so does what functions of Keras ask that go by a
    length, or that are handed a tensor's shape. Whoever calls a library's function that raises an error asks, too: it
    may go on otherwise.
    """
    found, thread = Questions(), threading.get_ident()  # other threads may trace, and fail, meanwhile
    handed: dict[int, tuple[tf.TensorShape, Line]] = {}  # by id: shapes that lines have read of tensors

    def read(get: Callable[..., tf.TensorShape], tensor: tf.Tensor) -> tf.TensorShape:
        shape = get(tensor)
        if not shape._dims or None not in shape._dims or threading.get_ident() != thread:
            return shape
        frame: Any = sys._getframe(2)
        if frame.f_code.co_name == "get_shape":
            frame = frame.f_back
        if _is_of(is_library, frame):
            return shape
        own = tf.TensorShape(shape)
        handed[id(own)] = own, _line_of(frame)
        return own

    def asked(ask: Callable[..., Any], shape: tf.TensorShape, *given: Any) -> Any:
        if not shape.rank or None not in _lengths_asked(shape._dims, *given) or threading.get_ident() != thread:
            return ask(shape, *given)
        line = _asking_line(is_library, passes_on)
        if line is None and builds:
            line = _building_line(is_library)
            found.builds = line is not None
        if line is None and id(shape) in handed and sys._getframe(2).f_code.co_filename.startswith(_KERAS):
            line = handed[id(shape)][1]
        if line is not None:
            found.append(line)
            if ends:
                raise OpenLengthAsked
        return ask(shape, *given)

    def raised(kept_frames: Callable[..., Any], *given: Any) -> Any:
        line = _erring_line(is_library) if threading.get_ident() == thread else None
        if line is not None:
            found.append(line)
            if ends:
                raise OpenLengthAsked
        return kept_frames(*given)

    with contextlib.ExitStack() as stack:
        stack.enter_context(methods_wrapped([tf.Tensor], "shape", read))
        for module in _WITH_ERRORS:
            stack.enter_context(methods_wrapped([module], "_process_traceback_frames", raised))
        for name in vars(tf.TensorShape).keys() - _OF_RANK:
            if isinstance(vars(tf.TensorShape)[name], (FunctionType, property)):
                stack.enter_context(methods_wrapped([tf.TensorShape], name, asked))
        yield found


class ValueAsked(TraceEnded):
    """A line has gone by a tensor's value, as autograph alone lets it."""


# By what Python asks for a tensor's or a dataset's values; a graph's tensors lack the last ones.
_FOR_VALUES = ("__bool__", "__iter__", "__len__", "__complex__", "__float__", "__index__", "__int__")


@contextlib.contextmanager
def values_asked(is_library: Callable[[str], bool]) -> Iterator[list[Line]]:
    """Note, and end by a ValueAsked, what lines outside libraries do meanwhile that autograph would have changed.

    They may handle the error that they would hear, and go another way.
    """
    found, thread = list[Line](), threading.get_ident()

    def asked(ask: Callable[..., Any] | None, value: Any, *given: Any) -> Any:
        is_given = tf.is_symbolic_tensor(value) or (isinstance(value, tf.data.Dataset) and not tf.executing_eagerly())
        frame = sys._getframe(2)
        if is_given and threading.get_ident() == thread and not _is_of(is_library, frame):
            found.append(_line_of(frame))
            raise ValueAsked
        if ask is None:
            raise TypeError(f"a graph's tensor has no value yet: {value}")
        return ask(value, *given)

    def added(value: Any) -> Any:
        return asked(None, value)

    with contextlib.ExitStack() as stack:
        for name in _FOR_VALUES:
            stack.enter_context(methods_wrapped([tf.Tensor, tf.data.Dataset], name, asked))
            if name not in vars(tf.Tensor):
                setattr(tf.Tensor, name, added)
                stack.callback(delattr, tf.Tensor, name)
        yield found


def _lengths_asked(lengths: Sequence[int | None], key: Any = None, *_: Any) -> Sequence[int | None]:
    if isinstance(key, int):
        return lengths[key : key + 1 or None]
    return lengths[key] if isinstance(key, slice) else lengths


def _is_of(is_library: Callable[[str], bool], frame: Any) -> bool:
    """Return whether a frame is of a library: by its file, or, if it has none, by that of its namespace.

    What is typed in, or run from a text, has no file.
    """
    file = frame.f_code.co_filename
    if file.startswith("<") and is_library(file):
        file = frame.f_globals.get("__file__")
        return isinstance(file, str) and is_library(file)
    return is_library(file)


def _asking_line(is_library: Callable[[str], bool], passes_on: bool = True) -> Line | None:
    """Return the line that asks for a shape, as the caller's caller; None if that is a library's own question."""
    frame: Any = sys._getframe(3)
    names, is_of_keras = set[str](), frame.f_code.co_filename.startswith(_KERAS)
    while frame is not None and ((passing := _passes_on(frame)) or _is_of(is_library, frame)):
        if not passing:
            names.add(frame.f_code.co_name)
        frame = frame.f_back
    goes_by_it = _TO_TENSOR in names or (is_of_keras and names & _GOING_BY_LENGTHS)
    behind = names - _FOLDING - _IN_WORDS - (_PASSING_ON if passes_on else frozenset())
    return None if frame is None or (behind and not goes_by_it) else _line_of(frame)


def _passes_on(frame: Any) -> bool:
    """Return whether a frame is of Python's library, or of what autograph calls a function by."""
    file = frame.f_code.co_filename
    return file == _CONVERTED or is_pythons(file)


def _erring_line(is_library: Callable[[str], bool]) -> Line | None:
    """Return the line whose call of a library's function has failed, as the caller's caller's; None if a library's."""
    frame: Any = sys._getframe(4)
    while frame is not None and _is_of(is_library, frame):
        if not frame.f_code.co_filename.startswith(_WRAPPERS):
            return None
        frame = frame.f_back
    return None if frame is None else _line_of(frame)


def _building_line(is_library: Callable[[str], bool]) -> Line | None:
    """Return the line that calls a layer whose `build` Keras is about to call, if that is not of a library."""
    frame: Any = sys._getframe(2)
    builds = False
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_name == _BUILDING and frame.f_code.co_filename.startswith(_KERAS):
            code = getattr(inspect.unwrap(type(frame.f_locals["self"]).build), "__code__", None)
            builds = code is not None and not is_library(code.co_filename)
        frame = frame.f_back
    return _line_of(frame) if builds else None


def _line_of(frame: Any) -> Line:
    file = "" if frame is None else frame.f_code.co_filename
    return ("", 0) if frame is None or "__autograph_generated_file" in file else (file, frame.f_lineno)


class ReadShapes(list[tuple[Line, tf.TensorShape]]):
    """Hold the lines that have read tensors' shapes, and these, in turn.

    Attributes:
        open: the lines that have heard that a length is open.
    """

    def __init__(self) -> None:
        """Hold none yet."""
        super().__init__()
        self.open: list[Line] = []

    def begin(self) -> None:
        """Forget all: the Python that reads them begins, or begins again."""
        self.clear()
        self.open.clear()

    def untold(self, told: "ReadShapes") -> Line | None:
        """Return a line that has gone by other shapes than these, of an earlier trace; None if there is none."""
        longest = itertools.zip_longest(self, told)
        strayed = [(one or known)[0] for one, known in longest if one != known]
        strayed += collections.Counter(self.open) - collections.Counter(told.open)
        return next((line for line in strayed if line[0]), strayed[0]) if strayed else None


@contextlib.contextmanager
def shapes_read(is_library: Callable[[str], bool], told: ReadShapes | None = None) -> Iterator[ReadShapes]:
    """Note each shape that is read meanwhile of a graph's tensor by a line outside libraries.

    With `told`, of an earlier trace of the same Python, each of these lines reads what it has read in that trace,
    whatever the tensor's own shape leaves open; except within a `tf.function`, which keeps its trace for others.
    """
    found, thread = ReadShapes(), threading.get_ident()
    tells = told is not None

    def read(get: Callable[..., tf.TensorShape], tensor: tf.Tensor) -> tf.TensorShape:
        shape = get(tensor)
        if threading.get_ident() != thread or (line := _asking_line(is_library)) is None:
            return shape
        if told is not None and tells and len(found) < len(told) and told[len(found)][1].is_compatible_with(shape):
            shape = told[len(found)][1]
        found.append((line, shape))
        return shape

    def called(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        nonlocal tells
        if threading.get_ident() != thread:
            return call(*given, **named)
        before, tells = tells, False
        try:
            return call(*given, **named)
        finally:
            tells = before

    with contextlib.ExitStack() as stack:
        found.open = stack.enter_context(open_lengths_asked(is_library))
        stack.enter_context(methods_wrapped([tf.Tensor], "shape", read))
        stack.enter_context(methods_wrapped([polymorphic_function.Function], "__call__", called))
        yield found


def spec_behind(tensor: tf.Tensor) -> tf.TensorSpec | None:
    """Return the spec of the variable behind a handle, or of a list's elements; None if the graph does not know it."""
    data = handle_data_util.get_resource_handle_data(tensor)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    (known,) = data.shape_and_type
    return tf.TensorSpec(tf.TensorShape(known.shape), tf.as_dtype(known.dtype))


def folded(tensor: tf.Tensor) -> Any:
    """Return a graph's tensor as NumPy if TensorFlow can fold it to a constant; else None.

    No op runs eagerly for it: the first eager run of each type takes milliseconds.
    """
    return tensor_util.try_evaluate_constant(tensor)


def run_op(op: tf.Operation, inputs: Sequence[Any]) -> list[Any]:
    """Run an op like that of a graph, outside any graph, on a flat list of inputs; return its results."""
    flat: list[Any] = []
    for name in [one.name for one in op.op_def.attr]:
        value = op.get_attr(name)
        flat += [name, [_plain(one) for one in value] if isinstance(value, list) else _plain(value)]
    return eager_execute.quick_execute(op.type, len(op.outputs), list(inputs), tuple(flat), eager_context.context())


def run_without_results(op_type: str, inputs: Sequence[tf.Tensor], attributes: Mapping[str, Any]) -> None:
    """Run an op that has no results, outside any graph, given its attributes: numbers, dtypes, and lists of these."""
    flat: list[Any] = []
    for name, value in attributes.items():
        flat += [name, [_plain(one) for one in value] if isinstance(value, list) else _plain(value)]
    eager_execute.quick_execute(op_type, 0, list(inputs), tuple(flat), eager_context.context())


def read_variables(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """Return what variables of one device contain, by one op, in a graph or outside; no method of theirs is called."""
    handles, dtypes = [handle_of(one) for one in variables], [one.dtype for one in variables]
    enums = [dtype.as_datatype_enum for dtype in dtypes]
    with tf.device(variables[0].device):
        if tf.executing_eagerly():
            attributes = ("N", len(handles), "dtypes", enums)
            context = eager_context.context()
            return eager_execute.quick_execute("_ReadVariablesOp", len(handles), handles, attributes, context)
        kinds = tf.compat.v1.AttrValue
        given = {"N": kinds(i=len(handles)), "dtypes": kinds(list=kinds.ListValue(type=enums))}
        graph = tf.compat.v1.get_default_graph()
        # Its own name may not begin as its type does.
        return list(graph._create_op_internal("_ReadVariablesOp", handles, dtypes, attrs=given, name="reads").outputs)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hide ops made in the body from observers such as `tf.debugging.enable_check_numerics()`.

    These would add checks to ops that are not the user's, and name ncclsync's lines in place of the user's.
    """
    thread = eager_context.context()._thread_local_data
    callbacks, thread.op_callbacks = thread.op_callbacks, []
    try:
        yield
    finally:
        thread.op_callbacks = callbacks


_READING = frozenset(
    {"ReadVariableOp", "VarIsInitializedOp", "VariableShape", "ResourceGather", "ResourceGatherNd"}
    | {"DisableCopyOnRead", "DestroyResourceOp"}
)


@contextlib.contextmanager
def eager_writes() -> Iterator[dict[int, tuple[Any, Any]]]:
    """Note which variables eager ops of this thread write, but for the first value of those that are created meanwhile.

    Yields:
        By a handle's id: the handle, and the variable's first value; None if it was there before.
    """
    first: dict[int, Any] = {}
    found: dict[int, tuple[Any, Any]] = {}
    kept: list[Any] = []  # whose ids are no others' meanwhile

    def seen(op_type: str, inputs: Sequence[Any], attrs: Any, outputs: Sequence[Any], *_: Any) -> None:
        if op_type == "VarHandleOp":
            kept.append(outputs[0])
            first[id(outputs[0])] = None
        for one in () if op_type in _READING else inputs:
            if one.dtype == tf.resource:
                if id(one) in first and first[id(one)] is None:
                    first[id(one)] = inputs[-1]
                else:
                    found[id(one)] = one, first.get(id(one))

    op_callbacks.add_op_callback(seen)
    try:
        yield found
    finally:
        op_callbacks.remove_op_callback(seen)


def _plain(attribute: Any) -> Any:
    if isinstance(attribute, tf.DType):
        return attribute.as_datatype_enum
    return eager_execute.make_shape(attribute, "shape") if hasattr(attribute, "unknown_rank") else attribute


def run_independently(op: tf.Operation) -> None:
    """Let a stateful op of a `tf.function` wait for its inputs alone; it still runs.

    Graphs of `tf.compat.v1.wrap_function` do not need it.
    """
    manager = getattr(op.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(op)


def forget_custom_gradients(graph: tf.Graph) -> None:
    """Free the functions of `tf.custom_gradient` in a graph of which no gradient is taken any more.

    TensorFlow registers them for good, and they hold the graph, with the memory of all its variables. Branches and
    loops belong to the graph; functions that it calls do not, since other graphs may call them.
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
    """Wait until all GPUs have done the work that this process has given them.

    `tf.test.experimental.sync_devices` skips GPUs that a plug-in adds. A copy to the host comes after all earlier work.
    """
    for gpu in tf.config.list_logical_devices("GPU"):
        with tf.device(gpu.name):
            (tf.zeros([]) + 1.0).numpy()  # computed there


def is_profiling() -> bool:
    """Return whether TensorFlow's profiler is recording."""
    enabled = profiler_trace.enabled  # a function since TensorFlow 2.21, a bool before
    return enabled() if callable(enabled) else enabled


def is_op_determinism_enabled() -> bool:
    """Return whether `enable_op_determinism` was called, or TF_DETERMINISTIC_OPS is set."""
    return framework_config.is_op_determinism_enabled()


def backend_variable(variable: Any) -> tf.Variable:
    """Return the `tf.Variable` inside a `keras.Variable`, in any autocast scope."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def loaded_classes(base: type) -> list[type]:
    """Return `base`, its bases, and all loaded classes that derive from it."""
    classes: list[type] = [cls for cls in base.__mro__ if cls is not object]
    for cls in classes:
        derived: list[type] = cls.__subclasses__()
        classes += [one for one in derived if issubclass(one, base) and one not in classes]
    return classes


_wrap_lock = threading.RLock()


@contextlib.contextmanager
def methods_wrapped(classes: Sequence[type | ModuleType], name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Let `replacement` stand for method `name` of those `classes` (or modules) that define it, for a while.

    See `wrapped`. Classes are changed, since the objects that a step uses cannot be enumerated. One thread at a time.
    """
    with _wrap_lock:
        methods = [(cls, cls.__dict__[name]) for cls in classes if name in cls.__dict__]
        for cls, method in methods:
            setattr(cls, name, wrapped(method, replacement))
        try:
            yield
        finally:
            for cls, method in methods:
                setattr(cls, name, method)


@contextlib.contextmanager
def members_replaced(owner: Any, **members: Any) -> Iterator[None]:
    """Give an object these members for a while, past its class's `__setattr__`."""
    own = vars(owner)
    before = {name: own[name] for name in members if name in own}
    own.update(members)
    try:
        yield
    finally:
        own.update(before)
        for name in members.keys() - before.keys():
            del own[name]


def wrapped(method: Any, replacement: Callable[..., Any]) -> Any:
    """Return `replacement`, which takes a method and its arguments, as this method, or property."""
    if isinstance(method, property):
        return property(wrapped(method.fget, replacement))

    @functools.wraps(method)
    def replaced(*args, **kwargs):
        return replacement(method, *args, **kwargs)

    return replaced


def datasets_of(given: tf.data.Iterator | tf.data.Dataset) -> list[tf.data.Dataset]:
    """Return a dataset, or an iterator's, and all datasets that it is made of."""
    dataset = given if isinstance(given, tf.data.Dataset) else given._dataset
    found: list[tf.data.Dataset] = [] if dataset is None else [dataset]
    for one in found:
        found += one._inputs()
    return found


def let_go_of_arrays(datasets: Sequence[tf.data.Dataset]) -> None:
    """Free the copies, on GPU 0, of arrays that datasets are made of.

    TensorFlow makes an array a tensor on GPU 0, and a dataset of that. The dataset reads a copy in the host's memory;
    its Python object would keep the tensor, as large as all the data, as long as it lives.
    """
    for dataset in datasets:
        if any("GPU" in tensor.device for tensor in getattr(dataset, "_tensors", ())):
            dataset._tensors = []


def _method_of(variable: tf.Variable, name: str) -> Callable:
    """Return a variable's method as a function that does not hold the variable, which holds the method's wrapper.

    A reference cycle would keep the variable's memory on a GPU until Python's garbage collector runs.
    """
    if name in vars(variable):
        return vars(variable)[name]
    held, method = weakref.ref(variable), getattr(type(variable), name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        own: Any = held()
        if _BEFORE not in vars(own):
            return method(own, *args, **kwargs)
        with _unseen(own):  # whoever tracks writes hears of it already
            return method(own, *args, **kwargs)

    return call


def handle_of(variable: tf.Variable) -> tf.Tensor:
    """Return a variable's handle, which `track_reads` does not hear of."""
    return vars(variable)["_handle"]


def track_reads(variable: tf.Variable, before: Callable[[], None]) -> None:
    """Call `before` whenever somebody takes a variable's handle, which every op that reads or writes it needs.

    Not by methods alone: TensorFlow's C++ takes the handle of a variable that an eager op is given. Who has kept the
    handle from before, such as a graph, is not heard of.
    """
    vars(variable)[_BEFORE] = before
    own: Any = type(variable)
    variable.__class__ = _tracked_class(own)


_BEFORE = "_ncclsync_before"  # an attribute of variables whose reads are tracked


class _Unseen(threading.local):
    """Hold the ids of the variables whose handles this thread takes unseen."""

    ids: frozenset[int] = frozenset()


_UNSEEN = _Unseen()


@contextlib.contextmanager
def _unseen(variable: tf.Variable) -> Iterator[None]:
    """Let this thread take a variable's handle in the body without a call of `before`."""
    kept = _UNSEEN.ids
    _UNSEEN.ids = kept | {id(variable)}
    try:
        yield
    finally:
        _UNSEEN.ids = kept


@functools.cache
def _tracked_class(own: type) -> type:
    """Return a class of variables that is `own` but for the handle, which an object's own attribute cannot hide."""

    def handle(variable: Any) -> tf.Tensor:
        before = vars(variable).get(_BEFORE)
        if before is not None and id(variable) not in _UNSEEN.ids:
            with _unseen(variable):
                before()
        return handle_of(variable)

    def put(variable: Any, value: tf.Tensor) -> None:
        vars(variable)["_handle"] = value

    device = property(lambda variable: handle_of(variable).device)
    return type(own)(own.__name__, (own,), {"_handle": property(handle, put), "device": device, "__doc__": own.__doc__})


def track_writes(variable: tf.Variable, wrap: Callable[[Callable], Callable]) -> None:
    """Replace each method by which Python writes a variable by `wrap(method)`; `wrap` must not hold the variable."""
    for name in VARIABLE_WRITERS:
        if hasattr(variable, name):
            setattr(variable, name, wrap(_method_of(variable, name)))


def untrack(variable: tf.Variable) -> None:
    """Undo `track_reads` and `track_writes`."""
    for name in VARIABLE_WRITERS:
        vars(variable).pop(name, None)
    if vars(variable).pop(_BEFORE, None) is not None:
        variable.__class__ = type(variable).__base__


def read_by(tensor: tf.Tensor, read: Callable[..., Any]) -> None:
    """Let `read` give an eager tensor's numbers: it is called with a function that brings them to the host.

    The reader may be any method of the tensor: `numpy()`, `float()`, `str()`. `np.array(tensor)` calls none, nor do
    ops.
    """
    held = weakref.ref(tensor)  # a reference cycle would keep the tensor's memory until Python's garbage collector runs

    def numbers() -> Any:
        own: Any = held()
        return type(own)._numpy_internal(own)

    tensor._numpy_internal = functools.partial(read, numbers)


def numbers_of(value: Any, **given: Any) -> Any:
    """Return the numbers of a tensor that is read by a function, to which `given` goes, too; None for anything else."""
    read = vars(value).get("_numpy_internal") if isinstance(value, tf.Tensor) else None
    return None if read is None else read(**given)


def shared_function(
    body: Callable, signature: Sequence[tf.TensorSpec], jit_compile: bool, *, meets_in_caller: bool = False
) -> Any:
    """Return `body` as a ConcreteFunction that TensorFlow optimises alike for all of its callers.

    If TensorFlow inlined the function, or specialised it for a caller's constants and used results, each caller's copy
    would be optimised by itself and rounded differently: towers would drift apart by the last bit. `tf.function` does
    not offer "_nospecialize", which TensorFlow's optimiser reads.
    Source: tensorflow/core/grappler/optimizers/function_optimizer.cc.

    If a function's ops are on several devices, its tensors go between them by a rendezvous of the function, which ends
    with it. If another call of the same graph fails at that moment, TensorFlow still uses that rendezvous: the process
    crashes, or hangs. The caller's rendezvous ends with the whole graph.
    Source: tensorflow/core/framework/local_rendezvous.cc, RecvAsync: the callback of a cancellation owns nothing.

    Args:
        body, signature: a function of tensors, and their specs.
        jit_compile: whether XLA compiles it.
        meets_in_caller: whether its tensors go from device to device by its caller's rendezvous. That identifies a
            tensor by its devices and the op that makes it: two calls on the same devices must not run at once.
    """
    attributes = {"_noinline": True, "_nospecialize": True}
    if meets_in_caller:
        attributes["shared_rendezvous"] = True

    def named(*args: Any) -> Any:
        with tf.name_scope("called"):  # so that no tensor of the caller's has the same name
            return body(*args)

    thread = threading.get_ident()

    def return_itself(mark: Callable, dependencies: Any, result: tf.Tensor) -> tf.Tensor:
        """Make no identity, which would wait for all side effects: a call ends after them anyway."""
        return result if threading.get_ident() == thread else mark(dependencies, result)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_wrap_lock)
        lists = {name: known for name, known in vars(function_attributes).items() if name.endswith("_ALLOWLIST")}
        allowed = {name: known | attributes.keys() for name, known in lists.items()}
        stack.enter_context(members_replaced(function_attributes, **allowed))
        if not (jit_compile or meets_in_caller):
            dependencies = [auto_control_deps.AutomaticControlDependencies]
            stack.enter_context(methods_wrapped(dependencies, "mark_as_return", return_itself))
        return tf.function(
            named if meets_in_caller else body,
            input_signature=signature,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes=attributes,
        ).get_concrete_function()


@contextlib.contextmanager
def made_apart() -> Iterator[None]:
    """Run outside of a function that is traced: for variables made here `tf.function` does not trace it again.

    `tf.init_scope` alone leaves `tf.function` in charge of variables.
    """
    with tf.init_scope(), members_replaced(framework_ops.get_default_graph()._thread_local, _variable_creator_stack=[]):
        yield


@contextlib.contextmanager
def calling_segments() -> Iterator[None]:
    """Call functions, in this thread, with `config_of_segments`. `tf.config.optimizer` would do it in all threads."""
    context = eager_context.context()
    usual = context.function_call_options
    config = config_of_segments(usual.as_attrs()["config_proto"])
    context.function_call_options = eager_context.FunctionCallOptions(
        usual.executor_type, tf.compat.v1.ConfigProto.FromString(config)
    )
    try:
        yield
    finally:
        context.function_call_options = usual


def config_of_segments(config: bytes) -> bytes:
    """Return a function call's "config_proto" for what a tower computes.

    TensorFlow's optimiser then makes no sums of three and more tensors of sums of two: their order would be open
    (`program/ordered_sums.py`). It goes over a function once, unless the user has chosen how often: a step has many
    segments, and a second time finds little.
    Source: tensorflow/core/grappler/optimizers/arithmetic_optimizer.cc, AddOpsRewriteStage; meta_optimizer.cc.
    """
    changed = tf.compat.v1.ConfigProto.FromString(config)
    options = changed.graph_options.rewrite_options
    options.arithmetic_optimization = options.OFF
    if options.meta_optimizer_iterations == options.DEFAULT_NUM_ITERS:
        options.meta_optimizer_iterations = options.ONE
    return changed.SerializeToString(deterministic=True)


@contextlib.contextmanager
def open_branches() -> Iterator[None]:
    """Let a trace for XLA leave the rows open that a branch gives to its gradient where the branch is not taken.

    XLA takes no open length there; `crossing.close_branches` closes it after the cut.
    """
    with methods_wrapped([cond_v2], "_convert_dynamic_dimension_to_zero", lambda _, shape: shape):
        yield


def padded(tensor: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Return a tensor as long along each of these axes as XLA knows that it may be, in a graph that XLA compiles."""
    for axis in axes:
        tensor = gen_xla_ops.xla_remove_dynamic_dimension_size(tensor, axis)
    return tensor


def unpadded(tensor: tf.Tensor, axes: Sequence[int], lengths: Any) -> tf.Tensor:
    """Return a tensor of `padded` with its own lengths along these axes; `lengths` has one for each axis."""
    for axis in axes:
        tensor = gen_xla_ops.xla_set_dynamic_dimension_size(tensor, axis, lengths[axis])
    return tensor


def own_sentence(error: tf.errors.OpError) -> str | None:
    """Return the sentence of ncclsync's in an error of a failed op or Python function; None without one."""
    found = _OWN_SENTENCE.search(error.message)
    if found is None:
        return None
    # An assertion's message has each of its tensors in brackets, and escapes quotes.
    return re.sub(r"\]+ \[+", " ", found[1]).rstrip("]' ").replace("\\'", "'")


def refused_by_xla(error: BaseException) -> str:
    """Return why XLA has not converted a function whose ops it all knows; "" if an error is another one."""
    if not isinstance(error, tf.errors.OpError) or "tf2xla conversion failed" not in error.message:
        return ""
    *_, why = filter(None, map(str.strip, error.message.partition("Stack trace for op definition")[0].splitlines()))
    return re.sub(r"^\(\d+\) \w+:\s*", "", why)


def name_lines(error: tf.errors.OpError, calls_of: Callable[[str], str | None]) -> None:
    """Let an error name the lines of the op that failed, given its name in the trace, where TensorFlow knows none."""
    # A segment is called by an op of its name, or by Python.
    node = re.search(r"\{\{node (?:(?:\S*/)?segment\w*/)?(\S+)\}\}", error.message)
    calls = calls_of(node[1]) if node else None
    if calls is not None:
        error._message = error.message.replace("<stack traces unavailable>", calls)


def autograph_converted(function: Callable) -> Callable:
    """Return `function` as `tf.function` would trace it: through autograph, if it has source to convert.

    Also where autograph is off, as in all functions that Keras calls.
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


class SameDataset(tf.data.Dataset):
    """Give the elements of another `tf.data.Dataset`: a base of dataset classes."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        """Give the elements of `dataset`."""
        self._given = dataset
        super().__init__(dataset._variant_tensor)

    @property
    def element_spec(self) -> Any:
        """Return the structure of an element."""
        return self._given.element_spec

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._given]
