"""Our own TensorFlow kernels for the host's memory: all-reduce."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
from parity import data, mlp, on_towers

from ncclsync.communicator import native
from ncclsync.errors import NcclError, NcclSyncError
from ncclsync.ops import host_ops

X, Y = data(rows=24)
ROOT = pathlib.Path(__file__).parents[2]
ONE = tf.constant(1.0, tf.float64)


@pytest.fixture(autouse=True, scope="module")
def _registered():
    host_ops.register()


# The all-reduce


def towers_values(dtype, shapes, towers):
    """[N][V] small whole numbers, exact in every dtype."""
    return [[np.arange(np.prod(s)).reshape(s) % 4 + i for s in shapes] for i in range(towers)], [
        [tf.cast(tf.constant(np.arange(np.prod(s)).reshape(s) % 4 + i, tf.int32), dtype) for s in map(tuple, shapes)]
        for i in range(towers)
    ]


@pytest.mark.parametrize("dtype", sorted(native.DTYPES))
def test_all_reduce(dtype):
    """Every operation, of tensors of no, one and many elements, more than a thread takes at a time."""
    shapes = [(0, 3), (), (3, 5), (70_001,)]
    arrays, tensors = towers_values(dtype, shapes, 3)
    for op, function in (("sum", np.add), ("prod", np.multiply), ("max", np.maximum), ("min", np.minimum)):
        results = host_ops.all_reduce(tensors, [ONE, ONE, ONE], op)
        for result, parts in zip(results, zip(*arrays, strict=True), strict=True):
            assert result.dtype.name == dtype and result.shape == parts[0].shape
            np.testing.assert_array_equal(tf.cast(result, tf.float64), function.reduce(parts))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_weights(dtype):
    """A tower's tensors are multiplied by its weight; with a weight of 0 even its NaN counts nothing."""
    tensors = [[tf.constant([1.0, 2.0, 3.0], dtype)], [tf.fill([3], tf.constant(np.nan, dtype))]]
    tensors += [[tf.constant([8.0, 0.0, -4.0], dtype)]]
    weights = [tf.constant(w, tf.float64) for w in (0.5, 0.0, 0.25)]
    (result,) = host_ops.all_reduce(tensors, weights, "sum")
    np.testing.assert_array_equal(tf.cast(result, tf.float64), [2.5, 1.0, 0.5])
    (largest,) = host_ops.all_reduce(tensors, [ONE, 0 * ONE, ONE], "max")
    np.testing.assert_array_equal(tf.cast(largest, tf.float64), [8.0, 2.0, 3.0])


def test_weights_of_large_tensors():
    """Bitwise what TensorFlow computes, also where the result is too large for a cache."""
    rng = np.random.default_rng(0)
    tensors = [[tf.constant(rng.standard_normal(2_200_003), tf.float32)] for _ in range(4)]
    weights = [0.3, 0.0, 1.0, 0.7]
    tensors[1] = [tf.fill([2_200_003], np.nan)]
    (result,) = host_ops.all_reduce(tensors, [tf.constant(w, tf.float64) for w in weights], "sum")
    first, _, third, fourth = (tensor * weight for (tensor,), weight in zip(tensors, weights, strict=True))
    np.testing.assert_array_equal(result, first + third + fourth)


@pytest.mark.parametrize(
    "shapes, weights, dtype, message",
    [
        ([(3,), (4,)], (1.0, 1.0), "float32", "3 elements on tower 0, 4 on tower 1"),
        ([(3,), (3,)], (0.0, 0.0), "float32", "Expected a tower with samples"),
        ([(3,), (3,)], (1.0, 0.5), "int32", "Expected weights of 0 or 1"),
    ],
)
def test_all_reduce_refuses(shapes, weights, dtype, message):
    """What cannot be reduced is an error of the step, which says what it received."""
    tensors = [[tf.zeros(shape, dtype)] for shape in shapes]
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        host_ops.all_reduce(tensors, [tf.constant(w, tf.float64) for w in weights], "sum")


