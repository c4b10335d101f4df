"""`model.towers`, and what `@nccl_parallel` leaves as it was: the model, its class, the process around it."""

import copy
import dataclasses
import gc
import logging
import pickle
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, mlp, on_towers

from ncclsync import NcclSyncError, Towers, nccl_parallel
from ncclsync.communicator.processes import Process
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import gpu_streams
from ncclsync.sharding.roles import Role, declare_role
from ncclsync.towers import placement
from ncclsync.towers.placement import keep_quiet

X, Y = data(24)


def fit(model, epochs=1):
    return model.fit(X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0).history


def copies(model, variable):
    """Every tower's own copy of a Keras variable; tower 0's is the variable itself."""
    return model.towers.replicas.of(tf_compat.backend_variable(variable))


@pytest.fixture(scope="module")
def shared():
    """A model trained on 4 towers."""
    model = on_towers(mlp, 4)
    fit(model)
    return model


@pytest.fixture
def trained(shared):
    """The shared model; whatever a test does to its weights and towers is mended after it."""
    variables = [*shared.weights, *shared.optimizer.variables]
    before = [v.numpy() for v in variables]
    yield shared
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    shared.towers.broadcast()
    assert shared.towers.divergence() == 0.0


def test_towers_describe_themselves(trained):
    """Their number, devices and backend, and all of it in the repr."""
    towers = trained.towers
    assert isinstance(towers, Towers)
    assert len(towers) == 4
    assert tuple(towers.devices) == ("CPU:0",) * 4
    assert towers.backend == "cpu"
    assert repr(towers) == "<Towers 4 on CPU:0, CPU:0, CPU:0, CPU:0, backend cpu>"


@pytest.mark.slow
def test_devices_by_name():
    """`devices=` names them, and several towers may name one CPU."""
    model = nccl_parallel(devices=["CPU:0", "/CPU:0"])(mlp)()
    assert tuple(model.towers.devices) == ("CPU:0", "CPU:0")
    assert_close([fit(model), model.get_weights()], [fit(alone := mlp()), alone.get_weights()])


def test_get_weights_is_one_towers_own(trained):
    """The weights of tower i as arrays, in the order of `model.get_weights()`."""
    fourth = trained.layers[1].kernel
    with_own_value = copies(trained, fourth)[3]
    with_own_value.assign_add(tf.ones(with_own_value.shape))
    expected = trained.get_weights()
    for tower in (0, 1, 2):
        for one, other in zip(trained.towers.get_weights(tower), expected, strict=True):
            assert isinstance(one, np.ndarray)
            np.testing.assert_array_equal(one, other)
    expected[2] = expected[2] + 1.0
    for one, other in zip(trained.towers.get_weights(3), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_get_weights_takes_a_numpy_int(trained):
    """An index out of a NumPy array is an index."""
    assert_close(trained.towers.get_weights(np.arange(4)[2]), trained.get_weights(), tolerance=0.0)


@pytest.mark.parametrize("index", [-1, 4, 1.0, "1", None, True])
def test_get_weights_of_no_tower(trained, index):
    """What is not the index of a tower is refused, and told what is one."""
    with pytest.raises(ValueError, match=r"from 0 to 3\. Received: "):
        trained.towers.get_weights(index)


@pytest.mark.parametrize("tower", [1, 2, 3])
def test_divergence_sees_every_tower(trained, tower):
    """0.0 in health; the largest absolute difference where a tower's copy is another; `broadcast` heals."""
    towers = trained.towers
    health = towers.divergence()
    assert (type(health), health) == (float, 0.0)
    broken = copies(trained, trained.layers[0].kernel)[tower]
    broken.scatter_nd_add([[0, 0], [3, 2]], [0.25, -0.5])
    assert towers.divergence() == pytest.approx(0.5, rel=1e-6)
    towers.broadcast()
    assert towers.divergence() == 0.0
    assert_towers_agree(trained)


def test_broadcast_leaves_nothing_to_send(trained, monkeypatch):
    """What Python wrote goes out once: a broadcast is not repeated before the next step."""
    trained.layers[0].kernel.assign_add(keras.ops.ones((12, 16)))
    trained.towers.broadcast()
    sent = []
    monkeypatch.setattr(trained.towers.communicator, "broadcast", lambda *_: sent.append(1))
    trained.towers.get_weights(1)
    assert not sent


def test_divergence_covers_optimizer_state(trained):
    """Slots, the learning rate and the integer step count must be identical too."""
    for variable, amount in (
        (trained.optimizer.iterations, 3),
        (trained.optimizer.learning_rate, 0.5),
        (trained.optimizer.variables[-1], 2.0),
    ):
        broken = copies(trained, variable)[2]
        broken.assign_add(tf.fill(broken.shape, tf.cast(amount, broken.dtype)))
        assert trained.towers.divergence() == pytest.approx(amount)
        trained.towers.broadcast()
        assert trained.towers.divergence() == 0.0


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (np.nan, np.nan, 0.0),
        (np.inf, np.inf, 0.0),
        (np.nan, 1.0, np.inf),
        (1.0, np.nan, np.inf),
        (np.inf, 1.0, np.inf),
        (np.inf, -np.inf, np.inf),
    ],
)
def test_divergence_of_what_is_no_number(trained, mine, theirs, expected):
    """Equal NaNs and infinities do not differ; against anything else they are infinitely far."""
    bias = trained.layers[1].bias
    values = np.array([mine, 0, 0, 0, 0], "float32")
    bias.assign(values)
    assert trained.towers.divergence() == 0.0  # what was written is sent: nothing later mends a tower
    values[0] = theirs
    copies(trained, bias)[2].assign(values)
    assert trained.towers.divergence() == expected


