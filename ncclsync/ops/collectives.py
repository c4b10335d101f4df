"""Offer collectives as TensorFlow ops, for a user to call inside a step: "with the other towers".

While a step is traced for towers they are marks (`Context`). Where a step runs alone they return the tensor
itself, since a reduction over one tower is the identity. No step needs them to be right. In the end
`group_ops.py` joins the towers' tensors.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from ncclsync.communicator import native

REDUCE_OPS = ("mean", "sum", "prod", "max", "min")


@dataclasses.dataclass(frozen=True)
class Collective:
    """Describe how one tensor meets its counterparts on the other towers.

    Attributes:
        kind: "all_reduce"; "broadcast" (all get the root's); "all_gather" (all get all towers' rows, in
            order, as many as there are per sample); "stack" (the same, of a tensor with one row per tower);
            "reduce_scatter" (of the sum of tensors with one row per tower, each gets its row).
        op: one of `REDUCE_OPS`; "mean" weighs each tower by its samples. Unused by a broadcast.
        root: the tower that a broadcast starts from.
        empty_too: whether towers without samples take part, with what they kept from earlier batches.
    """

    kind: str
    op: str = "sum"
    root: int = 0
    empty_too: bool = False

    @property
    def concatenates(self) -> bool:
        """Return whether the result holds the rows of all towers."""
        return self.kind in ("all_gather", "stack")

    @property
    def changes_rows(self) -> bool:
        """Return whether the result has other rows than what each tower has given."""
        return self.concatenates or self.kind == "reduce_scatter"

    @property
    def divides(self) -> bool:
        """Return whether it divides a tensor among towers, a row for each, or joins such rows again."""
        return self.kind == "reduce_scatter" or (self.kind == "stack" and self.empty_too)

    @property
    def differs(self) -> bool:
        """Return whether each tower gets something else."""
        return self.kind == "reduce_scatter"

    def shape(self, shape: tf.TensorShape) -> tf.TensorShape:
        """Return the shape of the result, as far as it is known whatever the number of towers."""
        if shape.rank is None:
            return shape
        if self.concatenates:
            return tf.TensorShape([None, *shape[1:]])
        return tf.TensorShape([1, *shape[1:]]) if self.kind == "reduce_scatter" else shape


SCATTERED = Collective("reduce_scatter")


class Share(NamedTuple):
    """Hold which part of the batch a tower has.

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


class Context(Protocol):
    """Decide what a collective becomes in a step that is traced for towers.

    Attributes:
        share: the tower's part of the batch.
    """

    share: Share

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

    def mark(self, tensors: Sequence[tf.Tensor], purpose: str, **details: Any) -> list[tf.Tensor]:
        """Return the tensors, placed as `program.Mark` says for that purpose."""
        ...

    def can_exchange(self) -> bool:
        """Return whether a collective can be had here: not inside a loop or a branch of a traced step."""
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

    Collective and differentiable, like `all_reduce`: what flows back to a tower is its own row. Outside a
    step on towers N is 1.
    """
    context = current_context()
    row = tensor[tf.newaxis]
    if context is None:
        return row

    @tf.custom_gradient
    def stacked(row):
        return context.exchange([row], Collective("stack"))[0], lambda upstream: _marked([upstream], "own row")[0]

    return stacked(row)


def to_local(tensors: Sequence[tf.Tensor], *, by_choice: bool = False) -> list[tf.Tensor]:
    """Take a tower's own rows out of the batch; what is computed of them is its own. Differentiable.

    Args:
        tensors: of the batch.
        by_choice: whether that gives other numbers than one device's.
    """
    return [_both_ways("local", "rows", by_choice)(tensor) for tensor in tensors]


def from_local(tensors: Sequence[tf.Tensor], *, by_choice: bool = False) -> list[tf.Tensor]:
    """Let what each tower has computed of its own take part in the step; differentiable.

    The gradient that flows back to a tower is its own addend of the batch's gradient.
    """
    return [_both_ways("local", "addends", by_choice)(tensor) for tensor in tensors]


def to_replicate(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Let tensors be the batch's here, and what flows back to them too; differentiable."""
    return [_both_ways("whole", "whole", False)(tensor) for tensor in tensors]


