"""Build the models that benchmarks train, with random data; each is limited by something else."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
from keras import layers


@dataclasses.dataclass(frozen=True)
class BenchModel:
    """Hold a model and its data.

    Attributes:
        build: makes and compiles it.
        inputs: makes x for so many samples, [samples, ...], from a generator.
        classes: labels are below; 1: y is a float.
        batch_size: global.
    """

    build: Callable[[], keras.Model]
    inputs: Callable[[np.random.Generator, int], np.ndarray]
    classes: int
    batch_size: int

    def data(self, batches: int) -> tuple[np.ndarray, np.ndarray]:
        """Return x and y for so many batches."""
        generator = np.random.default_rng(0)
        samples = batches * self.batch_size
        x = self.inputs(generator, samples)
        if self.classes == 1:
            return x, generator.random((samples, 1), dtype="float32")
        return x, generator.integers(self.classes, size=samples).astype("int32")


def _classifier(inputs: keras.KerasTensor, features: keras.KerasTensor, classes: int) -> keras.Model:
    model = keras.Model(inputs, layers.Dense(classes)(features))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Without jit_compile, which Keras turns on by itself for one GPU but not for several.
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
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


def _transformer(tokens: int = 32, width: int = 128, words: int = 1000) -> keras.Model:
    inputs = keras.Input((tokens,), dtype="int32")
    features = layers.Embedding(words, width)(inputs)
    for _ in range(4):
        normal = layers.LayerNormalization()(features)
        features = features + layers.MultiHeadAttention(4, width // 4)(normal, normal)
        hidden = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(features))
        features = features + layers.Dense(width)(hidden)
    return _classifier(inputs, layers.GlobalAveragePooling1D()(features), 10)


def _embedding() -> keras.Model:
    inputs = keras.Input((16,), dtype="int32")
    features = layers.GlobalAveragePooling1D()(layers.Embedding(200_000, 64)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(64, activation="relu")(features)))
    model.compile("sgd", "mse", jit_compile=False)
    return model


def _images(*shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda generator, samples: generator.random((samples, *shape), dtype="float32")


def _words(tokens: int, words: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda generator, samples: generator.integers(words, size=(samples, tokens)).astype("int32")


MODELS = {
    "mlp": BenchModel(_mlp, _images(784), 10, 256),
    "cnn": BenchModel(_cnn, _images(28, 28, 1), 10, 128),
    "resnet50": BenchModel(resnet50, _images(32, 32, 3), 10, 32),
    "transformer": BenchModel(_transformer, _words(32, 1000), 10, 64),
    "embedding": BenchModel(_embedding, _words(16, 200_000), 1, 256),
}