def test_all_reduce_writes_no_input_that_anybody_else_holds():
    """An input's memory becomes the result's only where nobody else has it, no variable and no other op."""
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def step():
        own, shared = variable + 1.0, variable * 2.0
        (first,) = host_ops.all_reduce([[variable.read_value()], [own]], [ONE, ONE], "sum")
        (second,) = host_ops.all_reduce([[shared], [shared]], [ONE, ONE], "sum")
        return first, second, shared

    for _ in range(3):
        first, second, shared = step()
        np.testing.assert_array_equal(first, [3.0, 5.0])
        np.testing.assert_array_equal(second, [4.0, 8.0])
        np.testing.assert_array_equal(shared, [2.0, 4.0])
    np.testing.assert_array_equal(variable, [1.0, 2.0])


def test_all_reduce_is_no_side_effect():
    """TensorFlow may leave one out that nobody uses; an op that was registered as stateful it may not."""

    @tf.function
    def unused(x):
        host_ops.all_reduce([[x], [x]], [ONE, ONE], "sum")
        return x

    graph = unused.get_concrete_function(tf.TensorSpec([2])).graph
    (op,) = [op for op in graph.get_operations() if op.type == "NcclsyncAllReduce"]
    assert op not in graph.control_outputs


def state_of(model):
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


# Where there is none


def test_without_our_kernels(monkeypatch):
    """A TensorFlow that does not take them is an error with its reason, before any tower is made."""

    def refusing(path):
        raise NcclError(2, "dlsym", "TensorFlow has no function TF_NewKernelBuilder", "ncclSystemError")

    monkeypatch.setattr(native, "register_tensorflow", refusing)
    host_ops.register.cache_clear()
    with pytest.raises(NcclSyncError, match=r"takes ncclsync's ops.*where dlsym .*no function TF_NewKernelBuilder"):
        on_towers(mlp, 4)
    monkeypatch.undo()
    host_ops.register()


def test_declarations_are_tensorflows():
    """What csrc/tf/api.h declares of TensorFlow's C API is what the installed headers declare."""
    source = (ROOT / "csrc" / "tf" / "api.h").read_text(encoding="utf-8")
    table = source[source.index("#define NCS_TF_CALLS(X)") : source.index("#define NCS_TF_DECLARE")]
    ours = re.findall(r"X\(([\w ]+\*?), (TF_\w+),\s*\((.*?)\)\)\s*(?=X\(|$)", table.replace("\\", ""), re.S)
    assert len(ours) == table.count("X(")
    headers = pathlib.Path(tf.sysconfig.get_include(), "tensorflow", "c")
    text = "".join(
        re.sub(r"//[^\n]*", "", (headers / name).read_text(encoding="utf-8"))
        for name in ("kernels.h", "ops.h", "tf_status.h", "tf_tensor.h")
    )
    for result, name, arguments in ours:
        found = re.search(rf"TF_CAPI_EXPORT\s+(?:extern\s+)?([\w ]+\*?)\s*\b{name}\((.*?)\);", text, re.S)
        assert found, name
        assert [types(result), *types(arguments)] == [types(found[1]), *types(found[2] or "void")], name


def types(declaration):
    """The types of a list of parameters, without their names, in one spelling."""
    flat = re.sub(r"\s+", " ", declaration).strip()
    flat = re.sub(r"\bTF_(DataType|Code)\b", "int", flat).replace("extern ", "")
    found = []
    for one in re.split(r",(?![^()]*\))", flat):
        one = re.sub(r"\(\*\w+\)", "(*)", one.strip())
        one = re.sub(r"(?<=[\w*]) ?\b(?!int\b|void\b|char\b|int64_t\b|int32_t\b|size_t\b|TF_)\w+$", "", one)
        one = re.sub(r"\b(ctx|context|status|kernel)\b", "", one)
        found.append(re.sub(r"\s*([*(),])\s*", r"\1", one).strip())
    return found
