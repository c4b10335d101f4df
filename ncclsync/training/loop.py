"""Run a user's own training loop on towers: `Towers.run` runs any step function, without `fit`."""

import collections
import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import keras
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError, elsewhere, remedied, shown
from ncclsync.sharding.exactness import Inexact
from ncclsync.sharding.shards import rows_of
from ncclsync.towers.explanation import Explanation, explain_program
from ncclsync.towers.options import TowerOptions, takes
from ncclsync.towers.programs import MOST_KEPT, Programs, Results, Source
from ncclsync.towers.retracing import Retracing
from ncclsync.towers.state import ENTERED, TowerState
from ncclsync.towers.step import TowerStep
from ncclsync.towers.step_function import to_tensor

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("ncclsync")

# So many traces of functions of one name mean that a new function is made for each step.
_TRACES_BEFORE_WARNING = 8

_HELD_AS = "_ncclsync_towers"  # an attribute of the model


class Towers(TowerState):
    """Train a model on N replicas of its state, one per device.

    A context manager; `close` ends it. Tower 0 is the user's own model.

    ```python
    with ncclsync.Towers(4) as towers:
        for batch in dataset:
            logs = towers.run(step, batch)
    ```

    """

    @remedied("Write Towers(4, backend='cpu'), with the name of each further option")
    @takes(TowerOptions)
    def __init__(self, towers: int | Sequence[str] | None = None, **options: Any) -> None:
        """Choose the devices and the backend, and join them.

        Args:
            {options}

        A list of devices may take the place of `towers`.

        Raises:
            TypeError, ValueError: bad arguments.
            NcclUnavailableError, NcclError: if NCCL was chosen and cannot be used.
        """
        if isinstance(towers, Sequence) and not isinstance(towers, str) and options.get("devices") is None:
            towers, options["devices"] = None, towers
        chosen = TowerOptions.of("Towers", {"towers": towers, **options})
        if chosen.health.emergency_checkpoint is not None:
            raise ValueError(
                "Expected no emergency_checkpoint: Towers know of no model to save. Give it to @nccl_parallel. "
                f"Received: {str(chosen.health.emergency_checkpoint)!r}"
            )
        self._begin(chosen)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"'Towers' object has no attribute {name!r}{elsewhere(name)}", name=name, obj=self)

    @classmethod
    def of(cls, options: TowerOptions) -> "Self":
        """Return towers, given checked options."""
        made = cls.__new__(cls)
        made._begin(options)
        return made

    def _begin(self, options: TowerOptions) -> None:
        super().__init__(options)
        self._steps: dict[tuple[Any, Results], TowerStep] = {}
        self._traced: collections.Counter[str] = collections.Counter()

    @property
    def devices(self) -> tuple[str, ...]:
        """Return [n] names such as "GPU:0", of this process' towers; several may share a CPU."""
        return self.layout.devices

    @property
    def backend(self) -> str:
        """Return "nccl" or "cpu"."""
        return self.session.backend

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self.session.closed

    @property
    def is_chief(self) -> bool:
        """Return whether this process is the first, or the only process: it should write files and print."""
        return self.layout.is_chief

    @property
    def process(self) -> int:
        """Return the number of this process among `processes`."""
        return self.communicator.process

    @property
    def processes(self) -> int:
        """Return the number of processes that train together."""
        return 1 if self.communicator.peers is None else self.communicator.peers.size

    @remedied("Write run(step, (x, y)), with one batch")
    def run(self, step: Callable[[Any], Any], batch: Any, *, per_tower: bool = False) -> Any:
        """Run one step on one batch, a shard of it on each tower.

        The first call traces `step(batch)` once, for any number of towers and rows; later calls with the same function
        run that trace. Another dtype or structure takes a trace of its own, another length a last one, which serves
        all lengths. If Python asks for a length that is open then (`x.shape[0]`), it is told the batch's, as by a
        `tf.function`, and each shape of a batch takes a trace of its own. Python's state, such as `layer.trainable`, is
        what it was then, as in a `tf.function`: pass another function after a change. In the step, gradients with
        respect to variables are those of the whole batch, Keras' optimizers and metrics behave as in `fit`, and
        `ncclsync.ops` joins other tensors. All variables that the step uses are replicated; tower 0 has the user's.

        Args:
            step: a function of a batch. Pass the same object each time: a new object is traced again.
            batch: the global batch, a nested structure of tensors or arrays that share their first axis, of any
                number of rows. It is split evenly, or as `shares=` says. None and scalars, Python's as tensors, go to
                every tower, a batch without rows to tower 0. A tensor with k times the rows of the smallest has k
                rows for each sample.
            per_tower: whether to return each tower's results, uncombined.

        Returns:
            The results of `step` on one device for the whole batch. With `per_tower` a list of the N towers' results,
            their rows or their parts of a sum; None for a tower without samples or of another process. With `shards=`,
            and after `on_oom` has divided a batch, a list of the shards' results.

        Raises:
            TypeError: `step` cannot be called; or `batch` is a dataset or an iterator.
            ValueError: the batch has no tensor with a first axis, or tensors of different numbers of rows.
            NcclSyncError: the towers are closed, the call is inside a `tf.function`, or the step calls a
                collective inside a loop or a branch.
            Exception: the step's error on any tower. All towers' variables are then equal, and those from before the
                step or from after it.
        """
        self.session.require_open()
        with self.telling():
            if not callable(step):
                raise TypeError(f"Expected a function of a batch. Received: {step!r}")
            method = getattr(step, "__name__", "")
            if isinstance(getattr(step, "__self__", None), keras.Model) and method in _WITH_STEPS:
                raise TypeError(
                    f"Expected a step, a function of a batch. Received: model.{method}, which runs steps itself. Write "
                    f"model.{method}(...), of a model that a decorated factory has returned"
                )
            self.session.require_eager("Towers.run")
            results = Results.EACH if per_tower else Results.COMBINED
            key = (step if isinstance(step, Hashable) else id(step), results)  # which the step of that key keeps alive
            if key not in self._steps:
                if len(self._steps) >= MOST_KEPT:
                    del self._steps[next(iter(self._steps))]
                programs = Programs(self, _StepOfUser(step, results), trains=True, any_rows=True)
                self._steps[key] = TowerStep(programs, Retracing())
                self._warn_of_new_functions(step)
            self._steps[key] = self._steps.pop(key)  # to the end; see `explain`
            if any(isinstance(one, (bool, int, float, str)) for one in tf.nest.flatten(batch)):
                self.session.warn_once(
                    "Python's numbers, True, False and texts in a batch of Towers.run reach the step as tensors, of "
                    "int32 and float32: arithmetic, `is True` or isinstance find them there otherwise than in a "
                    "tf.function. Write functools.partial(step, flag=True), once for each value, or a tensor, as "
                    "tf.constant(0.1, x.dtype), where it changes"
                )
            batch = self._steps[key].marked(tf.nest.map_structure(to_tensor, batch))
            outcome = self._steps[key].run_on_batch(batch)
        if not per_tower:
            return outcome
        sizes = self.layout.sizes_of(rows_of(batch) or 1)  # a batch without rows is tower 0's
        own = dict(zip(self.layout.own_shards, outcome, strict=True))
        return [own.get(tower) if size else None for tower, size in enumerate(sizes)]

    @remedied("Write explain(64), with a batch size, or explain((x, y))")
    def explain(self, batch: Any = None) -> Explanation:
        """Explain a training step on these towers: the last step that ran, or the first step to come.

        It tells each variable's bytes, its bucket, and how the towers' parts of its update are joined; the cuts of the
        step, with the lines that cause them; and each tower's rows of a batch. Nothing is trained.

        Args:
            batch: for a model of the decorator's: a batch size, if its input shapes are known; or a batch, `(x, y)` or
                `(x, y, sample_weight)` of arrays. None: the last step's batch; before the first step, the size that
                the model's inputs declare, or 32. Where one tower runs Keras' own step, no batch is known.

        Returns:
            Tables that can be printed; their rows are dataclasses.

        Raises:
            TypeError, ValueError: `batch` is no batch of this model.
            NcclSyncError: the towers are closed; or there is no step to explain: neither a compiled model, nor a step
                that `run` has run.
        """
        self.session.require_open()
        self.session.require_eager("Towers.explain")
        if self.session.model.explain is not None:
            return self.session.model.explain(batch)
        last = [one for step in self._steps.values() if (one := step.last()) is not None]
        if batch is not None or not last:
            raise NcclSyncError(
                "Expected a step that Towers.run has run, and no batch. "
                f"Received: {len(last)} steps that have run, and the batch {shown(batch)}"
            )
        program, ran = last[-1]
        return explain_program(program, self, rows_of(ran), of_last=True)

    def close(self) -> None:
        """Free the other towers' copies. In one process: end the communicator that no other towers use. Idempotent.

        Tower 0, the user's model, can be called and saved by itself; `fit`, `evaluate` and `predict` are errors until
        it has new towers.
        """
        self._steps.clear()
        super().close()

    def _warn_of_new_functions(self, step: Callable) -> None:
        name = getattr(step, "__qualname__", type(step).__qualname__)
        self._traced[name] += 1
        if self._traced[name] == _TRACES_BEFORE_WARNING:
            logger.warning(
                "Towers.run has traced %d functions named %s. Expected the same function object for every "
                "step: define it once, outside the loop.",
                _TRACES_BEFORE_WARNING,
                name,
            )


