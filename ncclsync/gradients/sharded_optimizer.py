"""Divide an optimizer's state among the towers: each updates its part of every weight, and sends it.

This is stage 1 of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020. Weights of one dtype, device and weight decay, up to a bucket's bytes, lie one after the other in a flat
variable, of which each tower holds its partition. A twin of the optimizer updates the partition as if it were a weight,
and keeps the tower's part of the optimizer's state.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ncclsync import ops
from ncclsync.communicator import native
from ncclsync.compat import keras_optimizers
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError
from ncclsync.gradients.partitions import PartitionedSlot, Place, Processes, not_in_a_function
from ncclsync.ops import Collective, CollectiveKind
from ncclsync.semantics.rules import ELEMENTWISE
from ncclsync.sharding.roles import Role, declare_role

SCATTERED = Collective(CollectiveKind.REDUCE_SCATTER)
# Towers without samples have updated their parts, too.
GATHERED = Collective(CollectiveKind.STACK, empty_too=True)

# Ops that write a variable, and `IdentityN`, which passes its inputs on.
_APART = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "IdentityN"})

# Different lengths, so that no axis can be taken for another.
_LENGTHS = (6, 5, 4, 3, 2, 2, 2)

Copies = Callable[[tf.Variable], list[tf.Variable]]


class _Group(NamedTuple):
    """Hold the weights of one flat variable and their places in it, and that variable on tower 0."""

    pairs: list[tuple[Any, Place]]
    flat: keras.Variable


class _Sharded:
    """Hold a divided optimizer."""

    def __init__(
        self, optimizer: keras.Optimizer, weights: Sequence[Any], copies: Copies, sharding: "OptimizerSharding"
    ) -> None:
        self._dense = {id(weight) for weight in weights}
        _check(optimizer, weights)
        self.twin = keras_optimizers.twin_of(optimizer)
        self.groups = _groups(optimizer, weights, sharding.bucket_bytes, sharding.towers)
        kept = [group.flat for group in self.groups if not keras_optimizers.decays(optimizer, group.pairs[0][0])]
        if kept:
            self.twin.exclude_from_weight_decay(var_list=[flat.value for flat in kept])
        self.twin.build([group.flat for group in self.groups])
        for name, scalar in keras_optimizers.scalars_of(optimizer).items():
            setattr(self.twin, name, scalar)
        if not keras_optimizers.is_as_keras_made_it(optimizer, self.twin):
            for group in self.groups:
                _check_parts(optimizer, self.twin, [weight for weight, _ in group.pairs], group.flat)
        indices = {id(weight): i for i, weight in enumerate(keras_optimizers.built_for(optimizer, None))}
        taken = set(map(id, sharding.captured))
        wholes = keras_optimizers.slots_of(optimizer)
        self.slots = []
        partitions = keras_optimizers.slots_of(self.twin) if wholes else {}
        for name, of_groups in partitions.items():
            for group, partition in zip(self.groups, of_groups, strict=True):
                declare_role(tf_compat.backend_variable(partition), Role.PARTITION)
                parts = copies(tf_compat.backend_variable(partition))
                for weight, place in group.pairs:
                    whole = tf_compat.backend_variable(wholes[name][indices[id(weight)]])
                    if id(tf_compat.handle_of(whole)) in taken and not tf_compat.is_made_in_a_function(whole):
                        raise not_in_a_function(whole)
                    self.slots.append(PartitionedSlot(whole, place, parts, sharding.processes, sharding.left))
        for group in self.groups:
            declare_role(tf_compat.backend_variable(group.flat), Role.PARTITION)

    def takes(self, weights: Sequence[Any]) -> bool:
        return {id(weight) for weight in weights} == self._dense

    def update(self, gradients: dict[int, Any], addends: set[int], context: ops.Context) -> None:
        """Update the weights in a step that is traced, given the gradients by the weights' ids.

        `addends` are the ids of weights whose gradients are this tower's addends.
        """
        tower = context.share.tower
        pairs = [pair for group in self.groups for pair in group.pairs]
        rows = [place.rows(gradients[id(weight)]) for weight, place in pairs if id(weight) in addends]
        sums = iter(context.exchange(rows, SCATTERED) if rows else [])
        parts = {}
        for weight, place in pairs:
            if id(weight) in addends:
                part = tf.reshape(next(sums), [place.length])
            else:
                part = place.part(gradients[id(weight)], tower)
            parts[id(weight)] = tf.cast(part, weight.dtype)
        flat_gradients = [tf.concat([parts[id(w)] for w, _ in group.pairs], 0) for group in self.groups]
        for group in self.groups:
            held = [place.part(tf.convert_to_tensor(weight), tower) for weight, place in group.pairs]
            group.flat.assign(tf.concat(held, 0))
        keras_optimizers.apply_gradients(self.twin, flat_gradients, [group.flat for group in self.groups])
        updated = [tf.convert_to_tensor(group.flat) for group in self.groups for _ in group.pairs]
        sent = [flat[tf.newaxis, place.begin : place.end] for flat, (_, place) in zip(updated, pairs, strict=True)]
        for (weight, place), rows in zip(pairs, context.exchange(sent, GATHERED), strict=True):
            weight.assign(place.whole(rows, weight.shape))


class OptimizerSharding:
    """Divide the state of a model's or a step's optimizers among its towers."""

    def __init__(self, towers: int, bucket_bytes: int, processes: Processes, left: native.Held) -> None:
        """Divide nothing yet: an optimizer is divided when a step that it updates is first traced.

        `towers` is N, in all processes; the weights of a flat variable take up to `bucket_bytes` together. `left` holds
        what optimizers' variables have been given.
        """
        self.towers = towers
        self.bucket_bytes = bucket_bytes
        self.processes = processes
        self.left = left
        self.captured: list[tf.Tensor] = []  # what the trace that first divides an optimizer has used before
        self._sharded: dict[int, _Sharded] = {}  # by id of the optimizer
        self._addends: dict[int, tf.Tensor] = {}  # by their ids

    def leave_addends(self, optimizer: keras.Optimizer, gradients: Sequence[Any]) -> list[Any]:
        """Return a tower's addends of the gradients that `optimizer` first uses in the update of its state.

        They are added up there. None stands for a gradient that `apply` must get whole.

        Raises:
            ValueError: `LargeBatch` updates the optimizer in its own way.
        """
        if keras_optimizers.has_wrapped_update(optimizer):
            raise ValueError(
                "Expected shard_optimizer or LargeBatch. "
                f"Received: both, for {type(optimizer).__name__} {optimizer.name!r}"
            )
        if not keras_optimizers.applies_untouched(optimizer):
            return [None] * len(gradients)
        with tf_compat.unobserved():
            addends = ops.parts([one if isinstance(one, tf.Tensor) else None for one in gradients])
        self._addends = {id(part): part for part in addends if part is not None}
        return addends

    def hooks(self, copies: Copies) -> contextlib.AbstractContextManager[None]:
        """Let optimizers update partitions, in a traced step; `copies` returns the towers' copies of a variable."""

        def sharding(update, optimizer, grads, trainable_variables):
            context = ops.current_context()
            is_twin = any(optimizer is sharded.twin for sharded in self._sharded.values())
            if context is None or tf.executing_eagerly() or is_twin:
                return update(optimizer, grads, trainable_variables)
            with tf_compat.unobserved():  # an op of `enable_check_numerics` would run on one tower for all
                return self._update(optimizer, update, grads, trainable_variables, copies, context)

        return keras_optimizers.updates_wrapped(sharding)

    def _slots(self) -> list[PartitionedSlot]:
        return [slot for sharded in self._sharded.values() for slot in sharded.slots]

    def divide(self) -> None:
        """Send Python's writes into optimizers' variables to the towers, before a step, and free these variables."""
        for slot in self._slots():
            slot.divide()

    def watched(self, written: set[int]) -> list[tuple[tf.Variable, int]]:
        """Return optimizers' variables whose parts a step writes, given all that it writes, and slots in `left`."""
        slots = [slot for slot in self._slots() if id(slot.partitions[0]) in written]
        return [(variable, slot.slot) for slot in slots if (variable := slot.held) is not None]

    def take_changed(self) -> None:
        """Let the next step take what others have written, of which `left` knows no value."""
        for slot in self._slots():
            if not self.left.knows(slot.slot):
                slot.mark_stale()
        self.divide()

    def make_whole(self) -> None:
        """Let optimizers' variables hold the whole of the towers' parts. Collective, with several processes."""
        for slot in self._slots():
            slot.make_whole()

    def release(self) -> None:
        """Give all optimizers their state back."""
        for slot in self._slots():
            slot.release()
        self._sharded.clear()

    def _update(
        self,
        optimizer: keras.Optimizer,
        update: Callable,
        gradients: Sequence[Any],
        weights: Sequence[Any],
        copies: Copies,
        context: ops.Context,
    ) -> None:
        if not context.can_exchange():
            raise NcclSyncError(
                "Expected, with shard_optimizer, an optimizer that updates at the top level of every step. "
                f"Received: {optimizer.name} within a branch, as a LossScaleOptimizer or tf.cond makes it"
            )
        if keras_optimizers.accumulates(optimizer):
            raise ValueError(
                "Expected, with shard_optimizer, an optimizer without gradient accumulation. Received: "
                f"{optimizer.name} with gradient_accumulation_steps={optimizer.gradient_accumulation_steps}"
            )
        gradients = keras_optimizers.clipped(optimizer, gradients)
        pairs = list(zip(gradients, weights, strict=True))
        dense = [(g, w) for g, w in pairs if not isinstance(g, tf.IndexedSlices)]
        sparse = [(g, w) for g, w in pairs if isinstance(g, tf.IndexedSlices)]
        others = keras_optimizers.averaged_beside(optimizer, weights)
        if sparse:
            _check_scalars(optimizer, sparse[0][1])
        if sparse or others:
            given = [gradient for gradient, _ in sparse], [weight for _, weight in sparse]
            with keras_optimizers.updating_some(optimizer, [*given[1], *others]):
                update(optimizer, *given)
        if dense:
            sharded = self._sharded_of(optimizer, [weight for _, weight in dense], copies)
            addends, self._addends = {id(w) for g, w in dense if id(g) in self._addends}, {}
            sharded.update({id(weight): gradient for gradient, weight in dense}, addends, context)

    def _sharded_of(self, optimizer: keras.Optimizer, weights: Sequence[Any], copies: Copies) -> _Sharded:
        sharded = self._sharded.get(id(optimizer))
        if sharded is None:
            self.captured = tf_compat.captured_by_graphs()
            with tf_compat.made_apart():
                sharded = _Sharded(optimizer, weights, copies, self)
            self._sharded[id(optimizer)] = sharded
            weakref.finalize(optimizer, self._sharded.pop, id(optimizer), None).atexit = False
        elif keras_optimizers.follow(sharded.twin, optimizer):  # a new trace sees what was changed
            with tf_compat.made_apart():
                _check(optimizer, weights)
        if not sharded.takes(weights):
            raise ValueError(
                "Expected, with shard_optimizer, the same weights in every update of an optimizer. Received: "
                f"{optimizer.name} with gradients of {[weight.path for weight in weights]}"
            )
        return sharded


