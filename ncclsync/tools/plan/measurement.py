"""Find a model's workload: time its steps on one device here, and run its traced program once.

The program is that of training on towers, with its buckets; it runs on one tower, outside a graph, so that the sizes of
all messages are known.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ncclsync.ops import CollectiveKind
from ncclsync.program.program import Outcome, Program, Segment
from ncclsync.program.roofline import OPERATIONS_PER_BYTE, Roofline
from ncclsync.semantics.axes import Axes
from ncclsync.semantics.functions import Functions
from ncclsync.tools.bench.turns import Spread, device_timer, filling, take_turns
from ncclsync.tools.plan.prediction import Message, Stage
from ncclsync.towers.laying_out import lay_out
from ncclsync.towers.recovery import Rollback
from ncclsync.training.keras_model import ModelStep
from ncclsync.training.loop import towers_of

_TURN_S = 0.2  # of one batch size
_MOST_STEPS = 50


def step_seconds(
    model: keras.Model, data: Any, batches: Sequence[int], rounds: int, show: Callable[[str], None]
) -> dict[int, Spread]:
    """Return the seconds of training steps on batches in memory, of several sizes in turns, by batch size.

    Args:
        model: compiled, on one device; it is trained.
        data: structure of arrays, of as many rows as the largest batch.
        batches: their sizes.
        rounds: turns of each.
        show: reports progress.
    """
    model.make_train_function()
    timers = {}
    for batch in batches:
        # As `fit` has them, with an open number of rows, so that all sizes run the same graph.
        batches_in_memory = tf.data.Dataset.from_tensor_slices(_first_rows(data, batch)).batch(batch).cache()
        iterator = iter(batches_in_memory.repeat())
        show(f"first steps with {batch} samples")
        for _ in range(2):
            _seconds(model, iterator, 1)
        once = _seconds(model, iterator, 2)
        steps = filling(_TURN_S, once, _MOST_STEPS)
        timers[str(batch)] = functools.partial(_seconds, model, iterator, steps)
    found = take_turns(timers, rounds, show)
    return {int(batch): Spread.of(samples) for batch, samples in found.items()}


def _first_rows(data: Any, batch: int) -> Any:
    """Return rows as `fit` passes them to a step: tf.data would take a list for one tensor."""
    rows = keras.tree.map_structure(lambda array: tf.constant(array[:batch]), data)
    return keras.tree.lists_to_tuples(rows)


def _seconds(model: keras.Model, iterator: Iterator, calls: int) -> float:
    """Return the mean time of a step in so many calls of the model's train function."""
    run = model.train_function
    return device_timer(lambda: run(iterator), calls * model.steps_per_execution, calls)()


def traced_traffic(model: keras.Model, data: Any, batch: int) -> tuple[tuple[Stage, ...], bool]:
    """Trace a model's train step as for several towers, and run it once.

    Args:
        model: on one tower, by `nccl_parallel`; it is trained by a step.
        data: structure of arrays, of at least `batch` rows.
        batch: samples of a tower.

    Returns:
        The stages of the step, each with its messages; and whether some messages are sent only in certain steps, as
        with gradient accumulation.
    """
    rows = _first_rows(data, batch)
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, rows)
    towers = towers_of(model)
    assert towers is not None
    session = towers.session
    session.target = dataclasses.replace(session.target, passes=())  # packed, as on GPUs
    program = ModelStep(model, towers, "train_step").program_of(specs)
    runs: list[tuple[float, tuple[Message, ...]]] = []
    recorded = dataclasses.replace(
        program, segments=tuple(_recorded(segment, batch, runs) for segment in program.segments)
    )
    for _, variable in program.variables:
        towers.replicas.of(variable)
    lay_out(recorded, towers, rows, Rollback(recorded, towers))
    runs = _joined(program, runs)
    total = sum(work for work, _ in runs)
    stages = tuple(Stage(work / total if total else 1 / len(runs), messages) for work, messages in runs)
    return stages, any(bucket.when for segment in program.segments for bucket in segment.outgoing)


def _joined(program: Program, runs: list[tuple[float, tuple[Message, ...]]]) -> list[tuple[float, tuple[Message, ...]]]:
    """Join each segment that waits for no exchange with the segment before: messages travel meanwhile."""
    joined: list[tuple[float, tuple[Message, ...]]] = []
    for segment, (work, messages) in zip(program.segments, runs, strict=True):
        if joined and not segment.incoming:
            before, earlier = joined.pop()
            both = before + work or 1.0
            earlier = tuple(dataclasses.replace(m, ready=m.ready * before / both) for m in earlier)
            messages = tuple(dataclasses.replace(m, ready=(before + m.ready * work) / both) for m in messages)
            work, messages = before + work, (*earlier, *messages)
        joined.append((work, messages))
    return joined


def _recorded(segment: Segment, batch: int, runs: list[tuple[float, tuple[Message, ...]]]) -> Segment:
    """Return a segment that, when it runs, adds its work and its messages to `runs`."""

    def run(*arguments: Any) -> Outcome:
        outcome = segment.function(*arguments)
        shares, work = _shares(segment.function, arguments, len(segment.fetches))
        messages = []
        for bucket, (tensor,), ready in zip(segment.outgoing, outcome.sent, shares, strict=True):
            size_bytes = float(tf.size(tensor)) * tensor.dtype.size
            grows = bucket.wire.kind == CollectiveKind.ALL_GATHER
            of_sample = size_bytes / batch if grows else 0.0
            messages.append(Message(bucket.wire.kind.value, ready, 0.0 if grows else size_bytes, of_sample))
        runs.append((work, tuple(messages)))
        return outcome

    return dataclasses.replace(segment, function=run)


def _shares(function: Any, arguments: Sequence[Any], skip: int) -> tuple[list[float], float]:
    """Return the shares of work before a segment's buckets, and its work, given arguments of these shapes."""
    definition = function.graph.as_graph_def()
    given = [*arguments, *function.captured_inputs]
    names = [tensor.name for tensor in function.graph.outputs[skip:-1]]

    def again() -> list[Any]:
        tensors = (tf.identity(tensor) for tensor in given)  # of this graph
        inputs = dict(zip((tensor.name for tensor in function.graph.inputs), tensors, strict=True))
        return tf.graph_util.import_graph_def(definition, input_map=inputs, return_elements=names)

    graph = tf.function(again, autograph=False).get_concrete_function().graph
    outputs = graph.outputs if names else []
    return shares_before(outputs, graph)


def shares_before(outputs: Sequence[Any], graph: tf.Graph) -> tuple[list[float], float]:
    """Return the share of a graph's work before each output and all outputs before it, and the whole work.

    Args:
        outputs: tensors of the graph, in the order of their use.
        graph: with static shapes; an unknown dimension counts as 1.

    Returns:
        Shares from 0 to 1, in ascending order; the work, in bytes moved or operations of the same time.
    """
    library = graph.as_graph_def().library
    functions = Functions({one.signature.name: one for one in library.function}, graph)
    roofline = Roofline(functions, Axes(functions, {}))
    work = {}
    for op in graph.get_operations():
        multiplications, moved, _ = roofline.work(op).sum(axis=1).tolist()
        work[op.name] = max(moved, 2 * multiplications / OPERATIONS_PER_BYTE)
    total = sum(work.values())
    done: set[str] = set()
    shares, spent = [], 0.0
    for output in outputs:
        queue = [output.op]
        while queue:
            op = queue.pop()
            if op.name not in done:
                done.add(op.name)
                spent += work[op.name]
                queue += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        shares.append(min(1.0, spent / total) if total else 1.0)
    return shares, total
