"""What is created before the first trace stands for Keras' own first trace: the user's Python runs as often."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from parity import assert_close, data, on_towers, state

X, _ = data(24)
Y = np.random.default_rng(1).standard_normal((24, 3)).astype("float32")
RUNS = collections.Counter()


def runs(what):
    """Count what a user's function has run; the number is part of what it computes."""
    RUNS[what] += 1
    return 1 + 0.1 * RUNS[what]


def loss(y, outputs):
    return ops.mean((y - outputs) ** 2, -1) * runs("loss")


def error(y, outputs):
    return ops.mean(ops.abs(y - outputs), -1) * runs("metric")


def activation(x):
    return ops.tanh(x) * runs("activation")


class Penalty(keras.regularizers.Regularizer):
    def __call__(self, weight):
        return 0.01 * ops.sum(weight**2) * runs("penalty")


class Scaled(keras.layers.Layer):
    def call(self, x):
        return x * runs("layer")


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            value = self.compute_loss(x, y, self(x, training=True)) * runs("step")
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
        return {"loss": value}


class OwnApply(keras.optimizers.SGD):
    """Makes averages of its own where Keras' `apply` builds."""

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
            self.averages = [self.add_variable_from_reference(v, "average") for v in trainable_variables]
        for average, gradient in zip(self.averages, grads, strict=True):
            average.assign(0.9 * average + 0.1 * gradient)
        return super().apply([average + 0.0 for average in self.averages], trainable_variables)


class Assigning(keras.optimizers.SGD):
    """Assigns the weights to a state in `build`: what Keras loses, since it builds while it traces."""

    def build(self, variables):
        super().build(variables)
        self.starts = [self.add_variable_from_reference(v, "start") for v in variables]
        for start, variable in zip(self.starts, variables, strict=True):
            start.assign(variable + 1.0)

    def update_step(self, gradient, variable, learning_rate):
        start = self.starts[self._get_variable_index(variable)]
        super().update_step(gradient + 0.1 * start, variable, learning_rate)


def model(optimizer="sgd", layers=(), kind=keras.Sequential, **options):
    """A factory of a built model."""

    def build():
        RUNS.clear()
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense(3, kernel_regularizer=Penalty())
        made = kind([keras.Input((12,)), keras.layers.Dense(4, name="first"), *(one() for one in layers), dense])
        made.compile(optimizer() if callable(optimizer) else optimizer, loss, **options)
        RUNS.clear()
        return made

    return build


def fit(made):
    return made.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0).history


def compiled_again(made):
    before = fit(made)
    made.compile("sgd", loss)
    return before, fit(made)


CASES = {
    "nothing is created": (model(), fit, {}),
    "a metric of a function": (model(metrics=[error]), fit, {}),
    "an optimizer's state": (model("adam"), fit, {}),
    "an optimizer's state, beside a user's layer": (model("adam", [Scaled]), fit, {}),
    "an optimizer's state, beside a Lambda": (
        model("adam", [lambda: keras.layers.Lambda(lambda x: x * runs("lambda"))]),
        fit,
        {},
    ),
    "an optimizer's state, beside an activation": (model("adam", [lambda: keras.layers.Dense(4, activation)]), fit, {}),
    "evaluate alone": (model(), lambda made: made.evaluate(X, Y, batch_size=7, verbose=0), {}),
    "compiled again": (model("adam"), compiled_again, {}),
    "a step of one's own": (model(kind=OwnStep), fit, {}),
    "parts of an optimizer": (model(kind=OwnStep), fit, {"shard_optimizer": True}),
    "an apply of one's own": (model(OwnApply), fit, {}),
    "a build that assigns": (model(Assigning), fit, {}),
}
if hasattr(keras.optimizers, "MultiOptimizer"):
    CASES["a build that assigns, of several"] = (
        model(
            lambda: keras.optimizers.MultiOptimizer(
                keras.optimizers.OptimizerMap(Assigning(), {"first/.*": keras.optimizers.Adam()})
            )
        ),
        fit,
        {},
    )


@pytest.mark.parametrize("name", CASES)
def test_python_runs_as_often(name):
    """The numbers are one device's, though the count of its runs is part of them."""
    build, run, options = CASES[name]
    single = build()
    expected = run(single), state(single), dict(RUNS)
    many = on_towers(build, 2, **options)
    assert_close((run(many), state(many), dict(RUNS)), expected, 1e-4)


def test_own_variables_take_no_second_trace():
    """Those that error feedback keeps are made apart."""
    build = model(kind=OwnStep)
    fit(on_towers(build, 2, compression="bfloat16"))
    assert RUNS["step"] == 1
