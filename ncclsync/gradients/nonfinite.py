"""Find gradients that are not finite, on each tower before they are reduced, and save their rows.

`finite_flags` finds them in a step; `OnNonFinite` reports and saves. `recovery.Rollback` undoes the step.
"""

import logging
import os
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync import ops
from ncclsync.errors import NonFiniteError
from ncclsync.gradients.observer import Observer
from ncclsync.sharding.shards import units_of

logger = logging.getLogger("ncclsync")

MOST_FILES = 10  # saved by a run, whose every step may be skipped
MOST_KEPT = 50  # of all runs and processes of this user: the newest


def finite_flags(observer: Observer) -> tf.Tensor | None:
    """Compute, in the graph of a step, which gradients of which tower are finite.

    Returns:
        bool, [towers with samples, gradients], equal on all towers; None without gradients, and with a
        `LossScaleOptimizer`, which expects infinite gradients, skips these steps itself, and lowers its scale.
    """
    context = ops.current_context()
    if not observer.gradients or observer.scale is not None or context is None:
        return None
    parts = ops.parts(observer.gradients)
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in parts]
    finite = tf.stack([tf.reduce_all(tf.math.is_finite(one)) for one in values])
    return ops.stack(finite)


class OnNonFinite:
    """Raise or skip, as the user asked, when a gradient is not finite."""

    def __init__(self, mode: str | None) -> None:
        """Start before the first step; `mode` is `Health.on_nonfinite`: "raise" or "skip"."""
        self._mode = mode
        self._files = 0

    def report(
        self, finite: np.ndarray, sizes: np.ndarray, names: Sequence[str], batch: Any, owners: Sequence[int], own: range
    ) -> None:
        """Save the rows of shards with gradients that are not finite; raise the error, or log it.

        Args:
            finite: [shards with samples, gradients] bool.
            sizes: [shards] the samples of each.
            names: [gradients] of the variables.
            batch: nested structure of eager tensors.
            owners: the tower of each shard, including shards without samples.
            own: the rows of the processes' batch that `batch` has.

        Raises:
            NonFiniteError: unless `mode` is "skip".
        """
        ends = np.cumsum(sizes)
        found: dict[int, tuple[int, int, tuple[str, ...]]] = {}
        indices: list[int] = []
        # A batch without rows belongs to tower 0.
        for shard, flags in zip(np.flatnonzero(sizes).tolist() or [0], finite, strict=True):
            if not flags.all():
                begin, end = int(ends[shard] - sizes[shard]), int(ends[shard])
                indices.extend(range(begin, end))
                bad = [name for name, one in zip(names, flags, strict=True) if not one]
                first, _, before = found.get(owners[shard], (begin, end, ()))
                found[owners[shard]] = (first, end, tuple(dict.fromkeys([*before, *bad])))
        error = NonFiniteError(found, *self._save(batch, indices, own))
        if self._mode == "raise":
            raise error
        logger.warning("%s. The step was skipped: no tower's weights or optimizer state have changed", error)

    def _save(self, batch: Any, indices: list[int], own: range) -> tuple[str | None, str]:
        """Save those rows that this process has; return the file, or None and the reason."""
        kept = [index for index in indices if index in own]
        if indices and not kept:
            return None, "another process reads them, and saves them"
        if self._files >= MOST_FILES:
            return None, f"this run has saved {MOST_FILES} files already"
        self._files += 1
        try:
            return _save_rows(batch, np.array(kept, int), own.start), ""
        except Exception as error:  # of any kind: the step is skipped, or fails by its own error
            return None, f"{type(error).__name__}: {error}"


def _save_rows(batch: Any, indices: np.ndarray, first: int) -> str:
    """Save rows of a batch, whose own `first` row has this index, to a new file; remove the oldest; return its path."""
    arrays: dict[str, Any] = {
        "/".join(map(str, path)): _rows_of(leaf, slice(None) if unit else indices - first)
        for (path, leaf), unit in zip(keras.tree.flatten_with_path(batch), units_of(batch), strict=True)
        if leaf is not None
    }
    # One folder for each user, which outlives the process: errors name its files.
    folder = pathlib.Path(tempfile.gettempdir(), f"ncclsync-nonfinite-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's")
    descriptor, name = tempfile.mkstemp(".npz", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-", folder)
    file = pathlib.Path(name)
    try:
        with open(descriptor, "wb") as opened:
            np.savez(opened, indices=indices, **arrays)
    except BaseException:
        file.unlink()
        raise
    for old in sorted(folder.glob("*.npz"), key=lambda one: one.name)[:-MOST_KEPT]:
        old.unlink(missing_ok=True)  # another process may do the same
    return name


def _rows_of(leaf: Any, indices: np.ndarray | slice) -> np.ndarray:
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(leaf)
    if isinstance(leaf, tf.RaggedTensor):
        leaf = leaf.to_tensor()
    array = leaf.numpy()
    array = array[indices] if array.ndim else array
    return array.astype(bytes) if array.dtype == object else array
