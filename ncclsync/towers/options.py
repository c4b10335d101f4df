"""Declare every option of towers once: its name, its default, its text and its check.

`TowerOptions` checks itself, before anything is created. `takes` documents a function that passes on
`**options`.
"""

import contextlib
import dataclasses
import difflib
import inspect
import os
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ncclsync.communicator.timeouts import DEFAULT_TIMEOUT_S, check_timeout
from ncclsync.ops.buckets import DEFAULT_BUCKET_BYTES

if TYPE_CHECKING:
    from typing_extensions import Self

# A host has up to 16 GPUs, and some hundred cores. A step is one graph with a part for each tower, which TensorFlow
# takes ever longer to build: for a small model 5 s for 128 CPU towers, 15 s for 256, 47 s for 512.
MOST_TOWERS = 256

AUTO = "auto"  # of shares
EXACT = ("batch_norm", "random")
MOST_SHARE = 10**6  # times the rows of a batch, within int64

# The words that an option may be, and how a message names them.
_WORDS = {
    "backend": (("nccl", "cpu", None), "one of ('nccl', 'cpu') or None"),
    "compression": (("bfloat16", None), "None or 'bfloat16'"),
    "on_divergence": (("raise", "repair"), "one of ('raise', 'repair')"),
    "on_nonfinite": (("raise", "skip", None), "None or one of ('raise', 'skip')"),
    "on_oom": (("split", None), "None or 'split'"),
}

# Options that exclude each other, and why, as a message says.
_WHOLE = ": a tower gets whole shards, of even size"
_EXCLUSIVE = {
    ("towers", "devices"): "",
    ("on_oom", "shard_optimizer"): ": a tower that computes several shards has the whole of an optimizer's state",
    ("shards", "shard_optimizer"): (
        ": which part of an optimizer's state a tower keeps depends on the number of towers, and shards must not"
    ),
    ("shares", "shards"): _WHOLE,
    ("shares", "on_oom"): _WHOLE,
}

# What to write in place of an option's earlier name, or of what other libraries and people call it.
_INSTEAD = {
    **dict.fromkeys(("gpu", "gpus", "n_gpu", "n_gpus", "num_gpus", "ngpus", "gpu_count"), "towers"),
    **dict.fromkeys(("num_towers", "n_towers", "num_replicas", "replicas", "workers", "num_workers", "n"), "towers"),
    **dict.fromkeys(("world_size", "size", "num_devices", "n_devices"), "towers"),
    **dict.fromkeys(("device_ids", "gpu_ids", "device_list"), "devices"),
    **dict.fromkeys(("sync_bn", "sync_batchnorm", "synchronized"), 'exact=("batch_norm",)'),
    **dict.fromkeys(("bucket_cap_mb", "bucket_size", "fusion_threshold"), "bucket_bytes"),
    **dict.fromkeys(("zero", "zero_stage", "zero1"), "shard_optimizer"),
    **dict.fromkeys(("timeout", "timeout_seconds"), "timeout_s"),
    "batch_size": "fit(batch_size=...), the size of the batch of all towers together",
    "sync_batch_norm": 'exact=("batch_norm",)',
    "batch_invariant_random": 'exact=("random",)',
    "check_first_step": "python -m ncclsync verify",
    "shards_at_once": "shards",
}

Function = TypeVar("Function", bound=Callable[..., Any])


def _check_words_and_flags(options: Any) -> None:
    """Check the fields of a dataclass that are words or bools; make NumPy's numbers and arrays Python's first."""
    for name, value in vars(options).items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(one, (np.generic, np.ndarray)) for one in values):
            plain = [one.tolist() if isinstance(one, (np.generic, np.ndarray)) else one for one in values]
            object.__setattr__(options, name, plain if values is value else plain[0])
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        allowed, words = _WORDS.get(field.name, ((value,), ""))
        if words and (not isinstance(value, (str, type(None))) or value not in allowed):
            texts = [one for one in allowed if one is not None]
            near = difflib.get_close_matches(str(value), texts, 1) or (texts if len(texts) == 1 else [])
            instead = (
                f"Write {field.name}={near[0]!r}, or leave it out" if near else "Write one of these, or leave it out"
            )
            raise ValueError(f"Expected {field.name} to be {words}. Received: {value!r}. {instead}")
        if isinstance(field.default, bool) and field.name != "exact" and not isinstance(value, bool):
            instead = f"Write {field.name}={not field.default}, or leave it out"
            raise TypeError(f"Expected {field.name} to be a bool. Received: {value!r}. {instead}")


