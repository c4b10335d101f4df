"""Find where towers must meet in a step, by following what can differ between them."""

import collections

import tensorflow as tf

from ncclsync import private
from ncclsync.kinds import AFFINE, UNKNOWN
from ncclsync.kinds import MEAN_OF_ALL as MEAN
from ncclsync.kinds import SUM_OF_ALL as SUM
from ncclsync.ops import Collective
from ncclsync.program import Exchange, Results, user_line
from ncclsync.step_graph import Fold, StepGraph, op_name
from ncclsync.variables import Role

FOLLOW = Collective("broadcast")

# Stateful ops whose results are equal on all towers if their inputs are.
_REPEATABLE = frozenset(
    {
        "Assert",
        "Case",
        "If",
        "LookupTableExportV2",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "NoOp",
        "PartitionedCall",
        "Print",
        "PrintV2",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "StatefulPartitionedCall",
        "VarHandleOp",
        "VarIsInitializedOp",
        "VariableShape",
        "While",
    }
)

# So do these: they write a variable, and draw nothing.
_WRITERS = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign")


def find_exchanges(graph: StepGraph, results: Results) -> None:
    """Find every tensor that must meet its counterparts, by following what can differ between towers.

    What differs: the batch, random state, the state of metrics, and all that is computed from them. What
    does not: variables, constants, and whatever comes out of an exchange. So an exchange is put
    - at each mark, unless all towers hold the same value already (then mean, max, min change nothing);
    - before a differing value is written to a variable that must be the same on all towers: a moving
      average takes the mean over the batch, and so does a hand-written weight update;
    - behind each read of a metric's state that is not part of its own update: the result is global;
    - behind differing results of the step;
    - behind means and sums that a nonlinear op then computes with, such as the ratio of two sums.
    Writes that cannot be intercepted (inside a branch, or a scatter) are folded at the end of the step, and
    so is metric state.
    """
    differs: set[str] = set()  # tensor names
    drifting: set[str] = set()  # handles of variables that differ until the end of the step
    share_states(graph)
    graph.kinds.tell()
    result_reads = _result_reads(graph)
    renamed: dict[str, str] = {}
    wanted = _needed_by_losses(graph) if results is Results.EACH else set(graph.by_name)
    wanted -= _asked_for(graph)
    kinds = graph.kinds
    meetings = {name: met for name, met in kinds.meetings.items() if op_name(name) in wanted}
    input_meetings = {place: met for place, met in kinds.input_meetings.items() if place[0] in wanted}
    back_meetings = {graph.inputs[name][i]: met for (name, i), met in input_meetings.items()}

    def meet(names):
        for name in names:
            source = renamed.get(name, name)
            if name in meetings and source in differs:
                renamed[name] = graph.exchange(source, meetings[name])
                if meetings[name].op == "share":
                    differs.add(renamed[name])

    for op in graph.ops:
        given = graph.inputs[op.name]
        inputs = graph.inputs[op.name] = [renamed.get(name, name) for name in graph.inputs[op.name]]
        outputs = [tensor.name for tensor in op.outputs]
        if op.name in graph.placeholders:
            differs.update(name for name in outputs if name in graph.arguments)
            continue
        if op.name in graph.marks:
            mark = graph.marks[op.name]
            collective, when = mark.collective, inputs.pop() if mark.conditional else None
            repeatable = collective.op in ("mean", "max", "min") and collective.kind == "all_reduce"
            for source, output in zip(inputs, outputs, strict=False):
                settled = source not in differs and (repeatable or collective.kind == "broadcast")
                renamed[output] = source if settled else graph.exchange(source, collective, when, mark.line)
                if collective.differs:
                    differs.add(renamed[output])
            continue
        if op.name in graph.passing:
            # Each output is its input, however different the others are: tf.custom_gradient passes the
            # results of a collective on beside its arguments.
            renamed.update(zip(outputs, inputs, strict=True))
            meet(outputs)
            continue
        for i, name in enumerate(inputs):
            met = input_meetings.get((op.name, i))
            if met is None and op.name in kinds.backward:
                met = back_meetings.get(given[i])
            if met is not None and name in differs:
                inputs[i] = graph.exchange(name, met)
        handles = [name for name in inputs if name in graph.role]
        local = any(graph.role[name] is not Role.SAME or name in drifting for name in handles)
        value_differs = any(name in differs for name in inputs)
        for handle in graph.writes[op.name]:
            if graph.role[handle] is not Role.SAME or not (value_differs or local or _is_random(op)):
                continue
            if len(inputs) == 2 and _settle_addends(graph, inputs[1], differs):
                value_differs = False
                continue
            settling = _settling(graph, op, inputs[1] if len(inputs) == 2 else None)
            if settling is None:
                drifting.add(handle)
            else:
                inputs[1] = graph.exchange(inputs[1], settling)
                value_differs = False
        if value_differs:
            graph.local.add(op.name)
        if op.name in result_reads:
            renamed[outputs[0]] = graph.exchange(outputs[0], SUM)
        elif local or value_differs or _is_random(op):
            differs.update(outputs)
            meet(outputs)

    _find_folds(graph, drifting, result_reads)
    for tensor in graph.results:
        name = renamed.get(tensor.name, tensor.name)
        graph.outputs.append(_settle_output(graph, name, differs, results))


