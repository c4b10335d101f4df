"""With the passes of the host and without them: the same plan, and one device's numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import gan, program_of
from parity import assert_close, assert_towers_agree, data, mlp, on_towers, state

from ncclsync.towers import placement

X, Y = data(rows=61)
TOKENS = np.abs(X * 10).astype("int32") % 50


def compiled(layers, optimizer):
    model = keras.Sequential([*layers, keras.layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def cnn():
    keras.utils.set_random_seed(1)
    convolution = keras.layers.Conv2D(4, 2, padding="same")
    norm = keras.layers.BatchNormalization(synchronized=True)
    layers = [keras.Input((12,)), keras.layers.Reshape((3, 4, 1)), convolution, norm, keras.layers.ReLU()]
    return compiled([*layers, keras.layers.Flatten()], keras.optimizers.SGD(0.1, momentum=0.9))


def embedding():
    keras.utils.set_random_seed(1)
    table = keras.layers.Embedding(50, 4)
    layers = [keras.Input((12,), dtype="int32"), table, keras.layers.GlobalAveragePooling1D()]
    return compiled(layers, keras.optimizers.Adam(0.01))


def run_gan(model):
    noise = np.random.default_rng(7).standard_normal((len(X), 4)).astype("float32")
    model.fit(tf.data.Dataset.from_tensor_slices((X, noise)).batch(20), epochs=2, verbose=0)
    return {"weights": model.get_weights()}


def run_on(x):
    def run(model):
        history = model.fit(x, Y, batch_size=20, epochs=2, verbose=0, shuffle=False).history
        return {"history": history, **state(model)}

    return run


PROGRAMS = {
    "mlp": (mlp, run_on(X), {}),
    "cnn": (cnn, run_on(X), {}),
    "embedding": (embedding, run_on(TOKENS), {}),
    "gan": (gan, run_gan, {}),
    "several buckets": (mlp, run_on(X), {"bucket_bytes": 256}),
    "sharded optimizer": (mlp, run_on(X), {"shard_optimizer": True}),
    "compression": (mlp, run_on(X), {"compression": "bfloat16"}),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("towers", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_cut_two_ways(name, towers, monkeypatch):
    """Segments, buckets and what `explain` shows are the same; so are the numbers, those of one device."""
    factory, run, options = PROGRAMS[name]
    results, cuts, packed = [], [], []
    for passes in (placement.host_passes, lambda *_, **__: ()):
        monkeypatch.setattr(placement, "host_passes", passes)
        model = on_towers(factory, towers, **options)
        results.append(run(model))
        assert_towers_agree(model)
        explained = model.towers.explain()
        cuts.append((explained.segments, [(row.bucket, row.rule) for row in explained.variables]))
        cuts[-1] += ([(cut.segment, cut.what, cut.tensors, cut.size_bytes) for cut in explained.cuts],)
        packed.append(program_of(model).packs)
        model.towers.close()
    assert cuts[0] == cuts[1]
    assert packed == [False, True]
    if "compression" not in options:
        assert_close(results[0], results[1])
        assert_close(results[0], run(factory()))