def test_seeds_differ_by_design():
    """Dropout's random states differ between towers, metrics are tower 0's: neither is a divergence."""

    def factory():
        return keras.Sequential([keras.Input((12,)), keras.layers.Dropout(0.5), keras.layers.Dense(5)])

    model = on_towers(factory, 3)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    fit(model)
    seeds = [tuple(seed.numpy()) for seed in copies(model, model.layers[0].seed_generator.state)]
    assert len(set(seeds)) == 3
    assert model.towers.divergence() == 0.0
    model.towers.broadcast()
    assert model.towers.divergence() == 0.0
    assert len({tuple(seed.numpy()) for seed in copies(model, model.layers[0].seed_generator.state)}) == 3


def test_close(tmp_path):
    """A context manager; idempotent; afterwards training says what to do, and the model works by itself."""
    model = on_towers(mlp, 3)
    with model.towers as towers:
        assert towers is model.towers
        fit(model)
        expected = np.asarray(model(X))
    assert towers.closed
    assert towers.communicator.closed
    towers.close()
    assert repr(towers).endswith("closed>")
    for use in (lambda: fit(model), towers.broadcast, towers.divergence, lambda: towers.get_weights(1)):
        with pytest.raises(NcclSyncError, match=r"towers that were closed, .* weights, by: model = nccl_parallel"):
            use()
    np.testing.assert_array_equal(np.asarray(model(X)), expected)
    model.set_weights(model.get_weights())
    model.save(tmp_path / "closed.keras")
    loaded = keras.models.load_model(tmp_path / "closed.keras")
    assert_close(loaded.predict(X, verbose=0), expected)
    fit(loaded)


class Classifier(keras.Sequential):
    """A class of the user's."""


@pytest.mark.parametrize("towers", [1, 3])
def test_model_stays_what_it_is(towers):
    """The very object that the factory made: class, summary and config are the plain model's."""
    made = []

    def factory(units, *, name):
        layers = [keras.Input((12,), name="in"), keras.layers.Dense(units, name="out")]
        made.append(Classifier(layers, name=name))
        return made[-1]

    model = nccl_parallel(towers=towers)(factory)(5, name="mine")
    assert made == [model], "the factory is called once"
    assert type(model) is Classifier
    assert isinstance(model, keras.Model)
    plain = factory(5, name="mine")
    summaries = [[], []]
    for each, lines in zip((model, plain), summaries, strict=True):
        each.summary(print_fn=lines.append)
    assert summaries[0] == summaries[1]
    assert model.get_config() == plain.get_config()


