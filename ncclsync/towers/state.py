"""Hold the towers: their devices, their communicator, and a copy of every variable for each of them.

Tower 0's variables are the user's. `TowerState` creates the other towers' copies, sends them whatever
Python writes into tower 0, and compares them. It knows nothing of models beyond the order of their weights.
"""

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.communicator.messages import MOST_BYTES
from ncclsync.communicator.timeouts import interruptible
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import DivergenceError, NcclSyncError, ProcessError
from ncclsync.gradients.compression import ErrorFeedback
from ncclsync.gradients.noise_scale import NoiseAverages
from ncclsync.gradients.nonfinite import OnNonFinite
from ncclsync.gradients.partitions import Processes
from ncclsync.gradients.sharded_optimizer import OptimizerSharding
from ncclsync.ops import device_ops
from ncclsync.ops.comparing import checksum, distance
from ncclsync.ops.group_ops import group_all_reduce
from ncclsync.ops.spans import Measured
from ncclsync.program.program import Target
from ncclsync.semantics.roles import Role, role_of, start_value
from ncclsync.towers.drift import Sentinel, outliers
from ncclsync.towers.feeding import Feeder
from ncclsync.towers.in_flight import InFlight
from ncclsync.towers.layout import Layout
from ncclsync.towers.options import AUTO, MOST_TOWERS, TowerOptions
from ncclsync.towers.placement import (
    choose_placement,
    connect,
    device_models,
    keep_quiet,
    make_target,
    own_process,
    share_cores,
)
from ncclsync.towers.replicas import Replicas
from ncclsync.towers.shares import Shares

logger = logging.getLogger("ncclsync")

DLPACK_CPU, DLPACK_CUDA = 1, 2
_NAMED = 6  # variables in a message


