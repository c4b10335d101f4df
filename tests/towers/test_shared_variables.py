"""Several `Towers` of one process that share variables: what a step on one of them writes reaches the others.

Every test compares with the same operations on plain Keras, one model after another.
"""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, data, mlp, state

from ncclsync import Health, NcclSyncError, Towers, nccl_parallel
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.towers.replicas import Replicas

X, Y = data(24)
REAL = np.random.default_rng(2).standard_normal((12, 6)).astype("float32")
LATENT = np.random.default_rng(3).standard_normal((5, 12, 4)).astype("float32")


def plain(factory):
    """Instead of a decorator."""
    return factory


def fit(model, epochs=1, **options):
    return model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options).history


def copies(model, variable):
    return model.towers.replicas.of(tf_compat.backend_variable(variable))


def assert_no_divergence(*models):
    """Every tower of every model holds what tower 0 holds."""
    for model in models:
        if hasattr(model, "towers") and not model.towers.closed:
            assert model.towers.divergence() == 0.0
            for weight in model.weights:
                for copy in copies(model, weight):
                    np.testing.assert_array_equal(copy.numpy(), weight.numpy(), err_msg=weight.path)


def gan(put_discriminator, put_combined, dropout=0.0):
    """The classic one: a compiled discriminator, and the generator with the discriminator behind it."""
    keras.utils.set_random_seed(1)

    def discriminator():
        layers = [keras.Input((6,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dropout(dropout)]
        model = keras.Sequential([*layers, keras.layers.Dense(1, activation="sigmoid")])
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
        return model

    generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh")])
    judge = put_discriminator(discriminator)()

    def combined():
        judge.trainable = False
        latent = keras.Input((4,))
        model = keras.Model(latent, judge(generator(latent)))
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
        return model

    return judge, generator, put_combined(combined)()


def train_gan(judge, generator, combined):
    """Train each in turn; return all losses and weights."""
    results = []
    for latent in LATENT:
        judge.trainable = True
        samples = np.concatenate([REAL, generator(latent).numpy()])
        labels = np.repeat([[1.0], [0.0]], len(REAL), axis=0)
        results += judge.train_on_batch(samples, labels)
        judge.trainable = False
        results.append(combined.train_on_batch(latent, np.ones((len(latent), 1))))
        assert_no_divergence(judge, combined)
    return [*map(float, results), judge.get_weights(), generator.get_weights()]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("towers", "options"),
    [
        ((2, 2), {}),
        ((4, 2), {"health": Health(check_every=1)}),  # towers that share no memory
        ((2, 3), {"shard_optimizer": True}),
        ((1, 2), {}),
        ((2, 1), {}),
    ],
)
def test_gan(towers, options):
    """Discriminator and combined model, each of a decorated factory, train as on one device."""
    puts = [nccl_parallel(towers=count, **options) for count in towers]
    assert_close(train_gan(*gan(*puts)), train_gan(*gan(plain, plain)))


@pytest.mark.slow
def test_gan_with_dropout():
    """Random state is shared as weights are: the numbers drawn are those of one device."""
    put = nccl_parallel(towers=3, exact=("random",))
    assert_close(train_gan(*gan(put, put, 0.3)), train_gan(*gan(plain, plain, 0.3)))


def extractor_of(model):
    """A factory of the features in front of a model's last layer."""
    return lambda: keras.Model(model.inputs, model.layers[-2].output)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("trained_on", [1, 3])
def test_feature_extractor(trained_on):
    """It predicts with the weights that the model around it has now.

    One tower is plain Keras, whose graph tells nobody what it writes.
    """
    base, alone = nccl_parallel(towers=trained_on)(mlp)(), mlp()
    assert_close(fit(base), fit(alone))  # traced before anybody else has copies
    features, expected = nccl_parallel(towers=2)(extractor_of(base))(), extractor_of(alone)()
    for _ in range(3):
        assert_close(features.predict(X, verbose=0), expected.predict(X, verbose=0))
        assert_close(fit(base), fit(alone))
        assert_no_divergence(base, features)
    assert_close(features.predict(X, verbose=0), expected.predict(X, verbose=0))


@pytest.mark.slow
def test_three_towers():
    """Of several models that share layers, each sees what any other has written, in whatever order."""

    def train(*puts):
        base = puts[0](mlp)()

        def headed():
            keras.utils.set_random_seed(7)
            hidden = base.layers[0].output
            model = keras.Model(base.inputs, keras.layers.Dense(5)(hidden))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
            return model

        models = [base, *(put(headed)() for put in puts[1:])]
        results = []
        for i in (0, 1, 2, 1, 0, 2, 2, 0):
            results.append(fit(models[i]))
            assert_no_divergence(*models)
        return [results, *map(state, models)]

    assert_close(train(*(nccl_parallel(towers=count) for count in (2, 3, 4))), train(plain, plain, plain))


def loop_of(model):
    """A step of a user's own loop, with the optimizer and the loss that the model was compiled with."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_weights)
        model.optimizer.apply(gradients, model.trainable_weights)
        return value

    return train


def run_here(train, batch):
    """`Towers.run` on one device."""
    return tf.function(train, autograph=False)(tuple(map(tf.convert_to_tensor, batch)))


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [(), (1,), (0, 1)])
def test_run_beside_fit(sharded):
    """Two loops and `fit` on one model and its one optimizer, whose state some towers divide."""
    options = [{"shard_optimizer": i in sharded} for i in range(2)]
    model, alone = nccl_parallel(towers=2, **options[0])(mlp)(), mlp()
    train, expected = loop_of(model), loop_of(alone)
    with Towers(3, **options[1]) as towers:
        for _ in range(3):
            assert_close(fit(model), fit(alone))
            batch = X[:10], Y[:10]
            assert_close(towers.run(train, batch), run_here(expected, batch))
            assert_close(towers.run(train, batch), run_here(expected, batch))
            assert_no_divergence(model)
            assert towers.divergence() == 0.0
            assert_close(state(model), state(alone))
    assert_close([fit(model), state(model)], [fit(alone), state(alone)])


@pytest.mark.slow
def test_optimizer_that_other_towers_divide():
    """A step that is traced while an optimizer is divided must divide it too; one that was before goes on."""
    model, alone = mlp(), mlp()
    train, expected = loop_of(model), loop_of(alone)
    batch = X[:10], Y[:10]
    with Towers(2) as whole, Towers(3, shard_optimizer=True) as divides, Towers(2) as late:
        for towers in (whole, divides, whole, divides, divides, whole, divides):
            assert_close(towers.run(train, batch), run_here(expected, batch))
        with pytest.raises(NcclSyncError, match="which need shard_optimizer=True as well"):
            late.run(train, batch)
        assert_close(state(model), state(alone))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("counts", [(2, 3), (3, 1), (1, 2)])
def test_accumulated_gradients(counts):
    """Of what is accumulated, each tower holds a part: one Towers goes on with the sum of the other's."""

    def factory():
        return mlp(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))

    model, alone = factory(), factory()
    train, expected = loop_of(model), loop_of(alone)
    with Towers(counts[0]) as one, Towers(counts[1]) as other:
        for i, towers in enumerate([one, other, one, one, other, other, one, other]):
            batch = X[i : i + 9], Y[i : i + 9]
            assert_close(towers.run(train, batch), run_here(expected, batch))
        other.close()
        assert_close(state(model), state(alone))
        assert_close(one.run(train, batch), run_here(expected, batch))
    assert_close(state(model), state(alone))