def _check(optimizer: keras.Optimizer, weights: Sequence[Any]) -> None:
    coupling = find_coupling(
        optimizer, {(len(weight.shape), keras.backend.standardize_dtype(weight.dtype)) for weight in weights}
    )
    if coupling is not None:
        raise ValueError(
            "Expected, with shard_optimizer, an optimizer that updates each element of a weight by itself, "
            f"as SGD and Adam do. Received: {type(optimizer).__name__}: {coupling}. "
            "Compile with another optimizer, or leave shard_optimizer out"
        )


def _check_parts(optimizer: keras.Optimizer, twin: keras.Optimizer, weights: Sequence[Any], flat: Any) -> None:
    """Refuse an optimizer of the user's own whose update of a weight is not what its twin makes of a part.

    Such an update goes by a weight's shape, name or place, or by what the optimizer's configuration does not tell.
    """
    expected = _update_of(twin, flat)
    for weight in weights:
        if _update_of(optimizer, weight) != expected:
            raise ValueError(
                "Expected, with shard_optimizer, an optimizer that updates a weight's elements alike wherever they "
                f"lie, and that from_config(get_config()) makes again. Received: {type(optimizer).__name__}, whose "
                f"update of {weight.name}, of shape {tuple(weight.shape)}, computes with other numbers or ops than "
                "that of a part of it: by the weight's shape, name or place, or by an attribute that get_config() "
                "does not give"
            )


