"""What ncclsync refuses, each by its message: models, towers, devices, backends, batches."""

import copy
import os
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, data, mlp, on_towers

import ncclsync
from ncclsync import Health, LargeBatch, NcclSyncError, NcclUnavailableError, Towers, nccl_parallel, verify
from ncclsync.communicator import shared
from ncclsync.communicator.processes import Process
from ncclsync.compat import host_gpus
from ncclsync.towers import placement
from ncclsync.towers.placement import choose_devices

X, Y = data()
HAS_GPU = bool(tf.config.list_physical_devices("GPU"))


def plain_model():
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])


@pytest.mark.parametrize(
    "returned, named",
    [
        (None, "NoneType. End it with `return model`$"),
        (keras.layers.Dense(1), "Dense. End it with"),
        ((plain_model(), 1), "tuple. End it with `return model`, the model alone$"),
        ([plain_model(), plain_model()], "list. Of several models, as a GAN's"),
        ("model", "str. End it with"),
        ({"loss": 0.5}, "dict. Decorate the function that makes the model, not its train_step"),
        (keras.callbacks.History(), "History. Decorate the function that makes"),
    ],
    ids=["None", "layer", "tuple", "several", "str", "logs", "history"],
)
def test_factory_must_return_a_model(returned, named):
    """A factory that returns no keras.Model is told what it returned, and the remedy of this mistake alone."""
    with pytest.raises(
        TypeError, match=rf"Expected the factory to return a keras.Model, .*. Received: .* of type {named}"
    ):
        nccl_parallel(towers=2)(lambda: returned)()


def test_decorated_must_be_callable():
    """`nccl_parallel(model)` instead of `nccl_parallel(factory)` is told so."""
    with pytest.raises(TypeError, match=r"Expected a function that returns a keras.Model. Received: 3.*\(towers=3\)"):
        nccl_parallel(3)
    with pytest.raises(TypeError, match=r"Write nccl_parallel\(devices=\['GPU:0'\]\)"):
        nccl_parallel("GPU:0")
    with pytest.raises(TypeError, match="Decorate a function that makes a model of the class"):
        nccl_parallel(keras.Sequential)
    with pytest.raises(TypeError, match="It is decorated already"):
        nccl_parallel(nccl_parallel(plain_model))


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: nccl_parallel(towers=2).__enter__(), r"Received: a `with`. Write model = nccl_parallel\(...\)"),
        (lambda: verify(plain_model, X, Y), r"write verify\(build_model, \(x, y\)\). Received: ndarray .* as a third"),
        (lambda: verify(plain_model, X, Y, towers=2), r"'towers'\. Write verify\(build_model, \(x, y\), towers=4\)"),
        (lambda: verify(plain_model), r"'data'. Write verify\(build_model, \(x, y\), towers=4\)"),
        (lambda: verify(plain_model, (X, Y), gpus=2), r"^verify\(\) got .* 'gpus'. Write towers=2"),
        (lambda: verify(plain_model, (X, Y), batchsize=3), r"^verify\(\) got .* 'batchsize'. Write batch_size=3"),
        (lambda: verify(plain_model, (X, Y), devices=2), "Expected devices to be a list"),
        (lambda: nccl_parallel(plain_model, 4), r"Write nccl_parallel\(towers=4\)\(build_model\)$"),
        (lambda: Health(1000), r"Received: Health\(1000\). Write each with its name, as in Health\(check_every=1000\)"),
        (lambda: Towers(2, "cpu"), r"Write Towers\(4, backend='cpu'\)"),
        (lambda: Towers.explain(None, batch_size=64), r"'batch_size'. Write explain\(64\), with a batch size"),
        (lambda: Towers.run(None, max, X, Y), r"Write run\(step, \(x, y\)\)"),
        (
            lambda: Towers.broadcast(None, root=0),
            r"^Towers.broadcast\(\) got .* 'root'. Write towers.broadcast\(\): it",
        ),
        (lambda: ncclsync.LargeBatch(reference_batchsize=32), r"^LargeBatch\(\) got .* Write reference_batch_size=32$"),
        (lambda: nccl_parallel(plain_model).fit(X, Y), r"Call that first: model = build_model\(\); model.fit\(...\)"),
    ],
)
def test_arguments_that_are_not_taken(call, told):
    """Say what to write."""
    with pytest.raises(TypeError, match=told):
        call()


def test_values_of_options_that_are_near():
    """Say what to write."""
    with pytest.raises(ValueError, match=r"Received: 'a/last.ckpt'. Write emergency_checkpoint='a/last.weights.h5'$"):
        Health(emergency_checkpoint="a/last.ckpt")
    with pytest.raises(ValueError, match=r"Received: shares=\[3, 1, 1\]. Write shares=\[3, 1\], or towers=3$"):
        nccl_parallel(towers=2, shares=[3, 1, 1])(plain_model)()