class TowerState:
    """Hold N replicas of one model's state, one per device, and the communicator that joins them.

    A context manager; `close` ends it. Tower 0 is the user's model.

    Attributes:
        devices: [n] names such as "GPU:0", of this process' towers; several may share a CPU.
        backend: "nccl" or "cpu".
        compression: what gradients are compressed by, if they are.
        sharding: what divides the optimizers' state among the towers, if it is divided.
        communicator: the N ranks, owned by this object.
        on_nonfinite: what happens when a gradient is not finite.
        sentinel: counts training steps, and says when to compare or audit.
        feeders: what fetches ahead of the steps, by iterator; on GPUs.
        in_flight: the steps whose collectives have not ended.
        noise: how much the towers' gradients differ, if a callback asks for it.
        shared: ids of the variables that other towers of the process hold copies of, too.
        traces: a list to which training steps' traces are added; None: they are not kept.
        options: as they were given.
        layout: which shard of a batch is whose.
        closed: whether `close` was called.
        target: what programs for these towers are cut for.
        sizes_of_given: `sizes` of `CountingDataset` for batches that steps are given, and take from no iterator.
    """

    sizes_of_given: tf.Variable | None = None

    def __init__(self, options: TowerOptions) -> None:
        """Choose devices and backend, and join them.

        Raises:
            ValueError: the options name a device that is not there, or more towers than there are GPUs.
            NcclUnavailableError, NcclError: if NCCL was chosen and cannot be used.
        """
        self.options, health = options, options.health
        self.traces: list[Any] | None = None
        self.sentinel = Sentinel(health.check_every, health.on_divergence, health.audit_every)
        self.on_nonfinite = OnNonFinite(health.on_nonfinite)
        process = own_process(options.devices) if options.processes else None
        if process is not None:
            keep_quiet(process)
        alone = ("shards", "shares", "on_oom")
        several = {name: getattr(options, name) for name in alone if getattr(options, name) is not None}
        if several and process is not None:
            raise ValueError(
                f"Expected {' and '.join(several)} in one process: towers of several processes have even shards. "
                f"Received: {several}, in process {process.rank} of {process.size}. Leave it away, or say "
                "processes=False"
            )
        if options.backend != "nccl":
            # How many threads an op has may change the order of its sums: it must not depend on the towers.
            divided = options.shards is not None and all("CPU" in str(one).upper() for one in options.devices or ())
            share_cores(*((options.shards, None) if divided else (options.towers, options.devices)), process)
        placement = choose_placement(options.towers, options.devices, options.backend, process)
        self.noise = NoiseAverages()
        self.devices = placement.devices
        if options.shards is not None and options.shards < len(self.devices):
            raise ValueError(
                f"Expected at least a shard for each of {len(self.devices)} towers. Received: "
                f"shards={options.shards}. A tower without a shard would compute nothing: use fewer towers, "
                "or more shards"
            )
        if health.audit_every is not None:
            self._check_audits()
        self._shares: Shares | None = None
        if options.shares is not None and (options.shares != AUTO or len(self.devices) > 1):
            self._shares = Shares(options.shares, self.devices)
        self.backend = placement.backend
        self.compression = None if options.compression is None else ErrorFeedback()
        self.communicator = connect(placement, process, timeout_s=health.timeout_s, preflight=health.preflight)
        self.layout = Layout(
            self.devices,
            range(self.communicator.ranks[0], self.communicator.ranks[-1] + 1),
            self.communicator.world_size,
            options.shards,
            weights=None if self._shares is None else self._shares.variable,
        )
        self.target = self._make_target()
        divides = options.shard_optimizer and len(self) > 1
        joined = Processes(self.layout.ranks, self._rows_of_all) if self.layout.meets_processes else None
        self.sharding = OptimizerSharding(len(self), options.bucket_bytes, joined) if divides else None
        self.in_flight = InFlight(self.communicator)
        self.closed = False
        self.feeders: weakref.WeakKeyDictionary[tf.data.Iterator, Feeder] = weakref.WeakKeyDictionary()
        self._replicas: dict[int, Replicas] = {}  # by id of tower 0's variable
        self._pending: set[int] = set()  # ids of those to be sent before the next step
        self.shared: set[int] = set()  # ids of those of which other towers hold copies, too
        self._warned: set[str] = set()
        self._functions: dict[Any, Callable[..., list[tf.Tensor]]] = {}
        self._watchers: list[Callable[[Measured], None]] = []
        self._save: Callable[[], None] | None = None
        self._saved_after: BaseException | None = None
        self._weights: Callable[[], Sequence[Any]] = lambda: [r.variable for r in self._replicas.values()]
        self._paths: Callable[[], Mapping[int, str]] = dict

    def __len__(self) -> int:
        """Return the number of towers in all processes."""
        return self.layout.towers

    def split_further(self, rows: int) -> bool:
        """Divide steps into twice as many shards from now on, so that they take less memory.

        Args:
            rows: of the batch that did not fit.

        Returns:
            Whether they are divided; if not, a warning has said why.
        """
        undivided = self._why_undivided(rows)
        if undivided:
            logger.warning(
                'A batch of %d rows does not fit the memory, and on_oom="split" divides it no further: %s',
                rows,
                undivided,
            )
            return False
        for key, replicas in list(self._replicas.items()):
            if replicas.role is not Role.SAME:  # each shard's own
                self._forget_copies(key)
        self.layout = self.layout.split()
        self.target = self._make_target()
        logger.warning(
            "A batch of %d rows does not fit the memory: from now on it is computed in %d shards, up to %d of them on "
            "each tower, one after another. A smaller batch, or shards=%d from the start, saves the attempt",
            rows,
            self.layout.shards,
            max(map(len, self.layout.places)),
            self.layout.shards,
        )
        return True

    def _why_undivided(self, rows: int) -> str:
        """Return why there cannot be twice as many shards; "" if there can."""
        count = self.layout.shards
        if count >= rows:
            return "each shard has one row"
        if self.options.shards is not None:
            return f"the bits belong to shards={count}. Choose more shards, or a smaller batch"
        return f"{count} shards are the most" if 2 * count > MOST_TOWERS else ""

    @property
    def is_chief(self) -> bool:
        """Return whether this process is to write files, and to print: the first, or the only one."""
        return self.layout.is_chief

    @property
    def process(self) -> int:
        """Return the number of this process among `processes`."""
        return self.communicator.process

    @property
    def processes(self) -> int:
        """Return how many processes train together."""
        return 1 if self.communicator.peers is None else self.communicator.peers.size

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<Towers {len(self)} on {', '.join(self.devices)}, backend {self.backend}{state}>"

    def __enter__(self) -> "TowerState":
        """Return these towers, which are closed where the `with` ends.

        Raises:
            NcclSyncError: an earlier `with` has closed them.
        """
        self.require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled and copied.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "Expected towers to stay in the process that made them: they hold devices, a communicator and "
            f"copies of variables. Received: {self!r}, to be pickled or copied. Pickle the model, which is "
            "then a plain one, or its factory, and call the decorated factory or Towers(...) anew."
        )

    def close(self) -> None:
        """Free the other towers' copies and end the communicator. Idempotent.

        Tower 0, the user's model, stays usable by itself; training it through closed towers is an error.
        """
        failure = None
        try:
            self.in_flight.settle()
        except NcclSyncError as error:  # raised when all is closed
            failure = error
        self.closed = True
        if self.sharding is not None:
            self.sharding.release()
        # Other processes may have ended, or may not close theirs now.
        with contextlib.suppress(ProcessError) if self.layout.meets_processes else contextlib.nullcontext():
            self.add_up_parts()
        for replicas in list(self._replicas.values()):
            replicas.untrack()
        self._replicas.clear()
        self._pending.clear()
        self.shared.clear()
        self.communicator.close()
        if failure is not None:
            raise failure

    def get_weights(self, tower: int) -> list[np.ndarray]:
        """Return tower `tower`'s weights as arrays, in the order of `model.get_weights()`.

        Raises:
            ValueError: if there is no such tower in this process.
        """
        ranks = self.layout.ranks
        if isinstance(tower, bool) or not isinstance(tower, (int, np.integer)) or tower not in ranks:
            raise ValueError(f"Expected a tower from {ranks[0]} to {ranks[-1]}. Received: {tower!r}")
        with self.telling():
            self.sync()
            self.in_flight.settle()
            first = self.layout.places[ranks.index(tower)][0]
            return [self.copies_of_shards(tf_compat.backend_variable(v))[first].numpy() for v in self._weights()]

    def broadcast(self) -> None:
        """Send tower 0's variables to all towers, now. Collective."""
        self.require_open()
        self.require_eager("Towers.broadcast")
        with self.telling():
            self._send(list(self._replicas))

    def divergence(self) -> float:
        """Return the largest absolute difference between any tower and tower 0; 0.0 in health.

        Over all variables that must be identical: weights, optimizer state, moving statistics; not over
        metric state and random seeds, which differ by design. Values that Python wrote into tower 0 since the
        last step are sent first. Equal NaNs do not differ; a NaN against a number is infinitely far.
        """
        with self.telling():
            return self._divergence()

    def _divergence(self) -> float:
        self.sync()
        self.in_flight.settle()
        self._of_all_processes(None, "divergence")
        largest = 0.0
        for replicas in list(self._replicas.values()):
            if replicas.role is Role.SAME and self._folds_on_devices(replicas.variable):
                values = [copy.value() for copy in (replicas.variable, *replicas.copies)]
                largest = max(largest, *(float(one) for one in self._of_each_tower(self._distances, values)))
            elif replicas.role is Role.SAME:
                reference = self._of_tower_0(replicas.variable, "divergence")
                for copy in (replicas.variable, *replicas.copies):
                    largest = max(largest, float(distance(reference, copy.value())))
        return max(self._of_all_processes(largest, "divergence"))

    # The rest is for the other modules of this package.

    def order_weights_by(self, weights: Callable[[], Sequence[Any]]) -> None:
        """Let `weights()` decide which variables `get_weights` returns, and in what order."""
        self._weights = weights

    def name_variables_by(self, paths: Callable[[], Mapping[int, str]]) -> None:
        """Let `paths()` give, by the id of tower 0's variable, the names that messages use."""
        self._paths = paths

    def names_of(self, variables: Sequence[tf.Variable]) -> list[str]:
        """Return the names of tower 0's variables for messages: their Keras paths where known."""
        paths = self._paths()
        return [paths.get(id(variable), variable.name) for variable in variables]

    def watch_next(self, watcher: Callable[[Measured], None]) -> None:
        """Give `watcher` the timestamps of the next training step, or of all steps that the next call makes.

        The step after it is not watched, even if the watched step fails.
        """
        self._watchers.append(watcher)

    @property
    def watchers(self) -> list[Callable[[Measured], None]]:
        """Return the watchers of the step that is about to run."""
        return list(self._watchers)

    def next_watchers(self) -> list[Callable[[Measured], None]]:
        """Return the watchers of the step that is about to run, and forget them."""
        watchers, self._watchers = self._watchers, []
        if self._shares is not None and not self._shares.settled:
            watchers.append(self._shares.measure)
        return watchers

    def count_steps(self, steps: int) -> None:
        """Count training steps that have run, and compare the towers if that is due.

        Raises:
            DivergenceError: towers differ, and are not to be repaired or cannot be.
        """
        if not self.sentinel.is_due(steps):
            return
        self.sync()
        self.in_flight.settle()
        kept = [(r.variable, r.copies) for r in self._replicas.values() if r.role is Role.SAME]
        # All are started before the first is waited for, each on its own device.
        checksums = [[_checksum(copy) for copy in (variable, *copies)] for variable, copies in kept]
        each = self._of_all_processes([[int(one) for one in row] for row in checksums], "checksums")
        found = [outliers(list(itertools.chain(*rows))) for rows in zip(*each, strict=True)]
        differing = [(variable, odd) for (variable, _), odd in zip(kept, found, strict=True) if odd]
        if not differing:
            return
        names = self.names_of([variable for variable, _ in differing])
        error = DivergenceError(self.sentinel.steps, dict(zip(names, (odd for _, odd in differing), strict=True)))
        if not self.sentinel.repairs or any(0 in odd for _, odd in differing):
            raise error
        logger.warning("%s. Repaired: tower 0's values were sent to all", error)
        self._send([id(variable) for variable, _ in differing])

    def _check_audits(self) -> None:
        if len(self.devices) < 2:
            raise ValueError(
                "Expected two towers in each process at least with audit_every: one computes the shard of the other. "
                f"Received: {self.devices}"
            )
        kinds = set(device_models(self.devices))
        if len(kinds) > 1:
            raise ValueError(
                "Expected devices of one model with audit_every: others may round otherwise, and nothing is wrong. "
                f"Received: {', '.join(sorted(kinds))}"
            )
        if not tf_compat.is_op_determinism_enabled():
            raise ValueError(
                "Expected deterministic ops with audit_every: else towers may differ in the last bits, and nothing is "
                "wrong. Received: TensorFlow without them. Call tf.config.experimental.enable_op_determinism() first, "
                "and keras.utils.set_random_seed(...)"
            )

    def check_repeatable(self) -> None:
        """Warn if equal bits are asked for and may differ: op determinism is off, or was off when NCCL joined the
        towers."""
        if not tf_compat.is_op_determinism_enabled():
            shards = self.options.shards
            if shards is not None and any("GPU" in device for device in self.devices):
                self.warn_once(
                    f"shards={shards} gives equal bits on any number of GPUs only with deterministic ops. If you "
                    "want them, call tf.config.experimental.enable_op_determinism() and "
                    "keras.utils.set_random_seed(...) before the model is made"
                )
        elif not self.communicator.repeatable:
            self.warn_once(
                "Sums of NCCL's may differ in their last bits from run to run: "
                "tf.config.experimental.enable_op_determinism() was called after the towers were joined, with NVLS. "
                "Call it before the first model on towers is made"
            )

    def require_open(self) -> None:
        """Raise NcclSyncError if the towers are closed."""
        if self.closed:
            raise NcclSyncError(
                "Expected open towers. Received: towers that were closed, as `with towers:` does where it ends. Keep "
                "all epochs within one `with`, or make new Towers. To train a model of a factory on towers, build it "
                "again; saving and calling it still work."
            )

    def require_eager(self, what: str) -> None:
        """Raise NcclSyncError within a tf.function: tensors made there are gone when its graph is complete.

        Args:
            what: was called, for the message.
        """
        if not tf.executing_eagerly():
            raise NcclSyncError(
                f"Expected {what} outside any tf.function. Received: a call inside one. Call it from plain "
                "Python: a step on towers is a graph of its own."
            )

    def copies(self, variable: tf.Variable) -> list[tf.Variable]:
        """Return [n] the copies of tower 0's `variable`, one on each tower of this process, itself first.

        Of what belongs to a shard there is one for each shard: metrics, random state and accumulated gradients.

        Creates the copies on first use, with tower 0's value (a metric's state starts from zero, a random
        seed from another one for each tower).
        """
        self.require_open()
        replicas = self._replicas.get(id(variable))
        role = role_of(variable, self.options.exact_random)
        if replicas is not None and len(replicas.copies) + 1 != len(self._holders(role)[0]):
            self._forget_copies(id(variable))
            replicas = None
        if replicas is None:
            copies = []
            for place, value in self._values(variable, role):
                if place == 0:
                    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
                    continue
                with tf.device(self._device_of(variable, place, role)):
                    copies.append(tf.Variable(value, trainable=variable.trainable, dtype=variable.dtype))
            # Compiling a model again makes a new optimizer: the copies go with the old one's variables.
            forget = functools.partial(_forget, weakref.ref(self), id(variable))
            replicas = Replicas(variable, role, copies, self._pending, self.shared, self.in_flight, forget)
            if self.layout.meets_processes:
                replicas.add_up_by(self._total)
            self._replicas[id(variable)] = replicas
            if tf_compat.has_flag(variable, "written_by_graph"):
                self._pending.add(id(variable))
        elif replicas.role is not role:
            replicas.take_role(role)
        return [variable, *replicas.copies]

    def _forget_copies(self, key: int) -> None:
        """Drop a variable's copies; tower 0 alone holds it until copies are made again."""
        replicas = self._replicas.pop(key)
        replicas.gather_parts()
        replicas.untrack()
        self._pending.discard(key)

    def copies_of_shards(self, variable: tf.Variable) -> list[tf.Variable]:
        """Return [s] the variable that each shard uses, a tower's weights or the shard's own; see `copies`."""
        copies, towers = self.copies(variable), self.layout.tower_places
        return copies if len(copies) == len(towers) else [copies[tower] for tower in towers]

    def _holders(self, role: Role) -> tuple[Sequence[str], range]:
        """Return the devices and numbers of who has a copy of a variable of this role: of towers, or of shards."""
        layout = self.layout
        return (layout.devices, layout.ranks) if role is Role.SAME else (layout.shard_devices, layout.own_shards)

    def sync(self) -> None:
        """Send to all towers what Python, or a step on other towers, wrote into tower 0 since the last step.

        Joins them anew if a collective had failed.

        Raises:
            NcclError: a collective of an earlier step has failed, which has not been reported yet.
            NcclSyncError: the towers are closed, the call is inside a `tf.function`, or variables are lost.
        """
        self.require_open()
        self.require_eager("towers to be read and trained")
        self.in_flight.check()
        self.communicator.reopen()
        self.in_flight.raise_lost(self._names_of_lost)
        if self._pending:
            self._send([key for key in self._replicas if key in self._pending])  # in one order in all processes
        if self.sharding is not None:
            self.sharding.divide()

    def report_writes(self, written: frozenset[int]) -> None:
        """Mark the variables that a step has written as stale for other `Towers` that hold copies.

        Args:
            written: ids of all variables that the step may have written.
        """
        for key in self.shared & written:
            if not self._replicas[key].mark_others_stale():
                self.shared.discard(key)  # the others are closed

    def warn_once(self, message: str, about: str | None = None) -> None:
        """Log a warning, unless it was logged before, or one `about` the same."""
        if (about or message) not in self._warned:
            self._warned.add(about or message)
            logger.warning("%s", message)

    def mark_stale(self) -> None:
        """Send every variable again before the next step: a step has failed, or tower 0 has loaded values."""
        if not self.layout.meets_processes:  # else they are added up when they are sent, by all processes
            self.add_up_parts()
        self._pending.update(self._replicas)

    def send_unused(self, variables: Sequence[tf.Variable]) -> None:
        """Let variables of which no step has made copies hold tower 0's values in all processes. Collective."""
        unused = [variable for variable in variables if id(variable) not in self._replicas]
        own = [variable.numpy() for variable in unused] if self.is_chief else None
        room = sum(map(_most_bytes, unused))
        values = self._of_all_processes(own, "variables that no step has used", room)[0]
        if not self.is_chief:
            for variable, value in zip(unused, values, strict=True):
                variable.assign(value)

    def add_up_parts(self) -> None:
        """Let the first tower of each process hold what is divided among all towers. Collective, if there are such."""
        for replicas in list(self._replicas.values()):
            replicas.gather_parts()
        if self.layout.meets_processes and self.sharding is not None:
            self.sharding.make_whole()

    def save_after_failure_by(self, save: Callable[[], None]) -> None:
        """Let `save()` save tower 0's state whenever a collective has failed."""
        self._save = save

    def cause_of(self, error: BaseException, written: frozenset[int] = frozenset()) -> BaseException:
        """Return the error to raise for a failed step; tell other processes if it is this process' own.

        TensorFlow wraps what a collective or Python raises within a graph, or reports what that cancelled. Returned is
        what was raised itself, or ncclsync's sentence about it, or else `error`.

        Args:
            error: that the step has raised.
            written: see `failed_collective`.
        """
        raised = self.in_flight.take()
        if not isinstance(error, Exception):  # Ctrl-C, of which this may have been made on the way
            raised = None
        if isinstance(raised, ProcessError):
            self.failed_collective()
        if raised is not None:
            return raised
        failure = self.failed_collective(written) if isinstance(error, Exception) else None
        if failure is not None and not isinstance(error, NcclSyncError):
            return failure
        if self.layout.meets_processes:
            self.communicator.report_failure(error)
        if not isinstance(error, tf.errors.OpError) or (sentence := tf_compat.own_sentence(error)) is None:
            return error
        told = NcclSyncError(f"{sentence}\n\nTensorFlow: {error.message}")
        told.__cause__ = error
        return told

    def failed_collective(self, written: frozenset[int] = frozenset()) -> BaseException | None:
        """Return the failure that ended the communicator, if any; save tower 0's state first.

        Args:
            written: see `InFlight.report`.
        """
        failure = self.in_flight.report(written)
        if failure is not None and failure is not self._saved_after and self._save is not None:
            self._saved_after = failure
            if not self.communicator.leads:
                return failure
            try:
                self._save()
            except Exception:  # whatever it is: the failure itself must be raised
                logger.exception("Tower 0 could not be saved after a failed collective")
        return failure

    def _names_of_lost(self) -> str:
        lost = [self._replicas[key].variable for key in self.in_flight.lost if key in self._replicas]
        return ", ".join(self.names_of(lost)[:_NAMED]) + (
            f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        )

    @functools.cached_property
    def enqueues(self) -> bool:
        """Return whether towers are joined by ops that only enqueue; see `ops.device_ops`."""
        return device_ops.takes(self.communicator)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Report errors raised within to the other processes; all of them can go on from tower 0's state."""
        try:
            yield
        except Exception as error:
            if self.layout.meets_processes:
                if isinstance(error, ProcessError):  # not always within a step, which saves by itself
                    self.failed_collective()
                self.mark_stale()
                self.communicator.report_failure(error)
            raise

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which Ctrl-C ends collectives, where they can hang."""
        communicator = self.communicator
        return interruptible(communicator.interrupt) if communicator.waits else contextlib.nullcontext()

    @property
    def keeps_weights(self) -> bool:
        """Return whether a failed collective must leave the weights unchanged, which costs a wait in each step."""
        return self._save is not None

    def _make_target(self) -> Target:
        options = self.options
        return make_target(self.layout, self.backend, options.bucket_bytes, same_seeds=options.exact_random)

    def _of_all_processes(self, value: Any, what: str, array_bytes: int = 0) -> list[Any]:
        """Return what each process gives; see `Communicator.exchange`. Collective."""
        return self.communicator.exchange(value, what, MOST_BYTES + array_bytes)

    def _of_tower_0(self, variable: tf.Variable, what: str) -> tf.Tensor:
        """Return tower 0's value, whichever process has it. Collective, if another process has."""
        value = variable.value()
        if not self.layout.meets_processes:
            return value
        numbers = self._of_all_processes(value.numpy() if self.is_chief else None, what, _most_bytes(value))[0]
        return tf.convert_to_tensor(numbers, value.dtype)

    def _total(self, parts: Sequence[tf.Tensor], what: str) -> tf.Tensor:
        """Return the sum of what the towers of all processes hold; `parts` are this process'. Collective."""
        if self.communicator.failure is not None:  # a file with the rest is better than none
            self.warn_once("Of gradients that an optimizer accumulates, the parts of other processes are lost")
            return tf.add_n(list(parts))
        return group_all_reduce(list(parts), self.communicator, "sum", what)[0]

    def _rows_of_all(self, rows: tf.Tensor, what: str) -> tf.Tensor:
        """Return [N, length] rows of all towers; `rows` are this process'. Collective."""
        if self.communicator.failure is not None:  # as in `_total`
            self.warn_once("Of optimizers' state, which shard_optimizer divides, the parts of other processes are lost")
            before = self.layout.ranks[0]
            return tf.pad(rows, [[before, len(self) - before - len(rows)], [0, 0]])
        row_bytes = _most_bytes(rows) // max(1, len(rows))
        return tf.concat(self._of_all_processes(rows.numpy(), what, len(self) * row_bytes), 0)

    def _send(self, keys: list[int]) -> None:
        """Send tower 0's values. One that has not arrived stays pending, or that a graph may write.

        Where several processes only enqueue, what arrives is written when all of them have launched all of it.
        """
        agrees, arriving, sent = self.enqueues and self.layout.meets_processes, [], []
        for key in keys:
            replicas = self._replicas[key]
            alone = not replicas.copies and not self.layout.meets_processes
            if alone or replicas.role in (Role.PARTIAL, Role.PARTITION):
                # Whoever holds parts of it, these towers or others, adds them up when it is read.
                replicas.variable.value()
                replicas.keep_part(self.is_chief)
                self._pending.discard(key)
                continue
            self._pending.add(key)
            # Freed before its successor is made: a variable's copies never take memory twice.
            for copy in replicas.copies:
                with tf.device(copy.device):
                    tf.raw_ops.AssignVariableOp(resource=copy.handle, value=tf.zeros([0], copy.dtype))
            held = [replicas.variable, *replicas.copies]
            for place, value in self._values(replicas.variable, replicas.role):
                if agrees:
                    arriving.append((held[place], value))
                else:
                    tf.raw_ops.AssignVariableOp(resource=held[place].handle, value=value)
            if not tf_compat.has_flag(replicas.variable, "written_by_graph"):
                sent.append(key)
        if agrees:
            self.communicator.agree(None, "the sending of variables")
        for variable, value in arriving:
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
        self._pending.difference_update(sent)

    def _values(self, variable: tf.Variable, role: Role) -> Iterator[tuple[int, tf.Tensor]]:
        """Yield (place, value) for this process' towers, by their place among them, but for tower 0, from its value.

        Identical values are broadcast into fresh tensors, which the copies then own: no staging buffer.
        """
        value, (_, ranks) = variable.value(), self._holders(role)
        if len(ranks) == 1 and not self.layout.meets_processes:
            return
        placed = [self._device_of(variable, place, role) for place in range(len(ranks))]
        self.communicator.reopen()
        name = variable.name if self.layout.meets_processes else ""
        if (
            role is not Role.SAME
            or value.dtype.name not in native.DTYPES
            or not all(self._reaches(device) for device in placed)
        ):
            if role in (Role.SAME, Role.SEED):
                value = self._of_tower_0(variable, name)
            for place, rank in enumerate(ranks):
                # Each process' first tower holds a metric's sum between steps; see `Rollback`.
                if rank > 0 and (place > 0 or role is not Role.SUM):
                    yield place, start_value(value, role, rank)
            return
        with tf.device(placed[0]):
            # No copy, unless other towers have their tower 0 elsewhere.
            own = tf.identity(value) if ranks[0] == 0 else tf_compat.uninitialized(value.shape, value.dtype)
            buffers = [own]
        for device in placed[1:]:
            with tf.device(device):
                buffers.append(tf_compat.uninitialized(value.shape, value.dtype))
        if self.enqueues:
            buffers = self._of_each_tower(self._write_in_place, buffers)
        else:
            self.communicator.broadcast(buffers, 0, label=name)
        begin = 1 if ranks[0] == 0 else 0
        yield from enumerate(buffers[begin:], start=begin)

    def _folds_on_devices(self, variable: tf.Variable) -> bool:
        """Return whether towers' values are compared where they lie: on GPUs."""
        numbers = variable.dtype.is_floating or variable.dtype.is_integer
        here = all(self._reaches(self._device_of(variable, place)) for place in range(len(self.devices)))
        return self.in_flight.active and here and numbers and variable.dtype.name in native.DTYPES

    def _of_each_tower(self, body: Callable[..., list[tf.Tensor]], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run `body`, a function of N tensors, one per tower, as a graph; it is traced once for each dtype."""
        dtype = values[0].dtype
        key = body.__name__, dtype
        if key not in self._functions:
            signature = [tf.TensorSpec(None, dtype)] * len(values)
            self._functions[key] = tf_compat.unordered_function(body, signature)
        return self._functions[key](*values)

    def _distances(self, *values: tf.Tensor) -> list[tf.Tensor]:
        """Return each tower's distance from tower 0's value, in a graph."""
        found = []
        firsts = device_ops.broadcast(values, self.communicator, self.devices, "divergence")
        for device, first, own in zip(self.devices, firsts, values, strict=True):
            with tf.device(f"/{device}"):
                found.append(distance(first, own))
        return found

    def _write_in_place(self, *values: tf.Tensor) -> list[tf.Tensor]:
        """Write tower 0's value into the other towers' tensors, in a graph."""
        return device_ops.broadcast(values, self.communicator, self.devices, "a variable", in_place=True)

    def _reaches(self, device: str) -> bool:
        """Return whether the communicator takes tensors in a device's memory."""
        kinds = {"CPU": DLPACK_CPU, "GPU": DLPACK_CUDA}
        return any(kind in device and code in self.communicator.memory for kind, code in kinds.items())

    def _device_of(self, variable: tf.Variable, place: int, role: Role = Role.SAME) -> str:
        """Return the device of a tower's copy: the tower's, unless the user keeps tower 0's on the CPU."""
        device = self._holders(role)[0][place]
        return variable.device if "CPU" in variable.device and "CPU" not in device else f"/{device}"


def _forget(borrowed: "weakref.ref[TowerState]", key: int) -> None:
    """Let towers, if they are there, free the copies of a variable that was deleted."""
    towers = borrowed()
    if towers is not None:
        towers._replicas.pop(key, None)
        towers._pending.discard(key)
        towers.in_flight.before_write(key)  # its id may become another's, that no step has written
        towers.shared.discard(key)


def _most_bytes(value: tf.Tensor | tf.Variable) -> int:
    """Return how many bytes its numbers have as a message, and more than short texts have."""
    return (value.shape.num_elements() or 0) * (256 if value.dtype == tf.string else value.dtype.size)


def _checksum(variable: tf.Variable) -> tf.Tensor:
    """Return the checksum of a variable, computed on its device."""
    with tf.device(variable.device):
        return checksum(variable.value())
