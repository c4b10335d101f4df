"""Make random inputs and targets for a model, from the shapes and dtypes it declares and its losses."""

import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync.compat import keras as keras_compat

# Names of the classes and functions of `keras.losses`, in lower case, without underscores.
_CLASS_IDS = {"sparsecategoricalcrossentropy", "categoricalgeneralizedcrossentropy", "circle"}
_ONE_HOT = {"categoricalcrossentropy", "categoricalfocalcrossentropy", "categoricalhinge", "kldivergence"}
_BITS = {"binarycrossentropy", "binaryfocalcrossentropy", "hinge", "squaredhinge", "dice", "tversky"}
_POSITIVE = {"poisson", "meansquaredlogarithmicerror", "meanabsolutepercentageerror"}
_WORDS = ("the", "towers", "train", "as", "one")


def random_data(
    model: keras.Model, rows: int, *, batch_size: int, seed: int = 0, open_size: int = 32
) -> tuple[Any, ...]:
    """Return `(x, y)`, or `(x,)` for a model that was compiled without a loss.

    Inputs: standard normal floats; an Embedding's ids; 0 and 1 for other integers; whole bytes for uint8; words for
    strings. Targets: class ids for a sparse loss, one-hot for a categorical loss, 0 and 1 for a binary loss, labels for
    CTC, positive floats for Poisson and similar losses, and standard normal floats for all others.

    Args:
        model: compiled, with known input shapes.
        rows: samples to make.
        batch_size: samples that the model predicts here, to show the shapes of its outputs.
        seed: of the numbers.
        open_size: of each dimension that an input leaves open.

    Raises:
        ValueError: the shapes of the inputs cannot be known.
    """
    if not getattr(model, "inputs", None):
        raise ValueError(
            "Expected a model whose input shapes are known: built from keras.Input. "
            f"Received: {model!r}, which learns them from data; call ncclsync.verify with your data"
        )
    rng = np.random.default_rng(seed)
    tensors = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    x = keras.tree.map_structure(lambda one: _random_input(model, one, rows, open_size, rng), tensors)
    if all(loss is None for loss in keras.tree.flatten(model.loss)):
        return (x,)
    outputs = model.predict_on_batch(keras.tree.map_structure(lambda one: one[:batch_size], x))
    targets = [
        _random_target(loss, np.asarray(output).shape[1:], rows, rng)
        for loss, output in zip(_losses_by_output(model, outputs), keras.tree.flatten(outputs), strict=True)
    ]
    return x, keras.tree.pack_sequence_as(outputs, targets)


def check_targets(model: keras.Model, y: Any) -> None:
    """Raise ValueError if a batch has no targets, `y` is None, and a compiled model's loss is Keras' to compute.

    Keras itself then says that None has no shape, or is not supported.
    """
    stock = all(getattr(type(model), name) is getattr(keras.Model, name) for name in ("train_step", "compute_loss"))
    if y is None and stock and any(loss is not None for loss in keras.tree.flatten(model.loss)):
        raise ValueError(
            f"Expected data with targets, (x, y) or (x, y, sample_weight), since {model.name} was compiled "
            f"with the loss {model.loss!r}. Received: x alone"
        )


def fixed_batch_size(model: keras.Model) -> int | None:
    """Return the batch size that a model's inputs declare, if one does."""
    return next((one.shape[0] for one in getattr(model, "inputs", None) or () if one.shape[0]), None)


def _random_input(model: keras.Model, tensor: Any, rows: int, open_size: int, rng: Any) -> Any:
    shape = (rows, *(open_size if size is None else size for size in tensor.shape[1:]))
    if tensor.dtype == "string":
        return tf.constant(rng.choice(_WORDS, shape))
    if tensor.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    ids = _ids(model, tensor)
    if ids is None and "int" in tensor.dtype:
        ids = 256 if tensor.dtype == "uint8" else 2
    if ids is not None:
        return rng.integers(0, ids, shape).astype(tensor.dtype)
    return tf.cast(rng.standard_normal(shape), tensor.dtype).numpy()


def _ids(model: keras.Model, tensor: Any) -> int | None:
    """Return the number of an input's ids: that of the Embedding it feeds, or, if that is not plain, the least of all.

    None: it feeds none.
    """
    embeddings = [one for one in keras_compat.layers_of(model) if isinstance(one, keras.layers.Embedding)]
    direct = [one.input_dim for one in embeddings if _first_input(one) is tensor]
    if not direct and "int" in tensor.dtype and tensor.dtype != "uint8":
        direct = [one.input_dim for one in embeddings]
    return min(direct, default=None)


def _first_input(layer: keras.Layer) -> Any:
    try:
        return layer.input
    except (AttributeError, ValueError):  # it was never called on a keras.Input
        return None


def _losses_by_output(model: keras.Model, outputs: Any) -> list[Any]:
    """Return the loss of each flat output; None for an output without a loss."""
    paths = [path for path, _ in keras.tree.flatten_with_path(outputs)]
    if isinstance(model.loss, dict):
        names = getattr(model, "output_names", None) or [None] * len(paths)
        return [
            model.loss.get(path[-1] if path else None, model.loss.get(name))
            for path, name in zip(paths, names, strict=True)
        ]
    if isinstance(model.loss, (list, tuple)):
        return list(model.loss)
    return [model.loss] * len(paths)


def _random_target(loss: Any, shape: tuple[int, ...], rows: int, rng: Any) -> np.ndarray:
    """Return targets [rows, ...] for an output whose `shape`, without the batch's axis, is given."""
    names = _names(loss)
    if names & _CLASS_IDS:
        return rng.integers(0, shape[-1], (rows, *shape[:-1]))
    if names & _ONE_HOT:
        return np.eye(shape[-1], dtype="float32")[rng.integers(0, shape[-1], (rows, *shape[:-1]))]
    if "ctc" in names:  # [time, classes] to labels, of which 0 is the blank
        return rng.integers(1, shape[-1], (rows, max(1, shape[0] // 2)))
    if names & _BITS:
        return rng.integers(0, 2, (rows, *shape)).astype("float32")
    if names & _POSITIVE:
        return rng.uniform(0.5, 1.5, (rows, *shape)).astype("float32")
    return rng.standard_normal((rows, *shape)).astype("float32")


def _names(loss: Any) -> set[str]:
    """Return the names of a loss: its function's, or its classes', for subclasses of Keras' own."""
    loss = keras.losses.get(loss)
    found = [cls.__name__ for cls in type(loss).__mro__] if isinstance(loss, keras.Loss) else []
    found += [getattr(one, "__name__", "") for one in (loss, getattr(loss, "fn", None))]
    return {re.sub("_", "", name).lower() for name in found}
