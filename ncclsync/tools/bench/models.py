"""Build the models that benchmarks train, each with another bottleneck, and random data for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

_WORDS, _TOKENS, _WIDTH = 1000, 32, 128
_COLUMNS, _FILLED = 10_000, 20  # of the sparse inputs, and of each row

Make = Callable[[np.random.Generator, int], Any]


@dataclasses.dataclass(frozen=True)
class BenchModel:
    """Hold a model and its data."""

    build: Callable[[], keras.Model]  # makes and compiles it
    inputs: Make  # makes x for so many samples, arrays [samples, ...] or a sparse tensor, from a generator
    labels: Make  # makes y

    def data(self, samples: int) -> tuple[Any, np.ndarray]:
        """Return x and y of so many samples."""
        generator = np.random.default_rng(0)
        return self.inputs(generator, samples), self.labels(generator, samples)


def rows_of(x: Any, begin: int, end: int) -> Any:
    """Return some rows of arrays, or of a sparse tensor."""
    if isinstance(x, tf.SparseTensor):
        return tf.sparse.slice(x, [begin, 0], [end - begin, x.shape[1]])
    return keras.tree.map_structure(lambda array: array[begin:end], x)


def _classifier(inputs: Any, features: keras.KerasTensor, classes: int) -> keras.Model:
    model = keras.Model(inputs, layers.Dense(classes)(features))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def _mlp() -> keras.Model:
    inputs = features = keras.Input((784,))
    for _ in range(3):
        features = layers.Dense(256, activation="relu")(features)
    return _classifier(inputs, features, 10)


def _cnn() -> keras.Model:
    inputs = features = keras.Input((28, 28, 1))
    for filters in (16, 32):
        features = layers.Conv2D(filters, 3, padding="same", use_bias=False)(features)
        features = layers.ReLU()(layers.BatchNormalization()(features))
        features = layers.MaxPooling2D()(features)
    return _classifier(inputs, layers.Flatten()(features), 10)


def resnet50() -> keras.Model:
    """Return a compiled ResNet-50 for images of 32×32 pixels; public as an example for `plan`."""
    body = keras.applications.ResNet50(include_top=False, weights=None, input_shape=(32, 32, 3), pooling="avg")
    return _classifier(body.inputs, body.outputs[0], 10)


def _blocks(inputs: keras.KerasTensor, causal: bool = False) -> keras.KerasTensor:
    features = layers.Embedding(_WORDS, _WIDTH)(inputs)
    for _ in range(4):
        normal = layers.LayerNormalization()(features)
        features = features + layers.MultiHeadAttention(4, _WIDTH // 4)(normal, normal, use_causal_mask=causal)
        hidden = layers.Dense(4 * _WIDTH, activation="gelu")(layers.LayerNormalization()(features))
        features = features + layers.Dense(_WIDTH)(hidden)
    return features


def _transformer() -> keras.Model:
    inputs = keras.Input((_TOKENS,), dtype="int32")
    return _classifier(inputs, layers.GlobalAveragePooling1D()(_blocks(inputs)), 10)


def _language() -> keras.Model:
    inputs = keras.Input((_TOKENS,), dtype="int32")
    return _classifier(inputs, _blocks(inputs, causal=True), _WORDS)


def _lstm() -> keras.Model:
    inputs = keras.Input((_TOKENS,), dtype="int32")
    return _classifier(inputs, layers.LSTM(_WIDTH)(layers.Embedding(_WORDS, _WIDTH)(inputs)), 10)


def _seq2seq() -> keras.Model:
    source, target = (keras.Input((_TOKENS // 2,), dtype="int32") for _ in range(2))
    embedded = (layers.Embedding(_WORDS, _WIDTH // 2, mask_zero=True)(tokens) for tokens in (source, target))
    _, *state = layers.LSTM(_WIDTH, return_state=True)(next(embedded))
    return _classifier(
        [source, target], layers.LSTM(_WIDTH, return_sequences=True)(next(embedded), initial_state=state), _WORDS
    )


def _unet() -> keras.Model:
    inputs = keras.Input((32, 32, 3))
    first = layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
    second = layers.Conv2D(32, 3, padding="same", activation="relu")(layers.MaxPooling2D()(first))
    features = layers.Concatenate()([first, layers.Conv2DTranspose(16, 2, strides=2)(second)])
    return _classifier(inputs, layers.Conv2D(16, 3, padding="same", activation="relu")(features), 10)


def _sparse() -> keras.Model:
    inputs = keras.Input((_COLUMNS,), sparse=True)
    return _classifier(inputs, layers.Dense(64, activation="relu")(layers.Dense(128, activation="relu")(inputs)), 10)


def _embedding() -> keras.Model:
    inputs = keras.Input((16,), dtype="int32")
    features = layers.GlobalAveragePooling1D()(layers.Embedding(200_000, 64)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(64, activation="relu")(features)))
    model.compile("sgd", "mse")
    return model


def _images(*shape: int) -> Make:
    return lambda generator, samples: generator.random((samples, *shape), dtype="float32")


def _words(below: int, *shape: int) -> Make:
    return lambda generator, samples: generator.integers(below, size=(samples, *shape)).astype("int32")


def _sentences(generator: np.random.Generator, samples: int) -> tuple[np.ndarray, ...]:
    """Return two sides of tokens, the last ones of each row 0: they are masked."""
    lengths = generator.integers(1, _TOKENS // 2 + 1, size=(2, samples, 1))
    made = generator.integers(1, _WORDS, size=(2, samples, _TOKENS // 2))
    return tuple(np.where(np.arange(_TOKENS // 2) < lengths, made, 0).astype("int32"))


def _filled(generator: np.random.Generator, samples: int) -> tf.SparseTensor:
    columns = np.sort(generator.integers(_COLUMNS // _FILLED, size=(samples, _FILLED)), axis=1) * _FILLED
    columns += np.arange(_FILLED)  # no two alike
    indices = np.stack([np.repeat(np.arange(samples), _FILLED), columns.reshape(-1)], 1)
    return tf.SparseTensor(indices, np.ones(len(indices), "float32"), (samples, _COLUMNS))


MODELS = {
    "mlp": BenchModel(_mlp, _images(784), _words(10)),
    "cnn": BenchModel(_cnn, _images(28, 28, 1), _words(10)),
    "resnet50": BenchModel(resnet50, _images(32, 32, 3), _words(10)),
    "transformer": BenchModel(_transformer, _words(_WORDS, _TOKENS), _words(10)),
    "embedding": BenchModel(_embedding, _words(200_000, 16), _images(1)),
    "lstm": BenchModel(_lstm, _words(_WORDS, _TOKENS), _words(10)),
    "language": BenchModel(_language, _words(_WORDS, _TOKENS), _words(_WORDS, _TOKENS)),
    "seq2seq": BenchModel(_seq2seq, _sentences, _words(_WORDS, _TOKENS // 2)),
    "unet": BenchModel(_unet, _images(32, 32, 3), _words(10, 32, 32)),
    "sparse": BenchModel(_sparse, _filled, _words(10)),
}
