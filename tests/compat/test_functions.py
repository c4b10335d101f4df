"""What of TensorFlow's cache of a `tf.function` a step can know that runs its Python itself."""

import operator
import types
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from ncclsync.compat.functions import functions_untraced, inlined, stale_functions

CHANGES = types.SimpleNamespace(factor=2.0, bias=None, weight=None)


def scaled(x, deep=False):
    x = x * CHANGES.factor
    if CHANGES.bias is not None:
        x = x + CHANGES.bias
    if CHANGES.weight is not None:
        x = x + CHANGES.weight
    return tf.nn.relu(x) if deep else x + 0 * tf.random.uniform([])


def called(function, arguments, *given):
    """Run a function's Python on a graph's tensors in place of arguments that are tensors."""
    rest = iter(given)
    return inlined(function)(*(next(rest) if tf.is_tensor(one) else one for one in arguments))


def found_in(*traces):
    """The names that are noted while a function's Python runs in the graphs of some calls, one after the other."""
    function = tf.function(scaled)
    with stale_functions() as found:
        for change, arguments in traces:
            vars(CHANGES).update(factor=2.0, bias=None, weight=None)
            vars(CHANGES).update(change)
            arguments = [tf.constant(one) if isinstance(one, np.ndarray) else one for one in arguments]
            tensors = [one for one in arguments if tf.is_tensor(one)]

            specs = [tf.TensorSpec([None, *one.shape[1:]], one.dtype) for one in tensors]
            tf.function(partial(called, function, arguments), input_signature=specs).get_concrete_function()
    return list(found)


ROWS, OTHERS = np.ones([3, 2], "float32"), np.ones([3, 4], "float32")
FIRST, SECOND = tf.Variable(1.0), tf.Variable(2.0)


@pytest.mark.parametrize("change", [{"factor": 3.0}, {"bias": 1.0}, {"weight": FIRST}])
def test_python_that_has_changed_is_named(change):
    """Where one device keeps its trace: for the same types. Then its line is told."""
    (told,) = found_in(({}, [ROWS]), (change, [ROWS]))
    assert told.startswith(f"scaled, at {__file__}:")
    assert found_in((change, [ROWS]), (change, [ROWS]), (change, [ROWS, True]), (change, [ROWS, True])) == []


def test_another_variable_is_another_python():
    """Also where all ops are alike."""
    assert len(found_in(({"weight": FIRST}, [ROWS]), ({"weight": SECOND}, [ROWS]))) == 1
    assert found_in(({"weight": FIRST}, [ROWS]), ({"weight": FIRST}, [ROWS])) == []


def test_other_types_are_traced_anew():
    """By one device, too: another width, or another argument."""
    assert found_in(({}, [ROWS]), ({"factor": 3.0}, [OTHERS]), ({"factor": 4.0}, [ROWS, True])) == []


def test_a_first_trace_that_creates_variables_is_not_compared():
    """What it makes beside them is not made again."""
    made = []

    @tf.function
    def weighted(x):
        made.append(made[-1] if made else tf.Variable(tf.ones([]) * 2))
        return x * made[-1]

    with stale_functions() as found:
        step = tf.function(lambda x: inlined(weighted)(x))
        step.get_concrete_function(tf.TensorSpec([None]))
    assert len(made) == 2 and not found


@pytest.mark.parametrize(
    ("called", "inlined_with", "rows", "is_kept"),
    [
        ((ROWS, False), (ROWS, False), 3, True),
        ((ROWS,), (ROWS, False), 3, True),  # a default counts
        ((ROWS, False), (ROWS, True), 3, False),
        ((ROWS, False), (OTHERS, False), 3, False),
        ((ROWS, False), (ROWS, False), 4, False),  # one device traces it for four rows
        ((ROWS, False), (ROWS, False), None, False),  # and here for any
        ((tf.TensorSpec([None, 2]), False), (ROWS, False), 4, True),
        ((tf.TensorSpec([None, 2]), False), (ROWS, False), None, True),
    ],
)
@pytest.mark.parametrize("change", [{"weight": FIRST}, {}])
def test_a_trace_from_outside_is_found_as_tensorflow_finds_it(called, inlined_with, rows, is_kept, change):
    """And is told if the function uses another number of variables now."""
    function = tf.function(scaled)
    vars(CHANGES).update(factor=2.0, bias=None, weight=None)
    function.get_concrete_function(*called)
    vars(CHANGES).update(change)
    spec = tf.TensorSpec([None, *inlined_with[0].shape[1:]])
    with stale_functions(rows) as found:
        step = tf.function(lambda x: inlined(function)(x, *inlined_with[1:]), input_signature=[spec])
        step.get_concrete_function()
    assert len(found) == (is_kept and bool(change))
    assert all("outside of a step" in why for why in found.values())


@pytest.mark.parametrize("writes", [True, False])
def test_a_trace_that_does_not_write_a_variable_is_told(writes):
    """Such as that of a look at shapes, in which Keras writes nothing."""
    count, now = tf.Variable(0.0), types.SimpleNamespace(writes=writes)

    @tf.function
    def counted(x):
        return x + (count.assign_add(1.0) if now.writes else count)

    counted(tf.constant(ROWS))
    now.writes = True
    with stale_functions(3) as found:
        tf.function(lambda x: inlined(counted)(x)).get_concrete_function(tf.TensorSpec([None, 2]))
    assert len(found) == (not writes)


class Object:
    """An object that is called."""

    def __call__(self, x):
        return scaled(x, False)


@pytest.mark.parametrize(
    ("python", "named"), [(Object(), ["Object"]), (partial(scaled, deep=False), ["scaled, at "]), (operator.neg, [])]
)
def test_what_has_no_line_is_named(python, named):
    """An object, a function with arguments, and one of C's, which uses no variable."""
    function = tf.function(python)
    vars(CHANGES).update(factor=2.0, bias=None, weight=None)
    function.get_concrete_function(tf.TensorSpec([None, 2]))
    vars(CHANGES).update(weight=FIRST)
    with stale_functions() as found:
        tf.function(lambda x: inlined(function)(x)).get_concrete_function(tf.TensorSpec([None, 2]))
    assert len(found) == len(named) and all(map(str.startswith, found, named))


def test_functions_untraced_keep_no_trace():
    """Their Python runs."""
    function = tf.function(scaled)
    with functions_untraced():
        tf.function(lambda x: function(x)).get_concrete_function(tf.TensorSpec([None, 2]))
    assert function.experimental_get_tracing_count() == 0
