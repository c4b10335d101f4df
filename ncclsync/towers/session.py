"""Open the towers' devices and their communicator.

A session holds no variables. `replicas.py` holds them, `watch.py` compares them; `failures.py` says what has failed.
"""

import dataclasses
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import AllReduce, Broadcast, NcclCommunicator
from ncclsync.communicator.timeouts import raise_ctrl_c_again
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError
from ncclsync.ops import device_ops, gpu_streams
from ncclsync.ops.group_ops import group_exchange
from ncclsync.sharding.exactness import Inexact
from ncclsync.towers.failures import Failures
from ncclsync.towers.feeding import Feeder
from ncclsync.towers.layout import Layout, is_cpu
from ncclsync.towers.options import AUTO, TowerOptions, written
from ncclsync.towers.placement import (
    announce,
    choose_devices,
    connect,
    device_models,
    exchange_gpus,
    keep_quiet,
    make_target,
    own_process,
    share_cores,
)
from ncclsync.towers.shares import Shares

logger = logging.getLogger("ncclsync")

_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True)
class ModelSide:
    """Hold what towers ask of their model; the defaults are those of `Towers` without a model."""

    weights: Callable[[], Sequence[Any]] | None = None  # those of `get_weights`, in order; None: all that have copies
    paths: Callable[[], Mapping[int, str]] = dict  # the variables' names in messages, by the id of tower 0's variable
    save: Callable[[], None] | None = None  # saves tower 0's state when a collective has failed
    explain: Callable[[Any], Any] | None = None  # explains the model's training step on a batch


