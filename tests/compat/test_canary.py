"""What a new TensorFlow brings that towers must know: a way to write a variable, an op that draws numbers.

Each test compares what the installed TensorFlow has with what is known, here and in the package's tables. It
fails on a name that is in neither, and says what there is to decide. tests/README.md tells how to take up a
new TensorFlow or Keras.
"""

import inspect
import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import auto_control_deps_utils, op_def_registry

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.semantics import rules
from ncclsync.semantics.placing import REPEATABLE

OPS = sorted(name for name in dir(tf.raw_ops) if op_def_registry.get(name) is not None)

# Methods of tf.Variable that touch its handle, and write nothing. (`load` does, but needs a session.)
READERS = rules.names(
    """
    __eq__ __init__ __ne__ __tf_tracing_type__ _export_to_saved_model_graph _init_from_args _init_from_proto
    _lazy_read _read_variable_op device gather_nd graph handle is_initialized load op sparse_read to_proto
    """
)

# How each writer is called, of a variable [1, 2, 3].
CALLS = {
    "assign": lambda v: v.assign([4.0, 5.0, 6.0]),
    "assign_add": lambda v: v.assign_add([4.0, 5.0, 6.0]),
    "assign_sub": lambda v: v.assign_sub([4.0, 5.0, 6.0]),
    "batch_scatter_update": lambda v: v.batch_scatter_update(tf.IndexedSlices([9.0], [1])),
    "count_up_to": lambda v: v.count_up_to(5),
    "scatter_add": lambda v: v.scatter_add(tf.IndexedSlices([9.0], [1])),
    "scatter_div": lambda v: v.scatter_div(tf.IndexedSlices([9.0], [1])),
    "scatter_max": lambda v: v.scatter_max(tf.IndexedSlices([9.0], [1])),
    "scatter_min": lambda v: v.scatter_min(tf.IndexedSlices([-9.0], [1])),
    "scatter_mul": lambda v: v.scatter_mul(tf.IndexedSlices([9.0], [1])),
    "scatter_nd_add": lambda v: v.scatter_nd_add([[1]], [9.0]),
    "scatter_nd_max": lambda v: v.scatter_nd_max([[1]], [9.0]),
    "scatter_nd_min": lambda v: v.scatter_nd_min([[1]], [-9.0]),
    "scatter_nd_sub": lambda v: v.scatter_nd_sub([[1]], [9.0]),
    "scatter_nd_update": lambda v: v.scatter_nd_update([[1]], [9.0]),
    "scatter_sub": lambda v: v.scatter_sub(tf.IndexedSlices([9.0], [1])),
    "scatter_update": lambda v: v.scatter_update(tf.IndexedSlices([9.0], [1])),
    "_strided_slice_assign": lambda v: v[1:2].assign([9.0]),
    "_restore_from_tensors": lambda v: v._restore_from_tensors({"VARIABLE_VALUE": tf.constant([4.0, 5.0, 6.0])}),
}

