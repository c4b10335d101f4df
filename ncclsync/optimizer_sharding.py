"""An optimizer whose state is divided among the towers: each updates its part of every weight, and sends it.

What Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, call
stage 1. The weights of one dtype and treatment lie one behind the other in one flat variable, of which each
tower holds a *partition*: as many elements of each weight as any other tower. A twin of the optimizer updates
these as if they were its weights. The optimizer's own variables hold nothing while towers train; whoever reads
or writes one finds it whole (`PartitionedSlot`).
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ncclsync import ops, private, private_keras
from ncclsync.elementwise import find_coupling
from ncclsync.errors import NcclSyncError
from ncclsync.ops import Collective

SCATTERED = Collective("reduce_scatter")
# Towers without samples have updated their part as well.
GATHERED = Collective("stack", empty_too=True)

Copies = Callable[[tf.Variable], list[tf.Variable]]


class Place(NamedTuple):
    """Where a weight lies in a partition.

    Attributes:
        begin: index in every tower's partition.
        length: elements that each tower holds of it: of N towers the N-th part, rounded up. Where that is
            more than there is, the last tower to hold any holds some that the one before it holds too, and
            towers behind it hold the same.
        elements: of the whole weight.
        towers: N.
    """

    begin: int
    length: int
    elements: int
    towers: int

    @property
    def end(self) -> int:
        """Index behind it."""
        return self.begin + self.length

    def rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return what each tower holds of a tensor of the weight's shape: [N, length]."""
        flat = tf.reshape(tensor, [-1])
        full = self.elements // self.length
        if full == self.towers:
            return tf.reshape(flat, [self.towers, self.length])
        last = flat[-self.length :]
        flat = tf.concat([flat[: full * self.length], *[last] * (self.towers - full)], 0)
        return tf.reshape(flat, [self.towers, self.length])

    def part(self, tensor: tf.Tensor, tower: Any) -> tf.Tensor:
        """Return what a tower holds of a tensor of the weight's shape: [length]."""
        first = tf.minimum(tower * self.length, self.elements - self.length)
        return tf.slice(tf.reshape(tensor, [-1]), [first], [self.length])

    def whole(self, rows: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
        """Return the weight of what the towers hold, [N, length]; the inverse of `rows`."""
        full, rest = divmod(self.elements, self.length)
        if full == self.towers:
            return tf.reshape(rows, shape)
        flat = tf.reshape(rows[:full], [-1])
        if rest:
            flat = tf.concat([flat, rows[full, self.length - rest :]], 0)
        return tf.reshape(flat, shape)


class PartitionedSlot:
    """One of an optimizer's own variables, of which the towers hold the parts.

    It takes memory only from when somebody reads or writes it until the next step.
    """

    def __init__(self, variable: tf.Variable, place: Place, partitions: Sequence[tf.Variable]) -> None:
        """Take over a variable, with the value it has.

        Args:
            variable: the optimizer's, which is not kept alive.
            place: of its weight.
            partitions: [N] the towers' variables.
        """
        self._variable = weakref.ref(variable)
        self._place = place
        self._partitions = partitions
        self._is_whole = self._is_written = True
        private.watch_reads(variable, self.make_whole)
        for name in private.VARIABLE_WRITERS:
            if hasattr(variable, name):
                setattr(variable, name, self._watched(getattr(variable, name)))

    def divide(self) -> None:
        """Before a step: bring what was written to the towers, and free the whole."""
        variable = self._variable()
        if variable is None or not self._is_whole:
            return
        if self._is_written:
            value = variable.value()
            for tower, partition in enumerate(self._partitions):
                with tf.device(partition.device):
                    part = self._place.part(tf.identity(value), tower)
                    before, behind = partition[: self._place.begin], partition[self._place.end :]
                    # Not into a slice, after which TensorFlow would copy whatever it reads.
                    partition.assign(tf.concat([before, part, behind], 0))
        with tf.device(variable.device):
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0], variable.dtype))
        self._is_whole = self._is_written = False

    def make_whole(self) -> None:
        """Let the optimizer's variable hold what the towers have."""
        variable = self._variable()
        if variable is None or self._is_whole:
            return
        if not tf.executing_eagerly():
            raise NcclSyncError(
                f"Expected {variable.name}, which shard_optimizer divides among the towers, to be read and "
                "written outside of any tf.function. Received: a tf.function that does so."
            )
        with tf.device(variable.device):
            held = [tf.identity(partition.value()) for partition in self._partitions]
            rows = tf.stack([partition[self._place.begin : self._place.end] for partition in held])
            whole = self._place.whole(rows, variable.shape)
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=whole)
        self._is_whole = True

    def release(self) -> None:
        """Give the variable back, whole."""
        variable = self._variable()
        if variable is None:
            return
        self.make_whole()
        private.unwatch_reads(variable)
        for name in private.VARIABLE_WRITERS:
            variable.__dict__.pop(name, None)

    def _watched(self, write: Callable) -> Callable:
        @functools.wraps(write)
        def watched(*args, **kwargs):
            self.make_whole()
            self._is_written = True
            return write(*args, **kwargs)

        return watched