def test_a_factory_is_no_function_of_tensorflows():
    """Above the decorator and below it; neither opens towers."""
    with pytest.raises(NcclSyncError, match=r"outside any tf\.function.* Leave out @tf\.function above @nccl_parallel"):
        tf.function(nccl_parallel(towers=2)(plain_model))()
    with pytest.raises(TypeError, match=r"Expected a function that returns a keras\.Model.* Leave out @tf\.function"):
        nccl_parallel(towers=2)(tf.function(plain_model))


def test_a_method_that_runs_steps_is_no_step():
    """As `strategy.run` takes no `fit`, either."""
    with Towers(2) as towers, pytest.raises(TypeError, match=r"model.fit, which runs steps itself. Write model.fit"):
        towers.run(plain_model().fit, X)


@pytest.mark.parametrize("home", [ncclsync, Towers.__new__(Towers)], ids=["module", "towers"])
@pytest.mark.parametrize("name", ["rank", "size", "scope", "DistributedOptimizer", "num_replicas_in_sync"])
def test_names_of_other_libraries(home, name):
    """Say what stands for them; other names say nothing more, and `hasattr` holds."""
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'. In its place .* See examples/coming_from.md"):
        getattr(home, name)
    with pytest.raises(AttributeError, match=r"'init'. Delete it: one process drives all GPUs. See"):
        _ = home.init
    assert not hasattr(home, name) and name not in dir(home)
    with pytest.raises(AttributeError, match=r"no attribute 'sizzle'$"):
        _ = home.sizzle


def copied(model, how, folder):
    """A model that comes from another by way of Keras."""
    if how in ("clone", "configuration"):
        configured = type(model).from_config
        clone = keras.models.clone_model(model) if how == "clone" else configured(model.get_config())
        clone.compile("sgd", "mse")
        return clone
    if how == "file":
        model.save(folder / "m.keras")
        return keras.models.load_model(folder / "m.keras")
    return copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("how", ["clone", "configuration", "file", "deepcopy", "pickle"])
def test_a_copy_that_trains_on_one_device_says_so(how, tmp_path, caplog):
    """Once, and not where it only predicts, nor on towers."""
    x, y = np.ones((8, 12), "float32"), np.ones((8, 5), "float32")
    model = plain_model()
    model.compile("sgd", "mse")
    nccl_parallel(towers=2)(lambda: model)()
    copy_of_it = copied(model, how, tmp_path)
    copy_of_it.predict(x, verbose=0)
    again = nccl_parallel(towers=2)(lambda: copied(model, how, tmp_path))()
    again.fit(x, y, verbose=0)
    assert "trains on one device" not in caplog.text
    for _ in range(2):
        copy_of_it.fit(x, y, verbose=0)
    assert caplog.text.count("trains on one device") == 1


def own_loop(model, optimizer, updates=3):
    """Train by hand, outside of any step."""
    for _ in range(updates):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(np.ones((8, 12), "float32")) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def around(part, trainable=True):
    """A plain model that contains another one."""
    part.trainable = trainable
    model = keras.Sequential([keras.Input((12,)), part, keras.layers.Dense(5)])
    model.compile("sgd", "mse")
    return model


def compiled():
    model = plain_model()
    model.compile("sgd", "mse")
    return model


ON_ONES = np.ones((8, 12), "float32"), np.ones((8, 5), "float32")


def in_a_with(train):
    with Towers(2):
        train(compiled())


ON_ONE_DEVICE = {
    "own loop": (lambda m: own_loop(m, m.optimizer), r"test_errors.py:\d+ .*model.towers.run\(step, batch\)"),
    "own optimizer": (lambda m: own_loop(m, keras.optimizers.SGD()), r"model.towers.run\(step, batch\)"),
    "traced": (lambda m: tf.function(own_loop)(m, m.optimizer, 1), r"model.towers.run\(step, batch\)"),
    "nested": (lambda m: around(m).fit(*ON_ONES, verbose=0), "contains .*Decorate the function .*__wrapped__"),
    "frozen": (lambda m: around(m, trainable=False).train_on_batch(*ON_ONES), "contains .*Decorate the function"),
    "nested, own loop": (lambda m: own_loop(around(m), keras.optimizers.SGD()), "needs a decorated factory"),
    "with, fit": (lambda m: in_a_with(lambda other: other.fit(*ON_ONES, verbose=0)), "`with Towers.*decorate the"),
    "with, own loop": (lambda m: in_a_with(lambda other: own_loop(other, other.optimizer)), "within `with Towers"),
}


@pytest.mark.parametrize("name", ON_ONE_DEVICE)
def test_training_beside_towers_is_told(name, caplog):
    """Once, however it is done."""
    train, told = ON_ONE_DEVICE[name]
    model = nccl_parallel(towers=2)(compiled)()
    if name == "traced":
        model.optimizer.build(model.trainable_variables)
    train(model)
    (warning,) = [text for record in caplog.records if "one device" in (text := record.getMessage())]
    assert re.search(told, warning)
    model.trainable = True
    own_loop(model, keras.optimizers.SGD())
    assert caplog.text.count("on one device") == (2 if name.startswith("with") else 1)


