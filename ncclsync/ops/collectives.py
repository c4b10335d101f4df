"""Offer collectives as TensorFlow ops that a user may call inside a step.

While a step is traced for towers, they add marks (`Context`), and the laid-out step joins the tensors. Without towers
they return the tensor itself, since a reduction over one tower is the identity. A step is exact without calling them.
"""

import contextlib
import dataclasses
import difflib
import enum
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat.names import OpName
from ncclsync.compat.source_lines import user_line
from ncclsync.errors import NcclSyncError

ReduceOp = Literal["mean", "sum", "prod", "max", "min"]  # "mean" weighs each tower by its samples
REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)
_NO_MARK = OpName("")


class CollectiveKind(str, enum.Enum):
    """Say what every tower gets."""

    ALL_REDUCE = "all_reduce"  # the sum, maximum, … of the towers' tensors
    BROADCAST = "broadcast"  # the root's tensor
    ALL_GATHER = "all_gather"  # all towers' rows, in the order of the batch
    STACK = "stack"  # an all-gather of one row of each tower
    REDUCE_SCATTER = "reduce_scatter"  # its row of a sum; the tensors that are added have a row for each tower


class Purpose(str, enum.Enum):
    """Say how the tensors of a mark are placed from there on, in a step that is traced."""

    COLLECTIVE = "collective"  # they meet their counterparts, as `Mark.collective` says
    WHOLE = "whole"  # they are the batch's
    SLICES = "slices"  # values and indices of a sparse gradient are the batch's
    PARTS = "parts"  # each is this tower's addend of the batch's
    SLICES_PART = "slices part"  # PARTS, of values and indices of a sparse gradient
    LOCAL = "local"  # this tower's alone, if the last tensor is divided by rows; otherwise the batch's
    ADDENDS = "addends"  # a gradient, of which each tower takes its addend
    ROWS = "rows"  # local values become this tower's rows of the batch again
    OWN_ROW = "own row"  # of a tensor with one row for each tower, this tower's row


@dataclasses.dataclass(frozen=True)
class Collective:
    """Describe how a tensor is joined with the other towers' tensors."""

    kind: CollectiveKind
    op: ReduceOp = "sum"
    root: int = 0  # the tower that a broadcast starts from
    empty_too: bool = False  # whether towers without samples take part, with values kept from earlier batches

    @property
    def concatenates(self) -> bool:
        """Return whether the result holds the rows of all towers."""
        return self.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.STACK)

    @property
    def changes_rows(self) -> bool:
        """Return whether a tower's result has other rows than its input."""
        return self.concatenates or self.kind == CollectiveKind.REDUCE_SCATTER

    @property
    def divides(self) -> bool:
        """Return whether it divides a tensor among towers, a row for each, or joins these rows again."""
        return self.kind == CollectiveKind.REDUCE_SCATTER or (self.kind == CollectiveKind.STACK and self.empty_too)

    @property
    def differs(self) -> bool:
        """Return whether towers get different results."""
        return self.kind == CollectiveKind.REDUCE_SCATTER

    def shape(self, shape: tf.TensorShape) -> tf.TensorShape:
        """Return the result's shape, with the dimensions that do not depend on the number of towers."""
        if shape.rank is None:
            return shape
        if self.concatenates:
            return tf.TensorShape([None, *shape[1:]])
        return tf.TensorShape([1, *shape[1:]]) if self.kind == CollectiveKind.REDUCE_SCATTER else shape


# Of values kept from earlier batches: a tower without rows of this batch has some, too.
KEPT_SUM = Collective(CollectiveKind.ALL_REDUCE, "sum", empty_too=True)


