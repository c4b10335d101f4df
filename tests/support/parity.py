"""Shared by the parity tests: the form of a matrix' rows, small models and data, the comparison.

A test module of the matrix holds a table `CASES` (name to `Case`) and a test that runs `check(case, towers)`
for each row; `examples/compare_parity.py` runs the same tables through other libraries.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import trainer

from ncclsync import nccl_parallel
from ncclsync.towers import exchange

TOWERS = (1, 2, 3, 4, 8)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the matrix.

    Attributes:
        build: makes the compiled model, from the same start each time it is called.
        run: trains it, or whatever the row is about; returns everything that must be equal, nested.
        tolerance: relative to the largest magnitude of each array.
        options: arguments of `nccl_parallel` beside `towers`.
    """

    build: Callable[[], keras.Model]
    run: Callable[[keras.Model], Any]
    tolerance: float = 1e-5
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def spread(cases: Mapping[str, Case], towers=(3, 2, 4, 8)) -> list:
    """Pytest parameters (name, towers): the numbers of towers in turn, so that a table meets all of them."""
    pairs = [(name, towers[i % len(towers)]) for i, name in enumerate(cases)]
    return [pytest.param(name, count, id=f"{name}-{count}") for name, count in pairs]


def check(case: Case, towers: int) -> None:
    """N towers give one device's numbers, and all towers hold the same; with given shards, to the bits of one tower."""
    model = on_towers(case.build, towers, **case.options)
    try:
        found = case.run(model)
    except tf.errors.OpError as error:
        assert_fails_by_xla(error, lambda: case.run(case.build()))
        return
    assert_close(found, on_one_device(case), case.tolerance)
    assert_towers_agree(model)
    has_shards = model.towers.layout.divided is not None
    model.towers.close()
    if has_shards and towers > 1:
        alone = on_towers(case.build, 1, **case.options)
        assert bits(case.run(alone)) == bits(found), f"{towers} towers have other bits than one"
        alone.towers.close()


def on_one_device(case: Case) -> Any:
    """What plain Keras gives; without XLA where XLA does not compile its one program, but towers' smaller ones."""
    try:
        return case.run(case.build())
    except tf.errors.OpError as error:
        if not compiles_by_xla() or "XLA" not in str(error):
            raise
        model = case.build()
        model.jit_compile = False
        return case.run(model)


def compiles_by_xla() -> bool:
    """Whether the environment lets Keras choose XLA as on GPUs."""
    return "NCCLSYNC_JIT" in os.environ


def choose_as_on_gpus(patch):
    """Let Keras have XLA compile on the CPU what it has it compile on GPUs, by default."""
    patch.setattr(trainer.Trainer, "_resolve_auto_jit_compile", trainer.model_supports_jit)


def assert_fails_by_xla(error, on_one_device):
    """What towers raise is raised on one device, too, since XLA does not compile it; else raise the error itself."""
    if not compiles_by_xla():
        raise error
    with pytest.raises(type(error)):
        on_one_device()


def bits(structure):
    """The bytes of each leaf of a nested result."""
    return [np.asarray(leaf).tobytes() for leaf in flat(structure)]


def fit(x, y=None, **options) -> Callable[[keras.Model], Any]:
    """A `run` of 20 steps: 5 epochs of 61 rows in batches of 20, the last of 1 row, unless told otherwise."""

    def run(model):
        arguments = {"batch_size": 20, "epochs": 5, "verbose": 0, "shuffle": False, **options}
        history = model.fit(x, y, **arguments).history
        return {"history": history, **state(model)}

    return run


def state(model) -> dict[str, Any]:
    """What a model and its optimizer hold."""
    optimizer = getattr(model, "optimizer", None)
    return {
        "weights": model.get_weights(),
        "optimizer": [np.asarray(v) for v in optimizer.variables] if optimizer else [],
    }


def data(rows=61, features=12, classes=5, seed=0):
    """Float inputs of shape [rows, features] and int labels of shape [rows]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, features)).astype("float32"), rng.integers(0, classes, rows)


def mlp(optimizer=None, **compile_arguments):
    """A built Sequential classifier: 12 features, 5 classes, logits."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(5)])
    compile_arguments.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    compile_arguments.setdefault("metrics", ["accuracy"])
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), **compile_arguments)
    return model


def on_towers(factory, towers, **arguments):
    """Build a factory's model on towers, with as many shards, or with such shares, as the environment says."""
    return nccl_parallel(towers=towers, **as_environment_says(towers, arguments))(factory)()


def as_environment_says(towers: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of towers, with NCCLSYNC_SHARDS=8 shards, or with NCCLSYNC_SHARES=3,1 in turn."""
    options = dict(options)
    shards = int(os.environ.get("NCCLSYNC_SHARDS", "0"))
    if shards and not options.keys() & {"shards", "shard_optimizer", "on_oom"}:
        options["shards"] = max(shards, towers)
    shares = [int(one) for one in os.environ.get("NCCLSYNC_SHARES", "").split(",") if one]
    if shares and towers > 1 and not options.keys() & {"shards", "shares", "on_oom"}:
        options["shares"] = [shares[tower % len(shares)] for tower in range(towers)]
    return options


def assert_close(actual, expected, tolerance=1e-5, what=""):
    """Compare nested results to a tolerance relative to the largest magnitude of each array."""
    names = [".".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(expected)]
    for name, one, other in zip(names, flat(actual), flat(expected), strict=True):
        name = f"{what} {name}"
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape, f"{name}: {one.shape} is not {other.shape}"
        if other.dtype.kind in "OSU":
            np.testing.assert_array_equal(one, other, err_msg=name)
            continue
        one, other = (array.astype(np.result_type(array, np.float64)) for array in (one, other))  # or complex
        scale = max(1.0, np.max(np.abs(other), initial=0.0))
        np.testing.assert_allclose(one, other, atol=tolerance * scale, rtol=tolerance, err_msg=name)


def flat(structure):
    """The leaves of a nested result, dictionaries by key."""
    return keras.tree.flatten(structure)


def assert_towers_agree(model):
    """Every tower holds what tower 0 holds, to the bit."""
    assert model.towers.divergence() == 0.0
    for tower in range(len(model.towers)):
        for one, other in zip(model.towers.get_weights(tower), model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)


def watch_exchanges(patch, called):
    """Call `called(collectives, arrays)` each time that a group of CPU towers is joined as on GPUs.

    `arrays` are what tower 0 sends.
    """
    real = exchange.group_exchange

    def watched(columns, communicator, collectives, turns=None):
        def call(*arrays):
            called(collectives, arrays)
            return arrays[0]

        (first, *others), *further = columns
        first = tf.ensure_shape(tf.numpy_function(call, [column[0] for column in columns], first.dtype), first.shape)
        return real([[first, *others], *further], communicator, collectives, turns)

    patch.setattr(exchange, "group_exchange", watched)
