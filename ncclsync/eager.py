"""`run_eagerly=True`: a step on towers without a graph, to debug it line by line.

The towers take turns, in order: each runs the model's own Python until it meets a collective or its end.
Before its turn a tower's state is put into the model's own variables, so that what a breakpoint shows is
that tower's. One thread per tower keeps its place in the code; only one of them runs at any time.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync import ops, private_keras
from ncclsync.communicator import CpuCommunicator, empty_aligned
from ncclsync.errors import NcclSyncError
from ncclsync.hooks import results_reduced
from ncclsync.kinds import COUNT, ROWS, UNKNOWN, Kind
from ncclsync.layout import concat_rows
from ncclsync.ops import Collective, Share
from ncclsync.shard import Shards, shard_batch
from ncclsync.towers import TowerState
from ncclsync.variables import Role, role_of, start_value


def run_eagerly(model: keras.Model, name: str, batch: Any, towers: TowerState) -> Any:
    """Run one step on all towers, one after the other.

    Args:
        model: tower 0. The other towers' state is derived from its variables at the start of the step.
        name: the step, a method of the model.
        batch: the global batch, of eager tensors.
        towers: how many, and whether they draw what one device draws.

    Returns:
        The step's results, combined as a step in a graph combines them.

    Raises:
        Exception: whatever the step raises on any tower. Every variable then has its value from before.
    """
    count, same_seeds = len(towers), towers.batch_invariant_random
    # Shards of one length would not tell which random numbers are drawn per sample.
    shards = shard_batch(batch, count, uneven=same_seeds)
    state = _State(private_keras.variables_of(model), count, same_seeds)
    step = getattr(model, name)
    turns = [
        _Turn(functools.partial(step, shards.batches[i]), state, i, shards.shares[i]) for i in range(count)
    ]
    with state.restored_on_error(), results_reduced(), CpuCommunicator(count) as communicator:
        try:
            _take_turns(turns, shards, communicator)
        finally:
            for turn in turns:
                turn.cancel()
        for variable in state.settle(shards, communicator):
            towers.warn_once(
                f"run_eagerly: the step gave {variable.name} another value on each tower, which is settled "
                "only at its end: floats by their mean, anything else as on tower 0. A graph settles it "
                "where it is written."
            )
        results = [turn.result for turn in turns]
        return _combine(results, shards, communicator, concat=name == "predict_step")


def _combine(results: list[Any], shards: Shards, communicator: CpuCommunicator, concat: bool) -> Any:
    """Make one result of the towers', as `cut` decides it for a graph, by the values themselves."""
    rows = [int(size) for size in shards.sizes]

    def combine(*pieces):
        if pieces[0] is None or not tf.is_tensor(pieces[0]):
            return pieces[0]
        tensors = [tf.convert_to_tensor(p) if isinstance(p, keras.Variable) else p for p in pieces]
        of_rows = tensors[0].shape.rank and [t.shape[0] for t in tensors] == [max(1, n) for n in rows]
        if tensors[0].shape.rank and (concat or of_rows):
            return concat_rows(tensors, rows)
        numeric = tensors[0].dtype.is_floating or tensors[0].dtype.is_integer
        if not numeric or _all_equal(tensors):
            return tensors[0]
        op = "mean" if tensors[0].dtype.is_floating else "sum"
        return exchange(tensors, Collective("all_reduce", op), shards, communicator)[0]

    return tf.nest.map_structure(combine, *results)


def _take_turns(turns: "list[_Turn]", shards: Shards, communicator: CpuCommunicator) -> None:
    """Let the towers run from collective to collective until all are done."""
    while True:
        for turn in turns:
            turn.resume()
        met = [turn.collective for turn in turns]
        if len(set(met)) != 1:
            raise NcclSyncError(f"Expected all towers to meet at the same collective. Received: {met}")
        if met[0] is None:
            return
        columns = zip(*(turn.tensors for turn in turns), strict=True)
        results = [exchange(column, met[0], shards, communicator) for column in columns]
        for turn, answer in zip(turns, zip(*results, strict=True), strict=True):
            turn.tensors = list(answer)


def exchange(
    tensors: Sequence[tf.Tensor], collective: Collective, shards: Shards, communicator: CpuCommunicator
) -> list[tf.Tensor]:
    """Join one eager tensor per tower; [N] in, [N] out. Towers without samples are left out."""
    count = len(tensors)
    if collective.root >= count:
        raise ValueError(
            f"Expected root to be below the number of towers, {count}. Received: {collective.root}"
        )
    if collective.kind == "broadcast":
        return [tensors[collective.root]] * count
    present = [i for i in range(count) if int(shards.sizes[i]) > 0 or collective.empty_too]
    if collective.concatenates:
        return [tf.concat([tensors[i] for i in present], axis=0)] * count
    sends = [np.asarray(tensors[i]) for i in present]
    op = collective.op
    if op == "mean":
        op = "sum"
        sends = [
            a * np.asarray(shards.shares[i].fraction, a.dtype) for i, a in zip(present, sends, strict=True)
        ]
    result = empty_aligned(sends[0].shape, sends[0].dtype)
    if len(present) == count:
        communicator.all_reduce([np.ascontiguousarray(a) for a in sends], [result] * count, op)
    else:
        with CpuCommunicator(len(present)) as part:
            part.all_reduce([np.ascontiguousarray(a) for a in sends], [result] * len(present), op)
    reduced = tf.convert_to_tensor(result)
    if collective.kind == "reduce":
        return [reduced if i == collective.root else tf.zeros_like(reduced) for i in range(count)]
    return [reduced] * count


