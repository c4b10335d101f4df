"""Train a small CNN on the CPU, and as the arguments say on virtual GPUs: the same losses and weights."""

import sys

import keras
import numpy as np
import tensorflow as tf

import ncclsync

inputs = np.random.default_rng(0).normal(size=(64, 12, 12, 3)).astype("float32")
labels = np.random.default_rng(1).integers(0, 10, 64)


def build(normalised=True):
    """The normalisation knows its own device's rows only, unless ncclsync makes it know the batch."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Conv2D(8, 3, activation="relu"), keras.layers.MaxPooling2D(), keras.layers.Flatten()]
    if normalised:
        layers.insert(1, keras.layers.BatchNormalization())
    layers += [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((12, 12, 3)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def trained(model):
    history = model.fit(inputs, labels, batch_size=16, epochs=3, verbose=0, shuffle=False)
    return [history.history["loss"], *model.get_weights(), *model.evaluate(inputs, labels, verbose=0)]


def recurrent():
    """GRU and LSTM, which would be cuDNN's on a GPU."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.GRU(8, return_sequences=True), keras.layers.LSTM(8), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((10, 3)), *layers])
    model.compile("sgd", "mse")
    model.fit(inputs[:, :10, 0], labels.astype("float32"), batch_size=32, verbose=0, shuffle=False)
    return model.get_weights()


def on(device, make):
    with tf.device(device):
        return make()


for what in sys.argv[1:]:
    if what == "one":
        found, expected = (on(device, lambda: trained(build())) for device in ("/GPU:0", "/CPU:0"))
    elif what == "recurrent":
        found, expected = (on(device, recurrent) for device in ("/GPU:0", "/CPU:0"))
    elif what == "mirrored":
        expected = on("/CPU:0", lambda: trained(build(normalised=False)))
        strategy = tf.distribute.MirroredStrategy(cross_device_ops=tf.distribute.HierarchicalCopyAllReduce())
        with strategy.scope():
            model = build(normalised=False)
        found = trained(model)
    else:
        expected = on("/CPU:0", lambda: trained(build()))
        model = ncclsync.nccl_parallel(exact=("batch_norm",), health=ncclsync.Health(timeout_s=60), bucket_bytes=4096)(
            build
        )()
        assert len(model.towers.devices) == len(tf.config.list_logical_devices("GPU"))
        found = trained(model)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, err_msg=what)
    print(what, "is well")
