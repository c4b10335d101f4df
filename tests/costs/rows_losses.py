"""All of Keras' losses and metrics, on outputs of two to five axes, with sample weights and masks."""

import keras
import numpy as np
from costs import fits, row
from keras import layers, losses, metrics

RNG = np.random.default_rng(1)
COUNT, CLASSES, TIME = 22, 5, 6
SHAPES = ((), (TIME,), (4, 3), (2, 4, 3))  # without rows and classes

X = [RNG.random((COUNT, *shape, 4)).astype("float32") for shape in SHAPES]
VALUES = [RNG.uniform(0.1, 1, (COUNT, *shape, CLASSES)).astype("float32") for shape in SHAPES]
LABELS = [RNG.integers(0, CLASSES, (COUNT, *shape)) for shape in SHAPES]
ONE_HOT = [np.eye(CLASSES, dtype="float32")[one] for one in LABELS]
WEIGHTS = [RNG.random((COUNT, *shape)).astype("float32") for shape in SHAPES]
TOKENS = RNG.integers(0, 9, (COUNT, TIME))


def outputs(loss, targets, activation=None, weights=None, which=slice(None), **compiled):
    """A `run`: outputs of two to five axes, each with this loss, or those of them that `which` says."""

    def build():
        inputs = [keras.Input(x.shape[1:]) for x in X[which]]
        units = 1 if targets is None else CLASSES
        model = keras.Model(inputs, [layers.Dense(units, activation=activation)(one) for one in inputs])
        model.compile("sgd", [loss()] * len(inputs), jit_compile=False, **compiled)
        return model

    y = targets[which]
    return fits(build, X[which], y, *([] if weights is None else [weights[which]]))


REGRESSIONS = "MeanSquaredError MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredLogarithmicError Huber LogCosh"
PROBABILITIES = "Poisson KLDivergence BinaryCrossentropy BinaryFocalCrossentropy Dice Tversky CosineSimilarity"
OF_CLASSES = "CategoricalCrossentropy CategoricalFocalCrossentropy CategoricalHinge CategoricalGeneralizedCrossEntropy"
MARGINS = "Hinge SquaredHinge"
ALL_LOSSES = {
    **dict.fromkeys(REGRESSIONS.split(), (VALUES, None)),
    **dict.fromkeys(PROBABILITIES.split(), (ONE_HOT, "sigmoid")),
    **dict.fromkeys(OF_CLASSES.split(), (ONE_HOT, "softmax")),
    **dict.fromkeys(MARGINS.split(), ([2 * one - 1 for one in ONE_HOT], None)),
    "SparseCategoricalCrossentropy": (LABELS, "softmax"),
}
ALL_LOSSES["CategoricalGeneralizedCrossEntropy"] = (LABELS, "softmax")
for name, (targets, activation) in ALL_LOSSES.items():
    row(name, outputs(getattr(losses, name), targets, activation, WEIGHTS))


def sparse(**options):
    return lambda: losses.SparseCategoricalCrossentropy(from_logits=True, **options)


for reduction in ("sum", "mean", "mean_with_sample_weight"):
    row(f"SparseCategoricalCrossentropy {reduction}", outputs(sparse(reduction=reduction), LABELS, weights=WEIGHTS))
row("SparseCategoricalCrossentropy ignore_class", outputs(sparse(ignore_class=1), LABELS))
row("SparseCategoricalCrossentropy class by class", outputs(sparse(axis=-1), LABELS))
row(
    "CategoricalCrossentropy label_smoothing",
    outputs(lambda: losses.CategoricalCrossentropy(True, label_smoothing=0.1), ONE_HOT),
)
row("BinaryCrossentropy from_logits", outputs(lambda: losses.BinaryCrossentropy(True, label_smoothing=0.1), ONE_HOT))
row("Dice per class", outputs(lambda: losses.Dice(axis=(1, 2)), ONE_HOT, "sigmoid", which=slice(2, 3)))


def circle():
    def build():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.UnitNormalization()])
        model.compile("sgd", losses.Circle(), jit_compile=False)
        return model

    return fits(build, X[0], LABELS[0])


def ctc():
    def build():
        model = keras.Sequential([keras.Input((TIME, 4)), layers.Conv1D(8, 3, padding="same"), layers.Dense(CLASSES)])
        model.compile("sgd", losses.CTC(), jit_compile=False)
        return model

    return fits(build, X[1], RNG.integers(0, CLASSES, (COUNT, 3)))


def masked(loss, y, **compiled):
    """A `run`: outputs at all timesteps, of which some are masked."""

    def build():
        words = layers.Embedding(9, 4, mask_zero=True)
        model = keras.Sequential([keras.Input((TIME,), dtype="int32"), words, layers.Dense(CLASSES)])
        model.compile("sgd", loss(), jit_compile=False, **compiled)
        return model

    return fits(build, TOKENS, y, WEIGHTS[1])