def test_training_on_towers_is_not_told_to_be_beside_them(caplog):
    """Nor an update that creates an optimizer's state, written weights, reads, a single tower, plain models."""
    model = nccl_parallel(towers=2)(compiled)()
    own_loop(model, model.optimizer, updates=1)
    model.fit(*ON_ONES, verbose=0)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(*ON_ONES, verbose=0)
    model.predict(ON_ONES[0], verbose=0)
    model.trainable_variables[0].assign_add(model.trainable_variables[0])
    model.towers.run(lambda x: own_loop(model, model.optimizer, 1), ON_ONES[0])
    with Towers(2) as towers:
        model.train_on_batch(*ON_ONES)
        other = compiled()
        towers.run(lambda x: own_loop(other, other.optimizer, 1), ON_ONES[0])
        compiled().train_on_batch(*ON_ONES)
    compiled().train_on_batch(*ON_ONES)
    model.towers.close()
    own_loop(model, model.optimizer)
    single = nccl_parallel(towers=1)(compiled)()
    own_loop(single, single.optimizer)
    assert "one device" not in caplog.text


def test_two_decorators_are_told():
    """A factory that calls a decorated one."""
    with pytest.raises(ValueError, match="already: another decorated factory, called by this one"):
        nccl_parallel(towers=2)(lambda: nccl_parallel(plain_model)())()