class _Group(NamedTuple):
    """Weights that lie in one flat variable, and that variable on tower 0."""

    weights: tuple[Any, ...]
    places: tuple[Place, ...]
    flat: keras.Variable

    @property
    def pairs(self) -> list[tuple[Any, Place]]:
        return list(zip(self.weights, self.places, strict=True))


class _Sharded:
    """One optimizer, divided."""

    def __init__(
        self,
        optimizer: keras.Optimizer,
        weights: Sequence[Any],
        copies: Copies,
        bucket_bytes: int,
        towers: int,
    ) -> None:
        self._dense = {id(weight) for weight in weights}
        _check(optimizer, weights)
        self.twin = private_keras.twin_of(optimizer)
        self.groups = _groups(optimizer, weights, bucket_bytes, towers)
        kept = [group.flat for group in self.groups if not private_keras.decays(optimizer, group.weights[0])]
        if kept:
            self.twin.exclude_from_weight_decay(var_list=[flat.value for flat in kept])
        self.twin.build([group.flat for group in self.groups])
        for name, scalar in private_keras.scalars_of(optimizer).items():
            setattr(self.twin, name, scalar)
        indices = {id(weight): i for i, weight in enumerate(private_keras.weights_of(optimizer))}
        wholes = private_keras.slots_of(optimizer)
        self.slots = []
        partitions = private_keras.slots_of(self.twin) if wholes else {}
        for name, of_groups in partitions.items():
            for group, partition in zip(self.groups, of_groups, strict=True):
                private.set_partitioned(private.backend_variable(partition))
                parts = copies(private.backend_variable(partition))
                for weight, place in group.pairs:
                    whole = private.backend_variable(wholes[name][indices[id(weight)]])
                    self.slots.append(PartitionedSlot(whole, place, parts))
        for group in self.groups:
            private.set_partitioned(private.backend_variable(group.flat))

    def takes(self, weights: Sequence[Any]) -> bool:
        return {id(weight) for weight in weights} == self._dense

    def update(self, gradients: dict[int, Any], addends: set[int], context: ops.Context) -> None:
        """In a step that is traced: update the weights.

        Args:
            gradients: by the weights' ids.
            addends: ids of the weights whose gradients the towers are to add up.
            context: the step's.
        """
        tower = context.share.tower
        pairs = [pair for group in self.groups for pair in group.pairs]
        added = [(weight, place) for weight, place in pairs if id(weight) in addends]
        rows = [place.rows(gradients[id(weight)]) for weight, place in added]
        sums = context.exchange(rows, SCATTERED) if rows else []
        parts = {id(weight): tf.reshape(row, [-1]) for (weight, _), row in zip(added, sums, strict=True)}
        for weight, place in pairs:
            part = parts.get(id(weight))
            part = place.part(gradients[id(weight)], tower) if part is None else part
            parts[id(weight)] = tf.cast(part, weight.dtype)
        flat_gradients = [tf.concat([parts[id(w)] for w in group.weights], 0) for group in self.groups]
        for group in self.groups:
            held = [place.part(tf.convert_to_tensor(weight), tower) for weight, place in group.pairs]
            group.flat.assign(tf.concat(held, 0))
        private_keras.apply_gradients(self.twin, flat_gradients, [group.flat for group in self.groups])
        updated = [tf.convert_to_tensor(group.flat) for group in self.groups for _ in group.weights]
        sent = [
            flat[tf.newaxis, place.begin : place.end] for flat, (_, place) in zip(updated, pairs, strict=True)
        ]
        for (weight, place), rows in zip(pairs, context.exchange(sent, GATHERED), strict=True):
            weight.assign(place.whole(rows, weight.shape))


