"""Gradients that are not finite: found on each tower before they are reduced, told with their rows, saved.

A `Watch` sees one step while it is traced; `OnNonFinite` is what happens when such a gradient turns up. What
undoes the step is `layout.Rollback`.
"""

import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync import ops, private
from ncclsync.errors import NonFiniteError
from ncclsync.shard import shard_sizes

logger = logging.getLogger("ncclsync")

MODES = ("raise", "skip")
MOST_FILES = 10  # that one run saves: every step may be skipped


class Watch:
    """What a step differentiates, while it is traced.

    Attributes:
        names: of the variables, in the order of the flags; their Keras paths where known.
        scaled: whether a `LossScaleOptimizer` scales the loss: it meets infinite gradients as a rule, skips
            such steps itself, and must see them to lower its scale.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.scaled = False
        self._gradients: list[tf.Tensor] = []

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch tapes and loss scales; opened before the hooks that add up, it sees a tower's own."""

        def watching(gradient: Callable) -> Callable:
            @functools.wraps(gradient)
            def watched(tape, target, sources, output_gradients=None, **kwargs):
                gradients = gradient(tape, target, sources, output_gradients, **kwargs)
                context = ops.current_context()
                # In a branch or a loop there is nothing that could be taken out of it.
                if context is not None and context.can_exchange():
                    self._note(sources, gradients)
                return gradients

            return watched

        def noting(scale_loss: Callable) -> Callable:
            @functools.wraps(scale_loss)
            def noted(*args, **kwargs):
                self.scaled = True
                return scale_loss(*args, **kwargs)

            return noted

        with (
            private.methods_wrapped([tf.GradientTape], "gradient", watching),
            private.methods_wrapped([keras.optimizers.LossScaleOptimizer], "scale_loss", noting),
        ):
            yield

    def around(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a step that returns what `step` does, and which gradients of which tower are finite.

        That is a bool tensor [towers with samples, gradients], equal on all towers; None if there is nothing
        to tell.
        """

        def watched(batch):
            # tf.function traces again when a step created variables; the last trace is the one that counts.
            self.names.clear()
            self._gradients.clear()
            results = step(batch)
            return results, self._flags()

        return watched

    def _note(self, sources: Any, gradients: Any) -> None:
        for source, gradient in zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True):
            if not isinstance(source, (tf.Variable, keras.Variable)) or gradient is None:
                continue
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            if values.dtype.is_floating:
                self.names.append(source.path if isinstance(source, keras.Variable) else source.name)
                self._gradients.append(values)

    def _flags(self) -> tf.Tensor | None:
        context = ops.current_context()
        if not self._gradients or self.scaled or context is None:
            return None
        finite = tf.stack([tf.reduce_all(tf.math.is_finite(values)) for values in self._gradients])
        self._gradients.clear()  # they would keep the trace alive
        with context.implied():
            return ops.stack(finite)


class OnNonFinite:
    """What happens when a gradient is not finite.

    Attributes:
        mode: "raise" or "skip"; None: nothing, and nothing is watched.
        raised: the error of a step that has failed so.
    """

    def __init__(self, mode: str | None) -> None:
        """Check the argument.

        Raises:
            ValueError: it is none of these.
        """
        if mode is not None and mode not in MODES:
            raise ValueError(f"Expected on_nonfinite to be None or one of {MODES}. Received: {mode!r}")
        self.mode = mode
        self.raised: NonFiniteError | None = None
        self._folder: str | None = None
        self._files = 0

    def tell(self, finite: np.ndarray, names: Sequence[str], batch: Any, towers: int) -> None:
        """Save the rows of the towers that have such gradients; raise what happened, or log it.

        Args:
            finite: [towers with samples, gradients] bool.
            names: [gradients] of the variables.
            batch: nested structure of eager tensors.
            towers: how many, those without samples too.

        Raises:
            NonFiniteError: unless the step is to be skipped.
        """
        rows = next(
            int(leaf.shape[0]) for leaf in tf.nest.flatten(batch) if leaf is not None and leaf.shape.rank
        )
        ends = np.cumsum(shard_sizes(rows, towers))
        found: dict[int, tuple[int, int, tuple[str, ...]]] = {}
        indices: list[int] = []
        for tower, flags in enumerate(finite):
            if not flags.all():
                begin, end = int(ends[tower - 1]) if tower else 0, int(ends[tower])
                bad = tuple(dict.fromkeys(name for name, one in zip(names, flags, strict=True) if not one))
                found[tower] = (begin, end, bad)
                indices.extend(range(begin, end))
        error = NonFiniteError(found, self._save(batch, np.array(indices)))
        if self.mode == "raise":
            self.raised = error
            raise error
        logger.warning("%s. The step was skipped: no tower's weights or optimizer state have changed", error)

    def _save(self, batch: Any, indices: np.ndarray) -> str | None:
        if self._files >= MOST_FILES:
            return None
        self._folder = self._folder or tempfile.mkdtemp(prefix="ncclsync-nonfinite-")
        self._files += 1
        file = os.path.join(self._folder, f"{self._files}.npz")
        arrays: dict[str, Any] = {
            "/".join(map(str, path)): _rows_of(leaf, indices)
            for path, leaf in keras.tree.flatten_with_path(batch)
            if leaf is not None
        }
        np.savez(file, indices=indices, **arrays)
        return file


def _rows_of(leaf: Any, indices: np.ndarray) -> np.ndarray:
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(leaf)
    if isinstance(leaf, tf.RaggedTensor):
        leaf = leaf.to_tensor()
    array = leaf.numpy()
    array = array[indices] if array.ndim else array
    return array.astype(bytes) if array.dtype == object else array