def test_model_that_has_towers_already():
    """A factory that returns the same model twice would put towers on towers."""
    model = plain_model()
    build = nccl_parallel(towers=2)(lambda: model)
    first = build()
    with pytest.raises(
        ValueError,
        match=r"Expected the factory to return a new model. Received: .*<Towers 2.*an earlier call.*close\(\)",
    ):
        build()
    first.towers.close()
    assert len(build().towers) == 2


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("towers", [1, 3])
def test_model_whose_towers_were_closed(towers):
    """It trains on new towers as on one device; building that fails leaves it its own methods."""
    alone, model = mlp(), mlp()
    twice = [alone, nccl_parallel(towers=2)(lambda: model)()]
    for each in twice:
        each.fit(X, Y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    model.towers.close()
    model.other = keras.optimizers.SGD()
    with pytest.raises(ValueError, match="compiled with one optimizer, and no other"):
        nccl_parallel(towers=2, recipe=LargeBatch())(lambda: model)()
    assert model.towers.closed
    assert not {"fit", "train_on_batch", "make_train_function"} & vars(model).keys()
    del model.other
    nccl_parallel(towers=towers)(lambda: model)()
    for each in twice:
        each.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(alone.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(alone.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_ends_with_the_towers_of_a_model():
    """A recipe does not stay for new towers; a method that the user has replaced does."""
    recipe = LargeBatch(reference_batch_size=1, warmup_epochs=0)
    model = nccl_parallel(towers=2, recipe=recipe)(lambda: mlp(keras.optimizers.SGD(0.01)))()
    model.fit(X, Y, batch_size=16, verbose=0)
    model.towers.close()
    fit, printed = model.fit, []
    model.fit = lambda *args, **kwargs: printed.append("mine") or fit(*args, **kwargs)
    alone = mlp(keras.optimizers.SGD(0.01))
    alone.set_weights(model.get_weights())
    nccl_parallel(towers=2)(lambda: model)()
    for each in (model, alone):
        each.train_on_batch(X, Y)
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    model.fit(X, Y, batch_size=16, verbose=0)
    assert printed == ["mine"]


def test_error_of_the_factory_surfaces_unchanged():
    """What the factory raises is what its caller sees."""

    def factory():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        nccl_parallel(towers=2)(factory)()


ON_NUMPY = """
import importlib.abc, importlib.machinery, sys, unittest.mock

class Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    # Keras' numpy backend borrows a few functions from JAX, which is not needed for this.
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "jax":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return unittest.mock.MagicMock(__spec__=spec, __name__=spec.name, __path__=[])
    def exec_module(self, module):
        pass

sys.meta_path.append(Stub())
from ncclsync import nccl_parallel
nccl_parallel(lambda: None)
"""


@pytest.mark.slow
def test_keras_on_another_backend():
    """The error names the backend found and the way to change it. Not an error of an import on the way."""
    done = subprocess.run(
        [sys.executable, "-c", ON_NUMPY],
        env={**os.environ, "KERAS_BACKEND": "numpy", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ncclsync.errors.NcclSyncError: Expected Keras to run on the TensorFlow backend.")
    assert "Received: 'numpy'" in last and "KERAS_BACKEND=tensorflow" in last


@pytest.fixture(scope="module")
def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0"])


def test_called_under_a_strategy(strategy):
    """Two libraries that place variables cannot both do it."""
    with (
        strategy.scope(),
        pytest.raises(
            ValueError, match=r"Expected to be called outside any tf.distribute scope. Received: .*MirroredStrategy"
        ),
    ):
        nccl_parallel(towers=2)(plain_model)()


@pytest.mark.parametrize("under_scope", ["created", "compiled", "both"])
def test_model_made_under_a_strategy(strategy, under_scope):
    """A model that the factory creates or compiles under a strategy's scope belongs to that strategy."""

    def factory():
        if under_scope == "created":
            with strategy.scope():
                model = plain_model()
            model.compile("adam", "mse")
            return model
        if under_scope == "compiled":
            model = plain_model()
            with strategy.scope():
                model.compile("adam", "mse")
            return model
        with strategy.scope():
            return mlp()

    with pytest.raises(
        ValueError, match=r"Expected a model made and compiled outside tf.distribute. Received: .*MirroredStrategy"
    ):
        nccl_parallel(towers=2)(factory)()


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(towers=0), ValueError, r"Expected towers to be at least 1. Received: towers=0. Leave towers= out"),
        (dict(towers=-1), ValueError, r"Expected towers to be at least 1. Received: towers=-1"),
        (dict(towers=2.0), TypeError, r"Expected towers to be an int. Received: 2.0 of type float. Write towers=2$"),
        (dict(towers="2"), TypeError, r"Expected towers to be an int. Received: '2' of type str. Write towers=2$"),
        (dict(towers="auto"), TypeError, r"Received: 'auto' of type str. Leave towers= out to take every GPU$"),
        (dict(towers="GPU:1"), TypeError, r"To choose devices, use devices=. Write devices=\['GPU:1'\]"),
        (dict(towers=True), TypeError, r"Expected towers to be an int. Received: True of type bool. Leave"),
        (
            dict(towers=2, devices=["CPU:0"]),
            ValueError,
            r"Expected towers or devices, not both. Received: towers=2, devices=\['CPU:0'\]",
        ),
        (
            dict(devices="GPU:0"),
            TypeError,
            r"Expected devices to be a list of names .* Received: 'GPU:0'. Write devices=\['GPU:0'\]",
        ),
        (dict(devices="4"), TypeError, "write towers=4$"),
        (dict(towers=[0, 1]), TypeError, r"Write devices=\['GPU:0', 'GPU:1'\]"),
        (dict(devices="GPU:0,GPU:1"), TypeError, r"Write devices=\['GPU:0', 'GPU:1'\]"),
        (dict(devices=[]), TypeError, r"Expected devices to be a list of names .* Received: \[\]. Leave devices= out"),
        (dict(towers=257), ValueError, "Expected towers to be at most 256, more than .* Received: towers=257"),
        (dict(towers=10**6), ValueError, r"Received: towers=1000000. A batch size belongs to fit\(batch_size"),
        (dict(devices=["CPU:0"] * 10**6), ValueError, "devices to name at most 256, .* Received: 1000000"),
        (dict(bucket_bytes=0), ValueError, r"Expected bucket_bytes to be a positive int. Received: 0"),
        (
            dict(bucket_bytes=1.5),
            ValueError,
            r"Expected bucket_bytes to be a positive int. Received: 1.5. Write bucket_bytes=",
        ),
        (dict(compression="float16"), ValueError, "Received: 'float16'. Write compression='bfloat16', or leave it out"),
        (dict(on_oom="skip"), ValueError, "Received: 'skip'. Write on_oom='split'"),
        (dict(exact="yes"), ValueError, "Received: 'yes'. Write exact=True"),
        (dict(shard_optimizer="zero1"), TypeError, "Received: 'zero1'. Write shard_optimizer=True"),
        (dict(shards="2x"), TypeError, "Write a number, as in shards=8"),
        (dict(shares=[0.5, 0.5]), TypeError, r"Write whole parts, as in shares=\[3, 1\]"),
        (dict(recipe=0.1), TypeError, r"Received: 0.1. Write recipe=ncclsync.LargeBatch\(\)"),
        (dict(backend="mpi"), ValueError, r"Expected backend to be one of \('nccl', 'cpu'\) or None. Received: 'mpi'"),
        (dict(backend=np.array(["cpu"])), ValueError, r"Expected backend to be one of"),
    ],
)
def test_bad_argument(arguments, error, message):
    """A bad argument is refused where it is written: when the decorator is applied, not at the first call."""
    with pytest.raises(error, match=message):
        nccl_parallel(**arguments)


def test_bad_number_of_towers_for_a_loop():
    """The same, at once."""
    with pytest.raises(ValueError, match=r"Expected towers to be at most 256, .* Received: towers=1000000"):
        Towers(10**6)
    with pytest.raises(ValueError, match=r"Expected devices to name at most 256, .* Received: 257"):
        Towers(["CPU:0"] * 257)


METHODS = {
    "fit": lambda model: model.fit(X, Y, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
    "divergence": lambda model: model.towers.divergence(),
    "get_weights": lambda model: model.towers.get_weights(1),
    "broadcast": lambda model: model.towers.broadcast(),
    "explain": lambda model: model.towers.explain(8),
}


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
def test_within_a_function(trained):
    """Whatever runs a step or reads towers is refused there, and leaves nothing for later fits to meet."""
    model, alone = on_towers(mlp, 2), mlp()
    if trained:
        model.fit(X, Y, verbose=0)
        alone.fit(X, Y, verbose=0)
    for name, method in METHODS.items():
        with pytest.raises(NcclSyncError, match=r"Expected .* outside any tf.function. Received: a call ins"):
            tf.function(method)(model)
        if name == "predict_on_batch":
            with pytest.raises(NcclSyncError, match="fit, evaluate, predict and the _on_batch methods"):
                tf.data.Dataset.range(2).map(lambda _: METHODS["fit"](model))
    np.testing.assert_allclose(
        model.fit(X, Y, verbose=0, shuffle=False).history["loss"],
        alone.fit(X, Y, verbose=0, shuffle=False).history["loss"],
        rtol=1e-5,
    )
    assert model.towers.divergence() == 0.0 and model.towers.explain().shards
    np.testing.assert_allclose(model.predict(X, verbose=0), alone.predict(X, verbose=0), atol=1e-5)
    # What a function may do with a model is call it.
    np.testing.assert_allclose(tf.function(model)(X), alone(X), atol=1e-5)


@pytest.mark.parametrize("name", ["TPU:0", "CPU:9", "GPU:77", "cuda:0", "", 0, None])
def test_unknown_device(name):
    """The error names the device asked for and the devices that there are."""
    with pytest.raises(ValueError, match=rf"Expected each device to be one of \[.*'CPU:0'.*\]. Received: {name!r}"):
        nccl_parallel(devices=["CPU:0", name])(plain_model)()


@pytest.fixture
def two_gpus(monkeypatch):
    """A host with two GPUs, as far as asking TensorFlow for its devices tells."""
    known = [tf.config.LogicalDevice(f"/device:{name}", name.split(":")[0]) for name in ("CPU:0", "GPU:0", "GPU:1")]
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind=None: [device for device in known if kind in (None, device.device_type)],
    )


@pytest.mark.parametrize(
    "devices, told",
    [
        (["CPU:0", "CPU:1"], r"'CPU:1'. For towers on the CPU write towers=2$"),
        (["/gpu:0"], r"'/gpu:0'. TensorFlow sees no GPU: .* tells why. For towers on the CPU write towers=1$"),
        (["cuda:0"], r"'cuda:0', as PyTorch names it. TensorFlow sees no GPU"),
    ],
)
def test_devices_that_a_host_without_gpus_lacks(devices, told):
    """Name what it has."""
    with pytest.raises(ValueError, match=told):
        Towers(devices)


@pytest.mark.parametrize(
    "name, told",
    [("cuda:1", "as PyTorch names it. Write 'GPU:1'"), (1, "tensorpack.* Write 'GPU:1'"), ("GPU:2", r"\.$")],
)
def test_devices_in_the_words_of_others(two_gpus, monkeypatch, name, told):
    """Are told in TensorFlow's words."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=told):
        Towers([name])


def test_devices_as_tensorflow_lists_them():
    """Are taken: by their names."""
    with Towers(tf.config.list_logical_devices("CPU") * 2) as towers:
        assert towers.devices == ("CPU:0", "CPU:0")


@pytest.mark.parametrize("value", [None, "1,0"])
def test_more_towers_than_gpus(two_gpus, monkeypatch, value):
    """On a GPU host a tower is a GPU: three on two GPUs are refused, not put on CPUs; what hides more is named."""
    monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES", raising=False)
    hides = ""
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        hides = f"CUDA_VISIBLE_DEVICES='{value}' hides all others. "
    expected = f"Expected at most as many towers as there are GPUs, 2. Received: towers=3. {hides}They are the GPUs"
    with pytest.raises(ValueError, match=re.escape(expected)):
        nccl_parallel(towers=3)(plain_model)()


@pytest.mark.skipif(HAS_GPU, reason="needs a host without a GPU")
@pytest.mark.parametrize(
    ("value", "changes", "cause"),
    [
        ("all", {}, "CUDA_VISIBLE_DEVICES='all' names none that CUDA knows"),
        ("none", {}, "CUDA_VISIBLE_DEVICES='none' names none"),
        (" 1, 2", {}, "CUDA_VISIBLE_DEVICES=' 1, 2' names none"),
        ("2", {}, "CUDA_VISIBLE_DEVICES='2' names none"),
        ("GPU-4", {}, "CUDA_VISIBLE_DEVICES='GPU-4' names none"),
        ("GPU-3b", {}, "it does not find its CUDA libraries, .*: pip install .*\\[cuda\\]"),
        (None, {}, "it does not find its CUDA libraries"),
        (None, {"kernel_driver": None}, "no driver is loaded, .* --gpus all"),
        (None, {"cuda": False}, "it was built without CUDA: pip install"),
        ("", {}, None),
        ("-1", {}, None),
        ("all", {"count_gpus": 0}, None),
        (None, {"count_gpus": 0}, None),
    ],
)
def test_a_fall_back_to_the_cpu_is_a_warning(monkeypatch, caplog, value, changes, cause):
    """Where the host has GPUs that nobody hides for good: with the cause, and with `doctor`, which tells more."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    facts = {"count_gpus": 2, "kernel_driver": "570.1", "read_uuids": ["GPU-3a", "GPU-3b"], "cuda": True, **changes}
    build = {"is_cuda_build": facts.pop("cuda")}
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
    for name, fact in facts.items():
        monkeypatch.setattr(placement.host_gpus, name, lambda fact=fact: fact)
    for towers in (None, 2):
        caplog.clear()
        assert set(choose_devices(towers, None, None).devices) == {"CPU:0"}
        warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        if cause is None:
            assert warnings == []
            continue
        (warning,) = warnings
        assert re.match(f"TensorFlow sees none of the 2 NVIDIA GPU\\(s\\) of this host: {cause}", warning)
        assert "`python -m ncclsync doctor` tells more" in warning


def test_uuids_of_the_kernel(tmp_path):
    """As the driver writes them; none where it is not loaded."""
    for name, uuid in (("0000:3b:00.0", "GPU-aa-1"), ("0000:0a:00.0", "GPU-bb-2"), ("0000:5e:00.0", "unknown")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "information").write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t {uuid}\nBus Type: PCIe\n")
    assert host_gpus.read_uuids(tmp_path) == ["GPU-bb-2", "GPU-aa-1"]
    assert host_gpus.read_uuids(tmp_path / "none") == []


@pytest.mark.parametrize("again", ["GPU:1", "/GPU:1", "gpu:1", "/device:GPU:1"])
def test_same_gpu_twice(two_gpus, again):
    """Two ranks of NCCL cannot share a GPU, however its name is spelt."""
    with pytest.raises(ValueError, match=r"Expected every GPU once. Received: devices=\['GPU:1', "):
        nccl_parallel(devices=["GPU:1", again])(plain_model)()


def test_nccl_on_cpu_devices(two_gpus):
    """`backend="nccl"` does not go with devices that NCCL cannot join."""
    with pytest.raises(
        ValueError, match=r"Expected only GPU devices for backend='nccl'. Received: .*\['GPU:0', 'CPU:0'\]"
    ):
        nccl_parallel(devices=["GPU:0", "CPU:0"], backend="nccl")(plain_model)()


def test_choice_follows_the_devices(two_gpus):
    """Defaults: every GPU, joined by NCCL; named devices in their order; the CPU's backend for a mixture."""
    assert choose_devices(None, None, None).devices == ("GPU:0", "GPU:1")
    assert choose_devices(None, None, None).backend == "nccl"
    assert choose_devices(1, None, "cpu").backend == "cpu"
    assert choose_devices(None, ["GPU:1", "GPU:0"], None).devices == ("GPU:1", "GPU:0")
    assert choose_devices(None, ["GPU:1", "CPU:0"], None).backend == "cpu"


def of_slurm(rank, size):
    """A process as Slurm starts it, which does not say how many there are on the host."""
    return Process("Slurm", rank, size, rank, None, None, "")


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        # As `srun` shows them: the same to all, in whatever order; or by --gpus-per-task GPUs of its own to each.
        (["uv", "uv"], [["GPU:0"], ["GPU:1"]]),
        (["uv", "vu"], [["GPU:0"], ["GPU:0"]]),
        (["uv", "wx"], [["GPU:0", "GPU:1"]] * 2),
        (["wx", "uv", "uv"], [["GPU:0", "GPU:1"], ["GPU:0"], ["GPU:1"]]),
        (["", ""], [["GPU:0"], ["GPU:1"]]),  # unknown: by the launcher's numbers
        (["uv", "vw"], "process 0 sees u, v; process 1 sees v, w. Set CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_of_each_process_of_a_host(two_gpus, each, expected):
    """What each sees says whether they share their host's GPUs: all that are a process' own, else its part."""
    seen = [[*uuids] for uuids in each]
    for rank in range(len(each)):
        given = None, None, None, of_slurm(rank, len(each)), seen
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=re.escape(expected)):
                choose_devices(*given)
        else:
            assert list(choose_devices(*given).devices) == expected[rank]


def test_more_processes_than_gpus_of_a_host(two_gpus):
    """Of three that see the same two GPUs, the third has none."""
    seen = [["u", "v"]] * 3
    with pytest.raises(ValueError, match=r"Expected a GPU for each tower of each process.*process 2 on this host"):
        choose_devices(None, None, None, of_slurm(2, 3), seen)


def joined_with(monkeypatch, choice):
    """What NCCL is given to join GPUs."""

    def joined(_, ordinals, **options):
        return SimpleNamespace(ordinals=ordinals, **options)

    monkeypatch.setattr(shared, "share", joined)
    return placement.connect(choice, None, timeout_s=None, preflight=False)


def test_logical_gpus_are_those_of_cuda(monkeypatch):
    """NCCL counts CUDA's devices, TensorFlow the logical ones that it made of those it was told to see."""
    visible = tf.config.get_visible_devices
    with monkeypatch.context() as real:
        real.setattr(tf.config, "get_visible_devices", lambda kind: visible("CPU"))
        assert placement._physical_gpus() == visible("CPU") * len(tf.config.list_logical_devices("CPU"))
    logical = tf.config.LogicalDeviceConfiguration(memory_limit=1024)
    seen = {
        tf.config.PhysicalDevice(f"/physical_device:GPU:{ordinal}", "GPU"): configuration
        for ordinal, configuration in {1: None, 3: [logical, logical], 10: [logical]}.items()
    }
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: list(seen))
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", seen.get)
    choice = placement.Choice(("GPU:3", "GPU:2", "GPU:0", "GPU:1"), "nccl", "")
    assert joined_with(monkeypatch, choice).ordinals == [10, 3, 1, 3]
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"device_name": gpu.name[-2:]})
    assert placement.device_models(["GPU:3", "GPU:0", "CPU:0"]) == ["10", ":1", "CPU"]


