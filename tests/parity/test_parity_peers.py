"""What users of other ways to train Keras on several devices complain of, by the number of their issue.

A row is named after the public issue and what failed there. Complaints that other tests answer:

    keras#19891 gradients were not aggregated        test_parity_optimizers.py, every optimizer
    keras#19340 accuracy of a mean of means          test_parity_metrics.py, every metric
    keras#19280 NaN in the loss                      test_step_errors.py::test_nan_is_not_hidden
    keras#18862 freezes on more than one device      test_threads.py
    keras#16788 a loaded model trains one replica    test_saving.py, test_weights.py
    keras#8123  checkpoints of a replicated model    test_parity_callbacks.py, test_saving.py
    tf#44518    slots of the optimizer not restored  test_saving.py, test_weights.py
    tf#61314    one failed fit poisons the next      test_step_errors.py; test_towers.py, two models
    tf#22088    memory of the replicas               test_memory.py
    tf#33929    clipped before aggregation           test_parity_gradients.py, and below

A model made in one place and trained in another (an AssertionError with an empty message) is every test's.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers
from parity import Case, assert_towers_agree, check, data, fit, mlp, on_towers, spread

from ncclsync import nccl_parallel

X, Y = data()
IDS = np.random.default_rng(3).integers(0, 20, (len(X), 7))


def classifier(*body, inputs=(12,), dtype=None, policy="float32", cls=keras.Sequential, **compile_arguments):
    """A factory of a model with 5 logits behind the layers that `body` makes."""

    def factory():
        keras.utils.set_random_seed(1)
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            made = [make() for make in body]
            model = cls([keras.Input(inputs, dtype=dtype), *made, layers.Dense(5, dtype="float32")])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            arguments = {"optimizer": "adam", "loss": loss, "metrics": ["accuracy"], **compile_arguments}
            model.compile(**arguments)
        finally:
            keras.config.set_dtype_policy(before)
        return model

    return factory


def one_weight():
    """w = 1, a large gradient, a rate of 1: a step of norm 1 ends at 0, or at -1 if both towers clip."""
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="ones", name="w")])
    model.compile(optimizers.SGD(1.0, global_clipnorm=1.0), "mse")
    return model


class MeanLossStep(keras.Sequential):
    """The step of Keras' own guide: a loss per sample, its mean, no word of replicas."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            per_sample = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x, training=True))
            loss = tf.reduce_mean(per_sample)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, self(x))
        return {"loss_of_batch": loss, **{metric.name: metric.result() for metric in self.metrics}}


class RowsPerTower(keras.Sequential):
    """Tells, for each row, with how many others it was computed."""

    def train_step(self, batch):
        rows = tf.shape(batch[0])[0]
        return {**super().train_step(batch), "rows": tf.fill([rows], rows)}


def all_sizes(model):
    """Fit, evaluate and predict in batches of 7, of 1, and of more rows than there are."""
    results = []
    for size in (7, 1, 100):
        results.append(fit(X[:17], Y[:17], batch_size=size, epochs=1)(model))
        results.append(model.evaluate(X[:17], Y[:17], batch_size=size, verbose=0))
        results.append(model.predict(X[:17], batch_size=size, verbose=0))
    return results


def unknown_length(rows):
    """A `run` on batches that no cardinality announces, the last of one row, one with one row only."""

    def run(model):
        batches = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(8).filter(lambda x, y: True)
        results = [model.evaluate(batches, verbose=0), model.predict(batches, verbose=0)]
        model.fit(batches, epochs=2, verbose=0)
        return [results, model.get_weights()]

    return run


def evaluated(rows):
    """A `run`: the loss over some rows, in batches of 20, before and after a training on them."""

    def run(model):
        before = model.evaluate(X[:rows], Y[:rows], batch_size=20, verbose=0)
        trained = fit(X[:rows], Y[:rows], epochs=2)(model)
        return [before, trained, model.evaluate(X[:rows], Y[:rows], batch_size=20, verbose=0)]

    return run


def plain_sgd():
    """Without a count of steps: where a source of unknown length ends, plain Keras counts one too many."""
    return mlp(optimizers.SGD(0.1))


