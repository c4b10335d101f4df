"""Define the exceptions of ncclsync. Bad arguments are ``ValueError`` and ``TypeError`` as everywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_MOST_LETTERS = 300  # of a value in a message

# What stands here for the names of Horovod, tf.distribute, PyTorch and Lightning.
_ELSEWHERE = {
    **dict.fromkeys(
        ("init", "shutdown", "init_process_group", "is_initialized"), "Delete it: one process drives all GPUs"
    ),
    **dict.fromkeys(
        ("size", "local_size", "world_size", "num_replicas_in_sync", "get_world_size"), "len(model.towers)"
    ),
    **dict.fromkeys(("rank", "local_rank", "global_rank", "get_rank"), "model.towers.is_chief"),
    **dict.fromkeys(("DistributedOptimizer", "DistributedGradientTape"), "the optimizer or the tape as it is"),
    **dict.fromkeys(("broadcast_variables", "broadcast_parameters", "callbacks"), "Delete it: towers start equal"),
    **dict.fromkeys(("MirroredStrategy", "Strategy", "strategy", "scope"), "nccl_parallel(towers=4)(build_model)()"),
    **dict.fromkeys(("DistributedDataParallel", "DDP", "DataParallel"), "nccl_parallel(towers=4)(build_model)()"),
    **dict.fromkeys(("Trainer", "Fabric", "multi_gpu_model"), "nccl_parallel(towers=4)(build_model)()"),
    **dict.fromkeys(
        ("experimental_distribute_dataset", "make_dataset_iterator"), "the dataset as it is, of whole batches"
    ),
    **dict.fromkeys(
        ("distribute_datasets_from_function", "DistributedSampler"), "the dataset as it is, of whole batches"
    ),
    **dict.fromkeys(("reduce", "gather", "experimental_local_results"), "what towers.run(step, batch) returns"),
    **dict.fromkeys(("allreduce", "all_reduce", "allgather", "all_gather"), "ncclsync.ops, within a step"),
}


def elsewhere(name: str) -> str:
    """Return what stands for a name of another library's, to follow an error; "" for any other name."""
    instead = _ELSEWHERE.get(name)
    if instead is None:
        return ""
    return f". {'' if instead.startswith('Delete') else 'In its place stands '}{instead}. See examples/coming_from.md"


def shown(value: Any) -> str:
    """Return how a message shows a value of the user's: an array by its shape, anything else by its repr's begin."""
    with contextlib.suppress(AttributeError, TypeError, ValueError):  # no shape, a class' own, one of open rank
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        text = f"{type(value).__name__} of {len(value)}: {', '.join(map(shown, value[:4]))}"
    else:
        text = repr(value)
    return shorter(text)


