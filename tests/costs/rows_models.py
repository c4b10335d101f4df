"""Whole models: bench's, keras.applications', keras-hub's; and the parity tables' rows and the published programs."""

import functools
import importlib
import pathlib
import sys

import harness
import keras
import numpy as np
import parity
from costs import TOWERS, fits, row
from thorough import some

from ncclsync.semantics import rules
from ncclsync.tools.bench.models import MODELS
from ncclsync.tools.bench.training import BATCH_SIZES

TESTS = pathlib.Path(__file__).parent.parent
COUNT = 8

for name, made in MODELS.items():
    row(f"bench: {name}", lambda made=made, rows=BATCH_SIZES[name]: fits(made.build, *made.data(rows))())

# One of each family, and the others.
FAMILIES = "VGG16", "ResNet50V2", "MobileNetV3Small", "DenseNet121", "EfficientNetV2B0", "ConvNeXtTiny"
OTHERS = "ResNet50", "MobileNet", "MobileNetV2", "EfficientNetB0", "NASNetMobile", "InceptionV3", "Xception"
LARGE = {"InceptionV3": 75, "Xception": 71}


def application(name):
    side = LARGE.get(name, 32)

    def build():
        model = getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3), classes=10)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
        return model

    return fits(build, np.zeros((COUNT, side, side, 3), "float32"), np.zeros(COUNT, "int32"))


for name in some(FAMILIES, FAMILIES + OTHERS):
    row(f"application: {name}", application(name))


def load(folder, pattern):
    """Import the modules of a folder of tests, as pytest does."""
    sys.path.insert(0, str(TESTS / folder))
    names = [file.stem for file in sorted((TESTS / folder).glob(pattern))]
    try:
        return [importlib.import_module(name) for name in names if name != "test_public_programs"]
    finally:
        sys.path.remove(str(TESTS / folder))


# Why ops of published programs, and of cases, need all rows, by their types.
COMPARED = dict.fromkeys(("MatMul", "AddV2", "Sub", "Equal", "Greater"), "each row is compared with all rows")
ORDERED = "it is about the order of the batch's rows"
QUEUED = "each row is put into a queue that is no batch's"
LISTED = dict.fromkeys(("Unique", "GatherV2"), "the sparse gradient lists each column that the batch has once")
DRAWN_ALIKE = "an element's number rests on its place in the batch"
FIRST = "each row meets the first one"
KEPT = {"AssignVariableOp": "every tower has all rows of the state"}
INHERENT_OF_CASES = {
    "Circle": COMPARED,
    "circle-by_name": COMPARED,
    "draw_categorical": {"StatelessMultinomial": DRAWN_ALIKE},
    "draw_categorical_samples": {"StatelessMultinomial": DRAWN_ALIKE},
    "draw_beta": {"BroadcastTo": DRAWN_ALIKE},  # of the parameters
    "draw_beta_per_sample": {"BroadcastTo": DRAWN_ALIKE},
    "draw_in_a_loop": dict.fromkeys(("StatelessWhile", "Fill"), DRAWN_ALIKE),
    "draw_samples_last_in_a_loop": dict.fromkeys(("StatelessWhile", "Fill"), DRAWN_ALIKE),
    "draw_one_row_more": dict.fromkeys(("StridedSlice", "AddV2"), FIRST),
    "draw_two_copies": dict.fromkeys(("Mul", "AddV2"), DRAWN_ALIKE),  # of the drawn numbers' mean and deviation
    "draw_keras_shuffle": {"TopKV2": ORDERED, "GatherV2": ORDERED}
    | dict.fromkeys(("Mul", "AddV2", "Neg"), DRAWN_ALIKE),  # of the drawn numbers that are sorted
    "draw_stateless_shuffle": {"StatelessShuffle": ORDERED},
    "fields": dict.fromkeys(
        rules.names("AddV2 GatherV2 Less RaggedTensorToTensor SelectV2 Slice StringSplitV2"),
        "how many words a text has is known once it is split, of all texts at once",
    ),
    "generators_and_functions": dict.fromkeys(("If", "StatelessIf"), DRAWN_ALIKE),
    "gradient_in_a_loop": {"While": "each turn trains on all rows' gradient, and nothing can meet within a loop"},
    "sparse_input": LISTED,
    **dict.fromkeys(("stateful_lstm", "stateful_lstm_unrolled", "stateful_bidirectional_gru"), KEPT),
    "stateful_rnn_of_sequences": KEPT,
    "state_that_says_the_rows": KEPT
    | dict.fromkeys(("Reshape", "AddV2", "Mul"), "its Python fixes the number of rows"),
}


