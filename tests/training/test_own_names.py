"""Names and methods that a user's model has of its own: they stay, and are used on towers."""

import collections
import logging
import pathlib
import re
import unittest.mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, data

import ncclsync
from ncclsync import nccl_parallel, towers_of
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.training import processes

X, Y = data(20)


class TwoTowers(keras.Model):
    """A retrieval model, which calls its two halves towers."""

    def __init__(self):
        super().__init__()
        self.towers = [keras.layers.Dense(3), keras.layers.Dense(3)]
        self.head = keras.layers.Dense(Y.shape[-1] if Y.ndim > 1 else 1)

    def call(self, x):
        """Join both."""
        return self.head(keras.ops.concatenate([tower(x) for tower in self.towers], -1))


class TowersAsProperty(TwoTowers):
    """The same by a property, which has no setter."""

    def __init__(self):
        keras.Model.__init__(self)
        self.halves = [keras.layers.Dense(3), keras.layers.Dense(3)]
        self.head = keras.layers.Dense(1)

    towers = property(lambda self: tuple(self.halves))


def built(kind, **options):
    """A compiled model of a class; on two towers, unless `options` are None."""

    def build():
        keras.utils.set_random_seed(1)
        model = kind()
        model.compile("sgd", "mse")
        return model

    return build() if options.get("towers") == 0 else nccl_parallel(**{"towers": 2, **options})(build)()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", [TwoTowers, TowersAsProperty])
def test_a_models_own_towers_stay(kind, caplog):
    """A model that calls its halves towers trains as on one device; `towers_of` returns the Towers."""
    x, y = X, np.ones((20, 1), "float32")
    with caplog.at_level(logging.WARNING, "ncclsync"):
        model = built(kind)
    assert [len(model.towers), *map(type, model.towers)] == [2, keras.layers.Dense, keras.layers.Dense]
    towers = towers_of(model)
    assert isinstance(towers, ncclsync.Towers) and len(towers) == 2
    assert "its own model.towers, " in caplog.text and "ncclsync.towers_of(model) returns them" in caplog.text
    timeline = ncclsync.NoiseScale()
    fitted = model.fit(x, y, batch_size=10, shuffle=False, verbose=0, callbacks=[timeline])
    alone = built(kind, towers=0)
    assert_close(fitted.history["loss"], alone.fit(x, y, batch_size=10, shuffle=False, verbose=0).history["loss"])
    assert_close(model.get_weights(), alone.get_weights())
    assert towers.divergence() == 0.0
    with pytest.raises(ValueError, match="has <Towers 2"):
        nccl_parallel(towers=2)(lambda: model)()


def test_a_number_for_towers_is_told(caplog):
    """Who sets `model.towers` to a number has not chosen as many towers; the next `fit` says so, once."""
    model = built(lambda: keras.Sequential([keras.layers.Dense(1)]))
    model.towers = 4
    with caplog.at_level(logging.WARNING, "ncclsync"):
        for _ in range(2):
            model.fit(X, np.ones((20, 1), "float32"), batch_size=10, verbose=0)
    assert caplog.text.count("its own model.towers, 4, which stays and changes nothing: 2 towers train it") == 1
    assert len(towers_of(model)) == 2


def test_towers_of_a_plain_model():
    """There are none."""
    assert towers_of(keras.Sequential()) is None


class Labels(keras.Sequential):
    """A model whose predict returns labels, by what Keras' own function gives, and whose train function counts."""

    def __init__(self):
        super().__init__([keras.layers.Dense(4)])
        self.calls = []

    def make_predict_function(self, force=False):
        """Return labels."""
        super().make_predict_function(force)
        scores = self.predict_function
        self.predict_function = lambda batches: tf.argmax(scores(batches), -1)
        return self.predict_function

    def make_train_function(self, force=False):
        """Count the steps."""
        if self.train_function is not None and not force:
            return self.train_function
        super().make_train_function(force)
        step = self.train_function

        def train_function(iterator):
            logs = step(iterator)
            self.calls.append(logs)
            return logs

        self.train_function = train_function
        return train_function


class Twice(keras.Sequential):
    """A model that trains each batch twice, by a function that Keras' own has no part in."""

    def __init__(self):
        super().__init__([keras.layers.Dense(4)])

    def make_train_function(self, force=False):
        """Make such a function."""

        @tf.function
        def train_function(iterator):
            batch = next(iterator)
            self.train_step(batch)
            return self.train_step(batch)

        self.train_function = train_function
        return train_function


def test_own_functions_run_on_towers():
    """An override that changes what super()'s function gives is used, by fit, predict and a callback that watches."""
    y = np.ones((20, 4), "float32")
    found = []
    for towers in (0, 2, 1):
        model = built(Labels, towers=towers)
        watches = [] if towers == 0 else [ncclsync.Throughput()]
        model.fit(X, y, batch_size=5, epochs=2, shuffle=False, verbose=0, callbacks=watches)
        found.append((len(model.calls), model.get_weights(), model.predict(X, verbose=0)))
    assert found[0][0] == 8 and found[0][2].dtype == np.int64
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


def test_own_functions_that_towers_cannot_run_are_refused():
    """Each time, before a step: it would train on one device."""
    model, y = built(Twice), np.ones((20, 4), "float32")
    for _ in range(2):
        with pytest.raises(ncclsync.NcclSyncError, match=r"Twice\.make_train_function to call super.*train_step"):
            model.fit(X, y, verbose=0)
    model.evaluate(X, y, verbose=0)