def _check_names(caller: str, given: Mapping[str, Any], *known: type, own: Iterable[str] = ()) -> None:
    """Raise TypeError, with what to write instead, for a name that the first of the known dataclasses does not have.

    `own`: the caller's other arguments.
    """
    owner = {field.name: one for one in reversed(known) for field in dataclasses.fields(one)}
    owner |= dict.fromkeys(own, known[0])
    for name, value in given.items():
        if owner.get(name) is known[0]:
            continue
        near = name if name in owner else _INSTEAD.get(name.lower())
        instead = near or next(iter(difflib.get_close_matches(name.lower(), owner, 1)), "")
        if instead in owner:
            instead += f"={value!r}"
            if owner[instead.partition("=")[0]] is not known[0]:
                instead = f"health=ncclsync.Health({instead})"
        names = (one for one, its in owner.items() if its is known[0])
        remedy = f". Write {instead}" if instead else f". Known are: {', '.join(names)}"
        raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{remedy}")


def _instead_of_towers(given: Any) -> str:
    """Return what to write in place of a number of towers that is no int."""
    if isinstance(given, Sequence) and (not isinstance(given, str) or ":" in given):
        names = [given] if isinstance(given, str) else [f"GPU:{one}" if _is_int(one) else one for one in given]
        return f"To choose devices, use devices=. Write devices={names!r}"
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(given, bool) and int(given) == float(given) >= 1:
            return f"Write towers={int(given)}"
    return "Leave towers= out to take every GPU"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
    """Say what watches a run, and what happens when something is found: `nccl_parallel(health=Health(...))`.

    Attributes:
        check_every: the number of training steps after which towers are compared: a checksum of the bits of each
            variable that must be the same on all. Any single flipped bit is found. A `DivergenceError` names variables,
            towers and the step. None: never.
        on_divergence: "raise" that error, and change nothing; or "repair": log it as a warning and send tower 0's
            values to all, unless tower 0 itself differs from most others.
        audit_every: the number of training steps after which towers, in one step, compute each other's shards again and
            compare the tensors that are added up, bit for bit. So a GPU that computes wrong numbers is found;
            `check_every` cannot find it, since all weights are equal after the sum. An `AuditError` names the
            variables, the step, and the tower; with only two towers both. Such a step takes up to three times as long
            (twice, on two towers), takes memory for what it computes again, and copies the compared tensors to the
            host. `Throughput` and `Timeline` count it as any step. It needs
            `tf.config.experimental.enable_op_determinism()`, and two towers on devices of one model in each process.
            None: never.
        on_nonfinite: what happens if a tower's own gradient, as a tape gives it and before it is reduced, holds a NaN
            or an infinity. "raise": a `NonFiniteError` names the tower, the variables, the tower's rows of the batch,
            and a file with these rows. "skip": a warning says the same. Either way no weight, moving average or
            optimizer state of any tower changes, nor `iterations`; metrics count the batch, so that a NaN shows in the
            epoch's loss. It takes the memory of one more copy of weights and optimizer state. A `LossScaleOptimizer`
            skips such steps itself, and they are left to it. None: Keras' behaviour.
        emergency_checkpoint: a file to save the model to (".keras"), or its weights (".weights.h5"), whenever a
            collective has failed, before the error is raised. For models of `@nccl_parallel`.
        preflight: send known numbers between each pair of GPUs before the first collective; corrupted numbers are an
            error.
        timeout_s: the limit of an NCCL collective, and of its GPUs' own work before it, in seconds each. After 60 s a
            warning names what is pending; after `timeout_s` the step fails with a `NcclTimeoutError` that names the
            collective and the missing towers. None: no limit. Tower 0 keeps its weights, and the next step joins the
            GPUs anew.

    Raises:
        TypeError, ValueError: bad arguments.
    """

    check_every: int | None = None
    on_divergence: str = "raise"
    audit_every: int | None = None
    on_nonfinite: str | None = None
    emergency_checkpoint: str | os.PathLike[str] | None = None
    preflight: bool = True
    timeout_s: float | None = DEFAULT_TIMEOUT_S

    def __new__(cls, *unnamed: Any, **given: Any) -> "Self":
        """Check the arguments' names."""
        if unnamed:
            words = "Write each with its name, as in Health(check_every=1000)"
            raise TypeError(f"Expected options by name. Received: Health({', '.join(map(repr, unnamed))}). {words}")
        _check_names("Health", given, cls)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check the arguments; make a file's path absolute now."""
        _check_words_and_flags(self)
        check_timeout(self.timeout_s)
        for name in ("check_every", "audit_every"):
            every = getattr(self, name)
            if every is None:
                continue
            if not _is_int(every):
                raise TypeError(f"Expected {name} to be a number of steps. Received: {every!r}. Write {name}=1000")
            if every < 1:
                raise ValueError(f"Expected {name} to be at least 1. Received: {every}. To never check, leave it out")
        path = self.emergency_checkpoint
        if path is None:
            return
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"Expected emergency_checkpoint to be a path. Received: {path!r}")
        if not os.fspath(path).endswith((".weights.h5", ".keras")):
            raise ValueError(
                "Expected emergency_checkpoint to end in .weights.h5 (weights) or .keras (the whole model). "
                f"Received: {path!r}. Write emergency_checkpoint={str(pathlib.Path(path).with_suffix('.weights.h5'))!r}"
            )
        object.__setattr__(self, "emergency_checkpoint", pathlib.Path(path).absolute())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerOptions:
    """Say where towers stand and how they train.

    Attributes:
        towers: train on this many GPUs, the first ones, or on this many CPU towers if the host has no GPU. None: every
            visible GPU; without a GPU one CPU tower. As many CPU towers as there are cores, or more, let TensorFlow run
            an op on one thread (`tf.config.threading`), for the whole process, unless you have chosen a number. If
            TensorFlow runs already, this is too late, and a warning says so.
        devices: train on these devices, such as `["GPU:0", "GPU:2"]`.
        backend: "nccl" or "cpu"; None follows the devices. The choice is logged once, at INFO.
        bucket_bytes: the most bytes of a bucket in which gradients are all-reduced.
        shards: split each batch into this many shards, at least one for each tower. A tower computes its shards one
            after another, each with random numbers of its own, and one tree adds up the shards' gradients: with the
            same `shards`, any number of towers trains to the same bits. A batch may then be larger than a GPU's memory
            holds at once. None: a shard for each tower.
        shares: unequal parts of a batch, for GPUs that differ in speed. `[3, 1]`, in the order of the devices, gives
            the first three times the rows of the second; results stay exact. "auto": the shares are measured in the
            first steps, at most 20 calls of the training step, and then stay; they are logged once, at INFO, as a list.
            For equal bits from run to run give that list. None: parts as even as possible. Not with `shards`, `on_oom`
            or several processes.
        exact: True: training does not depend on the number of towers in what Keras leaves to each replica, for more
            exchanges or draws; or a tuple of these words. "batch_norm": every `BatchNormalization` normalises by the
            whole batch's mean and variance instead of each shard's, as with `synchronized=True`; two more exchanges per
            layer. "random": random layers and `keras.random` draw the numbers that one device would draw for these very
            samples; each tower draws for the whole batch. An op that cannot do so, such as a shuffle of the batch or
            `tf.random.normal`, is an error that names it. Without "random", a warning names the layers, and each tower
            draws other numbers: reproducible for a given seed and number of towers.
        compression: "bfloat16": dense float32 gradients travel as bfloat16, half the bytes. The rounding error of a
            tower's gradient is added to its next gradient, so that training is close to that of one device, though not
            equal.
        shard_optimizer: let each of N towers keep and update the N-th part of the optimizer's state, and send the
            others the updated weights: 1/N of the optimizer's memory and work, and the same numbers. While towers
            train, the optimizer's own variables take no memory; a read, or a save of the model, finds them whole. For
            optimizers that update each element of a weight by itself, as SGD and Adam do; other optimizers are an
            error. State of weights with sparse gradients stays whole on every tower.
        on_oom: what happens if a step does not fit a tower's memory (TensorFlow's `ResourceExhaustedError`). "split":
            the step leaves no trace, and runs again with twice as many shards, which a tower computes one after
            another, until it fits; a warning tells their number, and it stays so. With `shards`, whose bits belong to
            their number, the error is raised, as with None. It takes the memory of one more copy of weights and
            optimizer state.
        processes: join the other processes, if mpirun, srun, torchrun or `TF_CONFIG` makes this one of several: the
            towers of all train as one device, and `towers` and `devices` are those of this process. By default it takes
            every visible GPU, or, if several processes of a host see the same GPUs, the GPU of its number there. The
            choice is logged once, at INFO. False: this process trains by itself.
        health: a `Health`: what watches the run, and what happens when something is found.
    """

    towers: int | None = None
    devices: Sequence[str] | None = None
    backend: str | None = None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    shards: int | None = None
    shares: Sequence[int] | str | None = None
    exact: bool | Sequence[str] = False
    compression: str | None = None
    shard_optimizer: bool = False
    on_oom: str | None = None
    processes: bool = True
    health: Health = Health()

    @property
    def exact_batch_norm(self) -> bool:
        """Return whether every `BatchNormalization` normalises by the whole batch."""
        return self.exact is True or "batch_norm" in (self.exact or ())

    @property
    def exact_random(self) -> bool:
        """Return whether random numbers are those of one device."""
        return self.exact is True or "random" in (self.exact or ())

    @classmethod
    def of(cls, caller: str, given: dict[str, Any], own: Iterable[str] = ()) -> "Self":
        """Make options of `given`, the arguments of `caller`; an unknown argument is `caller`'s TypeError.

        `own`: the names of its other arguments.
        """
        _check_names(caller, given, cls, Health, own=own)
        return cls(**given)

    def __post_init__(self) -> None:
        """Check all that needs no list of devices: to ask for it would start TensorFlow.

        Raises:
            TypeError, ValueError: bad arguments.
        """
        _check_words_and_flags(self)
        self._check_towers()
        if not _is_int(self.bucket_bytes) or self.bucket_bytes < 1:
            raise ValueError(
                f"Expected bucket_bytes to be a positive int. Received: {self.bucket_bytes!r}. Write "
                f"bucket_bytes={DEFAULT_BUCKET_BYTES}, or leave it out"
            )
        if not isinstance(self.exact, bool):
            known = isinstance(self.exact, Sequence) and not isinstance(self.exact, str)
            if not known or not all(one in EXACT for one in self.exact):
                words = f"Expected exact to be a bool or a tuple of some of {EXACT}. Received: {self.exact!r}"
                near = difflib.get_close_matches(str(self.exact), EXACT, 1)
                instead = f'exact=("{near[0]}",)' if near else "exact=True for all of these, or leave it out"
                raise ValueError(f"{words}. Write {instead}")
        health: Any = self.health
        if not isinstance(health, Health):
            words = "check_every=1000"
            if isinstance(health, dict):
                _check_names("Health", health, Health)
                words = ", ".join(f"{name}={value!r}" for name, value in health.items())
            raise TypeError(
                f"Expected health to be a Health. Received: {health!r}. Write health=ncclsync.Health({words})"
            )
        if self.shards is not None:
            self._check_shards(self.shards)
        if not isinstance(self.shares, (str, type(None))) or self.shares not in (AUTO, None):
            self._check_shares(self.shares)
        values = {**vars(self.health), **vars(self)}
        for (one, other), why in _EXCLUSIVE.items():
            given = values[one], values[other]
            if not any(value is None or value is False for value in given):
                received = f"{one}={given[0]!r}, {other}={given[1]!r}"
                raise ValueError(f"Expected {one} or {other}, not both{why}. Received: {received}")
        for name in ("devices", "shares", "exact"):  # the user may change a list
            value = getattr(self, name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                # TensorFlow's own lists of devices have objects with names.
                object.__setattr__(self, name, tuple(getattr(one, "name", one) for one in value))

    def _check_shards(self, shards: Any) -> None:
        if not _is_int(shards):
            words = "Write a number, as in shards=8"
            raise TypeError(
                f"Expected shards to be an int. Received: {shards!r} of type {type(shards).__name__}. {words}"
            )
        if not 1 <= shards <= MOST_TOWERS:
            raise ValueError(f"Expected shards to be from 1 to {MOST_TOWERS}. Received: {shards}")
        self.check_towers(self.towers if self.devices is None else len(self.devices))

    def check_towers(self, towers: int | None) -> None:
        """Raise ValueError if there are fewer shards than towers; None: their number is not known yet."""
        if self.shards is not None and towers is not None and self.shards < towers:
            raise ValueError(
                f"Expected at least a shard for each of {towers} towers. Received: shards={self.shards}. A tower "
                "without a shard would compute nothing: use fewer towers, or more shards"
            )

    def _check_shares(self, shares: Any) -> None:
        if isinstance(shares, str) or not isinstance(shares, Sequence) or not all(map(_is_int, shares)):
            words = "Write whole parts, as in shares=[3, 1]"
            raise TypeError(f"Expected shares to be a list of ints, {AUTO!r} or None. Received: {shares!r}. {words}")
        if not shares or not all(1 <= int(one) <= MOST_SHARE for one in shares):
            raise ValueError(f"Expected each of shares to be from 1 to {MOST_SHARE}. Received: shares={shares!r}")

    def _check_towers(self) -> None:
        towers, devices = self.towers, self.devices
        if towers is not None:
            if not _is_int(towers):
                words = _instead_of_towers(towers)
                raise TypeError(
                    f"Expected towers to be an int. Received: {towers!r} of type {type(towers).__name__}. {words}"
                )
            if towers < 1:
                words = "Leave towers= out to take every GPU"
                raise ValueError(f"Expected towers to be at least 1. Received: towers={towers}. {words}")
            if towers > MOST_TOWERS:
                raise ValueError(
                    f"Expected towers to be at most {MOST_TOWERS}, more than a host has GPUs. "
                    f"Received: towers={towers}. A batch size belongs to fit(batch_size=...)."
                )
        if devices is None:
            return
        if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
            words = "Leave devices= out to take every GPU"
            if _is_int(devices) or (isinstance(devices, str) and devices.isdecimal()):
                words = f"For a number of them, as hvd.size(), or gpus= of multi_gpu_model, write towers={devices}"
            elif isinstance(devices, str) and ":" in devices:
                words = f"Write devices={[one.strip() for one in devices.split(',')]!r}"
            raise TypeError(f"Expected devices to be a list of names such as 'GPU:0'. Received: {devices!r}. {words}")
        if len(devices) > MOST_TOWERS:
            raise ValueError(
                f"Expected devices to name at most {MOST_TOWERS}, one for each tower. Received: {len(devices)}"
            )


def written(options: Any) -> str:
    """Return the arguments that make options, without defaults, as a user writes them."""
    pairs = [(field, getattr(options, field.name)) for field in dataclasses.fields(options)]
    given = [(field.name, value) for field, value in pairs if value != field.default]
    words = {name: f"ncclsync.Health({written(v)})" if isinstance(v, Health) else repr(v) for name, v in given}
    return ", ".join(f"{name}={text}" for name, text in words.items())


def takes(options: type[TowerOptions]) -> Callable[[Function], Function]:
    """Give a function that ends in `**options` the options' signature, and their text at "{options}"."""

    def document(function: Function) -> Function:
        texts = [(one.__doc__ or "").partition("Attributes:\n")[2].rstrip() for one in reversed(options.__mro__)]
        text = textwrap.dedent("\n".join(filter(None, texts)))
        function.__doc__ = re.sub(
            r"^( *)\{options\}", lambda at: textwrap.indent(text, at[1]), function.__doc__ or "", flags=re.MULTILINE
        )
        *named, _ = inspect.signature(function).parameters.values()
        known = {parameter.name for parameter in named}
        added = [one for one in inspect.signature(options).parameters.values() if one.name not in known]
        function.__signature__ = inspect.Signature([*named, *added])  # type: ignore[attr-defined]
        return function

    return document