def relu():
    return layers.Dense(16, activation="relu")


def pooling():
    return [
        lambda: layers.Reshape((3, 4, 1)),
        lambda: layers.Conv2D(4, 2, padding="same", activation="relu"),
        lambda: layers.MaxPooling2D(2, padding="same"),
        layers.GlobalAveragePooling2D,
    ]


def embedding():
    return layers.Embedding(20, 4)


ROWS = np.ones((8, 1), "float32")
TARGETS = np.where(np.arange(8)[:, None] < 2, -30.0 * ROWS, 10.0 * ROWS)  # the shards pull in two directions
CASES = {
    # Reproduced with MirroredStrategy and Keras 3.
    "tf#33929_clipped_before_sum": Case(one_weight, fit(ROWS, TARGETS, batch_size=8, epochs=1)),
    "keras#19340_last_batch_of_3_rows": Case(mlp, evaluated(43)),
    "tf#41657_last_batch_of_1_row": Case(mlp, evaluated(41)),
    "keras#21167_first_batch_odd": Case(mlp, evaluated(13)),
    "keras#17429_accumulation": Case(lambda: mlp(optimizers.Adam(0.01, gradient_accumulation_steps=2)), fit(X, Y)),
    "keras#15509_mean_loss_of_own_step": Case(classifier(relu, cls=MeanLossStep), fit(X, Y)),
    # Complaints.
    "keras#19246_empty_replica": Case(plain_sgd, unknown_length(17)),
    "keras#19246_one_row_in_all": Case(plain_sgd, unknown_length(1)),
    "keras#11434_any_batch_size": Case(mlp, all_sizes),
    "keras#18862_pooling": Case(classifier(*pooling()), fit(X, Y)),
    "keras#18145_jit_compile": Case(classifier(*pooling(), jit_compile=True), fit(X, Y, epochs=2)),
    "keras#18666_mixed_float16_loss_scale": Case(
        classifier(relu, policy="mixed_float16", optimizer="sgd"), fit(X, Y), tolerance=3e-3
    ),
    "keras#21069_indexed_slices": Case(classifier(embedding, layers.Flatten, inputs=(7,), dtype="int32"), fit(IDS, Y)),
    "tf-keras#99_embedding_jit_compile": Case(
        classifier(embedding, layers.Flatten, inputs=(7,), dtype="int32", jit_compile=True), fit(IDS, Y, epochs=2)
    ),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name, towers", spread(CASES))
def test_complaint(name, towers):
    """What failed or was wrong elsewhere is one device's result here."""
    check(CASES[name], towers)


def test_clipped_weight():
    """The number itself: one step of norm 1 from 1 is 0, on any number of towers."""
    model = on_towers(one_weight, 2)
    model.fit(ROWS, TARGETS, batch_size=8, verbose=0, shuffle=False)
    np.testing.assert_allclose(model.get_weights()[0], [[0.0]], atol=1e-6)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("towers", [2, 4])
def test_tf_36224_batch_norm_and_a_last_batch_of_one_row(towers):
    """Finite, where a replica without rows made every weight NaN without an error."""
    model = on_towers(classifier(relu, layers.BatchNormalization), towers)
    history = model.fit(X[:41], Y[:41], batch_size=20, epochs=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert all(np.isfinite(array).all() for array in model.get_weights())
    assert_towers_agree(model)


@pytest.mark.slow
def test_every_tower_has_its_share():
    """Not one device that trains while `num_model_replicas` says two, as keras.distribution does here."""
    model = nccl_parallel(towers=4)(classifier(relu, cls=RowsPerTower))()
    rows = model.train_on_batch(X[:10], Y[:10], return_dict=True)["rows"]
    assert list(np.asarray(rows)) == [10] * 10  # a step means the batch
    assert [shard.end - shard.begin for shard in model.towers.explain().shards] == [3, 3, 2, 2]
    own = model.towers.run(lambda x: tf.shape(x)[0], X[:10], per_tower=True)
    assert [int(one) for one in own] == [3, 3, 2, 2]