def test_a_fit_of_the_models_own_gets_a_recipe():
    """With *args and **kwargs, too, nothing that it was given is lost; one that takes no callbacks is refused."""

    class Passing(keras.Sequential):
        def __init__(self):
            super().__init__([keras.layers.Dense(4)])

        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    class Bare(Passing):
        def fit(self, x, y):
            return super().fit(x, y, verbose=0)

    seen, y = [], np.ones((20, 4), "float32")
    counts = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    recipe = ncclsync.LargeBatch(reference_batch_size=5, warmup_epochs=0)
    history = built(Passing, recipe=recipe).fit(X, y, 10, epochs=2, verbose=0, callbacks=[counts]).history
    assert seen == [0, 1] and history["effective_learning_rate"] == pytest.approx([0.02, 0.02])
    with pytest.raises(TypeError, match=r"Bare\.fit\(x, y\).*\*\*kwargs"):
        built(Bare, recipe=recipe).fit(X, y)


def test_a_fit_of_the_models_own_keeps_its_callbacks_in_several_processes():
    """What is given by **kwargs alone is no less than what is given by name."""

    class Passing(keras.Sequential):
        def __init__(self):
            super().__init__([keras.layers.Dense(4)])

        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    seen, model, towers = [], built(Passing, towers=0), ncclsync.Towers(1)
    towers.communicator.peers = unittest.mock.Mock(
        place="", at=lambda *_: ("", 0), exchange=lambda value, *_: [value], lost=set(), rank=0
    )
    processes.keep_in_step(model, towers)
    counts = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    model.fit(X, np.ones((20, 4), "float32"), epochs=2, verbose=0, callbacks=[counts])
    assert seen == [0, 1]


class Scaled(keras.layers.Layer):
    """A layer with an attribute that Python reads while it is traced."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.factors = {"at": [1.0]}

    def call(self, x):
        """Scale."""
        return x * self.factor * self.factors["at"][0]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["trainable", "attribute", "within", "activation"])
def test_changes_that_keras_sees_are_seen(change):
    """Of `trainable`, or an attribute, without `compile`: when Keras traces anew, for the second shape without rows."""

    def train(towers):
        model = built(lambda: keras.Sequential([keras.layers.Dense(4), Scaled(), keras.layers.Dense(1)]), towers=towers)
        x, y, found = np.ones((12, 3), "float32"), np.ones((12, 1), "float32"), []
        for i, rows in enumerate((6, 6, 4, 6, 3, 5)):
            model.fit(x, y, batch_size=rows, verbose=0, shuffle=False)
            found += [model.get_weights(), model.train_on_batch(x[:rows], y[:rows])]
            found += [model.evaluate(x[:8], y[:8], batch_size=rows, verbose=0), model.predict_on_batch(x[:rows])]
            if change == "trainable":
                model.layers[0].trainable = i % 2 == 1
            elif change == "activation":
                model.layers[0].activation = [keras.ops.tanh, keras.ops.relu][i % 2]
            elif change == "within":
                model.layers[1].factors["at"][0] = i + 3.0
            else:
                model.layers[1].factor = i + 3.0
        return found

    assert_close(train(2), train(0))


def members(model):
    """The names that an object's `__dict__` has: of a model, its optimizer, its layers and metrics, its variables."""
    variables = [tf_compat.backend_variable(one) for one in (*model.variables, *model.optimizer.variables)]
    kinds = {"model": [model], "optimizer": [model.optimizer], "layer": model.layers, "metric": model.metrics}
    kinds["variable"] = variables
    return {kind: set().union(*map(vars, objects)) for kind, objects in kinds.items()}


@pytest.mark.slow
def test_the_readme_lists_all_that_is_set():
    """No name beside those in its table, and none of these in vain."""
    page = pathlib.Path(ncclsync.__file__).with_name("README.md").read_text(encoding="utf-8")
    section = page.partition("## What is set on your objects")[2].partition("\n## ")[0]
    listed = collections.defaultdict(set)
    for row in re.findall(r"^\| (model|optimizer|variable) \|.*\|(.*)\|$", section, flags=re.MULTILINE):
        listed[row[0]].update(re.findall(r"`(\w+)`", row[1]))

    def build():
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
        model.compile(optimizer, "mse", metrics=["mae"])
        return model

    def used(model):
        for call in (model.fit, model.evaluate):
            call(X, np.ones((20, 3), "float32"), verbose=0)
        model.predict(X, verbose=0)
        return model

    options = {
        "towers": 2,
        "exact": ("batch_norm",),
        "health": ncclsync.Health(on_nonfinite="skip", emergency_checkpoint="never.keras"),
    }
    model = used(nccl_parallel(**options, recipe=ncclsync.LargeBatch(8, 1))(build)())
    processes.keep_in_step(model, ncclsync.Towers(1))
    plain = members(used(build()))
    added = {kind: names - plain[kind] for kind, names in members(model).items()}
    added = {kind: {name for name in names if not name.startswith("_ncclsync_")} for kind, names in added.items()}
    added["variable"] -= set(tf_compat.VARIABLE_WRITERS)
    assert added == {"layer": set(), "metric": set(), **listed}