# Ops that write a variable. `tf_compat.hides_state` knows them by how their names begin.
WRITING = rules.names(
    """
    AssignAddVariableOp AssignSubVariableOp AssignVariableOp AssignVariableXlaConcatND ResourceApplyAdaMax
    ResourceApplyAdadelta ResourceApplyAdagrad ResourceApplyAdagradDA ResourceApplyAdagradV2 ResourceApplyAdam
    ResourceApplyAdamWithAmsgrad ResourceApplyAddSign ResourceApplyCenteredRMSProp ResourceApplyFtrl
    ResourceApplyFtrlV2 ResourceApplyGradientDescent ResourceApplyKerasMomentum ResourceApplyMomentum
    ResourceApplyPowerSign ResourceApplyProximalAdagrad ResourceApplyProximalGradientDescent
    ResourceApplyRMSProp ResourceScatterAdd ResourceScatterDiv ResourceScatterMax ResourceScatterMin
    ResourceScatterMul ResourceScatterNdAdd ResourceScatterNdMax ResourceScatterNdMin ResourceScatterNdSub
    ResourceScatterNdUpdate ResourceScatterSub ResourceScatterUpdate ResourceSparseApplyAdadelta
    ResourceSparseApplyAdagrad ResourceSparseApplyAdagradDA ResourceSparseApplyAdagradV2
    ResourceSparseApplyCenteredRMSProp ResourceSparseApplyFtrl ResourceSparseApplyFtrlV2
    ResourceSparseApplyKerasMomentum ResourceSparseApplyMomentum ResourceSparseApplyProximalAdagrad
    ResourceSparseApplyProximalGradientDescent ResourceSparseApplyRMSProp ResourceStridedSliceAssign
    """
)
# Of a tf.random.Generator's variable, and the counter of TensorFlow 1: they count as hidden state.
WRITING_STATE = rules.names("ResourceCountUpTo RngReadAndSkip RngSkip StatefulStandardNormal")
READING = rules.names(
    "ReadVariableOp ReadVariableXlaSplitND ResourceGather ResourceGatherNd VarIsInitializedOp VariableShape"
)
# Ops whose resource is no variable: a table, a queue, an iterator, a file.
NO_VARIABLE = re.compile(
    r"BoostedTrees|Dataset|Iterator|LookupTable|InitializeTable|Queue|Reader|^Stack|^TensorArray|Summary|^Collective"
    r"|StatsAggregator|ResourceAccumulator|^Delete|^DestroyResourceOp|^DisableCopyOnRead|^ImportEvent|^MutexLock"
)

# Random ops that are no draw of `rules.DRAWS`. A function of its seed alone: computed alike on all towers, or
# for the whole batch.
OF_A_SEED = rules.names(
    """
    RandomIndexShuffle StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg
    StatelessSampleDistortedBoundingBox StatelessShuffle KMC2ChainInitialization KmeansPlusPlusInitialization
    StatelessRandomGetAlg
    """
)
# Their state is hidden: `check_draws` warns of them by their attribute "seed2", and towers compute them once.
HIDDEN = rules.names(
    """
    AllCandidateSampler FixedUnigramCandidateSampler LearnedUnigramCandidateSampler LogUniformCandidateSampler
    Multinomial ParameterizedTruncatedNormal RandomCrop RandomShuffle RandomShuffleQueue RandomShuffleQueueV2
    SampleDistortedBoundingBox SampleDistortedBoundingBoxV2 ThreadUnsafeUnigramCandidateSampler
    UniformCandidateSampler
    """
)
# The same, but TensorFlow does not declare their state: each tower computes them. `check_draws` warns.
UNDECLARED = rules.names("ComputeAccidentalHits FractionalAvgPool FractionalMaxPool")
# Named or seeded as if they drew: data sets, what makes seeds for them, gradients, and cuDNN's layers,
# whose dropout Keras does not use.
NO_DRAW = re.compile(
    r"Dataset|SeedGenerator|^CudnnRNN|^RandomGammaGrad$|^RecordInput$|^Rng(ReadAnd)?Skip$|^StatefulStandardNormal$"
    r"|^StatefulPartitionedCall$|^Stateless(Case|If|While)$|^PyFuncStateless$"
)
RANDOM_NAMES = re.compile(r"Random|Stateless|Stateful|Sampler|Shuffle|Multinomial|Dropout|TruncatedNormal|^Rng")


def definition(op):
    """What an op type declares."""
    return op_def_registry.get(op)


def takes_resource(op):
    """Whether an op type declares an input that is a resource, as a variable's handle is."""
    return any(one.type == types_pb2.DT_RESOURCE for one in definition(op).input_arg)


def is_random(op):
    """Whether an op's type, an attribute or an input is named as if it drew random numbers."""
    named = [*definition(op).attr, *definition(op).input_arg]
    seeded = any("seed" in one.name.lower() for one in named) or {"key", "counter"} <= {x.name for x in named}
    return bool(RANDOM_NAMES.search(op)) or seeded


def assert_known(found, known, decide):
    """Fail on names that are not known, with what is to be decided of them."""
    unknown = sorted(set(found) - set(known))
    assert not unknown, f"TensorFlow {tf.__version__} has {', '.join(unknown)}, which nobody here knows. {decide}"