class Share(NamedTuple):
    """Hold the part of the batch that a shard has, as scalars: `fraction` is float64, the others are int32."""

    fraction: tf.Tensor  # its share of the batch's samples; 0 for a shard without samples
    tower: tf.Tensor  # the shard's number: the tower's, where each tower has one shard
    rows: tf.Tensor  # how many it computes on: its samples; or, without samples, 1, a copy of the batch's first row
    begin: tf.Tensor  # the index in the batch of its first row
    total: tf.Tensor  # samples in the batch

    def of_samples(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tower's addend of a sum over the samples: zeros for a tower without samples.

        A select, not a product: a tower without samples computes on a copy of a row, and may get NaN.
        """
        return tf.where(self.fraction > 0, tensor, tf.zeros_like(tensor))

    def of_mean(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tower's addend of a mean over the samples, of which `tensor` is the mean over the tower's."""
        return tensor * tf.cast(self.fraction, tensor.dtype)

    def of_whole(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tower's addend of a tensor that all towers have: all of it on the first, zeros on the others."""
        return tf.where(tf.equal(self.tower, 0), tensor, tf.zeros_like(tensor))


@dataclasses.dataclass(frozen=True)
class Mark:
    """Describe an `IdentityN` of a trace that says how tensors are to be placed from there on.

    Attributes:
        name: the op's.
        purpose: how they are placed.
        collective: how they meet their counterparts, if that is the purpose.
        conditional: whether its last tensor says if the collective happens.
        line: the user's that asks for it, or calls what does.
        height: the rows of the table that slices are of, where `whole` may add slices of one row up; else 0.
        of: of a mark of gradients, the name of the mark whose gradients they are.
        by_choice: whether it gives other numbers than one device's, for speed.
    """

    name: OpName
    purpose: Purpose
    collective: Collective = Collective(CollectiveKind.ALL_REDUCE)
    conditional: bool = False
    line: str = ""
    height: int = 0
    of: OpName = _NO_MARK
    by_choice: bool = False


class Context:
    """Leave marks in a step that is being traced for towers.

    Attributes:
        share: the tower's.
        marks: by name of the marking op.
    """

    def __init__(self, share: Share) -> None:
        """Begin in the graph that is being built."""
        self.share = share
        self.marks: dict[OpName, Mark] = {}
        self._graph = tf.compat.v1.get_default_graph()

    def can_exchange(self) -> bool:
        """Return whether a collective is possible here: not inside a loop or a branch of the step."""
        return tf.compat.v1.get_default_graph() is self._graph

    def exchange(
        self, tensors: Sequence[tf.Tensor], collective: Collective, when: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """Join the tower's tensors with the others'; called once per collective, in the step's order.

        `when` is a bool scalar, equal on all towers; if False, the tensors stay as they are.
        """
        if not self.can_exchange():
            raise NcclSyncError(
                "Expected a collective at the top level of a step, where the step can be cut. Received: one "
                f"inside tf.while_loop, tf.cond or a nested tf.function, called at {user_line()}. Move the "
                "collective out of it, or remove it: steps on towers compute what one device computes."
            )
        conditions = [] if when is None else [when]
        details = {"collective": collective, "conditional": when is not None}
        results = self.mark([*tensors, *conditions], Purpose.COLLECTIVE, **details)
        results = results[: len(tensors)]
        if collective.changes_rows:
            # On towers the number of rows will be another one: nothing that is traced from here on may know it.
            results = list(map(_of_any_rows, results))
        return results

    def mark(self, tensors: Sequence[tf.Tensor], purpose: Purpose, **details: Any) -> list[tf.Tensor]:
        """Return the tensors, placed as that purpose says; `details` are of `Mark`."""
        if not self.can_exchange():  # in a loop, or a branch: what has no rule there is made whole before it
            return list(tensors)
        outputs = tf.identity_n(list(tensors), name="ncclsync_mark")
        op = outputs[0].op
        self.marks[op.name] = Mark(op.name, purpose, line=user_line(op.traceback), **details)
        return list(outputs)


_running = threading.local()


@contextlib.contextmanager
def running_in(context: Context | None) -> Iterator[None]:
    """Let `context` handle the collectives of this thread; None: the step runs without towers."""
    before = getattr(_running, "context", None)
    _running.context = context
    try:
        yield
    finally:
        _running.context = before


def current_context() -> Context | None:
    """Return the context of this thread's step; None outside a step on towers."""
    return getattr(_running, "context", None)


def all_reduce(tensors: Any, op: str = "mean") -> Any:
    """Reduce each tensor over all towers; every tower gets the result.

    Collective: every tower must call it, as every tower does in a step that is traced once. Outside a step on towers
    the tensors are returned as they are. "mean" and "sum" are differentiable, with one device's gradient.

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
        near = ["mean"] if op in ("avg", "average") else difflib.get_close_matches(str(op), REDUCE_OPS, 1)
        write = f'. Write op="{near[0]}"' if near else ""
        raise ValueError(f"Expected op to be one of {REDUCE_OPS}. Received: op={op!r}{write}")
    return _map_collective(tensors, Collective(CollectiveKind.ALL_REDUCE, op))


def broadcast(tensors: Any, root: int = 0) -> Any:
    """Give every tower the tensors of tower `root`.

    Collective, like `all_reduce`. The gradient flows to the root's tensors. A root without samples
    (a batch with fewer rows than towers) computes on a copy of the batch's first row, and sends that.

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
    return _map_collective(tensors, Collective(CollectiveKind.BROADCAST, root=root))


def all_gather(tensors: Any) -> Any:
    """Give every tower the rows of all towers, in the order of the batch.

    Collective, like `all_reduce`, and differentiable. For code that compares the samples of a batch with each other,
    such as a contrastive loss. Outside a step on towers the tensors are returned as they are.

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
    return _map_collective(tensors, Collective(CollectiveKind.ALL_GATHER))


def stack(tensor: tf.Tensor) -> tf.Tensor:
    """Give every tower the tensors of all N towers that have samples: [N, *shape].

    Collective and differentiable, like `all_reduce`: a tower's gradient is its row of the result's gradient. Outside a
    step on towers N is 1.
    """
    row = tensor[tf.newaxis]
    context = current_context()
    return row if context is None else _stacked(context)(row)


def _stacked(context: Context) -> Any:
    """Return a function that gives [N, ...] the towers' rows, of [1, ...] its own."""

    @tf.custom_gradient
    def stacked(row):
        (rows,) = context.exchange([row], Collective(CollectiveKind.STACK))
        return rows, own_row

    @tf.custom_gradient
    def own_row(rows):
        (row,) = context.mark([rows], Purpose.OWN_ROW)
        return row, stacked if context.can_exchange() else tf.identity

    return stacked


def to_local(tensor: tf.Tensor, mask: Any = None, *, by_choice: bool = False) -> tuple[tf.Tensor, Any]:
    """Take a tower's rows out of the batch; results computed from them are this tower's alone. Differentiable.

    Args:
        tensor: of which a tower has its rows; if it has all, it keeps them.
        mask: of the same rows; it has no gradient. None stays None.
        by_choice: whether the numbers may differ from one device's, since the user chose so. If a tower has all rows,
            nothing is this tower's alone: the numbers are one device's.
    """
    context = current_context()
    if context is not None and mask is not None:
        mask = _of_any_rows(context.mark([mask, tensor], Purpose.LOCAL, by_choice=by_choice)[0])
    return _both_ways(Purpose.LOCAL, Purpose.ROWS, by_choice)(tensor), mask


def from_local(tensors: Sequence[tf.Tensor], *, by_choice: bool = False) -> list[tf.Tensor]:
    """Return each tower's own results to the step, as its rows of the batch; differentiable.

    The gradient that flows back to a tower is its addend of the batch's gradient.
    """
    return [_both_ways(Purpose.LOCAL, Purpose.ADDENDS, by_choice)(tensor) for tensor in tensors]


def to_replicate(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Let tensors, and the gradients that flow back to them, be the batch's here; differentiable."""
    return [_both_ways(Purpose.WHOLE, Purpose.WHOLE, False)(tensor) for tensor in tensors]


def _of_any_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Leave the number of rows open, which another tensor of that step may have fixed: a tower has its own number."""
    if not tensor.shape.rank or tensor.shape[0] is None:
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])


def _both_ways(forward: Purpose, backward: Purpose, by_choice: bool, of: OpName = _NO_MARK) -> Any:
    """Return a function that marks a tensor one way and its gradient the other way; of any order."""

    @tf.custom_gradient
    def marked(tensor):
        context = current_context()
        if context is None or not context.can_exchange():
            return tf.identity(tensor), lambda upstream: upstream
        (result,) = context.mark([tensor], forward, of=of, by_choice=by_choice)
        own = _of_any_rows(result) if (forward, backward) == (Purpose.LOCAL, Purpose.ROWS) else result
        return own, lambda upstream: _both_ways(backward, forward, by_choice, result.op.name)(upstream)

    return marked


def whole(gradients: Sequence[Any], *, rows_add_up: bool = False) -> list[Any]:
    """Let gradients be the batch's here: this is where they are all-reduced.

    If a sparse gradient's indices come from the samples, the towers' slices are gathered: the optimizer sees the slices
    of one device, with repeated rows. With `rows_add_up` a dense sum is taken instead if it moves fewer bytes.

    Args:
        gradients: tensors, `tf.IndexedSlices` or None.
        rows_add_up: whether several slices of one row may be replaced by their sum. (Not for Keras' adaptive
            optimizers, which square each slice.)

    Returns:
        The same kinds, in the same order.
    """
    return _marked(gradients, Purpose.WHOLE, Purpose.SLICES, rows_add_up)


def parts(gradients: Sequence[Any]) -> list[Any]:
    """Return this tower's addend of each of the batch's gradients; None stays None."""
    return _marked(gradients, Purpose.PARTS, Purpose.SLICES_PART)


def _marked(gradients: Sequence[Any], dense: Purpose, sparse: Purpose, rows_add_up: bool = False) -> list[Any]:
    """Mark dense gradients together, and each sparse one by itself."""
    context, result = current_context(), list(gradients)
    if context is None or not context.can_exchange():
        return result
    places = [i for i, one in enumerate(result) if tf.is_tensor(one) and not isinstance(one, tf.IndexedSlices)]
    for i, tensor in zip(places, context.mark([result[i] for i in places], dense) if places else [], strict=True):
        result[i] = tensor
    for i, one in enumerate(result):
        if isinstance(one, tf.IndexedSlices):
            shape: Any = None if one.dense_shape is None else tf.get_static_value(one.dense_shape)
            details = {"height": int(shape[0]) if rows_add_up and shape is not None else 0}
            marked = context.mark([one.values, one.indices], sparse, **details)
            result[i] = tf.IndexedSlices(*marked, dense_shape=one.dense_shape)
    return result


def _map_collective(structure: Any, collective: Collective) -> Any:
    leaves = tf.nest.flatten(structure)
    places = [i for i, leaf in enumerate(leaves) if leaf is not None]
    tensors = [tf.convert_to_tensor(leaves[i]) for i in places]
    for tensor in tensors:
        is_mean = collective.op == "mean" and collective.kind == CollectiveKind.ALL_REDUCE
        if is_mean and not tensor.dtype.is_floating:
            raise TypeError(f"Expected a floating dtype for op='mean'. Received: {tensor.dtype.name}")
        if tensor.dtype.name not in native.DTYPES and not collective.concatenates:
            raise TypeError(f"Expected one of the dtypes {sorted(native.DTYPES)}. Received: {tensor.dtype.name}")
    context = current_context()
    if context is not None and tensors:
        tensors = context.exchange(tensors, collective)
    for i, tensor in zip(places, tensors, strict=True):
        leaves[i] = tensor
    return tf.nest.pack_sequence_as(structure, leaves)