def _update_of(optimizer: keras.Optimizer, weight: Any) -> list[Any]:
    """Return the ops of an optimizer's update of one weight, without shapes, names and variables."""

    @tf.function(input_signature=[tf.TensorSpec(weight.shape, weight.dtype)], autograph=False)
    def update(gradient):
        no_branch = tf_compat.members_replaced(optimizer, ema_overwrite_frequency=None)
        with keras_optimizers.updating_some(optimizer, [weight]), no_branch:
            keras_optimizers.apply_gradients(optimizer, [gradient], [weight])

    with ops.running_in(None):
        made = update.get_concrete_function().graph.get_operations()
    places = {tensor.ref(): (i, j) for i, op in enumerate(made) for j, tensor in enumerate(op.outputs)}
    return [(op.type, [places[one.ref()] for one in op.inputs], _number_of(op)) for op in made]


def _number_of(op: tf.Operation) -> Any:
    """Return what a constant holds: one number, if all of it are equal. None: the op is none."""
    if op.type != "Const":
        return None
    value = np.asarray(tf.get_static_value(op.outputs[0]))
    return value.flat[0].item() if value.size and np.all(value == value.flat[0]) else (value.shape, value.tobytes())


def _check_scalars(optimizer: keras.Optimizer, weight: Any) -> None:
    """Refuse a sparse gradient, which the optimizer applies beside its twin, if both keep scalars."""
    both = set(keras_optimizers.scalars_of(optimizer)) - {"_iterations", "_learning_rate"}
    if both:
        raise ValueError(
            f"Expected, with shard_optimizer, dense gradients for {type(optimizer).__name__}, which keeps "
            f"{sorted(both)} for all weights together. Received: a sparse gradient of {weight.path}"
        )


