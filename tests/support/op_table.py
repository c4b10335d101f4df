"""Example calls of ops: what `test_op_types` runs on towers and on one device.

An example is a call of some data inputs, whose shapes are told in terms of the batch's rows: "n". Each of
these is given in turn in each placement that its shape has; what is no data (axes, permutations) stands
in the call. `UNREACHABLE` tells, for each op type that has a gradient and no example, the reason.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.linalg.sparse import sparse_csr_matrix_ops as csr  # public ops lack handle data

raw = tf.raw_ops


@dataclasses.dataclass(frozen=True)
class Input:
    """What an example takes.

    Attributes:
        shape: an axis each: a number, "n" (the batch's rows), "2n" (two for each sample), "3n", …
        kind: its dtype and range; see `value`.
        only: the placements that it is given in, if not all that its shape has.
    """

    shape: tuple[int | str, ...]
    kind: str
    only: tuple[str, ...] = ()

    def dims(self, rows: int) -> tuple[int, ...]:
        """The shape for a batch of `rows` rows."""
        return tuple(d if isinstance(d, int) else int(d[:-1] or 1) * rows for d in self.shape)

    def value(self, rows: int, seed: int) -> np.ndarray:
        """Values of this kind, of the shape for `rows` rows."""
        rng = np.random.default_rng([seed, rows, *self.kind.encode()])
        return _KINDS[self.kind](rng, self.dims(rows))


def _distinct(rng, shape):
    """No two alike, so that an order of them has no ties."""
    return (rng.permutation(int(np.prod(shape))).reshape(shape) + 1.0) / (np.prod(shape) + 1.0) - 0.4


def _spd(rng, shape):
    a = rng.normal(size=shape)
    return a @ np.swapaxes(a, -1, -2) + 2.0 * np.eye(shape[-1])


def _square(rng, shape):
    return rng.normal(size=shape) * 0.3 + 2.0 * np.eye(shape[-1])


def _complex(rng, shape):
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


def _integers(low, high, dtype):
    return lambda rng, shape: rng.integers(low, high, size=shape).astype(dtype)


def _words(rng, shape):
    return np.array([b"3", b"1.5", b"20", b"7"], object)[rng.integers(0, 4, size=shape)]


_KINDS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "f8": lambda rng, shape: rng.uniform(-0.9, 0.9, size=shape),
    "f4": lambda rng, shape: rng.uniform(-0.9, 0.9, size=shape).astype("f4"),
    "positive": lambda rng, shape: rng.uniform(0.2, 0.9, size=shape),
    "positive4": lambda rng, shape: rng.uniform(0.2, 0.9, size=shape).astype("f4"),
    "above1": lambda rng, shape: rng.uniform(1.2, 3.0, size=shape),
    "distinct": _distinct,
    "distinct4": lambda rng, shape: _distinct(rng, shape).astype("f4"),
    "sorted": lambda rng, shape: np.sort(_distinct(rng, shape), axis=-1),
    "spd": _spd,
    "square": _square,
    "triangular": lambda rng, shape: np.tril(_square(rng, shape)),
    "symmetric": lambda rng, shape: _spd(rng, shape),
    "complex": _complex,
    "complex64": lambda rng, shape: _complex(rng, shape).astype("c8"),
    "bool": lambda rng, shape: rng.uniform(size=shape) < 0.5,
    "i1": _integers(0, 2, "i4"),
    "i2": _integers(0, 3, "i4"),
    "i3": _integers(0, 4, "i4"),
    "i8": _integers(0, 3, "i8"),
    "int": _integers(-9, 10, "i4"),
    "shifts": _integers(1, 5, "i4"),
    "nonzero": _integers(1, 10, "i4"),
    # Labels of segments: they grow with the rows, the last is 2.
    "segments": lambda rng, shape: np.sort(np.append(rng.integers(0, 3, size=shape[0] - 1), 2)).astype("i4"),
    "permutation": lambda rng, shape: rng.permutation(shape[0]).reshape(shape).astype("i4"),
    "row": lambda rng, shape: rng.integers(0, shape[0], size=shape).astype("i4"),
    "lengths": _integers(1, 4, "i4"),
    "words": _words,
    "boxes": lambda rng, shape: np.concatenate(
        [rng.uniform(0, 0.4, (*shape[:-1], 2)), rng.uniform(0.5, 1, (*shape[:-1], 2))], -1
    ).astype("f4"),
}


def given(shape: str, kind: str = "f8", only: str = "") -> Input:
    """An input of a shape such as "n 3", or "" for a scalar; `only`: placements such as "S0 R"."""
    return Input(tuple(int(d) if d.isdigit() else d for d in shape.split()), kind, tuple(only.split()))


def variable(shape: str) -> Input:
    """An input that is a variable itself, not what is read from it."""
    return given(shape, only="V")


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """A call of an op.

    Attributes:
        op: the op type that it is an example of, or what the program is.
        call: a function of the tensors, and of the batch's rows, a Python number, if `sized`.
        inputs: of the call.
        index: which example of this op it is.
        sized: whether the call takes `rows=`.
        differentiable: whether its gradient is asked for.
    """

    op: str
    call: Callable[..., Any]
    inputs: tuple[Input, ...]
    family: str
    index: int = 0
    sized: bool = False
    differentiable: bool = True

    @property
    def name(self) -> str:
        """The op type, with a number if it has several examples."""
        return f"{self.op}.{self.index}" if self.index else self.op


EXAMPLES: list[Example] = []
_family = ""


def _begin(family: str) -> None:
    """What is added from now on belongs to a family: it is tested together."""
    global _family
    _family = family


def add(op: str, call: Callable[..., Any], *shapes: Input | str, **options: Any) -> None:
    """Add an example; a string is a shape of float64."""
    inputs = tuple(given(one) if isinstance(one, str) else one for one in shapes)
    index = sum(one.op == op for one in EXAMPLES)
    EXAMPLES.append(Example(op, call, inputs, _family, index, **options))


def add_raw(ops: str, kinds: Iterable[str], names: str, shapes: Iterable[str], **attributes: Any) -> None:
    """Add an example of each of the ops, which take inputs of these kinds under these names."""
    for op in ops.split():
        inputs = [given(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
        add(op, _raw_call(op, names.split(), attributes), *inputs)


def _raw_call(op, names, attributes):
    return lambda *tensors: getattr(raw, op)(**dict(zip(names, tensors, strict=True)), **attributes)


# Where an example has `differentiable=False` though its op type has a gradient, TensorFlow's own gradient
# fails: it
# asks for static shapes (beside it stands an example that has them), or for what the op does not take.

# ---------------------------------------------------------------------------------------------------------
_begin("unary")
# Of "n n", both axes can be the samples'.
SQUARE = ("n n",)
add_raw(
    "Abs Acos Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 Ceil Cos Cosh "
    "Dawsn Erf "
    "Erfc Erfinv Exp Expm1 Floor FresnelCos FresnelSin Log1p Neg Rint Round Sigmoid Sign Sin Sinh Square Tan "
    "Tanh",
    ["f8"],
    "x",
    SQUARE,
)
add_raw(
    "BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Digamma Expint Inv Lgamma Log Ndtri "
    "Reciprocal Rsqrt "
    "Spence Sqrt",
    ["positive"],
    "x",
    SQUARE,
)
add_raw("Acosh", ["above1"], "x", SQUARE)
add_raw("Elu LeakyRelu Relu Relu6 Selu Softplus Softsign", ["f8"], "features", SQUARE)
add_raw("OnesLike ZerosLike", ["f8"], "x", SQUARE)
add_raw("Identity StopGradient", ["f8"], "input", SQUARE)
add("PreventGradient", lambda x: raw.PreventGradient(input=x, message="no"), "n n", differentiable=False)
add("IdentityN", lambda x, y: raw.IdentityN(input=[x, y]), "n n", "n 2")
add("Cast", lambda x: raw.Cast(x=x, DstT=tf.float32), "n n")
add("Cast", lambda x: raw.Cast(x=x, DstT=tf.float64), given("n n", "int"))
add("Cast", lambda x: raw.Cast(x=x * 20.0, DstT=tf.int32), "n n")
add("Cast", lambda x: raw.Cast(x=x, DstT=tf.float64), given("n n", "bool"))
add("CheckNumerics", lambda x: tf.debugging.check_numerics(x, "bad"), "n n")
add("CheckNumericsV2", lambda x: raw.CheckNumericsV2(tensor=x, message="bad"), "n n")
add("EnsureShape", lambda x: tf.ensure_shape(x, [None, None]), "n n")
add("EnsureShape", lambda x, rows: tf.ensure_shape(x, [rows, 3]), "n 3", sized=True)
add("PlaceholderWithDefault", lambda x: raw.PlaceholderWithDefault(input=x, shape=[None, None]), "n n")
add("FakeQuantWithMinMaxArgs", lambda x: raw.FakeQuantWithMinMaxArgs(inputs=x), given("n 3", "f4"))
add(
    "FakeQuantWithMinMaxArgsGradient",
    lambda g, x: raw.FakeQuantWithMinMaxArgsGradient(gradients=g, inputs=x),
    given("n 3", "f4"),
    given("n 3", "f4"),
)
add("ClipByValue", lambda x: raw.ClipByValue(t=x, clip_value_min=-0.3, clip_value_max=0.4 + 0 * x[0, 0]), "n n")
add("LogSoftmax", lambda x: raw.LogSoftmax(logits=x), "n n")
add("Softmax", lambda x: raw.Softmax(logits=x), "n n")
add("Softmax", lambda x: tf.nn.softmax(x, axis=0), "n 3")
add("LogicalNot", lambda x: raw.LogicalNot(x=x), given("n n", "bool"))
add("Invert", lambda x: raw.Invert(x=x), given("n n", "int"))
add("PopulationCount", lambda x: raw.PopulationCount(x=x), given("n n", "int"))
add("Complex", lambda x, y: raw.Complex(real=x, imag=y, Tout=tf.complex128), "n 3", "n 3")
add("Complex", lambda x, y: raw.Complex(real=x, imag=y, Tout=tf.complex128), "n 3", "3")
add_raw("Conj", ["complex"], "input", SQUARE)
add_raw("Real Imag Angle", ["complex"], "input", SQUARE, Tout=tf.float64)
add("ComplexAbs", lambda x: raw.ComplexAbs(x=x, Tout=tf.float64), given("n n", "complex"))
add("Exp", lambda x: tf.exp(x), given("n 3", "complex"))
add("Bitcast", lambda x: tf.bitcast(tf.round(x * 8), tf.int64), "n 3")  # whose sum is the same in any order
add("IsNan", lambda x: tf.math.is_nan(tf.math.log(x)), "n 3")
add("IsFinite", lambda x: tf.math.is_finite(x), "n 3")
add(
    "QuantizeAndDequantizeV2",
    lambda x: raw.QuantizeAndDequantizeV2(input=x, input_min=-1.0 + 0 * x[0, 0], input_max=1.0 + 0 * x[0, 0]),
    "n 3",
)
add(
    "QuantizeAndDequantizeV3",
    lambda x: raw.QuantizeAndDequantizeV3(
        input=x, input_min=-1.0 + 0 * x[0, 0], input_max=1.0 + 0 * x[0, 0], num_bits=8
    ),
    "n 3",
)
add(
    "QuantizeAndDequantizeV4",
    lambda x: raw.QuantizeAndDequantizeV4(
        input=x, input_min=-0.5 + 0 * x[0, 0], input_max=0.5 + 0 * x[0, 0], range_given=True
    ),
    "n 3",
)
add(
    "QuantizeAndDequantizeV4Grad",
    lambda g, x: raw.QuantizeAndDequantizeV4Grad(
        gradients=g, input=x, input_min=tf.constant(-0.5, x.dtype), input_max=tf.constant(0.5, x.dtype)
    )[0],
    "n 3",
    "n 3",
    differentiable=False,
)
add(
    "FakeQuantWithMinMaxVars",
    lambda x, low, high: raw.FakeQuantWithMinMaxVars(inputs=x, min=low - 0.5, max=high),
    given("n 3", "f4"),
    given("", "positive4"),
    given("", "positive4"),
)
add(
    "FakeQuantWithMinMaxVarsPerChannel",
    lambda x, low, high: raw.FakeQuantWithMinMaxVarsPerChannel(inputs=x, min=low - 1.5, max=high),
    given("n 3", "f4"),
    given("3", "positive4"),
    given("3", "positive4"),
)
add(
    "FakeQuantWithMinMaxVarsGradient",
    lambda g, x, low: raw.FakeQuantWithMinMaxVarsGradient(gradients=g, inputs=x, min=low - 1.5, max=0.4),
    given("n 3", "f4"),
    given("n 3", "f4"),
    given("", "positive4"),
)
add(
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    lambda g, x, low: raw.FakeQuantWithMinMaxVarsPerChannelGradient(
        gradients=g, inputs=x, min=low - 1.5, max=[0.4, 0.5, 0.6]
    ),
    given("n 3", "f4"),
    given("n 3", "f4"),
    given("3", "positive4"),
)

# ---------------------------------------------------------------------------------------------------------
_begin("binary")
TWO = ("n n", "n n")
BINARY = "Add AddV2 Sub Mul MulNoNan Maximum Minimum SquaredDifference"
add_raw(BINARY, ["f8", "f8"], "x y", TWO)
add_raw("Div RealDiv DivNoNan FloorDiv FloorMod Xdivy", ["f8", "positive"], "x y", TWO)
add_raw("Pow Xlogy", ["above1", "positive"], "x y", TWO)
add("Zeta", lambda x, q: raw.Zeta(x=x, q=q), given("n 3", "above1"), given("n 3", "positive"))
add_raw("Xlog1py", ["f8", "positive"], "x y", TWO)
add_raw("Atan2", ["f8", "positive"], "y x", TWO)
add_raw("Igamma Igammac", ["above1", "positive"], "a x", TWO)
add("Polygamma", lambda a, x: raw.Polygamma(a=tf.round(a), x=x), given("n 3", "above1"), given("n 3", "positive"))
add_raw("TruncateDiv", ["int", "nonzero"], "x y", TWO)
add_raw("FloorDiv FloorMod", ["int", "nonzero"], "x y", ("n 3", "3"))
add_raw("Add AddV2 Sub Mul Maximum", ["int", "int"], "x y", ("n 3", "n 3"))
add_raw("BitwiseAnd BitwiseOr BitwiseXor", ["int", "int"], "x y", ("n 3", "n 3"))
add_raw("LeftShift RightShift", ["int", "shifts"], "x y", ("n 3", "n 3"))
add_raw("Equal NotEqual Less LessEqual Greater GreaterEqual", ["int", "int"], "x y", ("n n", "n n"))
add_raw("Equal Greater LessEqual", ["f8", "f8"], "x y", ("n 3", "3"))
add_raw("ApproximateEqual", ["f8", "f8"], "x y", ("n 3", "n 3"), tolerance=0.3)
add_raw("LogicalAnd LogicalOr", ["bool", "bool"], "x y", ("n n", "n n"))
add_raw("NextAfter", ["f8", "f8"], "x1 x2", ("n 3", "n 3"))
# Shapes that are broadcast: of fewer axes, of one element, against each other.
for _shapes in (("n 3", "3"), ("n 3", ""), ("n 3", "n 1"), ("3 n", "n"), ("n 1", "n"), ("n 1 3", "n 3"), ("", "n")):
    add_raw("AddV2 Sub Mul Maximum", ["distinct", "f8"], "x y", _shapes)
    add_raw("RealDiv", ["f8", "positive"], "x y", _shapes)
add_raw("SquaredDifference Minimum", ["f8", "f8"], "x y", ("n 1", "1 n"))
add_raw("SquaredDifference Pow", ["positive", "f8"], "x y", ("n 3", "3"))
add("AddN", lambda x, y, z: raw.AddN(inputs=[x, y, z]), "n 3", "n 3", "n 3")
add("AddN", lambda x: raw.AddN(inputs=[x]), "n 3")
add("AccumulateNV2", lambda x, y: raw.AccumulateNV2(inputs=[x, y], shape=[None, 3]), "n 3", "n 3")
add("Betainc", lambda a, b, x: raw.Betainc(a=a, b=b, x=x), *[given("n 3", k) for k in ("above1", "above1", "positive")])
add("Select", lambda c, x, y: raw.Select(condition=c, x=x, y=y), given("n 3", "bool"), "n 3", "n 3")
add("Select", lambda c, x, y: raw.Select(condition=c, x=x, y=y), given("n", "bool"), "n 3", "n 3")
add("SelectV2", lambda c, x, y: raw.SelectV2(condition=c, t=x, e=y), given("n n", "bool"), "n n", "n n")
add("SelectV2", lambda c, x, y: raw.SelectV2(condition=c, t=x, e=y), given("n 1", "bool"), "3", "n 3")
add("SelectV2", lambda c, x, y: raw.SelectV2(condition=c, t=x, e=y), given("", "bool"), "n 3", "")
add(
    "clip_by_value",
    lambda x, a, b: tf.clip_by_value(x, a - 1.0, b),
    "n 3",
    given("3", "positive"),
    given("3", "positive"),
)
add_raw("EluGrad SeluGrad", ["f8", "f8"], "gradients outputs", ("n 3", "n 3"))
add_raw("ReluGrad Relu6Grad LeakyReluGrad SoftplusGrad", ["f8", "f8"], "gradients features", ("n n", "n n"))
add_raw("InvGrad ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad", ["positive", "f8"], "y dy", ("n n", "n n"))
add("BroadcastGradientArgs", lambda x: raw.BroadcastGradientArgs(s0=tf.shape(x), s1=tf.constant([3]))[1], "n 3")
add("BiasAdd", lambda x, b: raw.BiasAdd(value=x, bias=b), "n 4 3", "3")
add("BiasAdd", lambda x, b: raw.BiasAdd(value=x, bias=b), "3 n", "n")
add("BiasAdd", lambda x, b: raw.BiasAdd(value=x, bias=b, data_format="NCHW"), "n 3 2 2", "3")
add("BiasAddV1", lambda x, b: raw.BiasAddV1(value=x, bias=b), "n 4 3", "3")
add("BiasAddGrad", lambda g: raw.BiasAddGrad(out_backprop=g), "n 4 3")
add("BiasAddGrad", lambda g: raw.BiasAddGrad(out_backprop=g), "3 n")
add("Cross", lambda a, b: raw.Cross(a=a, b=b), "n 3", "n 3")

# ---------------------------------------------------------------------------------------------------------
_begin("reductions")
for _axes in ([0], [1], [0, 1], [-1], []):
    for _keep in (False, True):
        for _op in ("Sum", "Mean") if _keep else ("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm"):
            if _axes or _op != "EuclideanNorm":  # whose gradient of no axis is NaN
                add_raw(_op, ["distinct"], "input", ("n n",), axis=_axes, keep_dims=_keep)
add("Sum", lambda x: tf.reduce_sum(x), given("n 3", "int"))
add("Sum", lambda x: tf.reduce_sum(x, [0, 2]), "n 3 n")
add("Sum", lambda x, i: raw.Sum(input=x, axis=i), "n 3", given("", "i1"))
add("Mean", lambda x: tf.reduce_mean(x, [1, 2]), "n 3 n")
add("Mean", lambda x: tf.reduce_mean(x, 0), given("n 3", "int"))
add("Mean", lambda x: tf.reduce_mean(tf.reduce_mean(x, 1)), "n 3")
add("Mean", lambda x: tf.reduce_mean(x), "2n 3")
add("Max", lambda x: tf.reduce_max(x, 0), given("n 3", "int"))
add("All", lambda x: tf.reduce_all(x, 0), given("n 3", "bool"))
add("All", lambda x: tf.reduce_all(x, 1), given("n 3", "bool"))
add("Any", lambda x: tf.reduce_any(x), given("n 3", "bool"))
add("L2Loss", lambda x: tf.nn.l2_loss(x), "n n")
add("ArgMax", lambda x: tf.argmax(x, 0), given("n n", "distinct"))
add("ArgMax", lambda x: tf.argmax(x, 1), given("n n", "distinct"))
add("ArgMin", lambda x: tf.argmin(x, 0), given("n n", "distinct"))
add("ArgMin", lambda x: tf.argmin(x, -1), given("n n", "distinct"))
for _op in ("Cumsum", "Cumprod", "CumulativeLogsumexp"):
    add_raw(_op, ["f8"], "x", ("n n",), axis=0)
    _exclusive = _op != "CumulativeLogsumexp"  # whose first one is infinite
    add_raw(_op, ["f8"], "x", ("n n",), axis=1, exclusive=_exclusive)
    add_raw(_op, ["f8"], "x", ("n n",), axis=0, exclusive=_exclusive, reverse=True)
add("reduce_logsumexp", lambda x: tf.reduce_logsumexp(x, 0), "n 3")
add("reduce_variance", lambda x: tf.math.reduce_variance(x, 0), "n 3")
add("reduce_std", lambda x: tf.math.reduce_std(x), "n 3")
add("moments", lambda x: tf.nn.moments(x, [0]), "n 3")
add("ratio of sums", lambda x, m: tf.reduce_sum(x * m) / tf.reduce_sum(m), "n 3", given("n 3", "positive"))
add("norm", lambda x: tf.norm(x), "n 3")
add("norm of rows", lambda x: tf.linalg.l2_normalize(x, axis=1), "n 3")
add("norm of columns", lambda x: tf.linalg.l2_normalize(x, axis=0), "n 3")
add("clip_by_global_norm", lambda x, y: tf.clip_by_global_norm([x, y], 0.5), "n 3", "2 3")
add(
    "IsotonicRegression",
    lambda x: raw.IsotonicRegression(input=x, output_dtype=tf.float64)[0],
    given("n 4", "distinct"),
    differentiable=False,
)
add("NthElement", lambda x: raw.NthElement(input=x, n=1), given("n n", "distinct"))
add("TopKV2", lambda x: tf.nn.top_k(x, 2), given("n n", "distinct"))
add("TopKV2", lambda x: tf.nn.top_k(x, 2), given("n", "distinct"))
add("ApproxTopK", lambda x: raw.ApproxTopK(input=x, k=2), given("3 5", "distinct4"))
add("ApproxTopK", lambda x: raw.ApproxTopK(input=x, k=2), given("n 5", "distinct4"), differentiable=False)
add("InTopKV2", lambda x, t: tf.math.in_top_k(t, x, 2), given("n 4", "distinct4"), given("n", "i3"))
add("InTopK", lambda x, t: raw.InTopK(predictions=x, targets=t, k=2), given("n 4", "distinct4"), given("n", "i3"))
add(
    "UpperBound",
    lambda x, v: raw.UpperBound(sorted_inputs=x, values=v),
    given("n 4", "sorted"),
    "n 3",
    differentiable=False,
)
add(
    "LowerBound",
    lambda x, v: raw.LowerBound(sorted_inputs=x, values=v),
    given("n 4", "sorted"),
    "n 3",
    differentiable=False,
)
add(
    "HistogramFixedWidth",
    lambda x: tf.histogram_fixed_width(x, [np.float64(-1), np.float64(1)], 5),
    "n 3",
    differentiable=False,
)
add(
    "CombinedNonMaxSuppression",
    lambda b, s: tf.image.combined_non_max_suppression(b[:, :, None], s, 2, 3),
    given("n 4 4", "f4"),
    given("n 4 2", "distinct4"),
    differentiable=False,
)
add(
    "SoftmaxCrossEntropyWithLogits",
    lambda x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y),
    "n 3",
    given("n 3", "positive"),
)
add(
    "SoftmaxCrossEntropyWithLogits",
    lambda x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y),
    "n 3",
    given("1 3", "positive"),
    differentiable=False,
)
add(
    "SoftmaxCrossEntropyWithLogits",
    lambda x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y),
    "3 n",
    given("3 n", "positive"),
)
add(
    "SparseSoftmaxCrossEntropyWithLogits",
    lambda x, y: raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=y),
    "n 3",
    given("n", "i2"),
)

# ---------------------------------------------------------------------------------------------------------
_begin("shapes")
add("Reshape", lambda x: tf.reshape(x, [-1, 6]), "n 2 3")
add("Reshape", lambda x: tf.reshape(x, [tf.shape(x)[0], 6]), "n 2 3")
add("Reshape", lambda x: tf.reshape(x, [tf.shape(x)[0] * 2, 3]), "n 2 3")
add("Reshape", lambda x: tf.reshape(x, [-1, 3]), "n 2 3")
add("Reshape", lambda x: tf.reshape(x, [-1]), "n n")
add("Reshape", lambda x: tf.reshape(x, [2, -1]), "n 2 3")
add("Reshape", lambda x: tf.reshape(x, [6, -1]), "n 2 3")
add("Reshape", lambda x: tf.reshape(x, [1, -1, 3]), "n 2 3")
add("Reshape", lambda x: tf.reshape(x, tf.concat([[-1], tf.shape(x)[2:]], 0)), "n 2 3")
add("Reshape", lambda x, rows: tf.reshape(x, [rows, 6]), "n 2 3", sized=True)
add("Reshape", lambda x, rows: tf.reshape(x, [6, rows]), "n 2 3", sized=True)
add("Reshape", lambda x, rows: tf.reshape(x, [rows, rows, 1]), "n n", sized=True)
add("Reshape", lambda x, y: tf.reshape(x, tf.shape(y)), "n 2 3", "n 6")
add("Reshape", lambda x: tf.reshape(x, [-1, 2, 3]), "2n 3")
for _shape in ("n n", "n n 2", "n 2 n", "2n n", "3 n n", "n 6"):  # rows that each row meets, or its own
    add("Reshape", lambda x: tf.reshape(x, [-1, tf.shape(x)[-1]]), _shape)
    add("Reshape", lambda x: tf.reshape(x, [-1, tf.shape(x)[1]]), _shape)
    add("Reshape", lambda x: tf.reshape(x, [tf.shape(x)[0], -1]), _shape)
    add("Reshape", lambda x, rows: tf.reshape(x, [-1, rows]), _shape, sized=True)
    add("Reshape", lambda x, rows: tf.reshape(x, [-1, rows, 1]), _shape, sized=True)
    add("Reshape", lambda x, rows: tf.reshape(x, [rows, -1]), _shape, sized=True)
add("Reshape", lambda x: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(-x), x), "n n")
add("ExpandDims", lambda x: tf.expand_dims(x, 0), "n n")
add("ExpandDims", lambda x: tf.expand_dims(x, 1), "n n")
add("ExpandDims", lambda x: tf.expand_dims(x, -1), "n n")
add("Squeeze", lambda x: tf.squeeze(x, [1]), "n 1 3")
add("Squeeze", lambda x: tf.squeeze(x, [0]), "1 n 3")
add("Squeeze", lambda x: tf.squeeze(x, [0, 2]), "1 n 1 2")
add("Transpose", lambda x: tf.transpose(x), "n n")
add("Transpose", lambda x: tf.transpose(x, [0, 2, 1]), "n 2 3")
add("Transpose", lambda x: tf.transpose(x, [2, 0, 1]), "n 2 n")
add("ConjugateTranspose", lambda x: tf.transpose(x, conjugate=True), given("n n", "complex"))
add("Shape", lambda x: tf.shape(x), "n n")
add("Shape", lambda x: tf.shape(x, tf.int64)[0], "n 3")
add("ShapeN", lambda x, y: tf.shape_n([x, y]), "n n", "2 n")
add("Size", lambda x: tf.size(x), "n 3")
add("Rank", lambda x: raw.Rank(input=x), "n 3")
add("sum over rows by hand", lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], x.dtype), "n 3")
add("sum over size", lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), x.dtype), "n n")
add("Fill", lambda x: x * tf.fill(tf.shape(x), x[0, 0]), "n 3")
add("Fill", lambda x: tf.fill([tf.shape(x)[0], 2], tf.reduce_max(x)), "n 3")
add("Fill", lambda x: tf.ones([tf.shape(x)[0]], x.dtype) * tf.reduce_sum(x, 1), "n 3")
add("Range", lambda x: x * tf.cast(tf.range(tf.shape(x)[0])[:, None], x.dtype), "n 3")
add("Range", lambda x: tf.range(0, tf.shape(x)[0], 2), "n 3")
add("Range", lambda x: tf.range(tf.shape(x)[0] - 1, -1, -1), "n 3")
add("Range", lambda x: tf.range(tf.shape(x)[0], tf.shape(x)[0] * 2), "n 3")
add("LinSpace", lambda x, y: raw.LinSpace(start=x, stop=y, num=4), "", "", differentiable=False)
add("linspace", lambda x, y: tf.linspace(x, y, 4), "n", "n")
add("linspace", lambda x: tf.linspace(tf.constant(0.0, x.dtype), tf.reduce_sum(x), tf.shape(x)[0]), "n")
add("eye", lambda x: tf.eye(tf.shape(x)[0], dtype=x.dtype) - x, "n n")
add("Fill", lambda x: tf.cumsum(tf.fill(tf.shape(x), tf.reduce_sum(x))), "n 3")
add("Fill", lambda x: tf.cumsum(2.0 * tf.ones([tf.shape(x)[0], 1], x.dtype)) * x, "n 3")
add("Fill", lambda x: tf.linalg.set_diag(tf.fill([tf.shape(x)[0]] * 2, x[0, 0]), x[0]), "n n")
add("BroadcastTo", lambda x: tf.cumsum(tf.broadcast_to(x[:1], tf.shape(x))) * x, "n 3")
add("BroadcastTo", lambda x: tf.cumsum(tf.broadcast_to(x, [tf.shape(x)[0], 4])), "n 1")
add("BroadcastTo", lambda x: tf.broadcast_to(x, [4, *tf.unstack(tf.shape(x))]), "n 3")
add("BroadcastTo", lambda x: tf.broadcast_to(x, [tf.shape(x)[0], 4]), "n 1")
add("BroadcastTo", lambda x, y: tf.broadcast_to(y, tf.shape(x)), "n 3", "3")
add("BroadcastTo", lambda x: tf.broadcast_to(x[None], [tf.shape(x)[0], tf.shape(x)[0]]), "n")
add("Tile", lambda x: tf.tile(x, [1, 2]), "n n")
add("Tile", lambda x: tf.tile(x, [2, 1]), "n n")
add("Tile", lambda x: tf.tile(x[:, None], [1, tf.shape(x)[0], 1]), "n 3")
add("Tile", lambda x: tf.tile(x[:1], [tf.shape(x)[0], 1]), "n 3")
add("repeat", lambda x: tf.repeat(x, 2, axis=0), "n 3")
add("repeat", lambda x: tf.repeat(x, 2, axis=1), "n 3")
add("repeat", lambda x, i: tf.repeat(x, i, axis=0), "n 3", given("n", "i2"))
add("Concat", lambda x, y: raw.Concat(concat_dim=0, values=[x, y]), "n 3", "n 3")
add("ConcatV2", lambda x, y: tf.concat([x, y], 0), "n n", "n n")
add("ConcatV2", lambda x, y: tf.concat([x, y], 1), "n n", "n n")
add("ConcatV2", lambda x, y: tf.concat([x, y], -1), "n 3", "n 2")
add("ConcatV2", lambda x, y: tf.concat([y, x], 0), "n 3", "2 3")
add("two views", lambda x: tf.reshape(tf.concat([x, 2.0 * x], 0), [2, -1, 3]), "n 3")
add("ConcatOffset", lambda x, y: raw.ConcatOffset(concat_dim=1, shape=[tf.shape(x), tf.shape(y)]), "n 3", "n 2")
add("Pack", lambda x, y: tf.stack([x, y], 0), "n 3", "n 3")
add("Pack", lambda x, y: tf.stack([x, y], 1), "n n", "n n")
add("Pack", lambda x, y: tf.stack([x, y], -1), "n 3", "n 3")
add("Unpack", lambda x: tf.unstack(x, axis=1), "n 3")
add("Unpack", lambda x, rows: tf.unstack(x, rows, axis=0), "n 3", sized=True)
add("Split", lambda x: tf.split(x, 2, axis=1), "n 4")
add("Split", lambda x: tf.split(x, 2, axis=0), "2n 3")
add("Split", lambda x: tf.split(x, 2, axis=0), "4 n")
add("SplitV", lambda x: tf.split(x, [1, 3], axis=1), "n 4")
add("SplitV", lambda x: tf.split(x, [1, -1], axis=0), "n 3")
add("Pad", lambda x: tf.pad(x, [[0, 0], [1, 2]]), "n n")
add("Pad", lambda x: tf.pad(x, [[1, 2], [0, 0]]), "n n")
add("PadV2", lambda x: tf.pad(x, [[0, 0], [1, 2]], constant_values=0.5 + 0 * x[0, 0]), "n n")
add("PadV2", lambda x: tf.pad(x, [[1, 0], [0, 2]], constant_values=0.5), "n 3")
add("MirrorPad", lambda x: tf.pad(x, [[0, 0], [1, 1]], "REFLECT"), "n n")
add("MirrorPad", lambda x: tf.pad(x, [[1, 1], [0, 0]], "SYMMETRIC"), "n 3")
add("MirrorPadGrad", lambda x: raw.MirrorPadGrad(input=x, paddings=[[0, 0], [1, 1]], mode="SYMMETRIC"), "n 4")
add(
    "MirrorPadGrad",
    lambda x: raw.MirrorPadGrad(input=tf.concat([x, x], 0), paddings=[[1, 1], [0, 0]], mode="SYMMETRIC"),
    "n 4",
)
add("ReverseV2", lambda x: tf.reverse(x, [0]), "n n")
add("ReverseV2", lambda x: tf.reverse(x, [1]), "n n")
add("ReverseV2", lambda x: tf.reverse(x, [-2]), "n 3")
add("Reverse", lambda x: raw.Reverse(tensor=x, dims=[True, False]), "n 3")
add("Reverse", lambda x: raw.Reverse(tensor=x, dims=[False, True]), "n 3")
add("ReverseSequence", lambda x, i: tf.reverse_sequence(x, i, seq_axis=1, batch_axis=0), "n 4 2", given("n", "lengths"))
add("ReverseSequence", lambda x, i: tf.reverse_sequence(x, i, seq_axis=0, batch_axis=1), "4 n", given("n", "lengths"))
add(
    "ReverseSequence", lambda x, i: tf.reverse_sequence(x, i % 2 + 1, seq_axis=0, batch_axis=1), "n 4", given("4", "i2")
)
add("Roll", lambda x: tf.roll(x, 1, 0), "n n")
add("Roll", lambda x: tf.roll(x, 2, 1), "n n")
add("Roll", lambda x: tf.roll(x, [1, -1], [0, 1]), "n 3")
add("Slice", lambda x: tf.slice(x, [0, 1], [-1, 2]), "n 3")
add("Slice", lambda x: tf.slice(x, [1, 0], [1, 3]), "n 3")
add("Slice", lambda x: tf.slice(x, [0, 0], [tf.shape(x)[0], 2]), "n 3")
add("Slice", lambda x: tf.slice(x, [0, 0], [tf.shape(x)[0] - 1, 3]), "n 3")
for _slice in (
    lambda x: x[:],
    lambda x: x[0],
    lambda x: x[-1],
    lambda x: x[:1],
    lambda x: x[1:],
    lambda x: x[:-1],
    lambda x: x[-1:],
    lambda x: x[::2],
    lambda x: x[1::2],
    lambda x: x[::-1],
    lambda x: x[:, 0],
    lambda x: x[:, 1:],
    lambda x: x[:, :-1],
    lambda x: x[..., 0],
    lambda x: x[..., ::-1],
    lambda x: x[0, ...],
    lambda x: x[..., None],
    lambda x: x[None],
    lambda x: x[:, None],
    lambda x: x[None, :, 0],
    lambda x: x[tf.newaxis, 1:, None, ..., :2],
    lambda x: x[: tf.shape(x)[0] // 2],
    lambda x: x[tf.shape(x)[0] // 2 :],
    lambda x: x[0 : tf.shape(x)[0]],
    lambda x: x[1, 0],
    lambda x: x[1:, 1:],
    lambda x: x[:1, None],
    lambda x: x[0, 1:, None],
):
    add("StridedSlice", _slice, "n n")
for _slice in (lambda x: x[::2], lambda x: x[1:2], lambda x: x[:2:2], lambda x: x[1:3], lambda x: x[1]):
    add("StridedSlice", _slice, "2n 3")
add("StridedSlice", lambda x: tf.strided_slice(x, [1], [2], begin_mask=1, shrink_axis_mask=1), "2n 3")
add("StridedSlice", lambda x: x[:, 1], "3 2n")
add("StridedSlice", lambda x, i: x[: i + 1], "n 3", given("", "i1"))
for _slice in (  # of one batch after another: by counts of rows, and beside them
    lambda x, n: x[:n],
    lambda x, n: x[n:],
    lambda x, n: x[n : 2 * n],
    lambda x, n: x[None, : 2 * n, 1:],
    lambda x, n: x[2 * n :, 0],
    lambda x, n: x[n : 4 * n],
    lambda x, n: x[n // 2 :],
    lambda x, n: x[1:n],
    lambda x, n: x[n::2],
    lambda x, n: x[: 2 * n - 1],
    lambda x, n: x[:-n],
    lambda x, n: x[:1],
    lambda x, n: tf.transpose(x)[..., n:],
    lambda x, n: tf.transpose(x)[:, None, : 2 * n],
    lambda x, n: raw.StridedSlice(input=x, begin=[n, 0], end=[n, 2], strides=[1, 1], begin_mask=1),
    lambda x, n: raw.StridedSlice(input=x, begin=[n, 0], end=[n, 2], strides=[1, 1], end_mask=1),
):
    add("StridedSlice", lambda x, cut=_slice: cut(tf.concat([x, 2.0 * x, x * x], 0), tf.shape(x)[0]), "n 3")
    add("StridedSlice", lambda x, cut=_slice: cut(tf.concat([x, 2.0 * x, x * x], 0), tf.shape(x)[0]), "2n 3")
add("StridedSlice", lambda x: tf.concat([x, 2.0 * x], 0)[tf.shape(x)[0] // 2 :], "2n 3")
add("StridedSlice", lambda x, y: tf.concat([x, y], 0)[tf.shape(x)[0] :], "n 3", "2n 3")
add("StridedSlice", lambda x: x[: tf.shape(x)[0], : tf.shape(x)[0]], "n n")
add("StridedSlice", lambda x: x[:, tf.shape(x)[0] :], "n 2n")
add("shift by a slice", lambda x: x[1:] - x[:-1], "n 3")
add(
    "StridedSliceGrad",
    lambda g: raw.StridedSliceGrad(
        shape=tf.shape(g) + tf.constant([0, 1]),
        begin=[0, 1],
        end=[0, 0],
        strides=[1, 1],
        dy=g,
        begin_mask=1,
        end_mask=3,
    ),
    "n 3",
)
add(
    "StridedSliceGrad",
    lambda g: raw.StridedSliceGrad(
        shape=tf.shape(g) + tf.constant([1, 0]),
        begin=[1, 0],
        end=[0, 0],
        strides=[1, 1],
        dy=g,
        begin_mask=2,
        end_mask=3,
    ),
    "n 3",
)
add(
    "TensorStridedSliceUpdate",
    lambda x, v: raw.TensorStridedSliceUpdate(
        input=x, begin=[0, 1], end=[0, 3], strides=[1, 1], value=v, begin_mask=1, end_mask=1
    ),
    "n 3",
    "n 2",
)
add(
    "TensorStridedSliceUpdate",
    lambda x, v: raw.TensorStridedSliceUpdate(
        input=x, begin=[0, 0], end=[1, 0], strides=[1, 1], value=v, begin_mask=2, end_mask=2
    ),
    "n 3",
    "1 3",
)
add("MatrixBandPart", lambda x: tf.linalg.band_part(x, 1, 0), "n n")
add("MatrixBandPart", lambda x: tf.linalg.band_part(x, -1, 0), "n 3 3")
add("Diag", lambda x: raw.Diag(diagonal=x), "n")
add("DiagPart", lambda x: raw.DiagPart(input=x), "n n")
for _version in ("", "V2", "V3"):
    _k = {} if not _version else {"k": 0, "padding_value": np.float64(0)}
    _n = {} if not _version else {"k": 0, "num_rows": -1, "num_cols": -1, "padding_value": np.float64(0)}
    _s = {} if not _version else {"k": 0}
    for _shape in ("n n", "n 3 3"):
        add_raw(f"MatrixDiagPart{_version}", ["f8"], "input", (_shape,), **_k)
    for _shape in ("n", "n 3"):
        add_raw(f"MatrixDiag{_version}", ["f8"], "diagonal", (_shape,), **_n)
    for _shapes in (("n n", "n"), ("n 3 3", "n 3")):
        add_raw(f"MatrixSetDiag{_version}", ["f8", "f8"], "input diagonal", _shapes, **_s)
add("OneHot", lambda i: tf.one_hot(i, 3, dtype=tf.float64), given("n", "i2"))
add("OneHot", lambda i: tf.one_hot(i, 3, axis=0, dtype=tf.float64), given("n", "i2"))
add("OneHot", lambda i, a: tf.one_hot(i, 3, a, 0.0 * a), given("n 2", "i2"), "")
add("OneHot", lambda i: tf.one_hot(i, tf.shape(i)[0]), given("n", "i1"))
add("InvertPermutation", lambda i: tf.math.invert_permutation(i), given("n", "permutation"))
add("BatchToSpace", lambda x: raw.BatchToSpace(input=x, crops=[[0, 0], [0, 0]], block_size=2), "4n 2 2 1")
add("BatchToSpaceND", lambda x: tf.batch_to_space(x, [2], [[0, 0]]), "2n 2 3")
add("SpaceToBatch", lambda x: raw.SpaceToBatch(input=x, paddings=[[0, 0], [0, 0]], block_size=2), "n 4 2 1")
add("SpaceToBatchND", lambda x: tf.space_to_batch(x, [2], [[0, 0]]), "n 4 3")
add("SpaceToDepth", lambda x: raw.SpaceToDepth(input=x, block_size=2), "n 2 4 1")
add("DepthToSpace", lambda x: raw.DepthToSpace(input=x, block_size=2), "n 2 1 4")

# ---------------------------------------------------------------------------------------------------------
_begin("gathers")
add("Gather", lambda x, i: raw.Gather(params=x, indices=i), "3 2", given("n", "i2"))
add("GatherV2", lambda x, i: tf.gather(x, i), "3 2", given("n", "i2"))
add("GatherV2", lambda x, i: tf.gather(x, i), "3 2", given("n 2", "i2"))
add("GatherV2", lambda x, i: tf.gather(x, i), "n 2", given("n", "row"))
add("GatherV2", lambda x, i: tf.gather(x, i), "n 2", given("2", "i1"))
add("GatherV2", lambda x, i: tf.gather(x, i), "n n", given("", "i1"))
add("GatherV2", lambda x, i: tf.gather(x, i, axis=1), "n n", given("n", "row"))
add("GatherV2", lambda x, i: tf.gather(x, i, axis=1), "n 3", given("2", "i2"))
add("GatherV2", lambda x, i: tf.gather(x, i, axis=-1), "2 3", given("n", "i2"))
add("GatherV2", lambda x, i: tf.gather(x, i, batch_dims=1), "n 3", given("n", "i2"))
add("GatherV2", lambda x, i: tf.gather(x, i, batch_dims=1), "n 3 2", given("n 2", "i2"))
add("GatherV2", lambda x, i: tf.gather(x, i, axis=2, batch_dims=1), "n 2 3", given("n 2", "i2"))
add("GatherV2", lambda x: tf.gather(x, tf.range(tf.shape(x)[0])), "n 3")
add("GatherV2", lambda x, rows: tf.gather(x, np.arange(rows)[::-1]), "n 3", sized=True)
add("GatherNd", lambda x, i: tf.gather_nd(x, i), "3 3", given("n 2", "i2"))
add("GatherNd", lambda x, i: tf.gather_nd(x, i), "n 3", given("n 1", "row"))
add("GatherNd", lambda x, i: tf.gather_nd(x, i, batch_dims=1), "n 3", given("n 1", "i2"))
add("GatherNd", lambda x, i: tf.gather_nd(x, tf.stack([tf.range(tf.shape(i)[0]), i], 1)), "n 3", given("n", "i2"))
add("GatherNd", lambda x: tf.gather_nd(tf.transpose(x, [1, 2, 0]), [[0, 1], [1, 2], [0, 1]]), "n 2 3")
add("GatherNd", lambda x: tf.gather_nd(tf.transpose(x, [1, 0, 2]), [[1]]), "n 2 3")
add("ScatterNd", lambda v: tf.scatter_nd([[2], [0], [2]], tf.transpose(v), [4, tf.shape(v)[0]]), "n 3")
add("ScatterNd", lambda i, v: tf.scatter_nd(i, v, [3, 2]), given("n 1", "i2"), "n 2")
add("ScatterNd", lambda i, v: tf.scatter_nd(i, v, [tf.shape(v)[0], 2]), given("n 1", "row"), "n 2")
add("ScatterNd", lambda i, v: tf.scatter_nd(i, v, [tf.shape(v)[0], 2]), given("n 1", "row"), given("n 2", "int"))
add(
    "ScatterNd",
    lambda i, v: tf.scatter_nd(tf.stack([tf.range(tf.shape(v)[0]), i], 1), v, [tf.shape(v)[0], 3]),
    given("n", "i2"),
    "n",
)
add(
    "TensorScatterUpdate",
    lambda x, i, v: tf.tensor_scatter_nd_update(x, tf.stack([tf.range(tf.shape(v)[0]), i], 1), v),
    "n 3",
    given("n", "i2"),
    "n",
)
add(
    "ScatterNdNonAliasingAdd",
    lambda x, i, v: raw.ScatterNdNonAliasingAdd(input=x, indices=i, updates=v),
    "3 2",
    given("n 1", "i2"),
    "n 2",
)
for _op in ("Add", "Sub", "Max", "Min"):
    add_raw(f"TensorScatter{_op}", ["f8", "i2", "distinct"], "tensor indices updates", ("3 2", "n 1", "n 2"))
    add_raw(f"TensorScatter{_op}", ["f8", "i1", "distinct"], "tensor indices updates", ("n 2", "2 1", "2 2"))
add(
    "TensorScatterUpdate",
    lambda x, i, v: raw.TensorScatterUpdate(tensor=x, indices=i, updates=v),
    "n 2",
    given("n 1", "permutation"),
    "n 2",
)
add("TensorScatterUpdate", lambda x, v: raw.TensorScatterUpdate(tensor=x, indices=[[0], [1]], updates=v), "n 2", "2 2")
for _op in ("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd"):
    add_raw(_op, ["distinct", "segments"], "data segment_ids", ("n 2", "n"))
for _op in ("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"):
    add_raw(_op, ["distinct", "i2"], "data segment_ids", ("n 2", "n"), num_segments=3)
add("UnsortedSegmentSum", lambda x, i: tf.math.unsorted_segment_sum(x, i, tf.shape(x)[0]), "n 2", given("n", "row"))
add("UnsortedSegmentSum", lambda x, i: tf.math.unsorted_segment_sum(x, i, 3), "n 2", given("n 2", "i2"))
add("unsorted_segment_mean", lambda x, i: tf.math.unsorted_segment_mean(x, i, 3), "n 2", given("n", "i2"))
for _op in ("Sum", "Mean", "SqrtN"):
    add_raw(f"SparseSegment{_op}", ["f8", "row", "segments"], "data indices segment_ids", ("n 2", "n", "n"))
    add_raw(
        f"SparseSegment{_op}WithNumSegments",
        ["f8", "i2", "segments"],
        "data indices segment_ids",
        ("3 2", "n", "n"),
        num_segments=4,
    )
add("DynamicPartition", lambda x, i: tf.dynamic_partition(x, i, 2), "n 2", given("n", "i1"))
add(
    "DynamicStitch", lambda i, x: raw.DynamicStitch(indices=[i, i], data=[x, 2.0 * x]), given("n", "permutation"), "n 2"
)
add(
    "ParallelDynamicStitch",
    lambda i, x: raw.ParallelDynamicStitch(indices=[i], data=[x]),
    given("n", "permutation"),
    "n 2",
)
add("boolean_mask", lambda x, m: tf.boolean_mask(x, m), "n 2", given("n", "bool"))
add("Where", lambda m: tf.where(m), given("n 2", "bool"))
add("Where", lambda x, m: tf.reduce_sum(tf.gather(x, tf.where(m)[:, 0])), "n", given("n", "bool"))
add("sort", lambda x: tf.sort(x, axis=0), given("n 3", "distinct"))
add("sort", lambda x: tf.sort(x, axis=1), given("n 3", "distinct"))
add("argsort", lambda x: tf.argsort(x, axis=0, stable=True), given("n 3", "distinct"))
add("Unique", lambda x: tf.unique(x), given("n", "int"))
add("UniqueWithCounts", lambda x: tf.unique_with_counts(x), given("n", "i3"))
add("bincount", lambda x: tf.math.bincount(x, minlength=4, maxlength=4), given("n", "i3"))
add(
    "bincount",
    lambda x, w: tf.math.bincount(x, w, minlength=4, maxlength=4),
    given("n", "i3"),
    "n",
    differentiable=False,
)
add("bincount of rows", lambda x: tf.math.bincount(x, minlength=4, maxlength=4, axis=-1), given("n 3", "i3"))
add("confusion_matrix", lambda x, y: tf.math.confusion_matrix(x, y, 4), given("n", "i3"), given("n", "i3"))
add("histogram", lambda x: tf.histogram_fixed_width(x, [-1.0, 1.0], 4), given("n 3", "f4"))
add("Bucketize", lambda x: raw.Bucketize(input=x, boundaries=[-0.5, 0.0, 0.5]), "n 3")
add("searchsorted", lambda x, v: tf.searchsorted(x, v), given("n 3", "sorted"), "n 2", differentiable=False)
add("searchsorted", lambda x, v: tf.searchsorted(x, v), given("n", "sorted"), "2", differentiable=False)
add("sequence_mask", lambda i: tf.sequence_mask(i, 4), given("n", "lengths"))
add("meshgrid", lambda x: tf.meshgrid(x, x), "n")
add("ListDiff", lambda x, y: tf.raw_ops.ListDiff(x=x, y=y), given("n", "i3"), given("2", "i1"))
add("ResourceGather", lambda v, i: v.sparse_read(i), variable("3 2"), given("n", "i2"))
add("ResourceGather", lambda v, i: v.sparse_read(i), variable("3 2"), given("n 2", "i2"))
add("ResourceGather", lambda v: v.sparse_read(tf.range(3)), variable("3 2"))
add("ResourceGatherNd", lambda v, i: v.gather_nd(i), variable("3 2"), given("n 2", "i1"))
add("ReadVariableOp", lambda v, x: v.read_value() * x, variable("3"), "n 3")
add("VariableShape", lambda v, x: x + tf.cast(raw.VariableShape(input=v.handle), x.dtype), variable("3"), "n 1")
add("VarIsInitializedOp", lambda v: raw.VarIsInitializedOp(resource=v.handle), variable("3"))
add("embedding_lookup", lambda x, i: tf.nn.embedding_lookup(x, i), "3 2", given("n 2", "i2"))

# ---------------------------------------------------------------------------------------------------------
_begin("products")
for _a, _b in ((False, False), (False, True), (True, False), (True, True)):
    add_raw("MatMul", ["f8", "f8"], "a b", ("n n", "n n"), transpose_a=_a, transpose_b=_b)
add("MatMul", lambda x, w: tf.matmul(x, w), "n 3", "3 2")
add("MatMul", lambda x, w: tf.matmul(w, x), "3 n", "2 3")
add("MatMul", lambda x, w: tf.matmul(x, w), "2n 3", "3 2")
add("MatMul", lambda x, w: tf.matmul(x, w), given("n 3", "complex"), given("3 2", "complex"))
add("MatMul", lambda x, y: tf.matmul(x, y, transpose_a=True), given("n 3", "complex"), given("n 2", "complex"))
add("Sum", lambda x: tf.reduce_sum(x, 0), given("n 3", "complex"))
add("Prod", lambda x: tf.reduce_prod(x, 0), given("n 3", "complex"))
add("batch with itself", lambda x: tf.matmul(x, x, transpose_b=True), "n 3")
add("covariance", lambda x: tf.matmul(x, x, transpose_a=True), "n 3")
for _op in ("BatchMatMul", "BatchMatMulV2"):
    add_raw(_op, ["f8", "f8"], "x y", ("n 2 3", "n 3 2"))
    add_raw(_op, ["f8", "f8"], "x y", ("2 n 3", "2 3 n"))
    add_raw(_op, ["f8", "f8"], "x y", ("n 2 3", "n 2 3"), adj_y=True)
add_raw("BatchMatMulV2", ["f8", "f8"], "x y", ("n 2 3", "3 2"))
add_raw("BatchMatMulV2", ["f8", "f8"], "x y", ("n 3", "n 3 2"))
add_raw("BatchMatMulV2", ["f8", "f8"], "x y", ("2 3", "n 3 2"))
add_raw("BatchMatMulV2", ["f8", "f8"], "x y", ("n n", "n n"))
add_raw("BatchMatMulV3", ["f8", "f8"], "x y", ("n 2 3", "n 3 2"), Tout=tf.float64)
for _equation, *_shapes in (
    ("bi,ij->bj", "n 3", "3 2"),
    ("bi,ij->jb", "n 3", "3 2"),
    ("bi,bj->ij", "n 3", "n 2"),
    ("bi,bi->b", "n 3", "n 3"),
    ("bi,ci->bc", "n 3", "n 3"),
    ("bqhd,bkhd->bhqk", "n 2 2 3", "n 2 2 3"),
    ("bij,jk->bik", "n 2 3", "3 2"),
    ("ib,bj->ij", "3 n", "n 2"),
    ("bi,bi->", "n 3", "n 3"),
    ("b,c->bc", "n", "n"),
    ("bi,j->bij", "n 3", "2"),
    ("...i,ij->...j", "n 2 3", "3 2"),
):
    add("Einsum", lambda x, y, e=_equation: raw.Einsum(inputs=[x, y], equation=e), *_shapes)
for _equation, _shape in (
    ("bi->b", "n 3"),
    ("bi->i", "n 3"),
    ("bi->ib", "n 3"),
    ("bi->", "n 3"),
    ("bb->b", "n n"),
    ("bii->bi", "n 3 3"),
):
    add("Einsum", lambda x, e=_equation: raw.Einsum(inputs=[x], equation=e), _shape)
add("Einsum", lambda x, y, z: tf.einsum("bi,ij,bj->b", x, y, z), "n 3", "3 2", "n 2")
add("tensordot", lambda x, y: tf.tensordot(x, y, 1), "n 2 3", "3 2")
add("tensordot", lambda x, y: tf.tensordot(x, y, [[0], [0]]), "n 2", "n 3")
add("matvec", lambda x, y: tf.linalg.matvec(x, y), "n 3", "3")
add("matvec", lambda x, y: tf.linalg.matvec(x, y), "n 2 3", "n 3")
add("SparseMatMul", lambda x, y: raw.SparseMatMul(a=x, b=y), given("n 3", "f4"), given("3 2", "f4"))
add("SparseMatMul", lambda x, y: raw.SparseMatMul(a=x, b=y, transpose_a=True), given("n 3", "f4"), given("n 2", "f4"))
add("pairwise distances", lambda x: tf.reduce_sum((x[:, None] - x[None]) ** 2, -1), "n 3")
add("attention", lambda q, k: tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), k), "n 2 3", "n 4 3")
for _op, _kind in (
    ("Cholesky", "spd"),
    ("MatrixDeterminant", "square"),
    ("MatrixInverse", "square"),
    ("LogMatrixDeterminant", "square"),
    ("MatrixSquareRoot", "spd"),
):
    add_raw(_op, [_kind], "input", ("n 3 3",))
    add_raw(_op, [_kind], "input", ("n n",))
add("expm", lambda x: tf.linalg.expm(x), "n 3 3")
add_raw("MatrixSolve MatrixTriangularSolve", ["triangular", "f8"], "matrix rhs", ("n 3 3", "n 3 2"))
add_raw("MatrixSolve MatrixTriangularSolve", ["triangular", "f8"], "matrix rhs", ("n n", "n n"))
add_raw("MatrixSolve", ["square", "f8"], "matrix rhs", ("3 3", "3 n"))
add(
    "MatrixTriangularSolve",
    lambda a, b: raw.MatrixTriangularSolve(matrix=a, rhs=b),
    given("3 3", "triangular"),
    "n 3 2",
)
add("MatrixSolveLs", lambda a, b: raw.MatrixSolveLs(matrix=a, rhs=b, l2_regularizer=np.float64(0.1)), "n 4 2", "n 4 1")
add("MatrixSolveLs", lambda a, b: raw.MatrixSolveLs(matrix=a, rhs=b, l2_regularizer=np.float64(0.1)), "n 2", "n 1")
add("BandedTriangularSolve", lambda a, b: raw.BandedTriangularSolve(matrix=a, rhs=b), given("n 2 3", "above1"), "n 3 2")
add(
    "TridiagonalSolve",
    lambda a, b: raw.TridiagonalSolve(diagonals=a + np.array([[0], [3], [0]]), rhs=b),
    "n 3 4",
    "n 4 2",
)
add(
    "TridiagonalMatMul",
    lambda a, b, c, d: raw.TridiagonalMatMul(superdiag=a, maindiag=b, subdiag=c, rhs=d),
    "n 1 4",
    "n 1 4",
    "n 1 4",
    "n 4 2",
)
add("SelfAdjointEigV2", lambda x: tf.linalg.eigvalsh(x + tf.linalg.matrix_transpose(x)), given("n 3 3", "spd"))
add("SelfAdjointEigV2", lambda x: tf.linalg.eigvalsh(x + tf.transpose(x)), given("n n", "spd"))
add(
    "Eig", lambda x: tf.math.real(tf.reduce_sum(tf.linalg.eigvals(tf.matmul(x, x, transpose_b=True)) ** 2, -1)), "n 3 3"
)
add("Svd", lambda x: tf.linalg.svd(x, compute_uv=False), "n 3 2")
add("Svd", lambda x: tf.linalg.svd(x, compute_uv=False), "n 2")
add("Qr", lambda x: raw.Qr(input=x)[1], "n 3 2")
add("Qr", lambda x: raw.Qr(input=x)[1], "n 2", differentiable=False)
for _op in ("FFT", "IFFT"):
    add_raw(_op, ["complex"], "input", ("n 4",))
    add_raw(_op, ["complex"], "input", ("3 n",))
    add_raw(f"{_op}2D", ["complex"], "input", ("n 2 4",))
    add_raw(f"{_op}2D", ["complex"], "input", ("n 4",))
    add_raw(f"{_op}3D", ["complex"], "input", ("n 2 2 2",))
add("RFFT", lambda x: tf.signal.rfft(x), given("n 4", "f4"))
add("RFFT2D", lambda x: tf.signal.rfft2d(x), given("n 2 4", "f4"))
add("IRFFT", lambda x: tf.signal.irfft(x), given("n 3", "complex64"))
add("IRFFT2D", lambda x: tf.signal.irfft2d(x), given("n 2 3", "complex64"))

# ---------------------------------------------------------------------------------------------------------
_begin("windows")
_1, _2 = [1, 1, 1, 1], [1, 2, 2, 1]
add("Conv2D", lambda x, w: raw.Conv2D(input=x, filter=w, strides=_1, padding="SAME"), "n 4 4 2", "2 2 2 3")
add("Conv2D", lambda x, w: raw.Conv2D(input=x, filter=w, strides=_2, padding="VALID"), "n 4 4 2", "2 2 2 3")
add("Conv2D", lambda x, w: raw.Conv2D(input=x, filter=w, strides=_1, padding="SAME"), "2 n 3 2", "2 2 2 3")
add("Conv2D", lambda x, w: raw.Conv2D(input=x, filter=w, strides=_1, padding="SAME"), "2 3 3 n", "2 2 n 2")
add(
    "Conv2DBackpropInput",
    lambda x, w: raw.Conv2DBackpropInput(
        input_sizes=[tf.shape(x)[0], 4, 4, 2], filter=w, out_backprop=x, strides=_1, padding="SAME"
    ),
    "n 4 4 3",
    "2 2 2 3",
)
add(
    "Conv2DBackpropFilter",
    lambda x, g: raw.Conv2DBackpropFilter(
        input=x, filter_sizes=[2, 2, 2, 3], out_backprop=g, strides=_1, padding="SAME"
    ),
    "n 4 4 2",
    "n 4 4 3",
)
add(
    "DepthwiseConv2dNative",
    lambda x, w: raw.DepthwiseConv2dNative(input=x, filter=w, strides=_1, padding="SAME"),
    "n 4 4 2",
    "2 2 2 2",
)
add(
    "DepthwiseConv2dNativeBackpropInput",
    lambda x, w: raw.DepthwiseConv2dNativeBackpropInput(
        input_sizes=[tf.shape(x)[0], 4, 4, 2], filter=w, out_backprop=x, strides=_1, padding="SAME"
    ),
    "n 4 4 4",
    "2 2 2 2",
)
add(
    "DepthwiseConv2dNativeBackpropFilter",
    lambda x, g: raw.DepthwiseConv2dNativeBackpropFilter(
        input=x, filter_sizes=[2, 2, 2, 2], out_backprop=g, strides=_1, padding="SAME"
    ),
    "n 4 4 2",
    "n 4 4 4",
)
add("conv1d", lambda x, w: tf.nn.conv1d(x, w, 1, "SAME"), "n 4 2", "2 2 3")
add("separable conv", lambda x, w, v: tf.nn.separable_conv2d(x, w, v, _1, "SAME"), "n 3 3 2", "2 2 2 1", "1 1 2 3")
add("Conv3D", lambda x, w: raw.Conv3D(input=x, filter=w, strides=[1] * 5, padding="SAME"), "n 2 3 2 1", "2 2 2 1 2")
add(
    "Conv3DBackpropInputV2",
    lambda x, w: raw.Conv3DBackpropInputV2(
        input_sizes=[tf.shape(x)[0], 2, 3, 2, 1], filter=w, out_backprop=x, strides=[1] * 5, padding="SAME"
    ),
    "n 2 3 2 2",
    "2 2 2 1 2",
)
add(
    "Conv3DBackpropFilterV2",
    lambda x, g: raw.Conv3DBackpropFilterV2(
        input=x, filter_sizes=[2, 2, 2, 1, 2], out_backprop=g, strides=[1] * 5, padding="SAME"
    ),
    "n 2 3 2 1",
    "n 2 3 2 2",
)
add(
    "Dilation2D",
    lambda x, w: raw.Dilation2D(input=x, filter=w, strides=_1, rates=_1, padding="SAME"),
    "n 3 3 2",
    "2 2 2",
)
add("AvgPool", lambda x: raw.AvgPool(value=x, ksize=_2, strides=_2, padding="VALID"), "n 4 4 2")
add("AvgPool", lambda x: raw.AvgPool(value=x, ksize=_2, strides=_2, padding="SAME"), "2 n 3 2")
add(
    "AvgPoolGrad",
    lambda g: raw.AvgPoolGrad(
        orig_input_shape=[tf.shape(g)[0], 4, 4, 2], grad=g, ksize=_2, strides=_2, padding="VALID"
    ),
    "n 2 2 2",
)
add("MaxPool", lambda x: raw.MaxPool(input=x, ksize=_2, strides=_2, padding="SAME"), given("n 3 3 2", "distinct"))
add("MaxPool", lambda x: raw.MaxPool(input=x, ksize=_2, strides=_2, padding="SAME"), given("2 n 3 2", "distinct"))
add("MaxPoolV2", lambda x: raw.MaxPoolV2(input=x, ksize=_2, strides=_2, padding="SAME"), given("n 3 3 2", "distinct"))
add(
    "MaxPoolWithArgmax",
    lambda x: raw.MaxPoolWithArgmax(input=x, ksize=_2, strides=_2, padding="SAME")[0],
    given("n 3 3 2", "distinct"),
)
add(
    "MaxPoolWithArgmax",
    lambda x: raw.MaxPoolWithArgmax(input=x, ksize=_2, strides=_2, padding="SAME", include_batch_in_index=True)[1],
    given("n 3 3 2", "distinct"),
    differentiable=False,
)
_pool = {"ksize": _2, "strides": _2, "padding": "VALID"}
add(
    "MaxPoolGrad",
    lambda x, g: raw.MaxPoolGrad(orig_input=x, orig_output=raw.MaxPool(input=x, **_pool), grad=g, **_pool),
    given("n 4 4 2", "distinct"),
    "n 2 2 2",
)
add(
    "MaxPoolGradV2",
    lambda x, g: raw.MaxPoolGradV2(orig_input=x, orig_output=raw.MaxPool(input=x, **_pool), grad=g, **_pool),
    given("n 4 4 2", "distinct"),
    "n 2 2 2",
)
add(
    "MaxPoolGradGrad",
    lambda x, g: raw.MaxPoolGradGrad(orig_input=x, orig_output=raw.MaxPool(input=x, **_pool), grad=g, **_pool),
    given("n 4 4 2", "distinct"),
    "n 4 4 2",
)
_pool3 = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
add("AvgPool3D", lambda x: raw.AvgPool3D(input=x, **_pool3), given("n 2 4 2 1", "f4"))
add(
    "AvgPool3DGrad",
    lambda g: raw.AvgPool3DGrad(orig_input_shape=[tf.shape(g)[0], 2, 4, 2, 1], grad=g, **_pool3),
    given("n 1 2 1 1", "f4"),
)
add("MaxPool3D", lambda x: raw.MaxPool3D(input=x, **_pool3), given("n 2 4 2 1", "distinct4"))
add(
    "MaxPool3DGrad",
    lambda x, g: raw.MaxPool3DGrad(orig_input=x, orig_output=raw.MaxPool3D(input=x, **_pool3), grad=g, **_pool3),
    given("n 2 4 2 1", "distinct4"),
    given("n 1 2 1 1", "f4"),
)
add(
    "FractionalAvgPool",
    lambda x: raw.FractionalAvgPool(value=x, pooling_ratio=[1.0, 1.4, 1.4, 1.0], deterministic=True, seed=3, seed2=5)[
        0
    ],
    given("2 5 5 1", "f4"),
)
add(
    "FractionalAvgPool",
    lambda x: raw.FractionalAvgPool(value=x, pooling_ratio=[1.0, 1.4, 1.4, 1.0], deterministic=True, seed=3, seed2=5)[
        0
    ],
    given("n 5 5 1", "f4"),
    differentiable=False,
)
add(
    "FractionalMaxPool",
    lambda x: raw.FractionalMaxPool(value=x, pooling_ratio=[1.0, 1.4, 1.4, 1.0], deterministic=True, seed=3, seed2=5)[
        0
    ],
    given("n 5 5 1", "distinct4"),
)
add(
    "ExtractImagePatches",
    lambda x: raw.ExtractImagePatches(images=x, ksizes=_2, strides=_1, rates=_1, padding="VALID"),
    given("n 3 3 2", "f4"),
)
add(
    "ExtractVolumePatches",
    lambda x: raw.ExtractVolumePatches(input=x, ksizes=[1, 2, 2, 2, 1], strides=[1] * 5, padding="VALID"),
    given("n 2 3 2 1", "f4"),
)
add("LRN", lambda x: raw.LRN(input=x, depth_radius=1), given("n 2 2 3", "f4"))
_all = [given("n 2 2 3", "f4"), given("3", "positive4"), given("3", "f4")]
add("FusedBatchNorm", lambda x, s, o: raw.FusedBatchNorm(x=x, scale=s, offset=o, mean=[], variance=[])[:3], *_all)
add("FusedBatchNormV2", lambda x, s, o: raw.FusedBatchNormV2(x=x, scale=s, offset=o, mean=[], variance=[])[:3], *_all)
add("FusedBatchNormV3", lambda x, s, o: raw.FusedBatchNormV3(x=x, scale=s, offset=o, mean=[], variance=[])[:3], *_all)
add(
    "FusedBatchNormV3",
    lambda x, s, o: raw.FusedBatchNormV3(x=x, scale=s, offset=o, mean=[0.1] * 3, variance=[0.7] * 3, is_training=False)[
        0
    ],
    *_all,
)
_more = [given("n 2 2 3", "f4"), given("n 2 2 3", "f4"), given("3", "positive4")]
add(
    "FusedBatchNormGrad",
    lambda g, x, s: raw.FusedBatchNormGrad(
        y_backprop=g, x=x, scale=s, reserve_space_1=[0.1] * 3, reserve_space_2=[0.7] * 3
    )[:3],
    *_more,
)
add(
    "FusedBatchNormGradV2",
    lambda g, x, s: raw.FusedBatchNormGradV2(
        y_backprop=g, x=x, scale=s, reserve_space_1=[0.1] * 3, reserve_space_2=[0.7] * 3
    )[:3],
    *_more,
)
add(
    "FusedBatchNormGradV3",
    lambda g, x, s: raw.FusedBatchNormGradV3(
        y_backprop=g, x=x, scale=s, reserve_space_1=[0.1] * 3, reserve_space_2=[0.7] * 3, reserve_space_3=[0.0]
    )[:3],
    *_more,
)
_size = [5, 4]
for _op in ("Bilinear", "Bicubic", "NearestNeighbor"):
    add_raw(f"Resize{_op}", ["f4"], "images", ("n 3 3 2",), size=_size)
add("ResizeBilinear", lambda x: raw.ResizeBilinear(images=x, size=_size), given("2 n 3 2", "f4"))
add(
    "ResizeBilinearGrad",
    lambda g, x: raw.ResizeBilinearGrad(grads=g, original_image=x),
    given("n 5 4 2", "f4"),
    given("n 3 3 2", "f4"),
)
add(
    "ScaleAndTranslate",
    lambda x: raw.ScaleAndTranslate(images=x, size=_size, scale=[1.5, 1.3], translation=[0.1, 0.2]),
    given("n 3 3 2", "f4"),
)
add(
    "CropAndResize",
    lambda x, b, i: raw.CropAndResize(image=x, boxes=b, box_ind=i, crop_size=[2, 2]),
    given("n 4 4 1", "f4"),
    given("n 4", "boxes", "S0 R"),
    given("n", "row"),
)
add(
    "CropAndResize",
    lambda x, b: raw.CropAndResize(image=x, boxes=b, box_ind=tf.range(tf.shape(b)[0]), crop_size=[2, 2]),
    given("n 4 4 1", "f4"),
    given("n 4", "boxes", "S0 R"),
)
add(
    "crop of all images",  # whose gradient has ten axes
    lambda x: raw.CropAndResize(image=tf.repeat(x, 2, 0), boxes=[[0.0, 0.0, 1.0, 1.0]], box_ind=[1], crop_size=[2, 2]),
    given("n 4 4 1", "f4"),
)
add(
    "ImageProjectiveTransformV2",
    lambda x, t: raw.ImageProjectiveTransformV2(
        images=x, transforms=t * 0.1 + [[1.0, 0, 0, 0, 1, 0, 0, 0]], output_shape=[3, 3], interpolation="BILINEAR"
    ),
    given("n 3 3 1", "f4"),
    given("n 8", "f4"),
    differentiable=False,
)
add(
    "ImageProjectiveTransformV3",
    lambda x, t: raw.ImageProjectiveTransformV3(
        images=x,
        transforms=t * [[0.1] * 6 + [0.0] * 2] + [[1.0, 0, 0, 0, 1, 0, 0, 0]],
        output_shape=[3, 3],
        fill_value=0.0,
        interpolation="BILINEAR",
    ),
    given("n 3 3 1", "f4"),
    given("1 8", "f4"),
)
for _shapes in (("n 2 2 3",), ("2 n 3",)):
    add_raw("RGBToHSV HSVToRGB", ["positive4"], "images", _shapes)
for _op, _name in (("AdjustContrastv2", "contrast_factor"), ("AdjustHue", "delta"), ("AdjustSaturation", "scale")):
    for _shape in ("n 2 2 3", "2 n 2 2 3", "n 2 3"):
        add(_op, _raw_call(_op, ["images"], {_name: 0.3}), given(_shape, "positive4"), differentiable=False)
add(
    "ExtractGlimpse",
    lambda x, o: raw.ExtractGlimpse(input=x, size=[2, 2], offsets=o, uniform_noise=False, noise="zero"),
    given("n 4 4 1", "f4"),
    given("n 2", "f4"),
    differentiable=False,
)
add(
    "DrawBoundingBoxes",
    lambda x, b: raw.DrawBoundingBoxes(images=x, boxes=b),
    given("n 4 4 3", "f4"),
    given("n 2 4", "boxes", "S0 R"),
    differentiable=False,
)
add(
    "NonMaxSuppressionV2",
    lambda b, s: raw.NonMaxSuppressionV2(boxes=b, scores=s, max_output_size=3, iou_threshold=0.5),
    given("n 4", "boxes", "S0 R"),
    given("n", "distinct4"),
    differentiable=False,
)
add(
    "NonMaxSuppression",
    lambda b, s: raw.NonMaxSuppression(boxes=b, scores=s, max_output_size=3, iou_threshold=0.5),
    given("n 4", "boxes", "S0 R"),
    given("n", "distinct4"),
    differentiable=False,
)
add(
    "NonMaxSuppressionWithOverlaps",
    lambda o, s: raw.NonMaxSuppressionWithOverlaps(
        overlaps=o, scores=s, max_output_size=3, overlap_threshold=0.3, score_threshold=0.0
    ),
    given("n n", "f4"),
    given("n", "distinct4"),
    differentiable=False,
)

# ---------------------------------------------------------------------------------------------------------
_begin("sequences")
add(
    "CTCLoss",
    lambda x, y: raw.CTCLoss(
        inputs=tf.transpose(x, [1, 0, 2]),
        labels_indices=tf.where(y >= 0),
        labels_values=tf.reshape(y, [-1]),
        sequence_length=tf.fill([tf.shape(x)[0]], 5),
    )[0],
    "n 5 4",
    given("n 2", "i2"),
)
add(
    "ctc_loss",
    lambda x, y, i: tf.nn.ctc_loss(y, x, i, tf.fill([tf.shape(x)[0]], 5), logits_time_major=False),
    given("n 5 4", "f4"),
    given("n 3", "i2"),
    given("n", "lengths"),
)
add(
    "CTCGreedyDecoder",
    lambda x: raw.CTCGreedyDecoder(inputs=tf.transpose(x, [1, 0, 2]), sequence_length=tf.fill([tf.shape(x)[0]], 4))[1:],
    "n 4 3",
    differentiable=False,
)
add(
    "CTCBeamSearchDecoder",
    lambda x: raw.CTCBeamSearchDecoder(
        inputs=tf.transpose(x, [1, 0, 2]), sequence_length=tf.fill([tf.shape(x)[0]], 4), beam_width=3, top_paths=1
    )[3],
    "n 4 3",
    differentiable=False,
)
for _op in ("BlockLSTM", "BlockLSTMV2"):
    add(
        _op,
        lambda x, w, op=_op: getattr(raw, op)(
            seq_len_max=np.int64(3),
            x=tf.transpose(x, [1, 0, 2]),
            cs_prev=tf.zeros([tf.shape(x)[0], 2]),
            h_prev=tf.zeros([tf.shape(x)[0], 2]),
            w=w,
            wci=np.zeros(2, "f4"),
            wcf=np.zeros(2, "f4"),
            wco=np.zeros(2, "f4"),
            b=np.zeros(8, "f4"),
        )[6],
        given("n 3 2", "f4"),
        given("4 8", "f4"),
    )
add("Assert", lambda x: _asserted(x), "n 3")
add("Print", lambda x: raw.Print(input=x, data=[], first_n=0), "n 3")
add(
    "PyFuncStateless",
    lambda x: tf.numpy_function(_cumsum, [x], tf.float64, stateful=False),
    "n 3",
    differentiable=False,
)
add("EagerPyFunc", lambda x: tf.py_function(lambda v: v * tf.cumsum(v), [x], tf.float64), "n 3")
add(
    "numpy_function",
    lambda x: tf.ensure_shape(tf.numpy_function(_cumsum, [x], tf.float64), [None, 3]),
    "n 3",
    differentiable=False,
)
add(
    "OptionalFromValue",
    lambda x: raw.OptionalGetValue(
        optional=raw.OptionalFromValue(components=[x]), output_types=[x.dtype], output_shapes=[x.shape]
    )[0],
    "n 3",
    differentiable=False,
)


def _cumsum(x):
    return np.cumsum(x, 0)


def _asserted(x):
    with tf.control_dependencies([raw.Assert(condition=tf.reduce_all(x < 9.0), data=[x])]):
        return tf.identity(x)


# ---------------------------------------------------------------------------------------------------------
_begin("sparse")


def _sparse(i, v, columns=3):
    """A sparse matrix of `v`'s rows, with one value in column `i` of each."""
    rows = tf.shape(v, tf.int64)[0]
    indices = tf.stack([tf.range(rows), tf.cast(i, tf.int64)], 1)
    return tf.SparseTensor(indices, v, [rows, columns])


_iv = (given("n", "i2"), "n")
_v = (given("n", "i2"), given("n", "positive"))
add("SparseAdd", lambda i, v, w: tf.sparse.to_dense(tf.sparse.add(_sparse(i, v), _sparse(i, w))), *_iv, "n")
add(
    "SparseAddGrad",
    lambda i, v: raw.SparseAddGrad(
        backprop_val_grad=v,
        a_indices=_sparse(i, v).indices,
        b_indices=_sparse(i, v).indices,
        sum_indices=_sparse(i, v).indices,
    ),
    *_iv,
)
add("SparseConcat", lambda i, v: tf.sparse.to_dense(tf.sparse.concat(1, [_sparse(i, v), _sparse(i, v)])), *_iv)
add(
    "SparseConcat",
    lambda i, v: tf.sparse.to_dense(tf.sparse.concat(0, [_sparse(i, v), _sparse(i, v)])),
    *_iv,
    differentiable=False,
)
for _op in ("Add", "Mul", "Div"):
    add(
        f"SparseDenseCwise{_op}",
        lambda i, v, d, op=_op: getattr(raw, f"SparseDenseCwise{op}")(
            sp_indices=_sparse(i, v).indices, sp_values=v, sp_shape=_sparse(i, v).dense_shape, dense=d
        ),
        *_iv,
        given("n 3", "positive"),
        differentiable=_op != "Add",
    )
add("SparseFillEmptyRows", lambda i, v: tf.sparse.fill_empty_rows(_sparse(i, v), np.float64(0.5))[0].values, *_iv)
add("SparseReduceSum", lambda i, v: tf.sparse.reduce_sum(_sparse(i, v), 1), *_iv)
add("SparseReduceSum", lambda i, v: tf.sparse.reduce_sum(_sparse(i, v), 0), *_iv)
for _axes in (1, 0, -1, -2, [0, 1], [], None):
    for _kept in (False, True):
        add(
            "SparseReduceSum",
            lambda x, axes=_axes, kept=_kept: tf.sparse.reduce_sum(tf.sparse.from_dense(tf.nn.relu(x)), axes, kept),
            "n 3",
        )
add("SparseReduceSum", lambda x: tf.sparse.reduce_sum(tf.sparse.from_dense(tf.nn.relu(x)), [2, 1]), "n 2 3")
add("SparseReorder", lambda i, v: tf.sparse.to_dense(tf.sparse.reorder(_sparse(i, v))), *_iv)
add("SparseSlice", lambda i, v: tf.sparse.slice(_sparse(i, v), [0, 0], [9, 2]).values, *_iv)
add("SparseSoftmax", lambda i, v: tf.sparse.softmax(_sparse(i, v)).values, *_iv)
add(
    "SparseSparseMaximum",
    lambda i, v, w: tf.sparse.maximum(_sparse(i, v), _sparse(i, w)).values,
    *_iv,
    "n",
    differentiable=False,
)
add(
    "SparseSparseMinimum",
    lambda i, v, w: tf.sparse.minimum(_sparse(i, v), _sparse(i, w)).values,
    *_iv,
    "n",
    differentiable=False,
)
add("SparseTensorDenseAdd", lambda i, v, d: tf.sparse.add(_sparse(i, v), d), *_iv, "n 3")
add("SparseTensorDenseMatMul", lambda i, v, w: tf.sparse.sparse_dense_matmul(_sparse(i, v), w), *_iv, "3 2")
add(
    "SparseTensorDenseMatMul",
    lambda i, v, w: tf.sparse.sparse_dense_matmul(_sparse(i, v), w, adjoint_a=True),
    *_iv,
    "n 2",
)
add("SparseToDense", lambda i, v: tf.sparse.to_dense(_sparse(i, v)), *_iv)
add("DenseToDenseSetOperation", lambda x, y: tf.sets.union(x, y).values, given("n 2", "i2"), given("n 3", "i2"))
add(
    "DenseToSparseSetOperation",
    lambda x, i, v: tf.sets.intersection(x, _sparse(i, tf.cast(v, tf.int32))).values,
    given("n 2", "i2"),
    given("n", "i2"),
    given("n", "i2"),
)
add(
    "SparseToSparseSetOperation",
    lambda i, v: tf.sets.union(_sparse(i, v), _sparse(i, v)).values,
    given("n", "i2"),
    given("n", "int"),
)
add("SetSize", lambda i, v: tf.sets.size(_sparse(i, v)), given("n", "i2"), given("n", "int"))
add(
    "EditDistance",
    lambda i, v: tf.edit_distance(_sparse(tf.sort(0 * i), v), _sparse(0 * i, v + 1)),
    given("n", "i2"),
    given("n", "int"),
)
add(
    "embedding_lookup_sparse",
    lambda i, w: tf.nn.embedding_lookup_sparse(w, _sparse(0 * i, i), None, combiner="mean"),
    given("n", "i2"),
    "3 2",
)
add(
    "safe_embedding_lookup_sparse",
    lambda i, w: tf.nn.safe_embedding_lookup_sparse(w, _sparse(0 * i, tf.cast(i, tf.int64))),
    given("n", "i2"),
    "3 2",
)


def _csr(x):
    return csr.dense_to_csr_sparse_matrix(x, tf.where(tf.abs(x) > -1.0))


def _dense(m):
    return csr.csr_sparse_matrix_to_dense(m, tf.float64)


add("DenseToCSRSparseMatrix", lambda x: _dense(_csr(x)), "4 3")
add("DenseToCSRSparseMatrix", lambda x: _dense(_csr(x)), "n 3", differentiable=False)
add(
    "CSRSparseMatrixToSparseTensor",
    lambda x: csr.csr_sparse_matrix_to_sparse_tensor(_csr(x), type=tf.float64)[1],
    "n 3",
)
add(
    "SparseTensorToCSRSparseMatrix",
    lambda i, v: _dense(csr.sparse_tensor_to_csr_sparse_matrix(*_parts(i, v))),
    *_iv,
    differentiable=False,
)
add("SparseMatrixMatMul", lambda x, y: csr.sparse_matrix_mat_mul(_csr(x), y), "4 3", "3 2")
add("SparseMatrixMatMul", lambda x, y: csr.sparse_matrix_mat_mul(_csr(x), y), "n 3", "3 2", differentiable=False)
add("SparseMatrixNNZ", lambda x: csr.sparse_matrix_nnz(_csr(x)), "n 3")
add(
    "SparseMatrixSparseMatMul",
    lambda x, y: _dense(csr.sparse_matrix_sparse_mat_mul(_csr(x), _csr(y), tf.float64)),
    "4 3",
    "3 2",
)
add(
    "SparseMatrixSparseMatMul",
    lambda x, y: _dense(csr.sparse_matrix_sparse_mat_mul(_csr(x), _csr(y), tf.float64)),
    "n 3",
    "3 2",
    differentiable=False,
)
add("SparseMatrixTranspose", lambda x: _dense(csr.sparse_matrix_transpose(_csr(x), type=tf.float64)), "4 3")
add(
    "SparseMatrixTranspose",
    lambda x: _dense(csr.sparse_matrix_transpose(_csr(x), type=tf.float64)),
    "n 3",
    differentiable=False,
)


def _parts(i, v):
    sparse = _sparse(i, v)
    return sparse.indices, sparse.values, sparse.dense_shape


def _ragged(x, i):
    """Of each row the first `i` elements."""
    return tf.RaggedTensor.from_tensor(x, i)


_xi = ("n 3", given("n", "lengths"))
add("ragged to_tensor", lambda x, i: _ragged(x, i).to_tensor(), *_xi)
add("ragged flat_values", lambda x, i: _ragged(x, i).flat_values * 2.0, *_xi)
add("ragged sum", lambda x, i: tf.reduce_sum(_ragged(x, i), 1), *_xi)
add("ragged mean", lambda x, i: tf.reduce_mean(_ragged(x, i), 1), *_xi)
add("RaggedGather", lambda x, i, j: tf.gather(_ragged(x, i), j).flat_values, *_xi, given("n", "row"))
add("RaggedRange", lambda i: tf.ragged.range(i).flat_values, given("n", "lengths"))
add("RaggedTensorToSparse", lambda x, i: _ragged(x, i).to_sparse().values, *_xi)
add("RaggedTensorToTensor", lambda x, i: _ragged(x, i).to_tensor(0.5, shape=[None, 3]), *_xi)
add(
    "RaggedTensorToVariant",
    lambda x, i: tf.map_fn(lambda r: tf.reduce_sum(r), _ragged(x, i), fn_output_signature=tf.float64),
    *_xi,
)
add(
    "RaggedFillEmptyRows",
    lambda x, i: raw.RaggedFillEmptyRows(
        value_rowids=tf.cast(_ragged(x, i).value_rowids(), tf.int64),
        values=_ragged(x, i).flat_values,
        nrows=tf.shape(x, tf.int64)[0],
        default_value=np.float64(0.5),
    )[1],
    *_xi,
)

# ---------------------------------------------------------------------------------------------------------
_begin("strings")
_text = given("n 2", "words")
add("AsString", lambda x: tf.strings.as_string(x), given("n 2", "int"))
add("EncodeBase64", lambda s: tf.io.encode_base64(s), _text)
add("Fingerprint", lambda s: tf.fingerprint(s), given("n", "words"))
add("DecodeCSV", lambda s: tf.io.decode_csv(s, [[0.0]]), given("n", "words"))
add("Substr", lambda s: raw.Substr(input=s, pos=0, len=1), _text)
add("UnicodeTranscode", lambda s: tf.strings.unicode_transcode(s, "UTF-8", "UTF-16-BE"), _text)
add("UnicodeScript", lambda x: tf.strings.unicode_script(x), given("n 2", "i3"))
add("DecodeBase64", lambda s: tf.io.decode_base64(tf.io.encode_base64(s)), _text)
add("DecodeRaw", lambda s: tf.io.decode_raw(raw.Substr(input=s, pos=0, len=1), tf.uint8), _text)
add("DecodePaddedRaw", lambda s: tf.io.decode_raw(s, tf.uint8, fixed_length=4), _text)
add("ReduceJoin", lambda s: tf.strings.reduce_join(s, 1), _text)
add("ReduceJoin", lambda s: tf.strings.reduce_join(s, 0), _text)
add("RegexReplace", lambda s: raw.RegexReplace(input=s, pattern="1", rewrite="x"), _text)
add("StringJoin", lambda s, t: tf.strings.join([s, t], "-"), _text, _text)
add("StringSplit", lambda s: raw.StringSplit(input=s, delimiter=".")[1], given("n", "words"))
add("StringSplit", lambda s: raw.StringSplit(input=s, delimiter=".")[0], given("n", "words"))
add("StringToHashBucket", lambda s: raw.StringToHashBucket(string_tensor=s, num_buckets=9), _text)
add("StringToHashBucketFast", lambda s: tf.strings.to_hash_bucket_fast(s, 9), _text)
add("StringToHashBucketStrong", lambda s: tf.strings.to_hash_bucket_strong(s, 9, [1, 2]), _text)
add("StringToNumber", lambda s: tf.strings.to_number(s, tf.float64), _text)
add("SerializeTensor", lambda x: tf.io.serialize_tensor(x), "n 2")
add("ParseTensor", lambda x: tf.io.parse_tensor(tf.io.serialize_tensor(x), tf.float64), "n 2")

# ---------------------------------------------------------------------------------------------------------
# Op types of which TensorFlow knows nothing of a gradient.
_begin("without gradient")


def _add_plain(op: str, call: Callable[..., Any], *shapes: Input | str) -> None:
    add(op, call, *shapes, differentiable=False)


_add_plain("DataFormatDimMap", lambda x: raw.DataFormatDimMap(x=x), given("n n", "i3"))
_add_plain("DecodeCompressed", lambda s: tf.io.decode_compressed(s), given("n 2", "words"))
_add_plain(
    "DecodeJSONExample",
    lambda s: tf.io.decode_json_example(tf.strings.regex_replace(s, ".*", "{}")),
    given("n 2", "words"),
)
for _axes in (1, 0, [0, 1]):
    _add_plain(
        "SparseReduceMax",
        lambda x, axes=_axes: tf.sparse.reduce_max(tf.sparse.from_dense(tf.nn.relu(x) - tf.nn.relu(x - 0.5)), axes),
        "n 3",
    )
_add_plain("SparseReduceMax", lambda x: tf.sparse.reduce_max(tf.sparse.from_dense(-tf.nn.relu(x)), 0), "n 3")
_add_plain(
    "UnicodeEncode",
    lambda s: tf.strings.unicode_encode(tf.strings.unicode_decode(s, "UTF-8") + 1, "UTF-8"),
    given("n", "words"),
)


def _hashed(s, t):
    """Cross a sparse column with a dense column: no public function calls this op."""
    return raw.SparseCrossHashed(
        indices=[s.indices],
        values=[s.values],
        shapes=[s.dense_shape],
        dense_inputs=[t],
        num_buckets=9,
        strong_hash=True,
        salt=[1, 2],
    )


for _op, _cross in (
    ("SparseCrossV2", lambda s, t: tf.sparse.cross([s, t])),
    ("SparseCross", lambda s, t: tf.sparse.cross_hashed([s, t], 9)),
    ("SparseCrossHashed", lambda s, t: _hashed(tf.sparse.from_dense(s), t)),
):
    _add_plain(
        _op,
        lambda s, t, cross=_cross: tf.nest.flatten(cross(s, t), expand_composites=True),
        given("n 2", "words"),
        given("n 1", "words"),
    )
_add_plain("SetSize", lambda x, y: tf.sets.size(tf.sets.intersection(x, y)), given("n 3", "i2"), given("n 2", "i2"))
_add_plain(
    "DenseToDenseSetOperation",
    lambda x, y: (
        tf.sets.union(x, y).indices,
        tf.sparse.to_dense(tf.sets.union(x, y)),
        tf.sets.union(x, y).dense_shape,
    ),
    given("n 3", "i2"),
    given("n 2", "i2"),
)
for _op in ("StringLower", "StringLength", "StringStrip", "StringUpper"):
    _add_plain(_op, lambda s, op=_op: getattr(raw, op)(input=s), given("n n", "words"))
_add_plain("StaticRegexFullMatch", lambda s: tf.strings.regex_full_match(s, "[0-9]*"), given("n 2", "words"))
_add_plain("RegexFullMatch", lambda s: raw.RegexFullMatch(input=s, pattern="[0-9]*"), given("n 2", "words"))
_add_plain("IsInf", lambda x: tf.math.is_inf(1.0 / tf.nn.relu(x)), "n n")
for _op in ("Mod", "TruncateMod"):
    _add_plain(_op, lambda x, y, op=_op: getattr(raw, op)(x=x, y=y), given("n 2", "int"), given("n 2", "nonzero"))
_add_plain("Lu", lambda x: tf.linalg.lu(x), given("n 3 3", "square"))
_add_plain("MatrixLogarithm", lambda x: tf.linalg.logm(tf.cast(x, tf.complex128)), given("n 2 2", "spd"))
_add_plain("ResizeArea", lambda x: tf.image.resize(x, [2, 3], "area"), given("n 4 4 1", "f4"))
_add_plain(
    "DrawBoundingBoxesV2",
    lambda x, b: raw.DrawBoundingBoxesV2(images=x, boxes=b, colors=[[1.0, 0.0, 0.5]]),
    given("n 4 4 3", "f4"),
    given("n 2 4", "boxes", "S0 R"),
)
_add_plain("UnravelIndex", lambda i: tf.unravel_index(i, [2, 3]), given("n", "i3"))
_add_plain(
    "NearestNeighbors",
    lambda x, c: raw.NearestNeighbors(points=x, centers=c, k=np.int64(2)),
    given("n 3", "f4"),
    given("4 3", "f4"),
)
_add_plain(
    "ExtractGlimpseV2",
    lambda x, o: raw.ExtractGlimpseV2(input=x, size=[2, 2], offsets=o, uniform_noise=False, noise="zero"),
    given("n 4 4 1", "f4"),
    given("n 2", "f4"),
)
_add_plain("AudioSpectrogram", lambda x: raw.AudioSpectrogram(input=x, window_size=4, stride=2), given("8 n", "f4"))
_add_plain("Mfcc", lambda x: raw.Mfcc(spectrogram=x, sample_rate=16000), given("n 3 65", "positive4"))


def _cell(x, h, w, kind):
    """A cell of a recurrent network, of 2 units, and its gradient."""
    if kind == "GRU":
        weights = {"w_ru": w[:, :4], "w_c": w[:, 4:6], "b_ru": w[0, :4], "b_c": w[0, 4:6]}
        r, u, c, y = raw.GRUBlockCell(x=x, h_prev=h, **weights)
        return y, *raw.GRUBlockCellGrad(x=x, h_prev=h, **weights, r=r, u=u, c=c, d_h=y * y)
    weights = {"w": w, "wci": w[0, :2], "wcf": w[1, :2], "wco": w[2, :2], "b": w[0]}
    return raw.LSTMBlockCell(x=x, cs_prev=h, h_prev=h, **weights, use_peephole=True)


for _op in ("GRUBlockCell", "GRUBlockCellGrad", "LSTMBlockCell"):
    _add_plain(
        _op,
        lambda x, h, w, op=_op: _cell(x, h, w, op[: op.index("Block")]),
        *map(given, ("n 2", "n 2", "4 8"), ["f4"] * 3),
    )
for _op in ("BlockLSTMGrad", "BlockLSTMGradV2"):
    _add_plain(
        _op, lambda x, h, w, op=_op: _cells(x, h, w, op), given("3 n 2", "f4"), given("n 2", "f4"), given("4 8", "f4")
    )


def _cells(x, h, w, op):
    """An LSTM of 2 units over time, and its gradient."""
    weights = {"w": w, "wci": w[0, :2], "wcf": w[1, :2], "wco": w[2, :2], "b": w[0]}
    given = {"seq_len_max": tf.constant(3, tf.int64), "x": x, "cs_prev": h, "h_prev": h, "use_peephole": True}
    i, cs, f, o, ci, co, y = getattr(raw, op.replace("Grad", ""))(**given, **weights)
    kept = {"i": i, "cs": cs, "f": f, "o": o, "ci": ci, "co": co, "h": y}
    return y, *getattr(raw, op)(**given, **weights, **kept, cs_grad=cs, h_grad=y * y)


_fraction = {"deterministic": True, "seed": 3, "seed2": 5}
_add_plain("FractionalAvgPoolGrad", lambda x: _fractional(x, "Avg"), given("n 5 5 1", "f4"))
_add_plain("FractionalMaxPoolGrad", lambda x: _fractional(x, "Max"), given("n 5 5 1", "distinct4"))


def _fractional(x, kind):
    """The gradient of a fractional pooling."""
    y, *at = getattr(raw, f"Fractional{kind}Pool")(value=x, pooling_ratio=[1.0, 1.4, 1.4, 1.0], **_fraction)
    at = dict(zip(("row_pooling_sequence", "col_pooling_sequence"), at, strict=True))
    if kind == "Avg":
        return raw.FractionalAvgPoolGrad(
            orig_input_tensor_shape=tf.shape(x, tf.int64), out_backprop=y * y, **at, overlapping=False
        )
    return raw.FractionalMaxPoolGrad(orig_input=x, orig_output=y, out_backprop=y * y, **at, overlapping=False)


# Of numbers in few bits: the first result as bytes, the range as it is.
def _bytes(made):
    return (tf.bitcast(made[0], {1: tf.uint8, 4: tf.int32}[made[0].dtype.size]), *made[1:])


def _few(x):
    return raw.QuantizeV2(input=x, min_range=-1.0, max_range=1.0, T=tf.quint8)


def _quantized(op, inputs, **attributes):
    """An op's result of a tensor in eight bits, given with its range; `inputs`: the names of these."""

    def call(x, *others):
        given = [_few(x), *map(_few, others)]
        tensors, lows, highs = zip(*given, strict=True)
        names, ranges = inputs.split(" | ")
        return _bytes(
            getattr(raw, op)(
                **dict(zip(names.split(), tensors, strict=True)),
                **dict(
                    zip(ranges.split(), [one for pair in zip(lows, highs, strict=True) for one in pair], strict=True)
                ),
                **attributes,
            )
        )

    return call


_bytes4 = given("n 4 4 2", "f4")
_range_of_two = "min_{0} max_{0} min_{1} max_{1}"
_add_plain("QuantizeV2", lambda x: _bytes(_few(x)), given("n 3", "f4"))
_add_plain(
    "QuantizeV2",
    lambda x: _bytes(raw.QuantizeV2(input=x, min_range=[-1.0] * 3, max_range=[1.0] * 3, T=tf.qint8, axis=1)),
    given("n 3", "f4"),
)
_add_plain("Dequantize", lambda x: tf.quantization.dequantize(*_few(x)), given("n 3", "f4"))
for _op in ("QuantizedRelu", "QuantizedRelu6"):
    _add_plain(_op, _quantized(_op, "features | min_features max_features"), given("n 3", "f4"))
_add_plain(
    "QuantizedMaxPool",
    _quantized("QuantizedMaxPool", "input | min_input max_input", ksize=_2, strides=_2, padding="VALID"),
    _bytes4,
)
_add_plain(
    "QuantizedAvgPool",
    _quantized("QuantizedAvgPool", "input | min_input max_input", ksize=_2, strides=_2, padding="VALID"),
    _bytes4,
)
_add_plain(
    "QuantizedBiasAdd",
    _quantized("QuantizedBiasAdd", "input bias | " + "min_input max_input min_bias max_bias", out_type=tf.qint32),
    given("n 3", "f4"),
    given("3", "f4"),
)
_add_plain(
    "QuantizedConv2D",
    _quantized(
        "QuantizedConv2D", "input filter | min_input max_input min_filter max_filter", strides=_1, padding="VALID"
    ),
    _bytes4,
    given("2 2 2 3", "f4"),
)
_add_plain(
    "QuantizedMatMul",
    _quantized("QuantizedMatMul", "a b | min_a max_a min_b max_b"),
    given("n 3", "f4"),
    given("3 2", "f4"),
)
_add_plain(
    "QuantizedResizeBilinear",
    lambda x: raw.QuantizedResizeBilinear(images=tf.bitcast(_few(x)[0], tf.quint8), size=[3, 3], min=-1.0, max=1.0)[1:],
    _bytes4,
)

# ---------------------------------------------------------------------------------------------------------
_begin("flow")


def _branch(p, x, w):
    return tf.cond(p, lambda: x * w, lambda: x + w)


def _over_time(x, w, read=None):
    """A recurrent cell: a loop over axis 1; `read` gives the weights anew in each turn."""
    outputs = tf.TensorArray(x.dtype, size=tf.shape(x)[1], element_shape=[None, None])

    def body(t, state, outputs):
        state = tf.tanh(tf.matmul(state, read() if read else w) + x[:, t])
        return t + 1, state, outputs.write(t, state)

    state = tf.zeros_like(x[:, 0])
    _, state, outputs = tf.while_loop(lambda t, *_: t < tf.shape(x)[1], body, [0, state, outputs])
    return state, tf.transpose(outputs.stack(), [1, 0, 2])


def _over_rows(x):
    """A running sum over axis 0."""

    def body(i, state):
        return i + 1, state * 0.5 + x[i]

    return tf.while_loop(lambda i, _: i < tf.shape(x)[0], body, [0, tf.zeros_like(x[0])])[1]


def _until(x):
    """As many turns as the batch's values ask for."""
    return tf.while_loop(lambda v: tf.reduce_sum(v * v) > 0.5, lambda v: [0.5 * v], [x])[0]


def _row_by_row(x):
    """A loop that writes a row in each turn."""
    rows = tf.TensorArray(x.dtype, size=tf.shape(x)[0], element_shape=x.shape[1:])
    _, rows = tf.while_loop(
        lambda i, _: i < tf.shape(x)[0], lambda i, rows: (i + 1, rows.write(i, x[i] * x[0])), [0, rows]
    )
    return rows.stack()


def _array(x):
    array = tf.TensorArray(x.dtype, size=0, dynamic_size=True, clear_after_read=False).unstack(x)
    array = array.write(0, array.read(1) * 2.0)
    return array.stack(), array.gather([1, 0]), tf.cast(array.size(), x.dtype)


def _pushed(x):
    """A list that grows by rows, and what is left when the last is gone."""
    rows = raw.TensorListFromTensor(tensor=x, element_shape=tf.constant([3]))
    rows = raw.TensorListPushBack(input_handle=rows, tensor=2.0 * x[0])
    rows, last = raw.TensorListPopBack(input_handle=rows, element_shape=tf.constant([3]), element_dtype=x.dtype)
    rows = raw.TensorListResize(input_handle=rows, size=raw.TensorListLength(input_handle=rows) + 0)
    shape = raw.TensorListElementShape(input_handle=rows, shape_type=tf.int32)
    stacked = raw.TensorListStack(input_handle=rows, element_shape=shape, element_dtype=x.dtype, num_elements=-1)
    return stacked, last


def _scattered(x):
    """Lists made of rows in another order, and joined."""
    shape, order = tf.constant([3]), tf.range(tf.shape(x)[0])
    one = raw.TensorListScatterV2(tensor=x, indices=order, element_shape=shape, num_elements=-1)
    one = raw.TensorListScatterIntoExistingList(input_handle=one, tensor=2.0 * x, indices=order[::-1])
    two = raw.TensorListScatter(tensor=x, indices=order, element_shape=shape)
    both = raw.TensorListConcatLists(input_a=one, input_b=two, element_dtype=x.dtype)
    return (
        raw.TensorListGather(input_handle=both, indices=order + 1, element_shape=shape, element_dtype=x.dtype),
        raw.TensorListStack(input_handle=both, element_shape=shape, element_dtype=x.dtype, num_elements=-1),
    )


def _lists(x):
    """A list for each row, and what was pushed onto it."""
    empty = raw.EmptyTensorList(element_shape=tf.constant([3]), max_num_elements=-1, element_dtype=x.dtype)
    lists = raw.TensorListPushBackBatch(input_handles=tf.fill([tf.shape(x)[0]], empty), tensor=x)
    first = raw.TensorListPopBack(input_handle=lists[0], element_shape=tf.constant([3]), element_dtype=x.dtype)
    return first[1]


def _joined(x, old=False):
    """A list of parts of the batch, one behind the other."""
    rows = tf.shape(x, tf.int64)[0]
    parts = raw.TensorListSplit(
        tensor=x, element_shape=tf.constant([-1, 3]), lengths=tf.stack([rows - 1, rows * 0 + 1])
    )
    if old:
        return raw.TensorListConcat(input_handle=parts, element_dtype=x.dtype, element_shape=[None, 3])[0]
    return raw.TensorListConcatV2(
        input_handle=parts,
        element_shape=tf.constant([-1, 3]),
        leading_dims=tf.zeros([0], tf.int64),
        element_dtype=x.dtype,
    )[0]


@tf.function
def _called(x, w):
    return tf.tanh(tf.matmul(x, w))


@tf.custom_gradient
def _customised(x):
    return x * x, lambda g: g * 3.0 * x


add("StatelessIf", _branch, given("", "bool"), "n 3", "3")
add("StatelessIf", lambda x, w: tf.cond(tf.reduce_sum(x) > 0.0, lambda: x * w, lambda: x - w), "n 3", "3")
add(
    "StatelessIf",
    lambda x: tf.cond(tf.shape(x)[0] > 5, lambda: tf.reduce_sum(x), lambda: tf.reduce_max(x)),
    given("n 3", "distinct"),
)
add("StatelessIf", lambda x: tf.cond(tf.reduce_mean(x) > 0.0, lambda: x[:, 0], lambda: x[:, 1]), "n 3")
add(
    "StatelessIf",  # what counts all rows says where a slice begins
    lambda x, i: tf.cond(tf.reduce_max(x) > 0.0, lambda: tf.slice(x, [i], [2]), lambda: tf.slice(-x, [i], [2])),
    "5",
    given("", "i2", "P R"),
)
add(
    "StatelessCase",
    lambda i, x: tf.switch_case(i, [lambda: x * 2.0, lambda: x * x, lambda: -x]),
    given("", "i2"),
    "n 3",
)
add(
    "Case",
    lambda i, x, w: tf.switch_case(i, [lambda: x * w, lambda: x - w, lambda: -x]),
    given("", "i2"),
    "n 3",
    variable("3"),
)
add("If", lambda x, w: tf.cond(tf.reduce_sum(x) > 0.0, lambda: x * w, lambda: x - w), "n 3", variable("3"))
add("While", lambda x, w: _over_time(x, w, w.read_value), "n 4 2", variable("2 2"))
add("StatelessWhile", _over_time, "n 4 2", "2 2")
add("StatelessWhile", _over_rows, "n 3")
add("StatelessWhile", _until, "n 3")
add("StatelessWhile", _row_by_row, "n 3")
add("map_fn", lambda x: tf.map_fn(lambda r: r * tf.reduce_sum(r), x), "n 3")
add("map_fn", lambda x, w: tf.map_fn(lambda r: tf.tensordot(r, w, 1), x), "n 3", "3 2")
add("scan", lambda x: tf.scan(lambda a, r: 0.5 * a + r * r, x), "n 3")
add("foldl", lambda x: tf.foldl(lambda a, r: 0.5 * a + r, x), "n 3")
add("vectorized_map", lambda x: tf.vectorized_map(lambda r: r * tf.reduce_sum(r), x), "n 3")
add("vectorized_map", lambda x, y: tf.vectorized_map(lambda p: tf.tensordot(p[0], p[1], 1), (x, y)), "n 3", "n 3")
add("tf.TensorArray", _array, "n 3")
add("TensorListPushBack", _pushed, "n 3")
add("TensorListScatter", _scattered, "n 3")
add("TensorListSplit", _joined, "n 3", differentiable=False)
add("TensorListPushBackBatch", _lists, "n 3", differentiable=False)
add("TensorListConcat", lambda x: _joined(x, old=True), "n 3", differentiable=False)
add("PartitionedCall", _called, "n 3", "3 2")
add("custom_gradient", _customised, "n 3")
add("recompute_grad", lambda x: tf.recompute_grad(lambda v: tf.sin(v) * v)(x), "n 3")
add("recompute_grad", lambda x: tf.recompute_grad(tf.tanh)(x[:1]) * x, "n 3")
add("jacobian in the step", lambda x, w: _input_gradient(x, w), "n 3", "3 2")


def _input_gradient(x, w):
    """A gradient penalty: the step differentiates twice."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.tanh(tf.matmul(x, w)))
    return tf.norm(tape.gradient(y, x), axis=1)


# ---------------------------------------------------------------------------------------------------------
# Op types with a gradient that stand within an example of another: by op type, that example.
WITHIN = {
    "CSRSparseMatrixToDense": "DenseToCSRSparseMatrix",
    "Const": "Fill",
    "MaxPool3DGradGrad": "MaxPool3DGrad",
    "OptionalGetValue": "OptionalFromValue",
    "PyFunc": "numpy_function",
    "RaggedTensorFromVariant": "RaggedTensorToVariant",
    "TensorListConcatLists": "TensorListScatter",
    "TensorListConcatV2": "TensorListSplit",
    "TensorListElementShape": "TensorListPushBack",
    "TensorListFromTensor": "TensorListPushBack",
    "TensorListGather": "TensorListScatter",
    "TensorListGetItem": "map_fn",
    "TensorListLength": "TensorListPushBack",
    "TensorListPopBack": "TensorListPushBack",
    "TensorListResize": "TensorListPushBack",
    "TensorListScatterIntoExistingList": "TensorListScatter",
    "TensorListScatterV2": "TensorListScatter",
    "TensorListSetItem": "map_fn",
    "TensorListStack": "TensorListPushBack",
}
UNREACHABLE: dict[str, str] = {}


def _without(reason: str, ops: str) -> None:
    UNREACHABLE.update(dict.fromkeys(ops.split(), reason))


_without(
    "GPU or TPU only",
    "AllToAll CollectivePermute CrossReplicaSum CudnnRNN CudnnRNNV2 CudnnRNNV3 NcclAllReduce "
    "NcclBroadcast NcclReduce "
    "TPUEmbeddingActivations TPUReplicatedInput XlaClusterOutput XlaEinsum XlaSharding "
    "XlaSpmdFullToShardShape "
    "XlaSpmdShardToFullShape XlaVariadicReduce SparseMatrixAdd SparseMatrixMul SparseMatrixSoftmax "
    "SparseMatrixZeros CTCLossV2",
)
_without("of DTensor", "CopyToMesh CopyToMeshGrad Relayout RelayoutLike")
_without(
    "of TensorFlow 1's variables, by reference",
    "Assign AssignAdd AssignSub DebugGradientRefIdentity RefEnter RefExit RefIdentity RefMerge "
    "RefNextIteration "
    "RefSwitch ScatterAdd ScatterDiv ScatterMul ScatterSub ScatterNdAdd ScatterNdDiv ScatterNdMul "
    "ScatterNdSub "
    "ScatterNdUpdate",
)
_without("of TensorFlow 1's control flow, which a function has not", "Enter Exit LoopCond Merge NextIteration Switch")
_without(
    "of TensorFlow 1's stacks, queues, readers and sessions",
    "DeleteSessionTensor FixedLengthRecordReader GetSessionHandle GetSessionHandleV2 GetSessionTensor "
    "IdentityReader "
    "LMDBReader Queue QueueClose QueueDequeue QueueDequeueMany QueueDequeueUpTo QueueEnqueue "
    "QueueEnqueueMany "
    "QueueSize ReaderNumRecordsProduced ReaderNumWorkUnitsCompleted ReaderRead ReaderReadUpTo ReaderReset "
    "ReaderRestoreState ReaderSerializeState Stack StackClose StackPop StackPush TFRecordReader "
    "TextLineReader "
    "WholeFileReader",
)
_without(
    "of TensorFlow 1's TensorArray; today's is a list of tensors",
    " ".join(
        f"TensorArray{name}{version}"
        for name in ("", "Close", "Concat", "Gather", "Grad", "Read", "Scatter", "Size", "Split", "Write")
        for version in ("", "V2", "V3")
    )
    + " TensorArrayGradWithShape",
)
_without(
    "of tables, which are no tensors",
    "HashTable HashTableV2 InitializeTable InitializeTableFromTextFile InitializeTableFromTextFileV2 "
    "InitializeTableV2 LookupTableFind LookupTableFindV2 LookupTableInsert LookupTableInsertV2 "
    "LookupTableSize "
    "LookupTableSizeV2 MutableDenseHashTable MutableDenseHashTableV2 MutableHashTable "
    "MutableHashTableOfTensors "
    "MutableHashTableOfTensorsV2 MutableHashTableV2",
)
_without("reads files", "GenerateVocabRemapping LoadAndRemapMatrix")
_without(
    "random",
    "GenerateBoundingBoxProposals Multinomial ParameterizedTruncatedNormal RandomCrop RandomGamma "
    "RandomIndexShuffle "
    "RandomShuffle RandomStandardNormal RandomUniform SampleDistortedBoundingBox "
    "SampleDistortedBoundingBoxV2 "
    "StatelessMultinomial StatelessParameterizedTruncatedNormal StatelessRandomBinomial "
    "StatelessRandomGammaV2 "
    "StatelessRandomGammaV3 StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomPoisson "
    "StatelessRandomShuffle StatelessRandomUniform StatelessRandomUniformFullInt "
    "StatelessRandomUniformFullIntV2 "
    "StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormal "
    "StatelessTruncatedNormalV2 TruncatedNormal",
)
_without(
    "of TensorFlow 1's summaries",
    "AudioSummary AudioSummaryV2 HistogramSummary ImageSummary MergeSummary ScalarSummary TensorSummary "
    "TensorSummaryV2",
)
_without("needs a file that describes a protocol buffer", "DecodeProtoV2 EncodeProto")
_without("of a debugger, which writes files", "DebugIdentityV2")
_without("takes a dataset's variant", "ReduceDataset")
_without("of SDCA's own state, by reference", "SdcaFprint SdcaOptimizer SdcaOptimizerV2 SdcaShrinkL1")
_without("has no kernel in the wheel", "AudioMicrofrontend")
_without("tells the time", "Timestamp")
_without("removed from TensorFlow 2's graphs", "BatchNormWithGlobalNormalization QuantizeAndDequantize TopK")
_without(
    "encodes Python types that TensorFlow alone writes",
    "CompositeTensorVariantFromComponents CompositeTensorVariantToComponents",
)
_without("of eager execution alone", "_EagerConst")
_without("has no gradient that can be called: it names an op that does not exist", "DebugGradientIdentity")
