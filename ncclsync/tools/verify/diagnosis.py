"""Find why towers and one device may differ, from the differences of a run; `exactness` needs no run."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from ncclsync.compat import keras as keras_compat
from ncclsync.program.check import Unchecked, first_difference
from ncclsync.program.program import Results
from ncclsync.semantics.exactness import Inexact
from ncclsync.tools.verify.batches import Batch
from ncclsync.tools.verify.report import Difference
from ncclsync.towers.step_function import to_tensor
from ncclsync.training.loop import Towers


def seen_nan(found: Sequence[Difference]) -> Iterator[Inexact]:
    """Name the first NaN, on towers or on one device."""
    for one in found:
        if one.nan:
            yield Inexact(
                f"{one.kind} {one.name}",
                f"holds a NaN from step {one.step} on; NaNs are equal to each other, whatever led to them",
                "a smaller learning rate, or other data: compare where the numbers are finite",
            )
            return


def false_step(towers: Towers, batch: Batch) -> Iterator[Inexact]:
    """Report the first tensor of a training step that towers compute otherwise than one device."""
    given = keras.tree.map_structure(to_tensor, batch)
    for trace in towers.watch.traces or ():
        with contextlib.suppress(Unchecked):
            line = first_difference(trace, towers.devices[0], Results.COMBINED, given, towers.layout.shards)
            if line:
                yield Inexact(
                    f"the step, from {line} on",
                    "is not partitioned into what one device computes: a fault of ncclsync's",
                    "report this line, with what Towers.explain() prints",
                )
                return


def disagreement(again: Sequence[Difference]) -> Iterator[Inexact]:
    """Report that one device differs from itself, given the differences of two equal runs."""
    first = next((one for one in again if not one.ok), None)
    if first is not None:
        yield Inexact(
            "the model on one device",
            f"differs from itself when run twice, first in {first.kind} {first.name} at step {first.step}: "
            "it draws random numbers that no seed of its own determines, or depends on something outside",
            "a keras.random.SeedGenerator in each layer that draws, as seed= of what keras.random draws",
        )


def missing_digits(dtype: str) -> Iterator[Inexact]:
    """Report half precision."""
    if dtype in ("float16", "bfloat16"):
        digits = {"float16": 11, "bfloat16": 8}[dtype]
        yield Inexact(
            f"dtype {dtype}",
            f"has {digits} significant bits: sums in another order differ early, and more with every step",
            "verify in float32; the same code is exact in every dtype",
        )


def rounding(reordered: Sequence[Difference], found: Sequence[Difference], limit: float) -> Iterator[Inexact]:
    """Report that rounding alone has such an effect, given one device's differences with reordered rows.

    A difference above `limit` does not come from rounding: the computation depends on the order of the samples.
    """
    largest = max(one.relative for one in reordered)
    differs = any(not one.ok for one in reordered)
    if differs and max(one.relative for one in found) / 10 <= largest <= limit:
        yield Inexact(
            "rounding",
            "one device differs from itself by as much when the samples of each batch come in another order: "
            f"this model amplifies rounding, to {largest:.2g} within these steps",
            f"dtype float64, or tolerance={10 * largest:.0e} if that is small enough for you",
        )


def own_code(model: keras.Model, found: Sequence[Difference]) -> Iterator[Inexact]:
    """Name the user's code in a model: metrics, if weights are equal; otherwise all code that gradients pass."""
    metrics = [one for one in keras_compat.metrics_of(model) if _is_own(one)]
    losses = [one for one in keras.tree.flatten(getattr(model, "loss", None)) if _is_own(one)]
    only_logs = all(one.ok or one.kind in ("log", "evaluate", "state") for one in found)
    if only_logs:  # or state, perhaps of a metric
        suspects = [f"metric {one.name!r}" for one in metrics] + [f"loss {_name(one)}" for one in losses]
    else:
        layers = {type(layer).__name__ for layer in keras_compat.layers_of(model) if _is_own(layer)}
        suspects = [f"loss {_name(one)}" for one in losses] + [f"layer {name}" for name in sorted(layers)]
        if _is_own(model):
            suspects.append(f"train_step or call of {type(model).__name__}")
    if suspects:
        yield Inexact(
            ", ".join(suspects),
            "code of your own, which may compare the samples of a batch, sum over them, or keep state that "
            "cannot be added up: on a tower it sees only its shard",
            "one value per sample, or a mean over samples; sums as a metric's state; else ncclsync.ops.all_reduce",
        )


def _is_own(one: Any) -> bool:
    """Return whether an object's class, or a function, is not Keras'."""
    if isinstance(one, str) or one is None:
        return False
    wrapped = getattr(one, "fn", None) or getattr(one, "_fn", None) if isinstance(one, keras.Metric) else None
    for part in (one, wrapped):
        if part is not None:
            module = part.__module__ if hasattr(part, "__name__") else type(part).__module__
            if module.split(".")[0] != "keras":
                return True
    return False


def _name(loss: Any) -> str:
    return repr(getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__))