@pytest.mark.slow
def test_metric_state():
    """A metric that two Towers update holds the sum of both, and its reset reaches both."""
    metric, alone = keras.metrics.MeanSquaredError(), keras.metrics.MeanSquaredError()
    largest = keras.Variable(0.0, aggregation="sum")

    def update(batch):
        metric.update_state(*batch)
        largest.assign(keras.ops.maximum(largest, keras.ops.max(batch[0])))
        return tf.constant(0.0)

    batches = [(X[i : i + 7], X[i + 1 : i + 8]) for i in range(6)]
    with Towers(2) as one, Towers(3) as other:
        for i, (towers, batch) in enumerate(zip([one, other, other, one, one, other], batches, strict=True)):
            towers.run(update, batch)
            alone.update_state(*batch)
            assert_close(float(metric.result()), float(alone.result()))
            if i == 3:
                metric.reset_state()
                alone.reset_state()


def doubled(variable):
    """A step that doubles a variable, and returns the mean of what the towers read before."""

    def step(batch):
        before = tf.identity(variable)
        variable.assign(2.0 * before)
        return before * tf.reduce_mean(batch)

    return step


def run_doubled(towers, run):
    """Run such a step; return what it read."""
    return round(float(towers.run(run, tf.ones([6]))), 5)


def test_close_of_one():
    """It takes off its own watch, not that of other towers, in whatever order they come and go."""
    variable = tf.Variable(1.0)
    run = doubled(variable)
    one, other, last = Towers(2), Towers(3), Towers(2)
    assert [run_doubled(towers, run) for towers in (one, other, last, one)] == [1.0, 2.0, 4.0, 8.0]
    other.replicas.sync()  # nothing is left to be sent, whoever is closed
    one.close()
    variable.assign(10.0)
    assert run_doubled(other, run) == 10.0
    assert (other.divergence(), last.divergence()) == (0.0, 0.0)
    last.close()
    variable.assign(3.0)
    assert run_doubled(other, run) == 3.0
    assert [float(copy) for copy in other.replicas.of(variable)] == [6.0, 6.0, 6.0]
    with Towers(4) as again:
        assert run_doubled(again, run) == 6.0
        assert run_doubled(other, run) == 12.0
        again.replicas.sync()
        other.close()
        variable.assign(5.0)
        assert run_doubled(again, run) == 5.0
    assert not {"assign", "_ncclsync_before"} & set(vars(variable)), "the variable's own methods are back"