def shorter(text: str) -> str:
    """Return a text, or its begin if it is too long for a message."""
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def remedied(words: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Let Python's error of arguments that a function does not take say what to write: the near name, or `words`."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # within the function
                text = str(error).replace("TowerState.", "Towers.").replace(".__init__", "")
                unknown = next((name for name in kwargs if f"unexpected keyword argument '{name}'" in text), "")
                near = difflib.get_close_matches(unknown, inspect.signature(function).parameters, 1, 0.8)
                write = f"Write {near[0]}={shown(kwargs[unknown])}" if near else words
                raise TypeError(f"{text}. {write}") from None

        return called

    return decorate


def install(extra: str = "") -> str:
    """Return the command that installs ncclsync, with an extra, where the reader is: no index has ncclsync."""
    clone = pathlib.Path(__file__).parent.parent
    extra = f"[{extra}]" if extra else ""
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e '{clone}{extra}'"
    return f"pip install '.{extra}', from the root of a clone of ncclsync"


class NcclSyncError(Exception):
    """Serve as the base class of ncclsync's errors; those with attributes are dataclasses."""

    def __reduce__(self):
        """Pickle by the fields: ``Exception`` would leave out those that were given by name."""
        fields = getattr(self, "__dataclass_fields__", None)
        return (type(self), tuple(getattr(self, name) for name in fields)) if fields else super().__reduce__()


class NcclUnavailableError(NcclSyncError):
    """Report that NCCL cannot be used on this machine: no library, no driver or GPU, or one too old."""


@dataclasses.dataclass(eq=False)
class NcclError(NcclSyncError):
    """Report that a native call returned another status than ``ncclSuccess``.

    Attributes:
        status: the status as a number, e.g. 1.
        call: the call that failed, e.g. ``"ncclAllReduce"``.
        last_error: the message of NCCL, CUDA or the loader; may be empty.
        status_name: the status' name in ``nccl.h``, e.g. ``"ncclUnhandledCudaError"``.
        during: the operation under way, e.g. which collective; may be empty.
    """

    status: int
    call: str
    last_error: str = ""
    status_name: str = "unknown status"
    during: str = ""

    def __str__(self) -> str:
        words = f": {self.last_error}" if self.last_error else ""
        during = f", during {self.during}" if self.during else ""
        return f"{self.call} returned {self.status_name} ({self.status}){words}{during}"

    def within(self, during: str) -> NcclError:
        """Return the error with the operation under way, unless it already names one."""
        return dataclasses.replace(self, during=self.during or during)


class NcclTimeoutError(NcclError):
    """Report that a collective, or the joining of ranks, did not end within ``timeout_s``.

    Attributes:
        during: the operation that did not end: the collective, its running number, its bytes.
        last_error: the seconds waited, and the ranks that had arrived.
    """

    def __str__(self) -> str:
        return f"Expected {self.during} to end. Received: {self.last_error}"


class NcclPreflightError(NcclError):
    """Report that a GPU received other data than another GPU sent, though every call succeeded.

    Attributes:
        last_error: the ranks, and the usual causes.
    """

    def __str__(self) -> str:
        return f"Expected each GPU to receive what the others sent it. Received: {self.last_error}"


class ProcessError(NcclSyncError):
    """Report that one of several processes has failed or ended, or differs from the others in what it does."""


@dataclasses.dataclass(eq=False)
class DivergenceError(NcclSyncError):
    """Report that towers hold different values of a variable that must be the same on all.

    Attributes:
        step: the number of training steps of these towers, including the last.
        variables: by name, the towers that differ from the majority; without a majority, from tower 0.
    """

    step: int
    variables: Mapping[str, Sequence[int]]

    def __str__(self) -> str:
        named = [f"{name} on tower {' and '.join(map(str, towers))}" for name, towers in self.variables.items()]
        if len(named) > _NAMED:
            named[_NAMED:] = [f"and {len(named) - _NAMED} more variables"]
        return (
            "Expected all towers to hold the same weights and optimizer state. "
            f"Received, after step {self.step}, others than the rest: {', '.join(named)}"
        )


@dataclasses.dataclass(eq=False)
class AuditError(NcclSyncError):
    """Report that towers computed different numbers from the same rows and weights.

    Attributes:
        step: the number of training steps of these towers, including the last.
        pairs: the towers that differ.
        culprits: the towers that differ from two other towers, which agree; empty if that cannot be told.
        names: the tensors that differ.
        devices: of the towers, by number.
    """

    step: int
    pairs: tuple[tuple[int, int], ...]
    culprits: tuple[int, ...]
    names: tuple[str, ...]
    devices: Mapping[int, str]

    def __str__(self) -> str:
        if self.culprits:
            who = " and ".join(f"tower {one} ({self.devices[one]})" for one in self.culprits)
            who += ", which differs from two others" if len(self.culprits) == 1 else ", which differ from two others"
        else:
            each = [f"towers {a} and {b} ({self.devices[a]}, {self.devices[b]})" for a, b in self.pairs]
            who = ", and ".join(each) + ": one of them is wrong"
        leave = [self.devices[one] for one in self.culprits] or ["one of them"]
        return (
            "Expected towers to compute the same bits from the same rows. "
            f"Received, in step {self.step}: others for {_some(self.names)}, by {who}. The weights hold what was "
            f"computed wrong: go on from a backup, on devices= without {' and '.join(leave)}, and examine it"
        )


@dataclasses.dataclass(eq=False)
class NonFiniteError(NcclSyncError):
    """Report a NaN or an infinity in a tower's own gradient.

    Attributes:
        towers: by tower, (begin, end, names): its rows of the batch, ``begin`` to ``end`` - 1, and the variables. With
            several shards on a tower, from the first shard with such a gradient to the last.
        file: a NumPy archive (.npz) of these rows, under the names of the batch's structure, with their ``indices`` in
            the batch; of several processes that read their own rows each saves these. None if it was not saved.
        unsaved: why it was not saved.
    """

    towers: Mapping[int, tuple[int, int, tuple[str, ...]]]
    file: str | None
    unsaved: str = ""

    def __str__(self) -> str:
        each = []
        for tower, (begin, end, names) in self.towers.items():
            rows = f"rows {begin} to {end - 1}" if end > begin else "of a batch without rows"
            each.append(f"tower {tower}, {rows}, for {_some(names)}")
        saved = f"These rows are saved in {self.file}" if self.file else f"These rows are not saved: {self.unsaved}"
        return f"Expected finite gradients. Received a NaN or infinity: {'; '.join(each)}. {saved}"


_NAMED = 10  # so many variables at most in a message


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and so on; each once, since errors may name each other as causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
