"""What is changed on classes while a step is traced: for that step alone, and not for other threads."""

import threading
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import data

from ncclsync import nccl_parallel, ops
from ncclsync.gradients.hooks import step_hooks

X, Y = data(rows=24)


class Counts:
    """A context that counts what a step asks of it, and changes nothing."""

    def __init__(self):
        self.marked = []

    def can_exchange(self):
        return True

    def mark(self, tensors, purpose, **details):
        self.marked.append((purpose, len(tensors)))
        return list(tensors)

    def exchange(self, tensors, collective, when=None):
        raise AssertionError("nothing here is exchanged")


class Wrapping(keras.optimizers.SGD):
    """An optimizer whose `apply` calls another's, and its base's."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


def variables():
    return [keras.Variable(np.ones(3, "float32")), keras.Variable(np.ones(2, "float32"))]


@pytest.mark.parametrize("optimizer", [Wrapping, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())])
def test_gradients_are_reduced_once(optimizer):
    """By the outermost `apply`, all at once, wherever one optimizer calls another; not without a context."""
    held, context = variables(), Counts()
    used = optimizer()
    used.build(held)
    with step_hooks():
        used.apply([tf.ones(3), tf.ones(2)], held)
        assert context.marked == []
        with ops.running_in(context):
            used.apply([tf.ones(3), tf.ones(2)], held)
    assert context.marked == [("whole", 2)]


def test_an_unknown_variable_is_keras_error():
    """Also where the optimizer accumulates, as after `enable_lora` without another `compile`."""
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer.build(variables())
    with step_hooks(), ops.running_in(Counts()), pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([tf.ones(3), tf.ones(2)], variables())


def test_classes_are_as_before():
    """Also after an error within."""
    before = keras.optimizers.SGD.__dict__.get("apply"), keras.Optimizer.apply, tf.GradientTape.gradient
    with pytest.raises(ValueError, match="told"), step_hooks():
        assert tf.GradientTape.gradient is not before[2]
        raise ValueError("told to fail")
    assert (keras.optimizers.SGD.__dict__.get("apply"), keras.Optimizer.apply, tf.GradientTape.gradient) == before


def test_functions_are_inlined_in_a_step_alone():
    """A `tf.function` that a step calls is a part of the step's graph; elsewhere it is a function."""
    doubled = tf.function(lambda x: 2.0 * x)

    def types(context):
        with tf.Graph().as_default() as graph, step_hooks(), ops.running_in(context):
            doubled(tf.compat.v1.placeholder(tf.float32, [3]))
        return {op.type for op in graph.get_operations()}

    assert "Mul" in types(Counts()) and not any("Call" in one for one in types(Counts()))
    assert "Mul" not in types(None) and any("Call" in one for one in types(None))


class Waits(keras.layers.Layer):
    """A layer that waits, while it is traced on towers, until another thread has trained."""

    def __init__(self, reached, trained):
        super().__init__()
        self.reached, self.trained = reached, trained

    def call(self, x):
        if ops.current_context() is not None:
            self.reached.set()
            assert self.trained.wait(60)
        return x


class Sees(keras.layers.Layer):
    """A layer that remembers in which contexts it was traced."""

    contexts: ClassVar[list] = []

    def call(self, x):
        self.contexts.append(ops.current_context())
        return x


def build(*layers):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input(X.shape[1:]), *layers, keras.layers.Dense(5)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def weights_after(model):
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


def test_another_thread_trains_plainly_while_a_step_is_traced():
    """A model without towers, traced and trained meanwhile, ends as it does alone; so does the one on towers."""
    expected = weights_after(build())
    reached, trained = threading.Event(), threading.Event()
    found = {}

    def plainly():
        assert reached.wait(60)
        try:
            found["plain"] = weights_after(build(Sees()))
        finally:
            trained.set()

    thread = threading.Thread(target=plainly)
    thread.start()
    model = nccl_parallel(towers=2)(lambda: build(Waits(reached, trained)))()
    on_towers = weights_after(model)
    thread.join()
    assert Sees.contexts and not any(Sees.contexts)
    for one, two, three in zip(expected, found["plain"], on_towers, strict=True):
        np.testing.assert_array_equal(two, one)
        np.testing.assert_allclose(three, one, atol=1e-6)
    assert model.towers.divergence() == 0.0