def _groups(optimizer: keras.Optimizer, weights: Sequence[Any], bucket_bytes: int, towers: int) -> list[_Group]:
    """Put weights of one dtype, device and weight decay into flat variables, in the order of the weights."""
    kinds: dict[Any, list[list[tuple[Any, Place]]]] = {}  # the pairs of each flat variable
    for weight in weights:
        value = tf_compat.backend_variable(weight)
        flats = kinds.setdefault((value.dtype, value.device, keras_optimizers.decays(optimizer, weight)), [])
        elements = int(value.shape.num_elements())
        length = -(-elements // towers)
        begin = flats[-1][-1][1].end if flats else 0
        if not flats or begin + length > bucket_bytes // value.dtype.size // towers:
            begin = 0
            flats.append([])
        flats[-1].append((weight, Place(begin, length, elements, towers)))
    groups: list[_Group] = []
    for (dtype, device, _), flats in kinds.items():
        for pairs in flats:
            with tf.device(device):
                flat = keras.Variable(tf.zeros([pairs[-1][1].end], dtype), name=f"partition_{len(groups)}")
            groups.append(_Group(pairs, flat))
    return groups


def find_coupling(optimizer: keras.Optimizer, kinds: Collection[tuple[int, str]]) -> str | None:
    """Return what couples the elements of a weight in an optimizer's update, in words; None if nothing does.

    Its twin is traced on one small weight of each of the `kinds`, (rank, dtype), which an optimizer may treat
    differently. Every op that computes with an array is checked.
    """
    twin = keras_optimizers.twin_of(optimizer)
    twin.ema_overwrite_frequency = None  # a branch that copies averages to weights
    weights = [
        keras.Variable(tf.zeros(_LENGTHS[:rank], dtype), name=f"weight_{rank}_{dtype}") for rank, dtype in sorted(kinds)
    ]
    twin.build(weights)
    for name, slots in sorted(keras_optimizers.slots_of(twin).items()):
        for weight, state in zip(weights, slots, strict=True):
            if state is None or state.shape != weight.shape:
                has = "no value" if state is None else f"a value of shape {tuple(state.shape)}"
                of_all = f"of its state {name!r} it has {has} for a weight of shape {tuple(weight.shape)}"
                return f"{of_all}, where a value for each element is expected"
    specs = [tf.TensorSpec(weight.shape, weight.dtype) for weight in weights]

    @tf.function(input_signature=specs, autograph=False)
    def update(*gradients):
        keras_optimizers.apply_gradients(twin, gradients, weights)

    with ops.running_in(None):
        graph = update.get_concrete_function().graph
    for op in graph.get_operations():
        if (found := _coupling_of(op)) is not None:
            return found
    return None


def _coupling_of(op: tf.Operation) -> str | None:
    arrays = {str(t.shape) for t in op.inputs if t.dtype != tf.resource and t.shape.rank != 0}
    if not arrays or op.type in _APART:
        return None
    results = {str(t.shape) for t in op.outputs}
    # A check is stateful for TensorFlow, and would run on one tower for all.
    alone = ELEMENTWISE.union({"ReadVariableOp"}) - {"CheckNumerics", "CheckNumericsV2"}
    if op.type in alone and len(arrays) == 1 and results == arrays:
        return None
    return f"its update computes {op.type} ({op.name}) of {' and '.join(sorted(arrays))}"