# Methods of a model that run steps.
_WITH_STEPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


@runtime_checkable
class HasTowers(Protocol):
    """Let type checkers know `model.towers`: `assert isinstance(model, ncclsync.HasTowers)`.

    Keras has no types, so that to them a model is this protocol and nothing else: they are told that it has more.
    """

    towers: Towers

    if TYPE_CHECKING:  # else `isinstance` would look for these

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def towers_of(model: keras.Model) -> Towers | None:
    """Return the towers on which a model of an `@nccl_parallel` factory trains; None for any other model."""
    return vars(model).get(_HELD_AS)


def idle_towers() -> Towers | None:
    """Return several towers within whose `with` the caller is, if they have no model and have run no step yet."""
    towers = ENTERED[-1]() if ENTERED else None
    if not isinstance(towers, Towers) or len(towers) < 2 or towers.session.model.explain is not None:
        return None
    return None if towers._steps else towers


def give_towers(model: keras.Model, towers: Towers) -> None:
    """Let `towers_of` return these towers for a model, and `model.towers`, unless the model uses that name."""
    members = vars(model)
    members[_HELD_AS] = towers
    if not warn_of_own_name(model, towers):
        members["towers"] = towers  # past Keras' bookkeeping, and a `__setattr__` of the model's


def warn_of_own_name(model: keras.Model, towers: Towers) -> bool:
    """Warn once if `model.towers` is not what `give_towers` has set; return whether it is something else."""
    own = inspect.getattr_static(model, "towers", towers)
    if isinstance(own, Towers):
        return False
    towers.session.warn_once(
        f"{type(model).__name__} has its own model.towers, {shown(own)}, which stays and changes nothing: "
        f"{len(towers)} towers train it. ncclsync.towers_of(model) returns them; "
        "nccl_parallel(towers=...) chooses others",
        about="model.towers",
    )
    return True


class _StepOfUser:
    """A user's function of a batch, to be traced; see `Traceable`."""

    def __init__(self, function: Callable[[Any], Any], results: Results) -> None:
        self._function, self._results = function, results
        self.model = None

    def source(self, specs: Any) -> Source:
        """See `Traceable`."""
        return Source(self._function, self._results, tf_compat.is_jit_compiled(self._function), autograph=True)

    def find_inexact(self) -> Sequence[Inexact]:
        """Return nothing: no model is known."""
        return ()

    def forget_failed(self) -> None:
        """Do nothing: no model is known."""