class Session:
    """Hold the devices of N towers and the communicator that joins them, from opening to closing."""

    def __init__(self, options: TowerOptions) -> None:
        """Choose devices and backend, and join them.

        Raises:
            ValueError: the options name a device that is not there, or more towers than there are GPUs, or exclude
                several processes.
            NcclUnavailableError, NcclError: NCCL was chosen and cannot be used.
        """
        self.options, health = options, options.health
        self.number = next(_NUMBERS)  # later sessions have larger numbers
        raise_ctrl_c_again()
        process = own_process(options.devices) if options.processes else None
        self.speak_again = weakref.finalize(self, keep_quiet(process))
        alone = ("shards", "shares", "on_oom")
        several = {name: getattr(options, name) for name in alone if getattr(options, name) is not None}
        if several and process is not None:
            raise ValueError(
                f"Expected {' and '.join(several)} in one process: towers of several processes have even shards. "
                f"Received: {several}, in process {process.rank} of {process.size}. Leave it away, or say "
                "processes=False"
            )
        if options.backend != "nccl":
            # The number of an op's threads may change the order of its sums: it must not depend on the towers.
            divided = options.shards is not None and all(is_cpu(str(one)) for one in options.devices or ())
            share_cores(*((options.shards, None) if divided else (options.towers, options.devices)), process)
        seen = () if process is None else exchange_gpus(process, health.timeout_s)
        choice = choose_devices(options.towers, options.devices, options.backend, process, seen)
        devices, self.backend = choice.devices, choice.backend
        options.check_towers(len(devices))
        if health.audit_every is not None:
            _check_audits(devices)
        # The unequal parts of a batch; None: they are even, as for a single tower that was to measure them.
        self.shares: Shares | None = None
        if options.shares is not None and (options.shares != AUTO or len(devices) > 1):
            self.shares = Shares(options.shares, devices)
        self.failures = Failures(
            lambda user: connect(choice, user, process, timeout_s=health.timeout_s, preflight=health.preflight)
        )
        self.communicator = self.failures.communicator
        announce(choice, process)
        self.launches = isinstance(self.communicator, NcclCommunicator)  # joins towers by the ops of `ops.device_ops`
        ranks = range(self.communicator.ranks[0], self.communicator.ranks[-1] + 1)
        weights = None if self.shares is None else self.shares.variable
        # `split` replaces both.
        self.layout = Layout(devices, ranks, self.communicator.world_size, options.shards, weights=weights)
        self.target = make_target(self.layout, self.backend, options)
        self.feeders: weakref.WeakKeyDictionary[tf.data.Iterator, Feeder] = weakref.WeakKeyDictionary()
        self.model = ModelSide()
        self.closed = False
        self._warned: set[str] = set()
        self.inexact: dict[Inexact, None] = {}  # why the steps that were traced differ from one device's
        self._broadcasts: dict[Any, Callable[..., list[tf.Tensor]]] = {}

    def serve(self, model: ModelSide) -> None:
        """Ask this model from now on."""
        self.model = model
        self.failures.save_by(model.save)

    def split(self) -> None:
        """Divide batches into twice as many shards from now on."""
        self.layout = self.layout.split()
        self.target = make_target(self.layout, self.backend, self.options)

    def lets_xla_compile(self) -> bool:
        """Return whether XLA may compile steps; warn if it may not."""
        reason = gpu_streams.missing() if self.communicator.enqueues and self.layout.on_gpus else ""
        if reason:
            self.warn_once(
                "XLA compiles no step on these GPUs: an exchange waits for all of a GPU's streams, which CUDA refuses "
                "while XLA records a command buffer. Expected TensorFlow's streams to be known. Received: "
                f"{reason}. Install a C++ compiler (on Debian: apt-get install g++) and leave NCCLSYNC_GPU_EVENTS out, "
                "or write compile(jit_compile=False)"
            )
        return not reason

    def check_repeatable(self) -> None:
        """Warn if bits that should be equal may differ: op determinism is off, or was when NCCL joined the towers."""
        if not tf_compat.is_op_determinism_enabled():
            shards = self.options.shards
            if shards is not None and self.layout.on_gpus:
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

    def close(self) -> None:
        """Be closed from now on."""
        self.closed = True

    def require_open(self) -> None:
        """Raise NcclSyncError if the towers are closed."""
        if self.closed:
            given = f"({options})" if (options := written(self.options)) else ""
            raise NcclSyncError(
                "Expected open towers. Received: towers that were closed, by close() or where `with towers:` ends. "
                "Keep all epochs within one `with`, or make new Towers. A model of a factory goes on on new ones, with "
                f"its weights, by: model = nccl_parallel{given}(lambda: model)(). Calling and saving it work without."
            )

    def require_eager(self, what: str) -> None:
        """Raise NcclSyncError if `what` was called within a tf.function, whose tensors end with its graph."""
        if not tf.executing_eagerly():
            raise NcclSyncError(
                f"Expected {what} outside any tf.function. Received: a call inside one. Call it from plain "
                "Python: a step on towers is a graph of its own."
            )

    def warn_once(self, message: str, about: str | None = None) -> None:
        """Log a warning, unless it, or a warning `about` the same, was logged before."""
        if (about or message) not in self._warned:
            self._warned.add(about or message)
            logger.warning("%s", message)

    def names_of(self, variables: Sequence[tf.Variable]) -> list[str]:
        """Return the names of tower 0's variables for messages: their Keras paths if known."""
        paths = self.model.paths()
        return [paths.get(id(variable), variable.name) for variable in variables]

    # Exchanges between processes, collective if there are several; `what` names the values in messages.

    def of_tower_0(self, variable: tf.Variable, what: str) -> tf.Tensor:
        """Return tower 0's value, whichever process has it."""
        value = variable.value()
        if not self.layout.meets_processes:
            return value
        own = value.numpy() if self.layout.is_chief else None
        return tf.convert_to_tensor(self.communicator.exchange(own, what)[0], value.dtype)

    def total(self, parts: Sequence[tf.Tensor], what: str) -> tf.Tensor:
        """Return the sum over the towers of all processes, given [n] this process' parts."""
        if self.communicator.find_failure() is not None:  # a file with the rest is better than no file
            self.warn_once("Other processes' parts of the gradients that an optimizer accumulates are lost")
            return tf.add_n(list(parts))
        return group_exchange([parts], self.communicator, [AllReduce((), (), "sum", what)])[0][0]

    def rows_of_all(self, rows: tf.Tensor, what: str) -> tf.Tensor:
        """Return [N, length] the rows of all towers, given [n, length] this process' rows."""
        towers = self.layout.towers
        if self.communicator.find_failure() is not None:  # as in `total`
            self.warn_once("Other processes' parts of the optimizers' state, which shard_optimizer divides, are lost")
            before = self.layout.ranks[0]
            return tf.pad(rows, [[before, towers - before - len(rows)], [0, 0]])
        return tf.concat(self.communicator.exchange(rows.numpy(), what), 0)

    def broadcast(self, values: Sequence[tf.Tensor], what: str, *, in_place: bool = False) -> list[tf.Tensor]:
        """Return tower 0's value on each tower, by a launch from a graph that is traced for each dtype.

        Args:
            values: [n] of this process' towers.
            what: names them in messages.
            in_place: see `device_ops.launch`.

        Raises:
            Exception: what `Failures.cause_of` says of an error.
        """
        key, devices = (what, values[0].dtype), self.layout.devices
        if key not in self._broadcasts:

            def body(*own: tf.Tensor) -> list[tf.Tensor]:
                collective = Broadcast((), 0, what)
                launched = device_ops.launch([own], self.communicator, [collective], devices, in_place=[in_place])
                return [launched.deliver(tower)[0] for tower in range(len(devices))]

            self._broadcasts[key] = tf.compat.v1.wrap_function(body, [tf.TensorSpec(None, key[1])] * len(values))
        try:
            return self._broadcasts[key](*values)
        except tf.errors.OpError as error:
            if (cause := self.failures.cause_of(error)) is error:
                raise
            raise cause from error


def _check_audits(devices: Sequence[str]) -> None:
    if len(devices) < 2:
        raise ValueError(
            "Expected two towers in each process, or more, with audit_every: each computes shards of others, too. "
            f"Received: {devices}"
        )
    kinds = set(device_models(devices))
    if len(kinds) > 1:
        raise ValueError(
            "Expected devices of one model with audit_every: another model may round differently, without a fault. "
            f"Received: {', '.join(sorted(kinds))}"
        )
    if not tf_compat.is_op_determinism_enabled():
        raise ValueError(
            "Expected deterministic ops with audit_every: otherwise towers may differ in the last bits, without a "
            "fault. Received: TensorFlow without them. Call tf.config.experimental.enable_op_determinism() first, "
            "and keras.utils.set_random_seed(...)"
        )