row("Circle", circle(), {"MatMul": "it compares all rows of the batch with each other"})
row("CTC", ctc())
row("MeanSquaredError masked", masked(losses.MeanSquaredError, VALUES[1]))
row(
    "SparseCategoricalCrossentropy masked",
    masked(sparse(), LABELS[1], metrics=["accuracy"], weighted_metrics=["accuracy"]),
)
row(
    "CategoricalCrossentropy masked",
    masked(lambda: losses.CategoricalCrossentropy(True), ONE_HOT[1], metrics=["accuracy"]),
)


def measured(
    *made, plain_too=(), targets=ONE_HOT, activation="softmax", which=slice(None), loss=losses.CategoricalCrossentropy
):
    """A `run`: outputs with metrics, plain and weighted; those of `plain_too` take no weights of such a shape."""

    def build():
        inputs = [keras.Input(x.shape[1:]) for x in X[which]]
        model = keras.Model(inputs, [layers.Dense(CLASSES, activation=activation)(one) for one in inputs])
        plain, weighted = ([[make() for make in some] for _ in inputs] for some in ((*made, *plain_too), made))
        model.compile("sgd", [loss()] * len(inputs), metrics=plain, weighted_metrics=weighted, jit_compile=False)
        return model

    return fits(build, X[which], targets[which], WEIGHTS[which])


FLAT, SEQUENCES, PICTURES = slice(0, 1), slice(0, 2), slice(1, 3)
LOGITS = {"targets": VALUES, "activation": None, "loss": losses.MeanSquaredError}
LABELLED = {"targets": LABELS, "loss": losses.SparseCategoricalCrossentropy}
row(
    "metrics: accuracies",
    measured(metrics.CategoricalAccuracy, metrics.TopKCategoricalAccuracy, metrics.BinaryAccuracy),
)
row(
    "metrics: accuracies of labels",
    measured(metrics.SparseCategoricalAccuracy, lambda: metrics.SparseTopKCategoricalAccuracy(2), **LABELLED),
)
row("metrics: AUC", measured(lambda: metrics.AUC(20), lambda: metrics.AUC(20, curve="PR"), which=SEQUENCES))
row("metrics: AUC of labels", measured(lambda: metrics.AUC(20, multi_label=True, num_labels=CLASSES), which=FLAT))
row(
    "metrics: Precision, Recall",
    measured(metrics.Precision, metrics.Recall, lambda: metrics.Precision(top_k=2), which=SEQUENCES),
)
row(
    "metrics: TruePositives and others",
    measured(
        metrics.TruePositives, metrics.TrueNegatives, metrics.FalsePositives, metrics.FalseNegatives, which=PICTURES
    ),
)
row(
    "metrics: at thresholds",
    measured(
        lambda: metrics.PrecisionAtRecall(0.5, 20),
        lambda: metrics.RecallAtPrecision(0.5, 20),
        lambda: metrics.SensitivityAtSpecificity(0.5, 20),
        lambda: metrics.SpecificityAtSensitivity(0.5, 20),
        which=FLAT,
    ),
)
row("metrics: F1Score, FBetaScore", measured(metrics.F1Score, lambda: metrics.FBetaScore("macro", 2.0), which=FLAT))
row("metrics: R2Score", measured(metrics.R2Score, which=FLAT, **LOGITS))
row("metrics: correlations", measured(metrics.PearsonCorrelation, metrics.ConcordanceCorrelation, which=FLAT, **LOGITS))
row(
    "metrics: errors",
    measured(
        metrics.MeanSquaredError,
        metrics.RootMeanSquaredError,
        metrics.MeanAbsoluteError,
        metrics.MeanAbsolutePercentageError,
        metrics.MeanSquaredLogarithmicError,
        metrics.LogCoshError,
        metrics.CosineSimilarity,
        which=SEQUENCES,
        **LOGITS,
    ),
)
row(
    "metrics: of probabilities",
    measured(
        metrics.KLDivergence,
        metrics.Poisson,
        metrics.BinaryCrossentropy,
        metrics.CategoricalCrossentropy,
        which=PICTURES,
    ),
)
row("metrics: hinges", measured(metrics.Hinge, metrics.SquaredHinge, metrics.CategoricalHinge, which=SEQUENCES))
row(
    "metrics: MeanIoU of labels",
    measured(
        lambda: metrics.MeanIoU(CLASSES, sparse_y_pred=False),
        lambda: metrics.IoU(CLASSES, [0, 1], sparse_y_pred=False),
        which=PICTURES,
        **LABELLED,
    ),
)
row(
    "metrics: OneHotIoU, OneHotMeanIoU, BinaryIoU",
    measured(
        lambda: metrics.OneHotIoU(CLASSES, [0, 1]),
        lambda: metrics.OneHotMeanIoU(CLASSES),
        plain_too=(metrics.BinaryIoU,),
        which=PICTURES,
    ),
)