def methods_of_the_handle():
    """The methods of a variable whose source uses its handle, or a generated op."""
    found = set()
    for cls in type(tf.Variable(1.0)).__mro__[:-1]:
        for name, member in vars(cls).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if not inspect.isfunction(inspect.unwrap(function)):
                continue
            if re.search(r"\bself\._?handle\b|\bgen_\w+_ops\.", inspect.getsource(inspect.unwrap(function))):
                found.add(name)
    return found


def test_methods_that_write():
    """Each method of tf.Variable that touches its handle is tracked, or known to write nothing."""
    found = methods_of_the_handle()
    assert {"assign", "_read_variable_op", "scatter_nd_update"} <= found, "the search finds nothing any more"
    assert_known(
        found,
        {*tf_compat.VARIABLE_WRITERS, *READERS},
        "Does it change the variable's value? Then it belongs into VARIABLE_WRITERS of "
        "ncclsync/compat/tensorflow.py, with a call in CALLS here; else into READERS here.",
    )


@pytest.mark.parametrize("name", tf_compat.VARIABLE_WRITERS)
def test_writer_is_tracked(name):
    """Whoever tracks the variable hears of what a method writes, and no more after `untrack`."""
    variable, calls = tf.Variable([1.0, 2.0, 3.0]), []
    if name == "count_up_to":
        variable = tf.Variable(1)
    before = variable.numpy()

    def wrap(method):
        def tracked(*args, **kwargs):
            calls.append(method.__name__)
            return method(*args, **kwargs)

        return tracked

    tf_compat.track_writes(variable, wrap)
    CALLS[name](variable)
    assert name in calls
    assert np.any(variable.numpy() != before)
    tf_compat.untrack(variable)
    calls.clear()
    variable.assign(before)
    CALLS[name](variable)
    assert not calls


def test_ops_that_write():
    """Each op that takes a variable is known, as one that writes or as one that reads."""
    found = {op for op in OPS if takes_resource(op) and not NO_VARIABLE.search(op)}
    known = {*WRITING, *WRITING_STATE, *READING, *rules.DRAWS}
    assert_known(
        found,
        known,
        "Does it write its variable? Into WRITING here, where its name begins as `hides_state` of "
        "ncclsync/compat/tensorflow.py expects, else teach it; into READING and REPEATABLE of "
        "ncclsync/semantics/placing.py if it reads; or NO_VARIABLE here if its resource is none.",
    )
    for op in {*WRITING, *READING} & found:
        # A variable's op hides no state. XLA's own reader counts as hidden: no step has it.
        expected = op == "ReadVariableXlaSplitND"
        assert tf_compat.hides_state(op, REPEATABLE) == expected, op
    for op in {*WRITING, *WRITING_STATE} & found:
        assert op not in auto_control_deps_utils.RESOURCE_READ_OPS, op


def test_random_ops():
    """Each op that draws random numbers has a rule, or another place where it is decided."""
    found = {op for op in OPS if is_random(op) and not NO_DRAW.search(op)}
    assert {"StatelessRandomUniformV2", "RandomUniform", "StatefulUniform"} <= found
    assert_known(
        found,
        {*rules.DRAWS, *OF_A_SEED, *HIDDEN, *UNDECLARED},
        "Can each tower draw its own rows' numbers? Then it belongs into DRAWS of "
        "ncclsync/semantics/rules.py. Is it a function of its seed alone? Into OF_A_SEED here. "
        "Is its state hidden? Into HIDDEN.",
    )
    for op in rules.DRAWS & set(OPS):
        assert is_random(op)
        # From a seed that the trace has, or by TensorFlow's own hidden state, which `check_draws` looks for.
        hidden = any(one.name == "seed2" for one in definition(op).attr)
        assert hidden == (op not in rules.SEEDED_DRAWS), op
    for op in {*HIDDEN, *UNDECLARED} & found:
        assert any(one.name == "seed2" for one in definition(op).attr), op
        assert tf_compat.hides_state(op, REPEATABLE) == (op in HIDDEN), op
    for op in set(OF_A_SEED) & found - {"StatelessRandomGetAlg"}:
        assert not tf_compat.hides_state(op, REPEATABLE), op
