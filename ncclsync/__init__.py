"""Train Keras 3 models on all GPUs of a host, exactly like on one.

The public names are imported on first use, so that `ncclsync.communicator` works without TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclsync import ops as ops
    from ncclsync.backup import BackupAndRestore as BackupAndRestore
    from ncclsync.cross_device_ops import CrossDeviceOps as CrossDeviceOps
    from ncclsync.errors import DivergenceError as DivergenceError
    from ncclsync.errors import NcclError as NcclError
    from ncclsync.errors import NcclSyncError as NcclSyncError
    from ncclsync.errors import NcclTimeoutError as NcclTimeoutError
    from ncclsync.errors import NcclUnavailableError as NcclUnavailableError
    from ncclsync.errors import NonFiniteError as NonFiniteError
    from ncclsync.history import plot_history as plot_history
    from ncclsync.large_batch import LargeBatch as LargeBatch
    from ncclsync.loop import Towers as Towers
    from ncclsync.native import nccl_version as nccl_version
    from ncclsync.noise import NoiseScale as NoiseScale
    from ncclsync.parallel import nccl_parallel as nccl_parallel
    from ncclsync.residual import zero_last_gamma as zero_last_gamma
    from ncclsync.shuffled import Shuffled as Shuffled
    from ncclsync.throughput import Throughput as Throughput
    from ncclsync.timeline import Timeline as Timeline
    from ncclsync.verification import verify as verify

__version__ = "0.1.0"

_HOMES = {
    "CrossDeviceOps": "cross_device_ops",
    "BackupAndRestore": "backup",
    "DivergenceError": "errors",
    "LargeBatch": "large_batch",
    "NcclError": "errors",
    "NcclSyncError": "errors",
    "NcclTimeoutError": "errors",
    "NcclUnavailableError": "errors",
    "NoiseScale": "noise",
    "NonFiniteError": "errors",
    "Shuffled": "shuffled",
    "Throughput": "throughput",
    "Timeline": "timeline",
    "Towers": "loop",
    "nccl_parallel": "parallel",
    "nccl_version": "native",
    "plot_history": "history",
    "verify": "verification",
    "zero_last_gamma": "residual",
}
__all__ = [*_HOMES, "ops"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ncclsync.{_HOMES[name]}"), name)
    if name in ("ops", "communicator"):
        return importlib.import_module(f"ncclsync.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