def _asked_for(graph: StepGraph) -> set[str]:
    """What a collective of the step itself is given: each tower's own value is meant."""
    asked = [mark.name for mark in graph.marks.values() if mark.explicit and mark.name in graph.inputs]
    return set().union(*(_ancestors(graph, name) for name in asked))


def _needed_by_losses(graph: StepGraph) -> set[str]:
    return set().union(*(_ancestors(graph, name) | {name} for name in graph.losses if name in graph.inputs))


def share_states(graph: StepGraph) -> None:
    """Let metric state that is not simply added to be the same on all towers.

    A running maximum, or a count of batches, is no sum of what the towers hold. (The state of Keras' own
    metrics is: each tower adds what its samples have.)
    """
    variables = dict(graph.variables)
    shared = False
    for op in graph.ops:
        for handle in graph.writes[op.name]:
            if graph.role[handle] is Role.SUM and not _adds_samples(graph, op, handle):
                private.set_shared(variables[handle])
                graph.role[handle] = Role.SAME
                shared = True
    if shared:
        graph.kinds.start_anew()


def _adds_samples(graph: StepGraph, op: tf.Operation, handle: str) -> bool:
    """Whether what `op` adds to metric state is a sum over the samples, as far as can be told."""
    if not op.type.startswith("Assign"):
        return True
    delta = graph.inputs[op.name][1]
    if op.type == "AssignVariableOp":
        if graph.is_constant(delta):
            return True  # the state is reset
        while (adding := graph.by_name[op_name(delta)]).type in ("Cast", "Identity"):
            delta = graph.inputs[adding.name][0]
        others = [name for name in graph.inputs[adding.name] if not _reads(graph, name, handle)]
        if adding.type not in ("Add", "AddV2", "Sub") or len(others) != 1:
            return False
        delta = others[0]
    kind = graph.kind(delta)
    return kind.is_sum or kind.form == UNKNOWN


def _reads(graph: StepGraph, name: str, handle: str) -> bool:
    """Whether tensor `name` is the value of the variable with that handle."""
    while (op := graph.by_name[op_name(name)]).type in ("Cast", "Identity"):
        name = graph.inputs[op.name][0]
    return op.type == "ReadVariableOp" and graph.inputs[op.name] == [handle]


def _settle_output(graph: StepGraph, name: str, differing: set[str], results: Results) -> tuple[str, str]:
    if results is Results.EACH:
        return name, "first"
    tensor, differs = graph.spec(name), name in differing
    of_rows = tensor.shape.rank and (tensor.shape[0] is None or tensor.shape[0] in graph.rows)
    if differs and tensor.shape.rank and (results is Results.ROWS or of_rows):
        return name, "concat"
    if not differs or not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        return name, "first"
    if _settle_addends(graph, name, differing):
        return name, "first"
    kind = graph.kind(name)
    graph.doubt("A result of the step", kind)
    by_default = MEAN if tensor.dtype.is_floating else SUM
    return graph.exchange(name, kind.collective or by_default), "first"