@pytest.mark.parametrize("on", [False, True])
def test_sums_are_repeatable_where_ops_are_deterministic(monkeypatch, on):
    """NCCL's communicator is made for it."""
    monkeypatch.setattr(placement.tf_compat, "is_op_determinism_enabled", lambda: on)
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{ordinal}", "GPU") for ordinal in (0, 1)]
    monkeypatch.setattr(placement, "_physical_gpus", lambda: gpus)
    assert joined_with(monkeypatch, placement.Choice(("GPU:0", "GPU:1"), "nccl", "")).repeatable is on


@pytest.mark.skipif(HAS_GPU, reason="needs a host without a GPU")
def test_nccl_without_gpu():
    """`backend="nccl"` insists, so that a host without a GPU is an error."""
    with pytest.raises(NcclUnavailableError) as caught:
        nccl_parallel(towers=2, backend="nccl")(plain_model)()
    assert isinstance(caught.value, NcclSyncError)
    text = str(caught.value)
    assert text.startswith("Expected a GPU for backend='nccl'. Received: none") and "Leave backend= out" in text
    assert "Expected the NVIDIA driver's libcuda. Received: " in str(caught.value.__cause__)
    with pytest.raises(NcclUnavailableError, match="Expected a GPU for backend='nccl'"):  # though one tower needs none
        nccl_parallel(backend="nccl")(plain_model)()


