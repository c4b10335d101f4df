"""Find what in a Keras model cannot train on towers exactly as on one device, by its objects alone.

Nothing is run or traced. BatchNormalization and random layers are inexact by choice; all else that a step
computes is partitioned exactly.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from ncclsync.compat import keras as keras_compat

_NAMED = 3  # so many layers are named where the same holds for many


@dataclasses.dataclass(frozen=True)
class Inexact:
    """Hold one reason why N towers and one device differ.

    Attributes:
        where: the layer or loss, or whatever it is, by class and name.
        reason: what it does on towers that it does not do on one device.
        remedy: what makes it exact, in the user's code.
    """

    where: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}. Remedy: {self.remedy}"


NORMALISES = (
    "normalises by the statistics of one tower's shard, not of the whole batch",
    "@nccl_parallel(exact=True), or BatchNormalization(synchronized=True)",
)
DRAWS = ("each tower draws random numbers of its own, not those that one device draws", "@nccl_parallel(exact=True)")


def say_inexact(found: Sequence[Inexact], of: str, what: str = "Training") -> str:
    """Say in one message what is inexact by choice; "" if nothing is.

    Args:
        found: with the causes `NORMALISES` and `DRAWS`.
        of: "tower" or "shard".
        what: is so.
    """
    words = (
        (DRAWS, "draws other random numbers on each {}", "draws one device's"),
        (NORMALISES, "normalises by each {}'s rows", "normalises by the whole batch"),
    )
    does, instead = [], []
    for (reason, _), here, exactly in words:
        if places := [one.where for one in found if one.reason == reason]:
            does.append(f"{here.format(of)} ({', '.join(places)})")
            instead.append(exactly)
    return f"{what} {' and '.join(does)}, as under MirroredStrategy; exact=True {' and '.join(instead)}" * bool(does)


def find_inexact(model: keras.Model, exact_batch_norm: bool = False, exact_random: bool = False) -> tuple[Inexact, ...]:
    """Find what cannot train exactly as on one device.

    Args:
        model: nested models, wrappers, and layers in lists and dictionaries are searched too. Layers
            that a layer creates when it is built are found once it is.
        exact_batch_norm: whether each `BatchNormalization` normalises by the whole batch.
        exact_random: whether random layers draw on towers what they draw on one device.

    Returns:
        One `Inexact` for each cause; layers of one class with the same cause are named together. Empty for
        a model that does not train: not compiled, without an optimizer, or frozen as a whole.
    """
    if not model.compiled or getattr(model, "optimizer", None) is None or not model.trainable:
        return ()
    names: dict[tuple[str, tuple[str, str]], list[str]] = {}
    for layer, cause in _layers_with_cause(model, exact_batch_norm, exact_random):
        names.setdefault((type(layer).__name__, cause), []).append(repr(layer.path or layer.name))
    return tuple(Inexact(f"{kind} {_listed(some)}", *cause) for (kind, cause), some in names.items())


def _layers_with_cause(
    model: keras.Model, exact_batch_norm: bool, exact_random: bool
) -> Iterator[tuple[Any, tuple[str, str]]]:
    within: set[int] = set()  # parts of a random layer of Keras' own: named with it
    for layer in keras_compat.layers_of(model):
        normalises = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        if normalises and not (exact_batch_norm or layer.synchronized):
            yield layer, NORMALISES
        if _draws(layer) and not exact_random and id(layer) not in within:
            yield layer, DRAWS
            if type(layer).__module__.startswith("keras."):
                within.update(map(id, keras_compat.layers_of(layer)))


def _draws(layer: Any) -> bool:
    """Return whether a layer draws random numbers in training.

    A layer of Keras makes a generator only if its rate is above 0; but a recurrent cell makes one always.
    """
    if not keras_compat.seed_generators_of(layer):
        return False
    if hasattr(layer, "recurrent_dropout"):
        return bool(layer.dropout or layer.recurrent_dropout)
    return True


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