def _settling(graph: StepGraph, op: tf.Operation, name: str | None) -> Collective | None:
    """How a differing value that `op` writes becomes the same on all towers; None if it cannot be reached."""
    if name is None or not op.type.startswith("Assign"):
        return None
    value, kind = graph.spec(name), graph.kind(name)
    if not (value.dtype.is_floating or value.dtype.is_integer):
        return None
    if (known := kind.collective) and (known is not MEAN or value.dtype.is_floating):
        return known
    graph.doubt(f"The value written by {op.name}", kind)
    if value.dtype.is_floating:
        return MEAN
    # A counter adds up; any other integer has no mean, so that tower 0 decides.
    return SUM if op.type in ("AssignAddVariableOp", "AssignSubVariableOp") else FOLLOW


def _settle_addends(graph: StepGraph, name: str, differs: set[str]) -> bool:
    """Where a tensor is a sum over the samples and something else, reduce the addends, each in its way.

    (`keras.Variable.assign_add` assigns such a tensor.) Return whether that made it the same on all towers.
    """
    if graph.kind(name).form != AFFINE:
        return False
    while (adding := graph.by_name[op_name(name)]).type in ("Cast", "Identity"):
        name = graph.inputs[adding.name][0]
    addends = graph.inputs[adding.name]
    differing = [i for i, addend in enumerate(addends) if addend in differs]
    if adding.type not in ("Add", "AddV2", "Sub", "AddN"):
        return False
    collectives = {i: graph.kind(addends[i]).collective for i in differing}
    if any(c is None and not _settle_addends(graph, addends[i], differs) for i, c in collectives.items()):
        return False
    for i, collective in collectives.items():
        if collective is not None:
            addends[i] = graph.exchange(addends[i], collective)
    return True


def _is_random(op: tf.Operation) -> bool:
    return private.is_stateful(op) and op.type not in _REPEATABLE and not op.type.startswith(_WRITERS)


def _result_reads(graph: StepGraph) -> set[str]:
    """Names of the reads of metric state, without those that feed an update of the same state."""
    reads = {
        op.name: graph.inputs[op.name][0]
        for op in graph.ops
        if op.type == "ReadVariableOp" and graph.role.get(graph.inputs[op.name][0]) is Role.SUM
    }
    updates: set[str] = set()
    for op in graph.ops:
        states = {handle for handle in graph.writes[op.name] if graph.role[handle] is Role.SUM}
        if states:
            ancestors = _ancestors(graph, op.name)
            updates.update(name for name, handle in reads.items() if handle in states and name in ancestors)
    return set(reads) - updates


def _ancestors(graph: StepGraph, name: str) -> set[str]:
    found: set[str] = set()
    queue = [name]
    while queue:
        for parent in map(op_name, graph.inputs[queue.pop()]):
            if parent not in found:
                found.add(parent)
                queue.append(parent)
    return found


def _find_folds(graph: StepGraph, drifting: set[str], result_reads: set[str]) -> None:
    """Plan what brings metric state and drifting variables together at the end of the step."""
    variables = dict(graph.variables)
    writers = collections.defaultdict(list)
    for op in graph.ops:
        for handle in graph.writes[op.name]:
            writers[handle].append(op.name)
    for handle, names in writers.items():
        role, variable = graph.role[handle], variables[handle]
        if role is Role.SUM and (read := _final_read(graph, handle, names[-1], result_reads)):
            result = next(name for name, e in graph.exchanges.items() if op_name(e.source) == read)
            graph.folds.append(Fold(handle, None, result, (), root_only=True))
        elif role is Role.SUM or handle in drifting:
            collective = SUM if role is Role.SUM else _fold_collective(variable.dtype)
            source = f"@fold_{len(graph.folds)}:0"
            result = f"@folded_{len(graph.folds)}:0"
            line = user_line(graph.by_name[names[-1]].traceback)
            graph.exchanges[result] = Exchange(
                source, result, collective, variable.shape, variable.dtype, line=line
            )
            graph.folds.append(Fold(handle, source, result, tuple(names), role is Role.SUM))


def _final_read(graph: StepGraph, handle: str, writer: str, result_reads: set[str]) -> str | None:
    """The name of a read of metric state behind its last write, which serves the fold as well."""
    for op in graph.ops:
        if (
            op.name in result_reads
            and graph.inputs[op.name][0] == handle
            and writer in graph.controls[op.name]
        ):
            return op.name
    return None


def _fold_collective(dtype: tf.DType) -> Collective:
    return MEAN if dtype.is_floating else FOLLOW
