"""Find where towers must meet in a step, by following what can differ between them."""

import collections

import tensorflow as tf

from ncclsync import private
from ncclsync.kinds import AFFINE, MAX, MIN, Kind
from ncclsync.ops import Collective
from ncclsync.program import Exchange, Results
from ncclsync.step_graph import Fold, StepGraph, op_name
from ncclsync.variables import Role

SUM, MEAN, FOLLOW = Collective("all_reduce", "sum"), Collective("all_reduce", "mean"), Collective("broadcast")

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


def find_exchanges(graph: StepGraph, results: Results) -> None:
    """Find every tensor that must meet its counterparts, by following what can differ between towers.

    What differs: the batch, random state, the state of metrics, and all that is computed from them. What
    does not: variables, constants, and whatever comes out of an exchange. So an exchange is put
    - at each mark, unless all towers hold the same value already (then mean, max, min change nothing);
    - before a differing value is written to a variable that must be the same on all towers: a moving
      average takes the mean over the batch, and so does a hand-written weight update;
    - behind each read of a metric's state that is not part of its own update: the result is global;
    - behind differing results of the step.
    Writes that cannot be intercepted (inside a branch, or a scatter) are folded at the end of the step, and
    so is metric state.
    """
    differs: set[str] = set()  # tensor names
    drifting: set[str] = set()  # handles of variables that differ until the end of the step
    result_reads = _result_reads(graph)
    renamed: dict[str, str] = {}

    for op in graph.ops:
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
                renamed[output] = source if settled else graph.exchange(source, collective, when)
                if collective.kind == "reduce":
                    differs.add(renamed[output])
            continue
        if op.name in graph.passing:
            # Each output is its input, however different the others are: tf.custom_gradient passes the
            # results of a collective on beside its arguments.
            renamed.update(zip(outputs, inputs, strict=True))
            continue
        handles = [name for name in inputs if name in graph.role]
        local = any(graph.role[name] is not Role.SAME or name in drifting for name in handles)
        value_differs = any(name in differs for name in inputs)
        if value_differs:
            graph.local.add(op.name)
        for handle in graph.writes[op.name]:
            if graph.role[handle] is not Role.SAME or not (value_differs or local or _is_random(op)):
                continue
            if len(inputs) == 2 and _settle_addend(graph, op, differs):
                value_differs = False
                continue
            settling = _settling(graph, op, inputs[1] if len(inputs) == 2 else None)
            if settling is None:
                drifting.add(handle)
            else:
                inputs[1] = graph.exchange(inputs[1], settling)
                value_differs = False
        if op.name in result_reads:
            renamed[outputs[0]] = graph.exchange(outputs[0], SUM)
        elif local or value_differs or _is_random(op):
            differs.update(outputs)

    _find_folds(graph, drifting, result_reads)
    for tensor in graph.results:
        name = renamed.get(tensor.name, tensor.name)
        graph.outputs.append(_settle_output(graph, name, name in differs, results))


def _settle_output(graph: StepGraph, name: str, differs: bool, results: Results) -> tuple[str, str]:
    if results is Results.EACH:
        return name, "first"
    tensor = graph.spec(name)
    of_rows = tensor.shape.rank and (tensor.shape[0] is None or tensor.shape[0] in graph.rows)
    if differs and tensor.shape.rank and (results is Results.ROWS or of_rows):
        return name, "concat"
    if not differs or not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        return name, "first"
    kind = graph.kind(name)
    graph.doubt("A result of the step", kind)
    by_default = MEAN if tensor.dtype.is_floating else SUM
    return graph.exchange(name, _collective_of(kind) or by_default), "first"


def _settling(graph: StepGraph, op: tf.Operation, name: str | None) -> Collective | None:
    """How a differing value that `op` writes becomes the same on all towers; None if it cannot be reached."""
    if name is None or not op.type.startswith("Assign"):
        return None
    value, kind = graph.spec(name), graph.kind(name)
    if not (value.dtype.is_floating or value.dtype.is_integer):
        return None
    if (known := _collective_of(kind)) and (known is not MEAN or value.dtype.is_floating):
        return known
    graph.doubt(f"The value written by {op.name}", kind)
    if value.dtype.is_floating:
        return MEAN
    # A counter adds up; any other integer has no mean, so that tower 0 decides.
    return SUM if op.type in ("AssignAddVariableOp", "AssignSubVariableOp") else FOLLOW


def _collective_of(kind: Kind) -> Collective | None:
    """The collective that makes the batch's value of the shards'; None if there is none, or who knows."""
    if kind.is_sum:
        return SUM
    if kind.is_mean:
        return MEAN
    return {MAX: Collective("all_reduce", "max"), MIN: Collective("all_reduce", "min")}.get(kind.form)


def _settle_addend(graph: StepGraph, op: tf.Operation, differs: set[str]) -> bool:
    """Where `op` writes a value that is the same on all towers plus a sum over the samples, reduce the sum.

    (`keras.Variable.assign_add` assigns such a sum.) Return whether it did.
    """
    name = graph.inputs[op.name][1]
    if graph.kind(name).form != AFFINE:
        return False
    while (adding := graph.by_name[op_name(name)]).type in ("Cast", "Identity"):
        name = graph.inputs[adding.name][0]
    addends = graph.inputs[adding.name]
    differing = [i for i, addend in enumerate(addends) if addend in differs]
    if len(differing) != 1 or not graph.kind(addends[differing[0]]).is_sum:
        return False
    addends[differing[0]] = graph.exchange(addends[differing[0]], SUM)
    return True


def _is_random(op: tf.Operation) -> bool:
    return private.is_stateful(op) and op.type not in _REPEATABLE and not op.type.startswith("Assign")


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
            graph.exchanges[result] = Exchange(source, result, collective, variable.shape, variable.dtype)
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
