"""Train Keras 3 models on all GPUs of a host, exactly like on one.

The public names are imported on first use, so that `ncclsync.communicator` works without TensorFlow.
"""

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclsync import ops as ops
    from ncclsync.communicator.native import nccl_version as nccl_version
    from ncclsync.errors import AuditError as AuditError
    from ncclsync.errors import DivergenceError as DivergenceError
    from ncclsync.errors import NcclError as NcclError
    from ncclsync.errors import NcclSyncError as NcclSyncError
    from ncclsync.errors import NcclTimeoutError as NcclTimeoutError
    from ncclsync.errors import NcclUnavailableError as NcclUnavailableError
    from ncclsync.errors import NonFiniteError as NonFiniteError
    from ncclsync.errors import ProcessError as ProcessError
    from ncclsync.parallel import Towers as Towers
    from ncclsync.parallel import nccl_parallel as nccl_parallel
    from ncclsync.tools.verify.verification import verify as verify
    from ncclsync.towers.options import Health as Health
    from ncclsync.training.callbacks.backup import BackupAndRestore as BackupAndRestore
    from ncclsync.training.callbacks.history import plot_history as plot_history
    from ncclsync.training.callbacks.large_batch import LargeBatch as LargeBatch
    from ncclsync.training.callbacks.noise_scale import NoiseScale as NoiseScale
    from ncclsync.training.callbacks.residual import zero_last_gamma as zero_last_gamma
    from ncclsync.training.callbacks.shuffled import Shuffled as Shuffled
    from ncclsync.training.callbacks.throughput import Throughput as Throughput
    from ncclsync.training.callbacks.timeline import Timeline as Timeline
    from ncclsync.training.local import Local as Local
    from ncclsync.training.loop import HasTowers as HasTowers
    from ncclsync.training.loop import towers_of as towers_of

__version__ = "0.1.0"

_HOMES = {
    "AuditError": "errors",
    "BackupAndRestore": "training.callbacks.backup",
    "DivergenceError": "errors",
    "HasTowers": "training.loop",
    "Health": "towers.options",
    "LargeBatch": "training.callbacks.large_batch",
    "Local": "training.local",
    "nccl_parallel": "parallel",
    "nccl_version": "communicator.native",
    "NcclError": "errors",
    "NcclSyncError": "errors",
    "NcclTimeoutError": "errors",
    "NcclUnavailableError": "errors",
    "NoiseScale": "training.callbacks.noise_scale",
    "NonFiniteError": "errors",
    "plot_history": "training.callbacks.history",
    "ProcessError": "errors",
    "Shuffled": "training.callbacks.shuffled",
    "Throughput": "training.callbacks.throughput",
    "Timeline": "training.callbacks.timeline",
    "Towers": "parallel",
    "towers_of": "training.loop",
    "verify": "tools.verify.verification",
    "zero_last_gamma": "training.callbacks.residual",
}
__all__ = [*_HOMES, "ops"]


class _Visible(logging.Handler):
    """Print warnings where logging has no other handler, as Python would, with the name of who speaks."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless another handler gets it."""
        logger = logging.getLogger(__name__)
        if not {*logger.handlers, *(logging.root.handlers if logger.propagate else ())} - {self}:
            print(f"{__name__}: {self.format(record)}", file=sys.stderr)


if not logging.getLogger(__name__).handlers:
    logging.getLogger(__name__).addHandler(_Visible(logging.WARNING))


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ncclsync.{_HOMES[name]}"), name)
    if name in ("ops", "communicator"):
        return importlib.import_module(f"ncclsync.{name}")
    words = importlib.import_module("ncclsync.errors").elsewhere(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{words}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
