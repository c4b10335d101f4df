"""Every op on towers gives one device's numbers, whatever the placements of its inputs: no rule is false.

Each example of `op_table` is called with up to three combinations of placements of its inputs (NCCLSYNC_THOROUGH=1: up
to 64), forward and backward, on batches that do not divide evenly. Many calls are one step, since a step costs more
than an op; each has its own results. Where a step as a whole fails, it is halved until it is known which call does.
"""

import collections
import dataclasses
import functools
import itertools
import os
import pathlib
import random
import re

import census
import numpy as np
import pytest
import tensorflow as tf
from op_table import EXAMPLES, UNREACHABLE, WITHIN, Example, Input
from tensorflow.python.framework import ops as framework_ops  # for the registry of gradients, and no more
from thorough import some

import ncclsync
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.semantics import rules

TOWERS = 3
ROWS, FEW = 7, 2  # shards of 3, 2 and 2 rows; of 1, 1 and none
# Cases of one step: as many as are quick to optimise.
MOST_CASES = 100
# So many combinations of placements of an example; where the tests are thorough, all, up to so many. The default
# run takes a sample of them: an op's first example by all samples on the first axis and by one more, each other
# example by one.
MOST_COMBINATIONS = some(3, 64)
ORDERED = ("f8", "f4", "distinct", "distinct4", "positive")  # kinds that can be a maximum over the rows
# How many culprits are looked for in a step that fails as a whole.
MOST_CULPRITS = int(os.environ.get("NCCLSYNC_MOST_CULPRITS", "3"))
# Relative to the largest number of a tensor, and absolute.
TOLERANCES = dict.fromkeys(["float64", "complex128"], (1e-9, 1e-10)) | dict.fromkeys(
    ["float32", "complex64"], (1e-4, 1e-5)
)


@dataclasses.dataclass(frozen=True)
class Case:
    """An example with a placement for each input.

    Placements:
        S0, S1, …: Shard: rows of the batch along that axis.
        R: Replicate: a variable that is read, or a constant.
        P, M: Partial: a sum, or a maximum, over the batch's rows.
        V: a variable, not read.

    Attributes:
        example: what is called.
        placements: [inputs].
        upstream: what the gradient with respect to the outputs is: "own", computed from them alone; "P",
            multiplied by a Partial number; "S0", multiplied by the batch's rows, so that Replicate outputs
            get a Shard.
    """

    example: Example
    placements: tuple[str, ...]
    upstream: str = "own"

    @property
    def name(self) -> str:
        """For messages."""
        upstream = "" if self.upstream == "own" else f", gradient {self.upstream}"
        return f"{self.example.name}({' '.join(self.placements)}{upstream})"


def placements_of(given: Input) -> list[str]:
    """The placements that an input can have."""
    if given.only:
        return list(given.only)
    shards = [f"S{axis}" for axis, size in enumerate(given.shape) if isinstance(size, str)]
    partial = {"words": []}.get(given.kind, ["P"])
    return [*shards, "R", *partial]


def cases_of(example: Example, rows: int) -> tuple[list[Case], list[Case]]:
    """Combinations of placements of an example: a sample that is the same each time, and the others."""
    inputs = example.inputs
    combinations = list(itertools.product(*map(placements_of, inputs)))
    whole = tuple("V" if "V" in given.only else "R" for given in inputs)
    samples, *others = combinations  # the first: all samples on the first axis that they can be on
    cases = [Case(example, one) for one in others if one != whole]
    ordered = [i for i, given in enumerate(inputs) if given.kind in ORDERED and not given.only]
    if ordered:
        cases.append(Case(example, tuple("M" if i == ordered[0] else p for i, p in enumerate(samples))))
    if example.differentiable:
        cases += [Case(example, whole, "P"), Case(example, whole, "S0")]
    elif whole in others:
        cases.append(Case(example, whole))
    random.Random(example.name).shuffle(cases)
    # A combination meets one of the two batches, but that with all samples on the first axis both.
    cases = [Case(example, samples), *cases[rows == FEW : MOST_COMBINATIONS - 1 : 2]]
    rng = random.Random(f"{example.name} {rows}")
    if rows == FEW:
        n_chosen = int(example.index == 0 and rng.random() < 0.15)
    elif example.index == 0:
        n_chosen = 2
    else:
        rng.shuffle(cases)
        n_chosen = 1
    return cases[:n_chosen], cases[n_chosen:]