def test_decorator_keeps_the_factory():
    """With and without parentheses; the name, the docstring and the original stay."""

    @nccl_parallel
    def bare():
        """Make a model."""
        return mlp()

    @nccl_parallel()
    def called():
        """Make a model."""
        return mlp()

    for factory, name in ((bare, "bare"), (called, "called")):
        assert (factory.__name__, factory.__doc__) == (name, "Make a model.")
        assert type(factory.__wrapped__()) is keras.Sequential
        assert not hasattr(factory.__wrapped__(), "towers")
        assert len(factory().towers) == max(1, len(tf.config.list_logical_devices("GPU")))


def test_choice_of_backend_is_logged_once(caplog):
    """At INFO, with the reason; training adds nothing."""
    with caplog.at_level(logging.INFO, logger="ncclsync"):
        fit(on_towers(mlp, 3))
    chosen = [r for r in caplog.records if r.name == "ncclsync" and "backend" in r.getMessage()]
    assert len(chosen) == 1
    assert chosen[0].levelno == logging.INFO
    assert "3 tower(s) on CPU:0, CPU:0, CPU:0" in chosen[0].getMessage()
    assert "backend cpu (the towers stand on CPU devices)" in chosen[0].getMessage()
    with caplog.at_level(logging.INFO, logger="ncclsync"):
        nccl_parallel(towers=2, backend="cpu")(mlp)()
    assert "backend cpu (asked for)" in caplog.records[-1].getMessage()


def test_one_tower_is_plain_keras():
    """Nothing is replaced on the model, and the numbers are the same bit for bit."""
    model, plain = on_towers(mlp, 1), mlp()
    assert set(vars(model)) - set(vars(plain)) == {"towers", "_ncclsync_towers"}
    results = [[fit(m, epochs=2), m.get_weights(), m.predict(X, verbose=0)] for m in (model, plain)]
    for one, other in zip(*map(keras.tree.flatten, results), strict=True):
        np.testing.assert_array_equal(one, other)
    model.towers.broadcast()
    assert_close(model.towers.get_weights(0), plain.get_weights(), tolerance=0.0)
    assert model.towers.divergence() == 0.0


@pytest.mark.slow
def test_two_models_in_one_process():
    """Trained alternately, neither disturbs the other; nor does the end of one."""
    factories = [mlp, lambda: mlp(keras.optimizers.SGD(0.2, momentum=0.9))]
    pair = [on_towers(factories[0], 3), on_towers(factories[1], 4)]
    alone = [factory() for factory in factories]
    for models in (pair, alone):
        for model in (*models, models[0]):
            fit(model)
    pair[0].towers.close()
    del pair[0]
    gc.collect()
    for model in (pair[0], *alone):
        fit(model)
    assert_close(pair[0].get_weights(), alone[1].get_weights())
    assert_towers_agree(pair[0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, keras.models.clone_model])
def test_copies_of_the_model_are_plain(trained, duplicate):
    """A copied model belongs to no towers and trains by itself; the original goes on as before."""
    plain = duplicate(trained)
    assert not hasattr(plain, "towers")
    assert type(plain) is type(trained)
    plain.set_weights(trained.get_weights())
    before = trained.get_weights()
    plain.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(plain)
    assert_close(trained.get_weights(), before, tolerance=0.0)
    assert np.abs(plain.get_weights()[0] - before[0]).max() > 0
    assert_towers_agree(trained)


def test_role_that_a_later_step_shows():
    """Copies made for a sum become copies of the whole, and the other way round, at the next step."""
    with Towers(3) as towers:
        total = tf.Variable(6.0, aggregation=tf.VariableAggregation.SUM)
        weight = tf.Variable(2.0)
        assert [float(copy) for copy in towers.replicas.of(total)] == [6.0, 0.0, 0.0]
        assert [float(copy) for copy in towers.replicas.of(weight)] == [2.0, 2.0, 2.0]
        declare_role(total, Role.SAME)
        declare_role(total, Role.PARTIAL)  # what a step needs stays
        declare_role(weight, Role.PARTIAL)
        before = [*towers.replicas.of(total), *towers.replicas.of(weight)]
        towers.replicas.sync()
        assert [float(copy) for copy in before] == [6.0, 6.0, 6.0, 2.0, 0.0, 0.0]
        assert towers.divergence() == 0.0
        towers.replicas.of(weight)[2].assign(5.0)
        assert float(weight) == 7.0
        towers.replicas.of(weight)[1].assign(1.0)
        weight.assign_add(2.0)
        assert float(weight) == 10.0
        towers.replicas.of(weight)[1].assign(1.0)
        weight.assign(3.0)
        towers.broadcast()
        assert float(weight) == 3.0


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda one: one.__name__)
def test_towers_stay_where_they_are(trained, duplicate):
    """A copy would share devices and variables with them: refused, with what to do instead."""
    with pytest.raises(TypeError, match=r"Expected towers to stay in .* Received: <Towers .* Pickle the model"):
        duplicate({"towers": trained.towers} if duplicate is not copy.copy else trained.towers)
    assert trained.towers.divergence() == 0.0