@pytest.mark.slow
def test_sharded_optimizer_of_closed_towers():
    """Whoever closes first leaves the optimizer's state whole to the other."""
    model, alone = mlp(), mlp()
    train, expected = loop_of(model), loop_of(alone)
    batch = X[:10], Y[:10]
    one, other = Towers(2, shard_optimizer=True), Towers(3, shard_optimizer=True)
    for towers in (one, other, one):
        assert_close(towers.run(train, batch), run_here(expected, batch))
    other.close()
    assert_close(state(model), state(alone))
    for _ in range(2):
        assert_close(one.run(train, batch), run_here(expected, batch))
    one.close()
    assert_close(state(model), state(alone))


@pytest.mark.slow
def test_towers_that_nobody_closes():
    """A model that is dropped leaves no copies behind, while the variables live on in another model."""
    base, alone = nccl_parallel(towers=2)(mlp)(), mlp()
    features = nccl_parallel(towers=3)(extractor_of(base))()
    features.predict(X, verbose=0)
    fit(base), fit(alone)
    left = [weakref.ref(copy) for weight in features.weights for copy in copies(features, weight)[1:]]
    assert len(left) == 4
    del features
    keras.backend.clear_session()
    gc.collect()
    assert [copy() for copy in left] == [None] * 4
    assert_close([fit(base), state(base)], [fit(alone), state(alone)])
    base.layers[0].kernel.assign(0.5 * base.layers[0].kernel)
    alone.layers[0].kernel.assign(0.5 * alone.layers[0].kernel)
    assert_close([fit(base), state(base)], [fit(alone), state(alone)])
    assert_no_divergence(base)


