"""Random numbers on towers: those that one device would draw for these very samples.

While a step on towers is traced or runs eagerly, `draws_of_whole_batch` lets each draw that has rows per
sample draw for the whole batch, from a seed that is the same on all towers, and take the shard's rows. What
depends on a state that TensorFlow hides, or on the order of all samples, cannot be had and is refused.
`traced_draws.py` looks at the finished trace for what the hooks cannot see.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ncclsync import ops, private, private_keras
from ncclsync.errors import NcclSyncError
from ncclsync.ops import Collective, Context
from ncclsync.program import user_line

# Names of what is drawn here, and of the op whose shape is what a tower asked for.
SCOPE, SHAPE = "ncclsync_draw", "asked_shape"
_SHAPES = Collective("stack", empty_too=True)
INSTEAD = "Draw with keras.random or tf.random.stateless_*"


@contextlib.contextmanager
def draws_of_whole_batch() -> Iterator[None]:
    """Let the towers of a step draw what one device draws; see the module's docstring.

    Raises within: NcclSyncError, where a step shuffles samples or draws from a state that TensorFlow hides.
    """
    with contextlib.ExitStack() as hooks:
        for name, (module, parameters) in private_keras.stateless_draws().items():
            wrap = functools.partial(_drawing, parameters=parameters)
            hooks.enter_context(private.methods_wrapped([module], name, wrap))
        for name, module in private_keras.shuffles().items():
            hooks.enter_context(private.methods_wrapped([module], name, _shuffling))
        for name, module in private.stateful_draws().items():
            hooks.enter_context(private.methods_wrapped([module], name, _refusing))
        hooks.enter_context(private.methods_wrapped([private.function_class()], "__call__", _inlining))
        hooks.enter_context(private.methods_wrapped([keras.random.SeedGenerator], "next", _noting))
        hooks.enter_context(private.methods_wrapped([tf.random.Generator], "_prepare_key_counter", _skipping))
        yield


def _drawing(draw: Callable, parameters: Sequence[str]) -> Callable:
    """Wrap a stateless draw; `parameters` may hold one row per row drawn."""
    signature = inspect.signature(draw)

    @functools.wraps(draw)
    def drawn(*args, **kwargs):
        context = ops.current_context()
        if context is None:
            return draw(*args, **kwargs)
        given = {name: value for name, value in signature.bind(*args, **kwargs).arguments.items()}
        given.pop("name", None)
        with tf.name_scope(SCOPE):
            if "shape" in given:
                shape = given["shape"] = tf.convert_to_tensor(given["shape"])
            else:
                given["logits"] = tf.convert_to_tensor(given["logits"])
                shape = tf.shape(given["logits"])
            if not _has_rows(context, shape):
                return draw(**given)
            factor = _rows_per_sample(context, shape, draw.__name__)
            if "shape" in given:
                given["shape"] = _of_whole_batch(context, shape, factor)
            for name in parameters:
                given[name] = _padded(context, tf.convert_to_tensor(given[name]), factor, shape.shape[0])
            whole = draw(**given)
            begin = factor * context.share.begin
            return whole[begin : begin + factor * context.share.rows]

    return drawn


def _shuffling(shuffle: Callable) -> Callable:
    """Wrap a permutation of one axis of a tensor, by default the first."""

    @functools.wraps(shuffle)
    def shuffled(x, *args, **kwargs):
        context = ops.current_context()
        if context is not None:
            axis = inspect.signature(shuffle).bind(x, *args, **kwargs).arguments.get("axis", 0)
            length = x.shape[axis]
            with tf.name_scope(SCOPE):
                shape = tf.convert_to_tensor([tf.shape(x)[axis] if length is None else length])
                rows = _has_rows(context, shape)
            if rows:
                raise NcclSyncError(
                    "Expected random numbers that are drawn per sample, with batch_invariant_random=True. "
                    f"Received: a shuffle of the samples of a batch, of which a tower has but a shard, at "
                    f"{user_line()}. Shuffle (or mix) the samples in the tf.data pipeline."
                )
        return shuffle(x, *args, **kwargs)

    return shuffled


def _refusing(draw: Callable) -> Callable:
    """Wrap a draw whose state is TensorFlow's own."""

    @functools.wraps(draw)
    def refused(*args, **kwargs):
        if ops.current_context() is not None:
            raise stateful_error(draw.__name__, f"at {user_line()}")
        return draw(*args, **kwargs)

    return refused


def stateful_error(name: str, place: str) -> NcclSyncError:
    """Return the error of a draw whose state TensorFlow hides."""
    return NcclSyncError(
        "Expected random numbers drawn from a seed or a generator, with batch_invariant_random=True. "
        f"Received: {name}, whose state TensorFlow hides, {place}. {INSTEAD}."
    )