def test_without_streams_xla_compiles_nothing_on_gpus(monkeypatch, caplog):
    """CUDA takes no event of a whole GPU while XLA records a command buffer: chosen before a step, said once."""
    with Towers(2) as towers:
        layout = dataclasses.replace(towers.session.layout, devices=("GPU:0", "GPU:1"))
        communicator = SimpleNamespace(enqueues=True)
        monkeypatch.setattr(gpu_streams, "missing", lambda: "there is no C++ compiler")
        assert towers.session.lets_xla_compile()  # on CPUs
        monkeypatch.setattr(towers.session, "layout", layout)
        monkeypatch.setattr(towers.session, "communicator", communicator)
        assert not towers.session.lets_xla_compile() and not towers.session.lets_xla_compile()
        assert (
            caplog.text.count("XLA compiles no step on these GPUs") == 1 and "there is no C++ compiler" in caplog.text
        )
        monkeypatch.setattr(gpu_streams, "missing", lambda: "")
        assert towers.session.lets_xla_compile()
        monkeypatch.undo()


def test_no_garbage_is_searched_for_while_a_graph_is_built():
    """Python's collector is as it was afterwards, also if the trace fails."""
    seen = []

    class Traced(keras.layers.Layer):
        def call(self, x):
            seen.append(gc.isenabled())
            if x.shape.rank == 3:
                raise RuntimeError("told to fail")
            return x

    layer = Traced()
    assert gc.isenabled()
    with Towers(2) as towers:
        towers.run(layer, np.ones([4, 2], "float32"))
        assert gc.isenabled()
        with pytest.raises(RuntimeError, match="told to fail"):
            towers.run(layer, np.ones([4, 2, 3], "float32"))
        assert gc.isenabled()
        gc.disable()
        try:
            towers.run(layer, np.ones([4, 2, 3, 5], "float32"))
            assert not gc.isenabled()
        finally:
            gc.enable()
    assert seen and not any(seen)


def test_variables_are_made_by_themselves():
    """Also where a step creates them, as an optimizer's, while it waits for an op: one device's numbers."""

    class Checked(keras.Sequential):
        def train_step(self, batch):
            with tf.control_dependencies([tf.debugging.assert_all_finite(batch[0], "x")]):
                return super().train_step(batch)

    def build():
        keras.utils.set_random_seed(1)
        model = Checked([keras.Input((12,)), keras.layers.Dense(5)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        return model

    def trained(model):
        history = model.fit(*data(21), batch_size=8, epochs=2, shuffle=False, verbose=0).history
        return history, model.get_weights()

    model = on_towers(build, 2)
    assert_close(trained(model), trained(build()))
    assert_towers_agree(model)
    model.towers.close()


def test_what_was_chosen_is_said(capsys, caplog, monkeypatch):
    """One line by default, on standard error, once for the same towers; not if logging says it, or is to say less."""
    placement._say.cache_clear()  # another test may have made the same towers last
    for _ in range(2):  # folds of a cross-validation: once
        on_towers(mlp, 3)
    assert capsys.readouterr() == ("", "ncclsync: 3 towers on CPU:0, by C\n")
    on_towers(mlp, 1)
    assert capsys.readouterr().err == "ncclsync: 1 tower on CPU:0\n"
    monkeypatch.setattr(placement.native, "usable_cores", lambda: 2)
    placement.announce(placement.Choice(("CPU:0",) * 9, "cpu", ""), None)
    said = "ncclsync: 9 towers on CPU:0, by C. They take turns on 2 cores: 2 to 4 towers show as much, and sooner\n"
    assert capsys.readouterr().err == said
    for level in (logging.INFO, logging.ERROR):
        with caplog.at_level(level, logger="ncclsync"):
            on_towers(mlp, 2)
        assert "ncclsync:" not in capsys.readouterr().err


def test_a_warning_says_who_speaks(monkeypatch, capsys):
    """Where nobody has set logging up, as in a script; else its own handlers format it, once."""
    logger = logging.getLogger("ncclsync")
    logger.warning("heard by pytest's handlers")
    monkeypatch.setattr(logging.root, "handlers", [])
    logger.warning("%d words", 2)
    logger.info("unheard")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, logging.NullHandler()])
    logger.warning("heard by a handler of the user's")
    assert capsys.readouterr() == ("", "ncclsync: 2 words\n")