def _both_ways(forward: str, backward: str, by_choice: bool, of: str = "") -> Any:
    """Return a function that marks tensors, and marks what flows back to them otherwise, to any order."""

    @tf.custom_gradient
    def marked(tensor):
        context = current_context()
        if context is None or not context.can_exchange():
            return tf.identity(tensor), lambda upstream: upstream
        (result,) = context.mark([tensor], forward, of=of, by_choice=by_choice)
        return result, lambda upstream: _both_ways(backward, forward, by_choice, result.op.name)(upstream)

    return marked


def whole(gradients: Sequence[Any], *, rows_add_up: bool = False) -> list[Any]:
    """Let gradients be the batch's here: this is where they are all-reduced.

    Of a sparse one whose indices come from the samples the towers' slices are gathered: an optimizer then
    sees the very slices that one device would have, repeated rows included. Where `rows_add_up`, their dense
    sum is taken instead if that moves fewer bytes.

    Args:
        gradients: tensors, `tf.IndexedSlices` or None.
        rows_add_up: whether it makes no difference to whoever gets the gradients that a row which several
            slices name is given as their sum. (To Keras' adaptive optimizers it does: they square slices.)

    Returns:
        The same kinds, in the same order.
    """
    context = current_context()
    result = list(gradients)
    if context is None or not context.can_exchange():
        return result
    dense = [i for i, one in enumerate(result) if tf.is_tensor(one) and not isinstance(one, tf.IndexedSlices)]
    for i, tensor in zip(dense, context.mark([result[i] for i in dense], "whole") if dense else [], strict=True):
        result[i] = tensor
    for i, one in enumerate(result):
        if isinstance(one, tf.IndexedSlices):
            shape: Any = None if one.dense_shape is None else tf.get_static_value(one.dense_shape)
            adds = rows_add_up and shape is not None
            details = {"rows_add_up": adds, "height": int(shape[0]) if adds else 0}
            marked = context.mark([one.values, one.indices], "slices", **details)
            result[i] = tf.IndexedSlices(*marked, dense_shape=one.dense_shape)
    return result


def parts(gradients: Sequence[Any]) -> list[Any]:
    """Return, of each of the batch's gradients, what this tower adds to it; None stays None."""
    return [
        None
        if one is None
        else tf.IndexedSlices(*_marked([one.values, one.indices], "slices part"), dense_shape=one.dense_shape)
        if isinstance(one, tf.IndexedSlices)
        else _marked([one], "parts")[0]
        for one in gradients
    ]


def _marked(tensors: list[tf.Tensor], purpose: str) -> list[tf.Tensor]:
    context = current_context()
    return tensors if context is None else context.mark(tensors, purpose)


def _map_collective(structure: Any, collective: Collective) -> Any:
    leaves = tf.nest.flatten(structure)
    places = [i for i, leaf in enumerate(leaves) if leaf is not None]
    tensors = [tf.convert_to_tensor(leaves[i]) for i in places]
    for tensor in tensors:
        _check_dtype(tensor.dtype, collective)
    context = current_context()
    if context is not None and tensors:
        tensors = context.exchange(tensors, collective)
    for i, tensor in zip(places, tensors, strict=True):
        leaves[i] = tensor
    return tf.nest.pack_sequence_as(structure, leaves)


def _check_dtype(dtype: tf.DType, collective: Collective) -> None:
    if collective.op == "mean" and collective.kind == "all_reduce" and not dtype.is_floating:
        raise TypeError(f"Expected a floating dtype for op='mean'. Received: {dtype.name}")
    if dtype.name not in native.DTYPES and not collective.concatenates:
        raise TypeError(f"Expected one of the dtypes {sorted(native.DTYPES)}. Received: {dtype.name}")
