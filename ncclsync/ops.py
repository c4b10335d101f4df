"""Collectives as TensorFlow ops, as a user calls them inside a step: "with the other towers".

What they become depends on who runs the step (a `Context`): a mark while a step is traced, an exchange
between towers that run eagerly, and nothing but the tensor itself where a step runs alone, since a reduction
over one tower is the identity. What joins the towers' tensors in the end is `group_ops.py`.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from ncclsync import native

REDUCE_OPS = ("mean", "sum", "prod", "max", "min")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One tensor's meeting with its counterparts on the other towers.

    Attributes:
        kind: "all_reduce"; "broadcast" (all get the root's); "reduce" (the root gets the sum, all others
            zeros: the gradient of a broadcast); "all_gather" (all get all towers' rows, in order, as many
            as there are per sample); "stack" (the same, of a tensor with one row per tower); "reduce_scatter"
            (of the sum of tensors with one row per tower, each gets its row).
        op: one of `REDUCE_OPS`; "mean" weighs each tower by its samples. Or "share": each tower gets, of the
            sum, the share that its samples have of all. Unused by a broadcast.
        root: the tower that a broadcast starts from, or that a reduce ends at.
        empty_too: whether towers without samples take part, with what they kept from earlier batches.
    """

    kind: str
    op: str = "sum"
    root: int = 0
    empty_too: bool = False

    @property
    def concatenates(self) -> bool:
        """Whether the result holds the rows of all towers."""
        return self.kind in ("all_gather", "stack")

    @property
    def changes_rows(self) -> bool:
        """Whether the result has other rows than what each tower has given."""
        return self.concatenates or self.kind == "reduce_scatter"

    @property
    def divides(self) -> bool:
        """Whether it divides a tensor among towers, one row for each, or puts such rows together again."""
        return self.kind == "reduce_scatter" or (self.kind == "stack" and self.empty_too)

    @property
    def differs(self) -> bool:
        """Whether each tower gets something else."""
        return self.kind in ("reduce", "reduce_scatter")

    def shape(self, shape: tf.TensorShape) -> tf.TensorShape:
        """Return the shape of the result, as far as it is known whatever the number of towers."""
        if self.concatenates:
            return tf.TensorShape([None, *shape[1:]])
        return tf.TensorShape([1, *shape[1:]]) if self.kind == "reduce_scatter" else shape


SCATTERED = Collective("reduce_scatter")