def uneven(static):
    """Batches of a dictionary whose "right" has one row less than "left"."""
    rows = (20, 19) if static else (None, None)
    signature = (
        {name: tf.TensorSpec([n, 12]) for name, n in zip(("left", "right"), rows, strict=True)},
        tf.TensorSpec([20 if static else None, 1]),
    )
    batch = {"left": X[:20], "right": X[:19]}, X[:20, :1]
    return tf.data.Dataset.from_generator(lambda: iter([batch]), output_signature=signature)


class Join(keras.Model):
    """Two inputs that never meet in one op: nothing but the shards' lengths can tell that they differ."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs["left"]) + tf.reduce_mean(self.dense(inputs["right"]))


def join():
    keras.utils.set_random_seed(1)
    model = Join()
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("static", [True, False])
def test_inputs_of_different_length(static):
    """Each is divided by its own number of rows, which the trace or only the data tell: as on one device."""
    found = []
    for model in (join(), on_towers(join, 4)):
        model.fit(uneven(static=static), verbose=0)
        loss = float(model.train_on_batch({"left": X[:20], "right": X[:19]}, X[:20, :1]))
        found.append([loss, *model.get_weights()])
    assert model.towers.divergence() == 0.0
    assert_close(found[1], found[0])


def test_inputs_of_different_length_that_are_refused():
    """Sparse ones: a ValueError with the shapes, and what to give instead; and a model that stays usable."""
    model = on_towers(join, 4)
    words = r"the same number of rows. Received: \(20, 12\) of \[0\]\['left'\], \(19, 12\) of .* \(20, 1\) of \[1\]. .*"
    words += r"roles.*\(samples, 2, ...\) for \(2, samples, ...\).*merged.* as tf.RaggedTensor"
    for call in (model.train_on_batch, model.test_on_batch):
        with pytest.raises(ValueError, match=words):
            call({"left": X[:20], "right": tf.sparse.from_dense(X[:19])}, X[:20, :1])
    loss = model.train_on_batch({"left": X[:20], "right": X[:20]}, X[:20, :1])
    assert np.isfinite(loss) and model.towers.divergence() == 0.0


@pytest.mark.parametrize(
    ("y", "error", "words"),
    [
        (None, ValueError, "None values not supported"),
        (X[:2, :3], tf.errors.InvalidArgumentError, r"Incompatible shapes: \[2,3\] vs. \[20,3\]"),
        (X[:20, 0], NcclSyncError, r"at the loss mse \(or shapes do not fit there, as labels \[rows\] beside outputs "),
    ],
    ids=["none", "too few", "of no width"],
)
def test_targets_that_do_not_fit(y, error, words):
    """Plain Keras' own error, with its lines, where a step has one; else what might be meant."""

    def build():
        model = keras.Sequential([keras.Input([12]), keras.layers.Dense(3)])
        model.compile("sgd", "mse", metrics=["accuracy"] if y is None else [])
        return model

    model = on_towers(build, 2)
    given = (X[:20],) if y is None else (X[:20], y)
    with pytest.raises(error, match=words):
        model.fit((one for one in [given]), verbose=0)
    model.fit(X[:20], X[:20, :3], verbose=0)
    assert model.towers.divergence() == 0.0


