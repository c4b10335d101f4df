"""N towers train like one device: every optimizer, its options, learning rate schedules, loss scaling."""

import functools

import keras
import numpy as np
import parity
import pytest
from keras import optimizers
from keras.optimizers import schedules
from parity import Case, check, data, mlp, on_towers, spread, state

# 19 rows are shared evenly by no number of towers, and the last of 4 batches has 1 row.
X, Y = data(58)
fit = functools.partial(parity.fit, batch_size=19)
IDS = np.random.default_rng(3).integers(0, 20, (len(X), 7))
TRAIN = fit(X, Y)  # 20 steps, every fourth of a single row


class Falling(schedules.LearningRateSchedule):
    """A user's own schedule."""

    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))


def excluding_biases(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def adam_for_biases():
    return optimizers.OptimizerMap(optimizers.SGD(0.1), {".*/bias": optimizers.Adam(0.01)})


def by_rank():
    matrices, vectors = optimizers.SGD(0.05, momentum=0.9), optimizers.RMSprop(0.01)
    return lambda variable: matrices if len(variable.shape) == 2 else vectors


# Rounding is about 1e-7 of a gradient. Steps that depend on a gradient's sign (Lion, the first ones of Adam
# and its kin) turn it into a difference only where a gradient is as small as that; in these data none is.
OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.1),
    "SGD-momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "SGD-nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda: optimizers.RMSprop(0.01),
    "RMSprop-momentum": lambda: optimizers.RMSprop(0.01, momentum=0.5),
    "RMSprop-centered": lambda: optimizers.RMSprop(0.01, centered=True, epsilon=1e-3),  # g² - mean(g)² cancels
    "Adam": lambda: optimizers.Adam(0.01),
    "Adam-amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "AdamW-amsgrad": lambda: optimizers.AdamW(0.01, amsgrad=True),
    "AdamW-excluding": lambda: excluding_biases(optimizers.AdamW(0.01, weight_decay=0.1)),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Adafactor-absolute_step": lambda: optimizers.Adafactor(0.01, relative_step=False),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Ftrl-regularised": lambda: optimizers.Ftrl(
        0.1,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.01,
        l2_shrinkage_regularization_strength=0.1,
        beta=0.1,
    ),
    "Lion": lambda: optimizers.Lion(0.003),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Muon": lambda: optimizers.Muon(0.01),
    "Muon-all_adam": lambda: optimizers.Muon(0.01, exclude_layers=["dense"]),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.01),
    "ScheduleFreeAdamW-warmup": lambda: optimizers.ScheduleFreeAdamW(0.01, warmup_steps=5, weight_decay=0.1),
    "MultiOptimizer": lambda: optimizers.MultiOptimizer(adam_for_biases()),
    "MultiOptimizer-callable": lambda: optimizers.MultiOptimizer(by_rank()),
    "MultiOptimizer-loss_scale_factor": lambda: optimizers.MultiOptimizer(adam_for_biases(), loss_scale_factor=8.0),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
    "LossScaleOptimizer-grows": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=3
    ),
    "clipnorm": lambda: optimizers.SGD(0.5, clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.5, clipvalue=0.02),
    "global_clipnorm": lambda: optimizers.SGD(0.5, global_clipnorm=0.1),
    "clipnorm-Adam": lambda: optimizers.Adam(0.01, clipnorm=0.1),
    "weight_decay": lambda: optimizers.SGD(0.1, weight_decay=0.1),
    "loss_scale_factor": lambda: optimizers.SGD(0.1, loss_scale_factor=1024.0),
    "loss_scale_factor-clipnorm": lambda: optimizers.SGD(0.1, loss_scale_factor=1024.0, global_clipnorm=0.1),
    "ema": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8),
    "ema-overwriting": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    # An epoch has 4 steps, the run 20: updates cross epochs (3, 5), and the run ends between updates (3, 7).
    "accumulation-2": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "accumulation-3": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "accumulation-5": lambda: optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=5),
    "accumulation-7": lambda: optimizers.RMSprop(0.01, gradient_accumulation_steps=7),
    "accumulation-clipnorm": lambda: optimizers.SGD(0.5, gradient_accumulation_steps=3, clipnorm=0.1),
    "accumulation-global_clipnorm": lambda: optimizers.SGD(0.5, gradient_accumulation_steps=2, global_clipnorm=0.1),
    "accumulation-clipvalue": lambda: optimizers.SGD(0.5, gradient_accumulation_steps=2, clipvalue=0.02),
    "accumulation-weight_decay": lambda: optimizers.AdamW(0.01, gradient_accumulation_steps=3, weight_decay=0.1),
    "accumulation-ema": lambda: optimizers.SGD(
        0.1, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
    "accumulation-loss_scale_factor": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2, loss_scale_factor=8.0),
    "accumulation-LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01, gradient_accumulation_steps=3), dynamic_growth_steps=4
    ),
    "accumulation-schedule": lambda: optimizers.SGD(Falling(), gradient_accumulation_steps=2),
    "CosineDecay": lambda: optimizers.SGD(schedules.CosineDecay(0.1, 15, warmup_target=0.2, warmup_steps=3)),
    "CosineDecayRestarts": lambda: optimizers.SGD(schedules.CosineDecayRestarts(0.1, 5)),
    "ExponentialDecay": lambda: optimizers.SGD(schedules.ExponentialDecay(0.1, 4, 0.5, staircase=True)),
    "InverseTimeDecay": lambda: optimizers.SGD(schedules.InverseTimeDecay(0.1, 4, 0.5)),
    "PiecewiseConstantDecay": lambda: optimizers.SGD(schedules.PiecewiseConstantDecay([3, 9], [0.1, 0.05, 0.2])),
    "PolynomialDecay": lambda: optimizers.SGD(schedules.PolynomialDecay(0.1, 7, 0.01, power=2.0, cycle=True)),
    "LearningRateSchedule": lambda: optimizers.SGD(Falling()),
    "learning_rate_callable": lambda: optimizers.SGD(lambda: keras.ops.convert_to_tensor(0.1)),
}


