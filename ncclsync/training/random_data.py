"""Make random inputs and targets for a model, from the shapes and dtypes it declares and its losses."""

import re
from collections.abc import Iterator, Sequence
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
_WORDS = ("the", "towers", "train", "as", "one")  # of strings that no layer looks up
_MOST_WORDS = 12  # of a text


def random_data(
    model: keras.Model, rows: int, *, batch_size: int, seed: int = 0, open_size: int = 32
) -> tuple[Any, ...]:
    """Return `(x, y)`, or `(x,)` for a model that was compiled without a loss.

    Inputs: what a lookup, text vectorization, category encoding or Embedding layer knows; else standard normal floats,
    0 and 1 for integers, whole bytes for uint8, and words for strings. Targets: class ids for a sparse loss, one-hot
    for a categorical loss, 0 and 1 for a binary loss, labels for CTC, positive floats for Poisson and similar losses,
    and standard normal floats for all others.

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
            f"Expected a model whose input shapes are known. Received: {model!r}, which learns them from data. "
            "Begin it with keras.Input(shape)"
        )
    rng = np.random.default_rng(seed)
    tensors = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    x = keras.tree.map_structure(lambda one: _random_input(model, one, rows, open_size, rng), tensors)
    if all(loss is None for loss in keras.tree.flatten(model.loss)):
        return (x,)
    kept = [(one, one.numpy()) for one in model.non_trainable_variables]  # an LSTM's dropout draws as it predicts
    outputs = model.predict_on_batch(keras.tree.map_structure(lambda one: one[:batch_size], x))
    for one, value in kept:
        if not np.array_equal(one.numpy(), value, equal_nan=value.dtype.kind in "fc"):
            one.assign(value)
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
    known, most = _known_values(model, tensor)
    if tensor.dtype == "string":
        counts = rng.integers(1, most + 1, shape)
        words = np.asarray(known or _WORDS)
        texts = [" ".join(rng.choice(words, count)) for count in counts.ravel()]
        return tf.constant(np.reshape(np.array(texts, object), shape))
    if tensor.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if known is None and "int" in tensor.dtype:
        known = range(256 if tensor.dtype == "uint8" else 2)
    if isinstance(known, range):
        return rng.integers(known.start, known.stop, shape).astype(tensor.dtype)
    if known is not None:
        return rng.choice(np.asarray(known), shape).astype(tensor.dtype)
    return tf.cast(rng.standard_normal(shape), tensor.dtype).numpy()


def _known_values(model: keras.Model, tensor: Any) -> tuple[Sequence[Any] | None, int]:
    """Return the values that the layer which an input feeds knows, and how many of these an element may hold.

    If that is not plain: the words of all layers together, or the ids that all Embeddings know. None: it feeds none.
    """
    fed, is_text = keras_compat.layers_fed_by(model, tensor), tensor.dtype == "string"
    found = [one for layer in fed for one in _vocabularies(layer) if isinstance(one[0][0], str) == is_text]
    if not found and (is_text or ("int" in tensor.dtype and tensor.dtype != "uint8")):
        layers = keras_compat.layers_of(model)
        found = [one for layer in layers for one in _vocabularies(layer) if isinstance(one[0][0], str) == is_text]
    if is_text:
        return [word for words, _ in found for word in words] or None, min((most for _, most in found), default=1)
    ids = [known for known, _ in found if isinstance(known, range)]
    return min(ids, key=len) if ids else next((known for known, _ in found), None), 1


def _vocabularies(layer: keras.Layer) -> Iterator[tuple[Sequence[Any], int]]:
    """Yield the values that a layer knows, and how many of these a text may hold; nothing for most layers."""
    if isinstance(layer, keras.layers.Embedding):
        yield range(layer.input_dim), 1
    elif isinstance(layer, keras.layers.CategoryEncoding) and layer.num_tokens:
        yield range(layer.num_tokens), 1
    elif isinstance(layer, (keras.layers.TextVectorization, keras.layers.StringLookup, keras.layers.IntegerLookup)):
        known: Sequence[Any] = layer.get_vocabulary(include_special_tokens=False)
        if getattr(layer, "invert", False):
            known = range(layer.vocabulary_size())
        if known:
            yield known, _MOST_WORDS if isinstance(layer, keras.layers.TextVectorization) else 1


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