@pytest.mark.slow
def test_variables_that_are_deleted():
    """Towers forget them, whichever of their holders goes first."""
    variable, kept = tf.Variable(1.0), tf.Variable(1.0)
    with Towers(2) as one, Towers(3) as other:
        for towers in (one, other):
            towers.replicas.of(variable)
            towers.replicas.of(kept)
        variable.assign(3.0)
        assert one.replicas.shared == other.replicas.shared == {id(variable), id(kept)}
        del variable
        gc.collect()
        assert one.replicas.shared == other.replicas.shared == {id(kept)}
        run = doubled(kept)
        assert [run_doubled(towers, run) for towers in (one, other, one)] == [1.0, 2.0, 4.0]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("on_nonfinite", [None, "skip"])
def test_step_that_is_undone(on_nonfinite):
    """A step that fails or is skipped leaves to the other towers what was before it."""
    model, alone = mlp(), mlp()
    train, expected = loop_of(model), loop_of(alone)

    def failing(batch):
        value = train(batch)
        if on_nonfinite is None:
            tf.debugging.assert_all_finite(batch[0], "not finite")  # when the weights are written
        return value

    batch = X[:10], Y[:10]
    bad = np.where(np.arange(10)[:, None] == 9, np.nan, X[:10]), Y[:10]
    with Towers(2, health=Health(on_nonfinite=on_nonfinite)) as one, Towers(3) as other:
        for _ in range(2):
            for towers, function in ((one, failing), (other, train)):
                assert_close(towers.run(function, batch), run_here(expected, batch))
            if on_nonfinite is None:
                with pytest.raises(tf.errors.InvalidArgumentError):
                    one.run(failing, bad)
            else:
                one.run(failing, bad)
            assert (one.divergence(), other.divergence()) == (0.0, 0.0)
            assert_close(state(model), state(alone))
        assert_close(other.run(train, batch), run_here(expected, batch))
        assert_close(state(model), state(alone))


def test_divergence_is_told_in_both():
    """A copy that is another is told by its own Towers alone, as long as nobody has written the variable."""
    variable = tf.Variable(1.0)
    run = doubled(variable)
    with Towers(2) as one, Towers(3) as other:
        for towers in (one, other):
            towers.run(run, tf.ones([6]))
        one.replicas.sync()
        other.replicas.of(variable)[2].assign(7.0)
        assert (one.divergence(), other.divergence()) == (0.0, 3.0)
        one.run(run, tf.ones([6]))
        assert (one.divergence(), other.divergence()) == (0.0, 0.0)
        assert [float(copy) for copy in other.replicas.of(variable)] == [8.0, 8.0, 8.0]


@pytest.mark.slow
def test_run_eagerly():
    """A step without a graph is seen too, and sees what others' graphs have written."""

    def train(put, other):
        base = put(mlp)()
        base.run_eagerly = True
        features = other(extractor_of(base))()
        features.compile("sgd", "mse")
        results = []
        for _ in range(2):
            results += [fit(base), features.predict(X, verbose=0)]
            results.append(features.fit(X, X[:, :1], batch_size=8, shuffle=False, verbose=0).history)
            assert_no_divergence(base, features)
        return results

    assert_close(train(nccl_parallel(towers=2), nccl_parallel(towers=3)), train(plain, plain))


def test_only_what_is_written_is_sent(monkeypatch):
    """A step tells of the variables that it writes; weights that it only reads are not sent again."""
    judge, generator, combined = gan(*[nccl_parallel(towers=2)] * 2)
    train_gan(judge, generator, combined)
    judge.towers.replicas.sync()
    sent = []
    send = judge.towers.replicas.send
    monkeypatch.setattr(judge.towers.replicas, "send", lambda keys: (sent.extend(keys), send(keys)))
    combined.train_on_batch(LATENT[0], np.ones((12, 1)))
    judge.towers.replicas.sync()
    assert sent == []


def test_towers_of_their_own_variables(monkeypatch):
    """A model that shares nothing: nobody asks what its steps write."""
    monkeypatch.setattr(Replicas, "report_writes", lambda *_: pytest.fail("asked"))
    models = [nccl_parallel(towers=2)(mlp)() for _ in range(2)]
    for model in models:
        fit(model)
        assert model.towers.replicas.shared == set()
