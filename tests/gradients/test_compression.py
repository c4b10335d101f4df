"""Gradients as bfloat16 with error feedback: what travels, how close training stays, what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import data, mlp, on_towers

import ncclsync
from ncclsync.gradients.compression import ErrorFeedback

X, Y = data(rows=48)


def trained(compression, rows, **arguments):
    keras.utils.set_random_seed(4)
    model = on_towers(lambda: mlp(keras.optimizers.SGD(0.1, momentum=0.9)), 3, compression=compression)
    history = model.fit(X[:rows], Y[:rows], batch_size=8, verbose=0, shuffle=False, **arguments)
    return model, history.history["loss"]


def change(weights, others):
    """How far two lists of weights are apart."""
    return np.linalg.norm(np.concatenate([(a - b).ravel() for a, b in zip(weights, others, strict=True)]))


@pytest.mark.slow
def test_training_is_close_to_uncompressed():
    """After 40 steps the weights are within 2 % of the way they have gone, and the towers are equal."""
    keras.utils.set_random_seed(4)
    start = mlp().get_weights()
    plain, plain_loss = trained(None, 40, epochs=8)
    model, loss = trained("bfloat16", 40, epochs=8)
    assert model.towers.divergence() == 0.0
    apart, gone = change(model.get_weights(), plain.get_weights()), change(plain.get_weights(), start)
    assert 0 < apart < 0.02 * gone
    np.testing.assert_allclose(loss, plain_loss, rtol=0.01)


def sums_of(gradients, rounds):
    """[rounds] what a variable has received by then, of the same batch each time."""
    optimizer = keras.optimizers.SGD(1.0)
    variable = keras.Variable(np.zeros(3, "float32"))
    optimizer.build([variable])

    def step(batch):
        with tf.GradientTape() as tape:
            tape.watch(variable.value)
            loss = tf.reduce_sum(tf.reduce_mean(batch, 0) * variable)
        optimizer.apply([tape.gradient(loss, variable.value)], [variable])

    with ncclsync.Towers(2, compression="bfloat16") as joined:
        found = []
        for _ in range(rounds):
            joined.run(step, tf.constant(gradients))
            found.append(-variable.numpy())
    return found


def test_rounding_is_kept_for_the_next_step():
    """A gradient that bfloat16 cannot hold arrives in full over time: the error does not grow."""
    gradients = np.array([[1.0 + 2**-12, 3.0, 1e-3]] * 4, "float32")
    found = sums_of(gradients, 64)
    expected = gradients[0] * np.arange(1, 65)[:, None]
    error = np.abs(np.array(found) - expected)
    assert error[0].max() > 0  # rounded
    assert (error <= 2.0**-7 * np.abs(gradients[0])).all()  # of one step, never of all


def test_what_is_not_finite_is_not_kept():
    """An infinite gradient spoils its own step only."""
    feedback = ErrorFeedback()
    variable = tf.Variable([1.0, 2.0])

    class Alone:
        class share:
            of_samples = staticmethod(tf.identity)

        def exchange(self, tensors, collective, when=None):
            return list(tensors)

    first = feedback.add_up([tf.constant([np.inf, 0.1])], [variable], Alone())
    second = feedback.add_up([tf.constant([1.0, 0.1])], [variable], Alone())
    assert np.isinf(first[0][0]) and second[0][0] == 1.0
    np.testing.assert_allclose(first[0][1] + second[0][1], 0.2, rtol=2.0**-8)


def test_sparse_gradients_are_left():
    """Slices stay slices, as the documentation of `add_up` says."""
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 4]), tf.constant([5, 3]))
    assert ErrorFeedback().add_up([slices, None], [tf.Variable(tf.zeros([5, 3])), None], None) == [None, None]


def test_half_the_bytes_travel(as_on_gpus, monkeypatch):
    """The gradients' bucket is of bfloat16; metric state and gradients of other dtypes are as they were."""
    model, _ = trained("bfloat16", 16)
    (program,) = model.train_function.__self__.step.programs.kept.values()
    exchanged = [e for segment in program.segments for bucket in segment.outgoing for e in bucket.exchanges]
    assert sorted(e.shape.num_elements() for e in exchanged if e.dtype == tf.bfloat16) == [5, 16, 80, 192]
    assert all(e.shape.rank == 0 for e in exchanged if e.dtype == tf.float32)


@pytest.mark.parametrize("compression", ["fp16", "bf16", 16, True])
def test_bad_compression(compression):
    """What is not offered is refused before anything is made."""
    with pytest.raises(ValueError, match=r"Expected compression to be None or 'bfloat16'\. Received"):
        ncclsync.nccl_parallel(towers=2, compression=compression)
    with pytest.raises(ValueError, match=r"Expected compression to be None or 'bfloat16'\. Received"):
        ncclsync.Towers(2, compression=compression)