def case_of_parity(case):
    return lambda: case.run(parity.on_towers(case.build, TOWERS, **case.options))


for module in load("parity", "test_parity_*.py"):
    tables = {table: cases for table, cases in vars(module).items() if isinstance(cases, dict)}
    for table, cases in tables.items():
        for name, case in cases.items():
            if isinstance(case, parity.Case) and "eager" not in name:  # such a step is not placed
                where = f"parity: {module.__name__.removeprefix('test_parity_')}/{table}/{name}"
                row(where, case_of_parity(case), INHERENT_OF_CASES.get(name))

# One device has there as many rows as the last node's number says: fewer than the batch, if its last graphs are empty.
SEGMENTED = dict.fromkeys(
    rules.names(
        """
        SegmentMean SegmentSum Sum ReluGrad MatMul Select RealDiv BroadcastGradientArgs BiasAddGrad Neg AddV2 Mul
        AddN ZerosLike GreaterEqual Exp Log1p Reciprocal
        """
    ),
    "what is computed of SegmentMean's result has as many rows as the data say",
)
OTHER_SIDE = "a row of the other side's softmax is a column of this side's, which all rows have"
BOTH_SIDES = COMPARED | dict.fromkeys(("AddN", "ArgMax", "Reshape", "SparseSoftmaxCrossEntropyWithLogits"), OTHER_SIDE)
TRIPLETS = dict.fromkeys(
    rules.names(
        """
        AddN AddV2 BroadcastGradientArgs Cast Equal Greater MatMul MatrixDiagV3 Max Min Mul Neg RealDiv Reshape SelectV2
        Sub Sum Tile Transpose
        """
    ),
    "each pair of rows is compared with all rows",
)
# How many rows are left of a batch, the data say: where these meet other rows again is open.
LEFT_OUT = dict.fromkeys(
    rules.names(
        """
        GatherV2 ResourceGather Select SparseFillEmptyRows SparseReshape SparseSegmentMean SparseSegmentMeanGrad
        StridedSlice Tile Unique Where ZerosLike
        """
    ),
    "ids below 0 are left out, and those that are left are looked up once for the whole batch",
)
CHOSEN = dict.fromkeys(
    rules.names("AddV2 Cast GatherV2 Mean RealDiv ScatterNd StridedSlice Tile"), "whose losses these are, the data say"
)
INHERENT = {
    **dict.fromkeys(("simclr", "clip_dual_encoder", "clip_with_logit_scale"), BOTH_SIDES),
    **dict.fromkeys(("nt_xent_with_masked_diagonal", "supcon", "metric_learning_by_einsum"), COMPARED),
    "maximum_mean_discrepancy": COMPARED,
    "two_tower_retrieval": COMPARED | {"MatrixSetDiagV3": "a row's label is its place in the batch"},
    "triplet_semihard": TRIPLETS,
    "safe_sparse_lookup": LEFT_OUT,
    "sparse_input": LISTED,
    "merged_graphs": SEGMENTED,
    "clipped_per_sample": {"Transpose": "TensorFlow chooses the order of the axes by the number of rows"}
    | dict.fromkeys(("Mul", "Tile"), "each row's gradient is asked of all rows"),
    "moco": dict.fromkeys(("ConcatV2", "StridedSlice", "AssignVariableOp"), QUEUED),
    "moco_with_pointer": {"ResourceScatterNdUpdate": QUEUED},
    "mixup_within_the_step": {"ReverseV2": "each image is mixed with another one of the batch, which is reversed"},
    "rows_of_numpy": {"PyFunc": "Python gets the batch that it would have on one device"},
    "pairwise_ranking": COMPARED,
    "actor_critic": {"Cumsum": ORDERED},
    "hardest_samples": {"TopKV2": ORDERED} | CHOSEN,
    "quantile_and_order": dict.fromkeys(("TopKV2", "Cumsum", "StridedSlice", "StridedSliceGrad"), ORDERED),
    "cox_partial_likelihood": dict.fromkeys(("TopKV2", "Cumsum", "GatherV2"), ORDERED),
}

load("programs", "[!_]*.py")
for name, made in harness.PROGRAMS.items():
    if made.outcome == "equal" and not name.startswith("batch_"):  # whose whole step is about the order of rows
        inherent = INHERENT.get(name, {})
        run = functools.partial(harness.run_on_towers, made, TOWERS)
        row(f"program: {name}", run, inherent, made.extra)