class OptimizerSharding:
    """The optimizers of a model or a step whose state is divided among its towers."""

    def __init__(self, towers: int, bucket_bytes: int) -> None:
        """Divide nothing yet: an optimizer is divided when a step that it updates is first traced.

        Args:
            towers: how many.
            bucket_bytes: how large the weights of one flat variable may be together.
        """
        self._towers = towers
        self._bucket_bytes = bucket_bytes
        self._sharded: dict[int, _Sharded] = {}  # by id of the optimizer
        self._addends: dict[int, tf.Tensor] = {}  # by their ids

    def leave_addends(self, optimizer: keras.Optimizer, parts: Sequence[Any]) -> list[bool]:
        """Return which gradients are to be given to `optimizer.apply` as each tower's part of them.

        They are then added up where the optimizer's state is: none that the optimizer looks at before.

        Args:
            optimizer: about to be called.
            parts: what this tower adds to each gradient; None where that is not known.
        """
        if not private_keras.applies_untouched(optimizer):
            return [False] * len(parts)
        left = [tf.is_tensor(part) for part in parts]
        self._addends = {id(part): part for part, one in zip(parts, left, strict=True) if one}
        return left

    def hooks(self, copies: Copies) -> contextlib.AbstractContextManager[None]:
        """Let optimizers update partitions, in a step that is traced.

        Args:
            copies: what stands for a variable of tower 0's on each tower.
        """

        def sharding(update: Callable) -> Callable:
            @functools.wraps(update)
            def sharded_update(optimizer, grads, trainable_variables):
                context = ops.current_context()
                if context is None or tf.executing_eagerly() or self._is_twin(optimizer):
                    return update(optimizer, grads, trainable_variables)
                return self._update(optimizer, update, grads, trainable_variables, copies, context)

            return sharded_update

        return private_keras.updates_wrapped(sharding)

    def divide(self) -> None:
        """Before a step: bring what Python wrote into optimizers' variables to the towers, and free them."""
        for sharded in self._sharded.values():
            for slot in sharded.slots:
                slot.divide()

    def release(self) -> None:
        """Give all optimizers their state back."""
        for sharded in self._sharded.values():
            for slot in sharded.slots:
                slot.release()
        self._sharded.clear()

    def _is_twin(self, optimizer: keras.Optimizer) -> bool:
        return any(optimizer is sharded.twin for sharded in self._sharded.values())

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
                "Expected, with shard_optimizer, an optimizer that updates in every step, at the top level of "
                f"it. Received: {optimizer.name} within a branch, as a LossScaleOptimizer or tf.cond makes it"
            )
        if private_keras.accumulates(optimizer):
            raise ValueError(
                "Expected, with shard_optimizer, an optimizer without gradient accumulation. Received: "
                f"{optimizer.name} with gradient_accumulation_steps={optimizer.gradient_accumulation_steps}"
            )
        gradients = private_keras.clipped(optimizer, gradients)
        pairs = list(zip(gradients, weights, strict=True))
        dense = [(g, w) for g, w in pairs if not isinstance(g, tf.IndexedSlices)]
        sparse = [(g, w) for g, w in pairs if isinstance(g, tf.IndexedSlices)]
        if sparse:
            _check_scalars(optimizer, sparse[0][1])
            with private_keras.unclipped(optimizer):
                update(optimizer, *map(list, zip(*sparse, strict=True)))
        if dense:
            sharded = self._sharded_of(optimizer, [weight for _, weight in dense], copies)
            addends, self._addends = {id(w) for g, w in dense if id(g) in self._addends}, {}
            sharded.update({id(weight): gradient for gradient, weight in dense}, addends, context)

    def _sharded_of(self, optimizer: keras.Optimizer, weights: Sequence[Any], copies: Copies) -> _Sharded:
        sharded = self._sharded.get(id(optimizer))
        if sharded is None:
            with tf.init_scope():
                sharded = _Sharded(optimizer, weights, copies, self._bucket_bytes, self._towers)
            self._sharded[id(optimizer)] = sharded
            weakref.finalize(optimizer, self._sharded.pop, id(optimizer), None).atexit = False
        if not sharded.takes(weights):
            raise ValueError(
                "Expected, with shard_optimizer, the same weights in every update of an optimizer. Received: "
                f"{optimizer.name} with gradients of {[weight.path for weight in weights]}"
            )
        return sharded


def _check(optimizer: keras.Optimizer, weights: Sequence[Any]) -> None:
    coupling = find_coupling(optimizer, {len(weight.shape) for weight in weights})
    if coupling is not None:
        raise ValueError(
            "Expected, with shard_optimizer, an optimizer that updates each element of a weight by itself, as "
            f"SGD and Adam do. Received: {type(optimizer).__name__}: {coupling}"
        )


def _check_scalars(optimizer: keras.Optimizer, weight: Any) -> None:
    """Weights with sparse gradients are updated by the optimizer itself, beside its twin."""
    both = set(private_keras.scalars_of(optimizer)) - {"_iterations", "_learning_rate"}
    if both:
        raise ValueError(
            f"Expected, with shard_optimizer, dense gradients for {type(optimizer).__name__}, which keeps "
            f"{sorted(both)} for all weights together. Received: a sparse gradient of {weight.path}"
        )


def _groups(
    optimizer: keras.Optimizer, weights: Sequence[Any], bucket_bytes: int, towers: int
) -> tuple[_Group, ...]:
    """Put weights of one dtype, device and treatment into flat variables, in the order of the weights."""
    kinds: dict[Any, list[tuple[list[Any], list[Place]]]] = {}
    for weight in weights:
        value = private.backend_variable(weight)
        decayed = private_keras.decays(optimizer, weight)
        lists = kinds.setdefault((value.dtype, value.device, decayed), [])
        elements = int(value.shape.num_elements())
        length = -(-elements // towers)
        most = bucket_bytes // value.dtype.size // towers
        begin = lists[-1][1][-1].end if lists else 0
        if not lists or begin + length > most:
            begin = 0
            lists.append(([], []))
        lists[-1][0].append(weight)
        lists[-1][1].append(Place(begin, length, elements, towers))
    groups = []
    for (_, device, _), lists in kinds.items():
        for members, places in lists:
            with tf.device(device):
                flat = keras.Variable(
                    tf.zeros([places[-1].end], members[0].dtype), name=f"partition_{len(groups)}"
                )
            groups.append(_Group(tuple(members), tuple(places), flat))
    return tuple(groups)