class Sources:
    """Where inputs come from: columns of a batch, and variables. Equal inputs come from the same ones.

    Of each dtype and shape of a row there is one leaf [rows, inputs, *shape], which the step takes apart.

    Attributes:
        batch: {name: array}, the step's argument.
    """

    def __init__(self, cases, rows):
        self._rows = rows
        self._columns = collections.defaultdict(list)  # by key of the leaf, arrays [rows, …]
        self._places = {}  # by input, seed and placement: (key of the leaf, column) or what is captured
        for case in cases:
            for seed, (given, placement) in enumerate(zip(case.example.inputs, case.placements, strict=True)):
                if (given, seed, placement) not in self._places:
                    self._places[given, seed, placement] = self._place(given, seed, placement)
        self._add("rows", np.linspace(0.5, 1.5, rows))
        self._add("parts", np.full([rows], 1.25 / rows))
        self.batch = {name: np.stack(columns, 1) for name, columns in self._columns.items()}

    def _add(self, name, column):
        """Put a column into a leaf; return where it is."""
        key = name if name in ("rows", "parts") else f"{name}{list(column.shape[1:])}"
        self._columns[key].append(column)
        return key, len(self._columns[key]) - 1

    def _place(self, given, seed, placement):
        value = given.value(self._rows, seed)
        name = value.dtype.name
        if placement in ("R", "V"):
            captured = value.dtype.kind in "fc" or placement == "V"
            return tf.Variable(value) if captured else tf.constant(value)
        if placement[0] == "S":
            column = np.moveaxis(value, int(placement[1:]), 0)
            return self._add(name, column.reshape(self._rows, -1, *column.shape[1:]))
        rng = np.random.default_rng(seed)
        if placement == "M" or value.dtype == bool:
            below = value & (rng.uniform(size=(self._rows, *value.shape)) < 0.5) if value.dtype == bool else None
            if below is None:
                below = value - rng.uniform(0.1, 1.0, size=(self._rows, *value.shape)).astype(value.dtype)
            below[self._rows // 2] = value
            return self._add(name, below)
        parts = rng.integers(-3, 4, size=(self._rows, *value.shape)).astype(value.dtype)
        parts[-1] += value - parts.sum(0)
        return self._add(name, parts)

    def opened(self, batch, scale):
        """Return a function of an input, its seed and its placement: the tensor in the step."""
        columns = {name: tf.unstack(leaf, axis=1) for name, leaf in batch.items()}

        @functools.cache
        def tensor(given, seed, placement):
            one = unscaled(given, seed, placement)
            floating = placement != "V" and (one.dtype.is_floating or one.dtype.is_complex)
            return one * tf.cast(scale, one.dtype) if floating else one

        def unscaled(given, seed, placement):
            place = self._places[given, seed, placement]
            if placement in ("R", "V"):
                return place if placement == "V" or not isinstance(place, tf.Variable) else place.value()
            column = columns[place[0]][place[1]]
            if placement[0] == "S":
                return self._along(column, int(placement[1:]), given.shape)
            if column.dtype == tf.bool:
                return tf.reduce_any(column, 0)
            return tf.reduce_max(column, 0) if placement == "M" else tf.reduce_sum(column, 0)

        return tensor, columns["rows"][0], tf.reduce_sum(columns["parts"][0])

    @staticmethod
    def _along(column, axis, shape):
        """Let the samples be on another axis; several of its elements may be one sample's."""
        rest = column.shape[2:].as_list()
        # A sample's elements are a leaf's second axis, of one element where there is one for each.
        rows = tf.squeeze(column, [1]) if shape[axis] == "n" else tf.reshape(column, [-1, *rest])
        order = list(range(1, len(shape)))
        order.insert(axis, 0)
        return tf.transpose(rows, order) if axis else rows


def step_of(cases, rows):
    """Return a step that runs all the cases, and its batch.

    It returns by case's name its results "y", [outputs], and "g", its gradients with respect to its inputs;
    and "scale", that with respect to a variable that scales all inputs.
    """
    sources = Sources(cases, rows)
    scale = tf.Variable(1.0, dtype=tf.float64)

    @tf.autograph.experimental.do_not_convert
    def step(batch):
        results, outputs, upstream, watched = {}, [], [], []
        with tf.GradientTape() as tape:
            tensor, row, partial = sources.opened(batch, scale.value())
            for case in cases:
                given = enumerate(zip(case.example.inputs, case.placements, strict=True))
                placed = [(tensor(one, seed, placement), placement) for seed, (one, placement) in given]
                sized = {"rows": rows} if case.example.sized else {}
                # By its name a tensor tells the example.
                with tf.name_scope(f"example{EXAMPLES.index(case.example)}/"):
                    inputs = [one if placement == "V" else tf.identity(one) for one, placement in placed]
                    found = tf.nest.flatten(case.example.call(*inputs, **sized), expand_composites=True)
                results[case.name] = {"y": found}
                if case.example.differentiable:
                    watched.append((case.name, inputs))
                    for y in found:
                        if y.dtype.is_floating or y.dtype.is_complex:
                            outputs.append(y)
                            upstream.append((y, case.upstream))
        gradients = tape.gradient(
            outputs,
            ([inputs for _, inputs in watched], scale),
            [_upstream(y, how, row, partial, rows) for y, how in upstream],
        )
        for (name, _), of_inputs in zip(watched, gradients[0], strict=True):
            results[name]["g"] = [tf.convert_to_tensor(g) for g in of_inputs if g is not None]
        if gradients[1] is not None:
            results["scale"] = {"g": [gradients[1]]}
        return results

    return step, sources.batch


def _upstream(y, how, row, partial, rows):
    """What the gradient with respect to an output is: of the sum of its cubes, or of more than that."""
    if how == "P":
        return y * y * tf.cast(partial, y.dtype)
    if how == "S0" and y.shape.rank and y.shape[0] == rows:
        return y * y * tf.cast(tf.reshape(row, [-1] + [1] * (y.shape.rank - 1)), y.dtype)
    return y * y


@dataclasses.dataclass
class Outcome:
    """What came of some cases.

    Attributes:
        problems: (symptom, message) of each case that differs or fails.
        traced: op types of the steps.
        gathering: examples for which the towers gather.
    """

    problems: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    traced: set[str] = dataclasses.field(default_factory=set)
    gathering: set[str] = dataclasses.field(default_factory=set)


def compare(cases, rows):
    """Run cases on towers and on one device; return the `Outcome`. A step that fails is halved, and so on."""
    outcome, waiting, culprits = Outcome(), [list(cases)], 0
    while waiting:
        some = waiting.pop()
        step, batch = step_of(some, rows)
        expected = plainly(step, batch, outcome.traced)
        try:
            found = run_on_towers(step, batch, outcome.gathering)
        except Exception as error:  # whatever it is, it is a problem
            if len(some) == 1:
                culprits += 1
                outcome.problems.append((f"error: {type(error).__name__}", f"{some[0].name}: {told_by(error)}"))
            elif culprits < MOST_CULPRITS:
                waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
            else:
                message = f"one of {some[0].name} to {some[-1].name}: {told_by(error)}"
                outcome.problems.append(("error: not told apart", message))
            continue
        differing = [difference(found[name], expected[name], name) for name in expected if name != "scale"]
        if not any(differing) and "scale" in expected:  # else it is wrong on account of one of them
            differing.append(difference(found["scale"], expected["scale"], f"scale of {len(some)} cases"))
        outcome.problems += [one for one in differing if one]
    return outcome


def difference(found, expected, name):
    """Tell what a case's results differ by, as (symptom, message); None if by nothing."""
    # The gradient of the scale, or of a cast, is float64, and adds up what ops of single precision give.
    single = name.startswith("scale of ") or any(
        one.dtype.name in ("float32", "complex64") for one in expected.get("y", ())
    )
    for key, symptom in (("y", "forward"), ("g", "backward")):
        pairs = list(itertools.zip_longest(found.get(key, ()), expected.get(key, ())))
        for i, (one, other) in enumerate(pairs):
            if one is None or other is None:
                return f"{symptom}: number of results", f"{name}: {len(found[key])}, not {len(expected[key])}"
            if one.shape != other.shape or one.dtype != other.dtype:
                ours, theirs = f"{one.dtype} {one.shape}", f"{other.dtype} {other.shape}"
                return f"{symptom}: shape", f"{name}: {key}[{i}] is {ours}, not {theirs}"
            if one.dtype.kind not in "fc":
                if not np.array_equal(one, other):
                    return f"{symptom}: values", f"{name}: {key}[{i}] has other values"
                continue
            relative, absolute = TOLERANCES["float32" if single else one.dtype.name]
            largest = np.max(np.abs(other), initial=0.0)
            assert np.isfinite(largest), f"Expected finite numbers of one device. Received: {name}, {other}"
            apart = np.max(np.abs(one - other), initial=0.0)
            if not apart <= absolute + relative * largest:
                return f"{symptom}: values", f"{name}: {key}[{i}] differs by {apart:.2g} of {largest:.2g}"
    return None


def plainly(step, batch, traced):
    """Run a step on one device, as a graph for any number of rows; return arrays, and note its op types."""
    tensors = tf.nest.map_structure(tf.constant, batch)
    specs = {name: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for name, leaf in tensors.items()}
    function = tf.function(step, input_signature=[specs], autograph=False).get_concrete_function()
    graph = function.graph.as_graph_def()
    traced.update(node.op for node in graph.node)
    traced.update(node.op for one in graph.library.function for node in one.node_def)
    return tf.nest.map_structure(_array, function(tensors))


def run_on_towers(step, batch, gathering):
    """Run a step on new towers; return arrays, and note the examples for which they gather."""
    with ncclsync.Towers(TOWERS) as towers:
        found = tf.nest.map_structure(_array, towers.run(step, batch))
        program, _ = next(iter(towers._steps.values())).last()
        for segment in program.segments:
            for exchange in (one for bucket in segment.outgoing for one in bucket.exchanges):
                scope = re.search(r"example(\d+)/", exchange.source)
                if scope and exchange.collective.kind == "all_gather":
                    gathering.add(EXAMPLES[int(scope[1])].op)
    return found


def _array(tensor):
    value = tensor.numpy()
    return np.asarray(value, object if tensor.dtype == tf.string else None)


def told_by(error):
    """What an error says, without the traceback that TensorFlow adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("File ", "in user code", "[[{{node", "[[Stateful"))]
    return f"{type(error).__name__}: {' '.join(told[-2:])[:300]}"


def steps(rows):
    """Yield a parameter of pytest for each step: its cases, of one family. All but few rows are slow."""
    for family in dict.fromkeys(example.family for example in EXAMPLES):
        chosen = [cases_of(example, rows) for example in EXAMPLES if example.family == family]
        for which, name in enumerate((family, f"{family}-more")):
            marks = () if which == 0 and rows == FEW else pytest.mark.slow
            cases = [case for both in chosen for case in both[which]]
            for i, begin in enumerate(range(0, len(cases), MOST_CASES)):
                some = cases[begin : begin + MOST_CASES]
                yield pytest.param(some, rows, id=f"{name}-{rows}-{i}", marks=marks)


@pytest.mark.parametrize(("cases", "rows"), [*steps(ROWS), *steps(FEW)])
def test_ops_in_every_placement(cases, rows, record_property):
    """Forward and backward, equal to one device. The examples hold the op types that they stand for."""
    outcome = compare(cases, rows)
    ops = {case.example.op for case in cases}
    record_property("ops: examples", sorted(ops))
    record_property("ops: examples of which some gather", sorted(outcome.gathering))
    if outcome.problems:
        counts = dict(collections.Counter(symptom for symptom, _ in outcome.problems))
        messages = "\n".join(f"[{symptom}] {message}" for symptom, message in outcome.problems)
        pytest.fail(f"{len(outcome.problems)} problems, {counts}:\n{messages}", pytrace=False)
    held = {op for op in ops if hasattr(tf.raw_ops, op)} | {op for op, of in WITHIN.items() if of in ops}
    assert held <= outcome.traced, f"no example holds {sorted(held - outcome.traced)}"


def test_every_op_with_a_gradient_has_an_example(record_property):
    """Or a reason why it has none. A new TensorFlow tells of its new ops."""
    registered = {op for op in framework_ops.gradient_registry.list() if not op.startswith("CustomGradient-")}
    examples = {example.op for example in EXAMPLES} | set(WITHIN)
    assert {of for of in WITHIN.values()} <= examples
    assert not examples & set(UNREACHABLE), "an op has both an example and a reason for none"
    missing = registered - examples - set(UNREACHABLE)
    assert not missing, f"Expected an example, or a reason, for each op with a gradient. Received: {sorted(missing)}"
    record_property("ops: with a gradient", sorted(registered))
    record_property("ops: with a gradient, and examples", sorted(registered & examples))
    for op in sorted(registered & set(UNREACHABLE)):
        record_property(f"ops: without examples, {UNREACHABLE[op]}", [op])


def test_op_types_without_a_rule_have_a_reason(record_property):
    """And the README says how many there are, and which."""
    assert not census.unlisted(census.with_gradient() | census.without_gradient())
    ruled = {op for op in census.listed(census.BY_NATURE) | census.listed(census.OPEN) if census.has_rule(op)}
    assert not ruled, f"Expected no reason for an op that has a rule. Received: {sorted(ruled)}"
    readme = pathlib.Path(rules.__file__).with_name("README.md").read_text()
    assert census.table() in readme, f"Expected this table in {rules.__name__}'s README:\n{census.table()}"
    record_property("ops: with a gradient, and a rule", sorted(filter(census.has_rule, census.with_gradient())))


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.op in rules.SAME_SHAPE], ids=lambda one: one.name)
def test_results_of_the_first_inputs_shape(example):
    """`Partition` relies on it: whole results go back to the rows that the first input has."""
    with tf.Graph().as_default() as graph:
        example.call(*(tf.constant(one.value(ROWS, 0)) for one in example.inputs))
    made = [op for op in graph.get_operations() if op.type == example.op]
    assert made and all(output.shape == op.inputs[0].shape for op in made for output in op.outputs)


@pytest.mark.slow
def test_what_is_linear_in_an_input():
    """Of a sum it makes the sum of what it makes of the parts, as the gradients of loops' weights rely on."""
    rng, asked = np.random.default_rng(5), set()
    for example in sorted(EXAMPLES, key=lambda one: one.op not in rules.LINEAR_WITHIN):
        if rules.LINEAR_WITHIN.keys() <= asked:
            break
        if example.sized or not example.differentiable or any("V" in one.only for one in example.inputs):
            continue

        @tf.function(autograph=False)
        def step(*given, call=example.call):
            with tf.GradientTape() as tape:
                tape.watch(given)
                made = tf.nest.flatten(call(*given), expand_composites=True)
                made = [one for one in made if tf.is_tensor(one) and one.dtype.is_floating]
                total = tf.add_n([tf.reduce_sum(tf.cast(one, tf.float64) ** 2) for one in made] or [0.0])
            return tape.gradient(total, given)

        values = [tf.constant(one.value(FEW, 1)) for one in example.inputs]
        graph = step.get_concrete_function(*values).graph
        ops = graph.get_operations()
        left = {op.name for op in ops if op.type in rules.LINEAR_WITHIN and op.type not in asked}
        known = {argument.ref(): value for argument, value in zip(graph.inputs, values, strict=False)}
        for op in ops if left and len(graph.inputs) == len(values) else ():
            calls = any(attribute.type == "func" for attribute in op.op_def.attr)
            if calls or op.type == "Placeholder" or any(one.ref() not in known for one in op.inputs):
                continue
            given = [known[one.ref()] for one in op.inputs]
            constant = op.type == "Const" and [tf.constant(tf.make_ndarray(op.get_attr("value")), op.outputs[0].dtype)]
            made = constant or tf_compat.run_op(op, given)
            known.update((output.ref(), one) for output, one in zip(op.outputs, made, strict=True))
            for at in rules.LINEAR_WITHIN[op.type] if op.name in left else ():
                other = tf.cast(rng.normal(size=given[at].shape), given[at].dtype)
                parts, both = ([*given[:at], one, *given[at + 1 :]] for one in (other, given[at] + other))
                added = map(np.add, made, tf_compat.run_op(op, parts))
                for one, whole in zip(added, tf_compat.run_op(op, both), strict=True):
                    np.testing.assert_allclose(one, whole, rtol=1e-5, atol=1e-6, err_msg=f"{op.type}, input {at}")
                asked.add(op.type)
    unasked = sorted(rules.LINEAR_WITHIN.keys() - asked)
    assert not unasked