def _all_equal(tensors: Sequence[tf.Tensor]) -> bool:
    return all(np.array_equal(tensors[0], tensor, equal_nan=True) for tensor in tensors[1:])


class _State:
    """What each tower's variables hold, while the model's own variables hold those of one tower."""

    def __init__(self, variables: Sequence[tf.Variable], towers: int, same_seeds: bool) -> None:
        self._variables = list(variables)
        self._same_seeds = same_seeds
        self._values: list[dict[int, tf.Tensor]] = [{} for _ in range(towers)]
        self._before: dict[int, tf.Tensor] = {}
        self.generator = private_keras.global_generator()
        for variable in self._variables:
            self._start(variable)

    def _start(self, variable: tf.Variable) -> None:
        value = variable.value()
        self._before[id(variable)] = value
        role = self._role(variable)
        for tower, values in enumerate(self._values):
            values[id(variable)] = start_value(value, role, tower) if tower else value

    def _role(self, variable: tf.Variable) -> Role:
        return role_of(variable, self._same_seeds)

    def adopt(self, variable: tf.Variable) -> None:
        """Give all towers a variable that the step has come upon, unless they have it."""
        if id(variable) not in self._before:
            self._variables.append(variable)
            self._start(variable)

    def create(self, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        """A `tf.variable_creator_scope`: a variable that one tower creates, all towers have."""
        variable = next_creator(**kwargs)
        self.adopt(variable)
        return variable

    def load(self, tower: int) -> None:
        for variable in self._variables:
            variable.assign(self._values[tower][id(variable)])

    def save(self, tower: int) -> None:
        self._values[tower] = {id(variable): variable.value() for variable in self._variables}

    @contextlib.contextmanager
    def restored_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for variable in self._variables:
                variable.assign(self._before[id(variable)])
            raise

    def settle(self, shards: Shards, communicator: CpuCommunicator) -> list[tf.Variable]:
        """Leave in the model's variables what the towers have in common; return those that differed."""
        differed = []
        for variable in self._variables:
            values = [tower[id(variable)] for tower in self._values]
            value = values[0]
            role = self._role(variable)
            if role in (Role.SUM, Role.PARTIAL):
                value = exchange(values, Collective("all_reduce", "sum"), shards, communicator)[0]
            elif role is Role.SAME and not _all_equal(values):
                differed.append(variable)
                if value.dtype.is_floating:
                    value = exchange(values, Collective("all_reduce", "mean"), shards, communicator)[0]
            variable.assign(value)
        private_keras.set_global_generator(self.generator)
        return differed


class _Turn:
    """One tower's way through the step, in a thread that runs only between `resume` and its return.

    Attributes:
        share: the tower's part of the batch.
        collective: what the tower waits for; None once it has finished.
        tensors: what it brings to that collective, then what it takes from it.
        result: what the step returned.
    """

    def __init__(self, step: Callable[[], Any], state: _State, tower: int, share: Share) -> None:
        self.share = share
        self.of_shard: dict[int, tuple[Any, Any]] = {}
        self.collective: Collective | None = None
        self.tensors: list[tf.Tensor] = []
        self.result: Any = None
        self._step, self._state, self._tower = step, state, tower
        self._error: BaseException | None = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._cancelled = False
        self._policy = keras.config.dtype_policy()
        self._thread = threading.Thread(target=self._run, name=f"tower {tower}", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Let the tower run to its next collective or its end; raise what it raises."""
        self._state.load(self._tower)
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error
        self._state.save(self._tower)

    def cancel(self) -> None:
        """Unwind a tower that waits; idempotent."""
        self._cancelled = True
        self._go.release()
        self._thread.join()

    def can_exchange(self) -> bool:
        return True

    def kind_of(self, tensor: tf.Tensor) -> Kind:
        """Of an eager tensor nothing is known but its size; an integer of that size counts the samples."""
        rows = int(self.share.rows)
        if tensor.shape.rank == 0:
            counts = tensor.dtype.is_integer and int(tensor) == rows
            return Kind(COUNT, 1) if counts else Kind(UNKNOWN)
        return Kind(ROWS) if tensor.shape[0] == rows else Kind(UNKNOWN)

    def taken_as(self, kind: Kind) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def implied(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def differentiating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def note_kind(self, tensors: Sequence[tf.Tensor], kind: Kind) -> None:
        """Nothing asks for it."""

    def note_loss(self, tensor: tf.Tensor) -> Kind:
        return self.kind_of(tensor)

    def adopt(self, state: tf.Variable) -> None:
        """Give every tower a random state of its own, also one that is not the model's."""
        self._state.adopt(state)

    def exchange(
        self, tensors: Sequence[tf.Tensor], collective: Collective, when: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """Called by the step, through `ops`: stop here until all towers have come."""
        if when is not None and not bool(when):
            return list(tensors)
        self.collective, self.tensors = collective, list(tensors)
        self._state.generator = private_keras.global_generator()
        self._stopped.release()
        self._go.acquire()
        private_keras.set_global_generator(self._state.generator)
        if self._cancelled:
            raise _Cancelled
        self.collective = None
        return self.tensors

    def _run(self) -> None:
        self._go.acquire()
        if self._cancelled:
            return
        keras.config.set_dtype_policy(self._policy)  # Keras keeps it per thread, and the next
        private_keras.set_global_generator(self._state.generator)
        try:
            with ops.running_in(self), tf.variable_creator_scope(self._state.create):
                self.result = self._step()
            self._state.generator = private_keras.global_generator()
        except _Cancelled:
            return
        except BaseException as error:  # handed to the thread that waits in `resume`
            self._error = error
        self._stopped.release()


class _Cancelled(BaseException):
    """Unwinds the step of a tower when another tower's has failed."""