def test_gpus_are_said_with_their_model_and_nccl(monkeypatch, capsys):
    """Each model once."""
    monkeypatch.setattr(placement, "device_models", lambda devices: ["NVIDIA T4"] * len(devices))
    monkeypatch.setattr(placement.native, "nccl_version", lambda: (2, 27, 3))
    placement._say.cache_clear()
    placement.announce(placement.Choice(("GPU:0", "GPU:1"), "nccl", ""), None)
    assert capsys.readouterr().err == "ncclsync: 2 towers on GPU:0, GPU:1 (NVIDIA T4), by NCCL 2.27\n"


def test_towers_in_a_notebook():
    """A cell that ends in towers shows a table."""
    pretty = pytest.importorskip("IPython.lib.pretty")
    shown = pretty.pretty(on_towers(mlp, 2).towers)
    assert [line.split() for line in shown.splitlines()[-2:]] == [["0", "CPU:0", "CPU"], ["1", "CPU:0", "CPU"]]
    assert shown.startswith("<Towers 2 on CPU:0, CPU:0")


def test_inexact_parts_are_one_warning(caplog):
    """All layers are named in it, and no sentence is repeated."""

    def build():
        layers = [keras.layers.Dropout(0.1, name=f"drop_{i}") for i in range(2)]
        layers += [keras.layers.GaussianNoise(0.1, name="noise"), keras.layers.BatchNormalization(name="norm")]
        model = keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(5)])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    fit(on_towers(build, 2))
    (warning,) = [record.getMessage() for record in caplog.records if "exact=True" in record.getMessage()]
    assert all(f"{name}'" in warning for name in ("drop_0", "drop_1", "noise", "norm"))
    assert warning.count("tower") == 2 and warning.count("as under MirroredStrategy") == 1


class NoisyWeights(keras.layers.Layer):
    """A dense layer with noise on its weights."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5))
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs):
        return inputs @ (self.kernel + keras.random.normal(self.kernel.shape, seed=self.seeds))


def test_draws_that_have_no_rows_are_not_warned_of(caplog):
    """Every tower draws the same noise of the weights' shape, which one device draws."""

    def build():
        model = keras.Sequential([keras.Input((12,)), NoisyWeights()])
        model.compile("sgd", "mse")
        return model

    keras.utils.set_random_seed(1)
    alone = build()
    keras.utils.set_random_seed(1)
    parallel = on_towers(build, 2)
    for model in (alone, parallel):
        model.fit(np.ones((9, 12)), np.ones((9, 5)), batch_size=4, shuffle=False, verbose=0)
    assert "exact=True" not in caplog.text
    np.testing.assert_allclose(parallel.get_weights()[0], alone.get_weights()[0], rtol=1e-5, atol=1e-6)


def test_a_process_is_quiet_as_long_as_its_towers_are_open(caplog):
    """It warns again of what it does alone afterwards."""
    logger = logging.getLogger("ncclsync")
    speak_again = keep_quiet(Process("torchrun", 1, 2, 1, 2, None, ""))
    logger.warning("quiet")
    speak_again()
    logger.warning("heard")
    assert "quiet" not in caplog.text and "heard" in caplog.text