def _noting(following: Callable) -> Callable:
    """Wrap `SeedGenerator.next`."""

    @functools.wraps(following)
    def noted(self, *args, **kwargs):
        _note_state(private_keras.generator_state(self))
        return following(self, *args, **kwargs)

    return noted


def _skipping(prepare: Callable) -> Callable:
    """Wrap what moves a `tf.random.Generator` on by what a draw of this shape uses up."""

    @functools.wraps(prepare)
    def prepared(self, shape):
        context = ops.current_context()
        if context is not None:
            _note_state(private_keras.generator_state(self))
            with tf.name_scope(SCOPE):
                shape = tf.convert_to_tensor(shape, dtype_hint=tf.int32)
                if _has_rows(context, shape):
                    factor = _rows_per_sample(context, shape, "tf.random.Generator")
                    shape = _of_whole_batch(context, shape, factor)
        return prepare(self, shape)

    return prepared


def _inlining(call: Callable) -> Callable:
    """Wrap the call of a `tf.function`: it may have been traced before, with draws that were not hooked."""

    @functools.wraps(call)
    def inlined(self, *args, **kwargs):
        if ops.current_context() is None:
            return call(self, *args, **kwargs)
        return private.autograph_converted(self.python_function)(*args, **kwargs)

    return inlined


def _note_state(state: tf.Variable) -> None:
    """Tell a step that runs eagerly of random state that may not be the model's: Keras' global one."""
    adopt = getattr(ops.current_context(), "adopt", None)
    if adopt is not None:
        adopt(state)


def _has_rows(context: Context, shape: tf.Tensor) -> bool:
    """Whether the first dimension of `shape` is counted by the shard's rows.

    In a trace, where the rows are open, what is known does not depend on them. Eagerly, shards are of
    different lengths, and what depends on them differs between towers.
    """
    if shape.shape[0] == 0:
        return False
    if not tf.executing_eagerly():
        if tf.is_tensor(context.share.rows) and hasattr(context.share.rows, "numpy"):
            raise NcclSyncError(
                "Expected no random numbers inside a tf.function of a step that runs eagerly, with "
                f"batch_invariant_random=True. Received: a draw at {user_line()}. "
                "Use tf.config.run_functions_eagerly(True) too."
            )
        static = tf.zeros(shape, tf.bool, name=SHAPE).shape
        if not context.can_exchange() and None in static.as_list()[1:]:
            raise misplaced_error(static, user_line())
        return static[0] is None
    (shapes,) = context.exchange([tf.cast(shape, tf.int32)[tf.newaxis]], _SHAPES)  # [N, rank]
    differ = tf.reduce_any(shapes != shapes[:1], axis=0).numpy()
    if any(differ[1:]):
        raise misplaced_error(shape.numpy().tolist(), user_line())
    return bool(differ[0])


def misplaced_error(shape: Any, line: str) -> NcclSyncError:
    """Return the error of a draw in which samples may run along another dimension than the first."""
    return NcclSyncError(
        "Expected draws whose first dimension runs over the samples, with batch_invariant_random=True. "
        f"Received: shape {tuple(shape)}, where another dimension may do so, at {line}. "
        "Draw with the samples first, or give the inputs a fixed length."
    )


def _rows_per_sample(context: Context, shape: tf.Tensor, name: str) -> tf.Tensor:
    """How many rows of a draw there are for each row of the shard, an int32 scalar."""
    rows = tf.cast(shape[0], tf.int32)
    message = (
        "Expected random numbers whose first dimension is a multiple of the samples, with "
        f"batch_invariant_random=True. Received: {name} at {user_line()}, with rows and samples:"
    )
    check = tf.debugging.Assert(rows % context.share.rows == 0, [message, rows, context.share.rows])
    with tf.control_dependencies([] if check is None else [check]):
        return rows // context.share.rows


def _of_whole_batch(context: Context, shape: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    total = tf.cast(factor * context.share.total, shape.dtype)
    return tf.concat([total[tf.newaxis], shape[1:]], axis=0)


def _padded(context: Context, parameter: tf.Tensor, factor: tf.Tensor, rank: int) -> tf.Tensor:
    """Place a draw's parameters per row among those of the whole batch, which are ones."""
    if tf.executing_eagerly():
        rowed = parameter.shape[:1] == [int(factor * context.share.rows)]
    else:
        rowed = parameter.shape[:1] != [1]
    if parameter.shape.rank != rank or not rowed:
        return parameter
    begin, total = factor * context.share.begin, factor * context.share.total
    behind = total - begin - tf.shape(parameter)[0]
    paddings = tf.concat([[[begin, behind]], tf.zeros([rank - 1, 2], tf.int32)], axis=0)
    return tf.pad(parameter, paddings, constant_values=tf.ones([], parameter.dtype))