class Share(NamedTuple):
    """What part of the batch a tower has.

    Attributes:
        fraction: its share of the batch's samples, a float64 scalar; 0 for a tower without samples.
        tower: its number, an int32 scalar, as all that follow.
        rows: the rows that it computes on: its samples, or 1, a copy of the first, where it has none.
        begin: index in the batch of the first of these rows.
        total: the samples of the batch.
    """

    fraction: tf.Tensor
    tower: tf.Tensor
    rows: tf.Tensor
    begin: tf.Tensor
    total: tf.Tensor

    def of_samples(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return what a tower's samples contribute to a sum: zeros for a tower without any.

        A select, not a product: what such a tower computed on a stand-in row may be NaN.
        """
        return tf.where(self.fraction > 0, tensor, tf.zeros_like(tensor))

    def split_fraction(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the power of two that is nearest to `fraction`, and what it is to be multiplied by.

        A gradient that flows back is multiplied by a power of two without rounding, in any dtype.
        """
        logarithm = tf.math.log(self.fraction) / tf.math.log(tf.constant(2.0, tf.float64))
        power = tf.where(self.fraction > 0, tf.pow(tf.constant(2.0, tf.float64), tf.round(logarithm)), 0.0)
        return power, tf.math.divide_no_nan(self.fraction, power)


class Context(Protocol):
    """Whoever runs a step on towers; decides what a collective in it does.

    Attributes:
        share: the tower's part of the batch.
        of_shard: by the id of a gradient that was reduced where it was computed: that gradient itself, and
            what this tower had computed.
    """

    share: Share
    of_shard: dict[int, tuple[Any, Any]]

    def exchange(
        self, tensors: Sequence[tf.Tensor], collective: Collective, when: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """Return what each tensor becomes; called once per collective, in the order of the step.

        Args:
            tensors: the tower's.
            collective: what happens to them.
            when: a bool scalar, equal on all towers: if it is False, nothing happens to them.
        """
        ...

    def can_exchange(self) -> bool:
        """Whether a collective can be had here: not inside a loop or a branch of a traced step."""
        ...

    def kind_of(self, tensor: tf.Tensor) -> Any:
        """Return what a tensor of the step is, relative to the samples: a `kinds.Kind`."""
        ...

    def taken_as(self, kind: Any) -> contextlib.AbstractContextManager[None]:
        """While it is open, what is computed is of that kind, whatever its ops tell."""
        ...

    def implied(self) -> contextlib.AbstractContextManager[None]:
        """While it is open, no collective is one that the step itself asks for."""
        ...

    def differentiating(self) -> contextlib.AbstractContextManager[None]:
        """While it is open, gradients are computed: what flows back is no statistic of samples."""
        ...

    def note_kind(self, tensors: Sequence[tf.Tensor], kind: Any) -> None:
        """Note the kind of tensors whose ops do not tell it."""
        ...

    def note_loss(self, tensor: tf.Tensor) -> Any:
        """Note that a tensor of the step is differentiated; return its kind."""
        ...


_running = threading.local()


@contextlib.contextmanager
def running_in(context: Context | None) -> Iterator[None]:
    """Make `context` decide what the collectives of this thread do. None: the step runs alone."""
    before = getattr(_running, "context", None)
    _running.context = context
    try:
        yield
    finally:
        _running.context = before


def current_context() -> Context | None:
    """Return who runs the step of this thread, None outside a step on towers."""
    return getattr(_running, "context", None)


def all_reduce(tensors: Any, op: str = "mean") -> Any:
    """Reduce each tensor with its counterparts on the other towers; every tower gets the result.

    Collective: every tower must call it, which holds by itself for a step that is traced once. Outside a
    step on towers there is one tower, and the result is the tensors themselves. Differentiable for
    "mean" and "sum", to the gradient that one device would have.

    Args:
        tensors: a tensor or a nested structure of tensors, any mix of numeric dtypes. Shapes must agree
            between the towers. `tf.IndexedSlices` are made dense. None stays None.
        op: "mean" weighs each tower by the number of its samples, sum(n_i * t_i) / sum(n_i), so that the
            mean over a shard becomes the mean over the batch; floating dtypes only. "sum", "prod", "max",
            "min" run over the towers that have samples.

    Returns:
        The same structure; dense tensors of the same shapes and dtypes.

    Raises:
        ValueError: if `op` is unknown.
        TypeError: if a dtype cannot be reduced.
        NcclSyncError: inside `tf.while_loop`, `tf.cond` or a nested `tf.function`, where a step cannot be
            cut.
    """
    if op not in REDUCE_OPS:
        raise ValueError(f"Expected op to be one of {REDUCE_OPS}. Received: op={op!r}")
    return _map_collective(tensors, Collective("all_reduce", op))


def broadcast(tensors: Any, root: int = 0) -> Any:
    """Give every tower the tensors of tower `root`.

    Collective, like `all_reduce`. The gradient flows to the root's tensors. A root without samples
    (a batch with fewer rows than towers) sends what it computed on a copy of the batch's first row.

    Args:
        tensors: a tensor or a nested structure of numeric tensors; shapes must agree between the towers.
        root: index of the tower to take the tensors from.

    Returns:
        The same structure.

    Raises:
        ValueError: if `root` is negative, or not below the number of towers.
        TypeError, NcclSyncError: as for `all_reduce`.
    """
    if isinstance(root, bool) or not isinstance(root, int) or root < 0:
        raise ValueError(f"Expected root to be the index of a tower. Received: root={root!r}")
    return _map_collective(tensors, Collective("broadcast", root=root))


def all_gather(tensors: Any) -> Any:
    """Give every tower the rows of all towers: what the whole batch would have held, in its order.

    Collective, like `all_reduce`, and differentiable: for what compares the samples of a batch with each
    other, such as a contrastive loss. Outside a step on towers the result is the tensors themselves.

    Args:
        tensors: a tensor or a nested structure of tensors of any dtype; the first axis runs over the
            samples, with the same number of rows for each.

    Returns:
        The same structure; the first axis runs over the samples of all towers.

    Raises:
        ValueError: for a scalar.
        NcclSyncError: as for `all_reduce`.
    """
    for leaf in tf.nest.flatten(tensors):
        if leaf is not None and tf.convert_to_tensor(leaf).shape.rank == 0:
            raise ValueError(f"Expected tensors whose first axis runs over the samples. Received: {leaf}")
    return _map_collective(tensors, Collective("all_gather"))


def stack(tensor: tf.Tensor) -> tf.Tensor:
    """Give every tower the counterparts of `tensor` on all towers that have samples: [N, *shape].

    Collective and differentiable, like `all_reduce`. Outside a step on towers N is 1.
    """
    context = current_context()
    row = tensor[tf.newaxis]
    return row if context is None else _exchange(context, [row], Collective("stack"))[0]


def add_gradients(gradients: Sequence[Any], *, rows_add_up: bool = False) -> list[Any]:
    """Add up the towers' parts of the batch's gradients.

    Sparse gradients are gathered: an optimizer then sees the very slices that one device would have, repeated
    rows included. Where `rows_add_up`, their dense sum is taken instead if that moves fewer bytes.

    Args:
        gradients: tensors, `tf.IndexedSlices` or None; of each, what this tower's samples contribute.
        rows_add_up: whether it makes no difference to whoever gets the gradients that a row which several
            slices name is given as their sum. (To Keras' adaptive optimizers it does: they square slices.)

    Returns:
        The same kinds, in the same order.
    """
    context = current_context()
    sparse = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
    if context is None:
        return list(gradients)
    added = all_reduce([None if i in sparse else g for i, g in enumerate(gradients)], op="sum")
    for i in sparse:
        adds = rows_add_up and gradients[i].values.shape[1:].is_fully_defined()
        added[i] = (_add_slices if adds else _gather_slices)(context, gradients[i])
    return added


def scaled(gradient: Any, factor: tf.Tensor) -> Any:
    """Return a gradient, a tensor or `tf.IndexedSlices`, multiplied by a scalar of any dtype."""
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _gather_slices(context: Context, slices: tf.IndexedSlices) -> tf.IndexedSlices:
    gathered = _exchange(context, [slices.values, slices.indices], Collective("all_gather"))
    return tf.IndexedSlices(*gathered, dense_shape=slices.dense_shape)


def _add_slices(context: Context, slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Gather slices, or reduce their dense sum, whichever moves fewer bytes; decided anew for each batch.

    By a gather a tower receives what all others have: (N - 1) / N of all slices, values and indices. An
    all-reduce moves 2 (N - 1) / N of the dense tensor. One of the two exchanges is then of nothing.
    """
    values, indices = slices.values, slices.indices
    rows, height = tf.shape(values)[0], tf.cast(slices.dense_shape[0], tf.int64)
    width = values.shape[1:].num_elements() * values.dtype.size  # bytes of a row
    total = _exchange(context, [tf.cast(rows, tf.int64)], Collective("all_reduce", "sum"))[0]
    dense = 2 * height * width < total * (width + indices.dtype.size)
    kept = tf.where(dense, 0, rows)
    height = tf.where(dense, height, tf.zeros_like(height))
    gathered = _gather_slices(context, tf.IndexedSlices(values[:kept], indices[:kept], slices.dense_shape))
    summed = tf.math.unsorted_segment_sum(values[kept:], indices[kept:], height)
    summed = _exchange(context, [summed], Collective("all_reduce", "sum"))[0]
    every = tf.cast(tf.range(height), indices.dtype)
    return tf.IndexedSlices(
        tf.concat([gathered.values, summed], 0), tf.concat([gathered.indices, every], 0), slices.dense_shape
    )


def _map_collective(structure: Any, collective: Collective) -> Any:
    leaves = tf.nest.flatten(structure)
    places = [i for i, leaf in enumerate(leaves) if leaf is not None]
    tensors = [tf.convert_to_tensor(leaves[i]) for i in places]
    for tensor in tensors:
        _check_dtype(tensor.dtype, collective)
    context = current_context()
    if context is not None and tensors:
        tensors = _exchange(context, tensors, collective)
    for i, tensor in zip(places, tensors, strict=True):
        leaves[i] = tensor
    return tf.nest.pack_sequence_as(structure, leaves)


def _exchange(context: Context, tensors: list[tf.Tensor], collective: Collective) -> list[tf.Tensor]:
    @tf.custom_gradient
    def differentiable(*values):
        results = context.exchange(values, collective)

        def gradient(*upstream):
            gradients = [None] * len(values)
            floating = [i for i, value in enumerate(values) if value.dtype.is_floating]
            if floating:
                pairs = ([values[i] for i in floating], [upstream[i] for i in floating])
                for i, tensor in zip(floating, _adjoint(context, collective, *pairs), strict=True):
                    gradients[i] = tensor
            return gradients

        return results, gradient

    return list(differentiable(*tensors))


def _adjoint(
    context: Context, collective: Collective, values: list[tf.Tensor], upstream: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Carry the gradients of a collective's results back to the `values` that went in.

    What a tower differentiates is its part of the batch's loss (`hooks.gradients_taped`), so that the loss'
    gradient of a result is the sum of the towers' `upstream`.
    """
    rest = context.share.split_fraction()[1]  # what all that flows back is yet to be multiplied by

    def met(adjoint):
        parts = [tensor * tf.cast(rest, tensor.dtype) for tensor in upstream]
        return [total / tf.cast(rest, total.dtype) for total in _exchange(context, parts, adjoint)]

    if collective.kind == "broadcast":
        return met(Collective("reduce", root=collective.root))
    if collective.kind == "reduce":
        return met(Collective("broadcast", root=collective.root))
    if collective.op not in ("mean", "sum"):
        raise ValueError(
            "Expected op 'mean' or 'sum' where an all-reduce is differentiated. "
            f"Received: op={collective.op!r}. Use tf.stop_gradient on its result."
        )
    sums = met(Collective("all_reduce", "sum"))
    if collective.concatenates:
        pairs = zip(values, sums, strict=True)
        return [_own_rows(context.share, collective, tf.shape(value)[0], total) for value, total in pairs]
    if collective.op == "mean":
        return [total * tf.cast(context.share.fraction, total.dtype) for total in sums]
    return sums


def _own_rows(share: Share, collective: Collective, rows: tf.Tensor, gathered: tf.Tensor) -> tf.Tensor:
    """Take from the rows of all towers those that this tower contributed."""
    begin = share.tower if collective.kind == "stack" else share.begin * (rows // share.rows)
    begin = tf.minimum(begin, tf.shape(gathered)[0] - rows)  # a tower without samples contributed none
    return gathered[begin : begin + rows]


def _check_dtype(dtype: tf.DType, collective: Collective) -> None:
    if collective.op == "mean" and collective.kind == "all_reduce" and not dtype.is_floating:
        raise TypeError(f"Expected a floating dtype for op='mean'. Received: {dtype.name}")
    if dtype.name not in native.DTYPES and not collective.concatenates:
        raise TypeError(f"Expected one of the dtypes {sorted(native.DTYPES)}. Received: {dtype.name}")