def test_a_step_without_a_result():
    """A forgotten `return` is told before anything has changed."""

    class Forgetful(keras.Sequential):
        def train_step(self, data):
            super().train_step(data)

    def build():
        model = Forgetful([keras.Input([12]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    model = on_towers(build, 2)
    before = model.get_weights()
    for call in (model.fit, model.train_on_batch):
        with pytest.raises(TypeError, match=r"Expected train_step to return .* lack a return"):
            call(X[:20], X[:20, :1])
    assert_close(model.get_weights(), before, 0)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("towers", [2, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_roles_on_an_axis(axis, towers):
    """A step that takes anchors and positives off an axis trains as one device does; off the first one
    too."""

    class Pairs(keras.Sequential):
        def __init__(self, axis):
            super().__init__([keras.Input((12,)), keras.layers.Dense(5)])
            self.axis = axis

        def train_step(self, batch):
            (x,) = batch
            with tf.GradientTape() as tape:
                one, other = (self(tf.gather(x, role, axis=self.axis), training=True) for role in (0, 1))
                loss = tf.reduce_mean((one - other) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def factory(axis):
        model = Pairs(axis)
        model.compile("sgd")
        return model

    pairs = np.stack([X[:20], X[20:40]], axis=axis)
    model, alone = on_towers(lambda: factory(axis), towers), factory(axis)
    alone.set_weights(model.get_weights())
    for one in (model, alone):
        one.fit(tf.data.Dataset.from_tensors((pairs,)), epochs=2, verbose=0)
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_closed_towers():
    """Training through closed towers is an error that says what to do; the model still predicts by itself."""
    model = on_towers(mlp, 2)
    with model.towers:
        pass
    words = r"Expected open towers. Received: towers that were closed.*nccl_parallel\(towers=2\)\(lambda: model\)\(\)"
    with pytest.raises(NcclSyncError, match=words):
        model.train_on_batch(X, Y)
    assert model(X[:3]).shape == (3, 5)
    kept, model = model.get_weights(), nccl_parallel(lambda: model)()
    np.testing.assert_array_equal(model.get_weights()[0], kept[0])
    model.train_on_batch(X, Y)


def test_a_factory_that_trains(caplog):
    """Its training is one device's, and a warning says so; without a model the error says what to return."""

    def main():
        model = mlp()
        model.fit(X, Y, batch_size=20, verbose=0)
        return model

    model = on_towers(main, 2)
    assert [one.getMessage() for one in caplog.records if "within the decorated factory" in one.getMessage()]
    caplog.clear()
    model.fit(X, Y, batch_size=20, verbose=0)
    on_towers(mlp, 2)
    assert "within the decorated factory" not in caplog.text
    with pytest.raises(TypeError, match=r"Received: None of type NoneType. End it with `return model`"):
        on_towers(lambda: None, 2)


@pytest.mark.slow
def test_check_numerics_finds_the_users_nan_alone():
    """Not memory that was never initialised, where copies of weights are made; its message names the user's op."""

    def build():
        model = keras.Sequential([keras.layers.Dense(64)])
        model.compile("sgd", lambda y, found: keras.ops.mean(keras.ops.log(y)) + keras.ops.mean(found**2))
        return model

    x, y = np.ones((6, 64), "float32"), np.ones((6, 1), "float32")
    model = nccl_parallel(towers=2)(build)()
    tf.debugging.enable_check_numerics()
    try:
        model.fit(x, y, verbose=0)
        for size in (1, 64, 4096):  # of the weights
            kept = [np.full(size, np.nan, "float32") for _ in range(100)]
            del kept  # memory that the copies get
            model.towers.broadcast()
        with pytest.raises(tf.errors.InvalidArgumentError, match=r'Detected Infinity or NaN in output 0.*"Log"'):
            model.fit(x, -y, verbose=0)
    finally:
        tf.debugging.disable_check_numerics()
    assert model.towers.divergence() == 0.0