def compiled(name, **compile_arguments):
    """A builder of an MLP with this optimizer, which the first step builds.

    What `build` of ScheduleFreeAdamW assigns is lost there, on one device as on towers: it starts from other averages.
    """
    return lambda: mlp(OPTIMIZERS[name](), **compile_arguments)


def embedding(optimizer):
    """A builder of a model with sparse gradients."""

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((7,), dtype="int32"),
                keras.layers.Embedding(20, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(5),
            ]
        )
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return build


def in_batches_of(*sizes):
    """A `run` of `train_on_batch` on batches of these sizes."""

    def run(model):
        ends = np.cumsum(sizes)
        logs = [model.train_on_batch(X[rows], Y[rows]) for rows in map(slice, ends - sizes, ends)]
        return [logs, state(model)]

    return run


def frozen_meanwhile(model):
    """A `run` in which the last layer is frozen when the optimizer updates: that loses what its gradients were."""
    logs = []
    for trainable, steps in ((True, 2), (False, 1), (True, 3)):
        model.layers[-1].trainable = trainable
        model.compile(model.optimizer, model.loss)
        logs += [model.train_on_batch(X[i : i + 8], Y[i : i + 8]) for i in range(steps)]
    return [logs, state(model)]


def overflowing():
    return mlp(optimizers.LossScaleOptimizer(optimizers.Adam(0.01), 2.0**60, dynamic_growth_steps=2))


# Rows of two batches, of one tower each: gradients of about 1e30 times the scale of the loss are infinite.
HUGE = X.copy()
HUGE[[15, 21]] *= 1e30

CASES = {name: Case(compiled(name), TRAIN) for name in OPTIMIZERS}
CASES |= {
    "overflow_on_one_tower": Case(overflowing, fit(HUGE, Y)),
    "overflow_in_a_batch_of_one_row": Case(overflowing, fit(np.concatenate([X[:57], HUGE[15:16]]), Y)),
    "accumulation-train_on_batch": Case(compiled("accumulation-3"), in_batches_of(10, 1, 7, 3, 27, 2, 8)),
    "accumulation-eagerly": Case(compiled("accumulation-3", run_eagerly=True), fit(X, Y, epochs=2)),
    "accumulation-steps_per_execution": Case(compiled("accumulation-3", steps_per_execution=3), TRAIN),
    "accumulation-jit_compile": Case(compiled("accumulation-3", jit_compile=True), TRAIN),
    "accumulation-sample_weight": Case(
        compiled("accumulation-3"), fit(X, Y, sample_weight=np.linspace(0.1, 2.0, len(X)))
    ),
    "accumulation-sum": Case(
        compiled("accumulation-2", loss=keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")),
        fit(X / 10, Y),
    ),
    "accumulation-frozen_meanwhile": Case(compiled("accumulation-3"), frozen_meanwhile),
    "accumulation-sparse": Case(embedding(lambda: optimizers.SGD(0.1, gradient_accumulation_steps=3)), fit(IDS, Y)),
    "accumulation-sparse-Adam": Case(
        embedding(lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2)), fit(IDS, Y)
    ),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "towers"), spread(CASES))
def test_optimizers(name, towers):
    """Same numbers as on one device."""
    check(CASES[name], towers)


def test_overflow_skips_the_step_on_all_towers():
    """The row of the table is about what it says: steps were skipped, and nothing infinite got through."""
    model = on_towers(overflowing, 3)
    model.fit(HUGE[:40], Y[:40], batch_size=20, verbose=0, shuffle=False)
    assert int(model.optimizer.iterations.numpy()) == 0
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**58
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    model.towers.close()


def test_every_optimizer_class_is_in_the_table():
    """An optimizer that Keras adds must get a row."""
    exported = {value for value in vars(optimizers).values() if isinstance(value, type)}
    covered = {type(make()) for make in OPTIMIZERS.values()} | {optimizers.OptimizerMap}
    assert exported - {optimizers.Optimizer} <= covered


def test_every_schedule_is_in_the_table():
    """A schedule that Keras adds must get a row of its name."""
    exported = {name for name, value in vars(schedules).items() if isinstance(value, type)}
    assert exported <= set(OPTIMIZERS)
