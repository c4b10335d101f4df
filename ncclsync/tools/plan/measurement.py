"""Find a model's workload: time its steps on one device here, and run its traced program once.

The program is that of training on towers, with its buckets. It runs on one tower, outside a graph, where the sizes of
all messages are known.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync.compat.names import OpName
from ncclsync.costs.roofline import GPU, Roofline
from ncclsync.ops import CollectiveKind
from ncclsync.parallel import nccl_parallel
from ncclsync.program.program import Outcome, Segment
from ncclsync.semantics.axes import Axes
from ncclsync.semantics.functions import Functions
from ncclsync.tools.bench.turns import about, device_seconds, fill_turns
from ncclsync.tools.plan.prediction import Message, Stage
from ncclsync.towers.laying_out import lay_out
from ncclsync.towers.recovery import Rollback
from ncclsync.training.keras_model import ModelStep
from ncclsync.training.loop import towers_of

_TURN_S = 0.2  # of one batch size


def step_seconds(model: keras.Model, data: Any, batches: Sequence[int], rounds: int) -> dict[int, np.ndarray]:
    """Time training steps of a model on one device, on batches in memory, of several sizes in turns.

    `data` has as many rows as the largest batch. Return, by batch size, [rounds] the mean seconds of a step.
    """
    model.make_train_function()
    sides = {}
    for batch in batches:
        # With an open number of rows, as in `fit`, so that all sizes run the same graph.
        batches_in_memory = tf.data.Dataset.from_tensor_slices(_first_rows(data, batch)).batch(batch).cache()
        iterator = iter(batches_in_memory.repeat())
        sides[batch] = functools.partial(_timed, model, iterator)
    found = fill_turns(sides, _TURN_S, rounds, about("batches of so many samples"))
    return {batch: answers["seconds"] for batch, answers in found.items()}


def _first_rows(data: Any, batch: int) -> Any:
    """Return rows as `fit` passes them to a step, with lists as tuples: tf.data would take a list for one tensor."""
    rows = keras.tree.map_structure(lambda array: tf.constant(array[:batch]), data)
    return keras.tree.lists_to_tuples(rows)


def _timed(model: keras.Model, iterator: Iterator, steps: int) -> dict[str, float]:
    """Return the mean time of a step in so many calls of the model's train function."""
    run = model.train_function
    return {"seconds": device_seconds(lambda: run(iterator), steps) / model.steps_per_execution}


def traced_traffic(
    factory: Callable[[], keras.Model], options: Mapping[str, Any], data: Any, batch: int
) -> tuple[tuple[Stage, ...], bool]:
    """Trace the train step of a factory's compiled model as for several towers, and run it once.

    `options` are those of `nccl_parallel`; `data` has at least `batch` rows, the samples of a tower.

    Returns:
        The stages of the step, each with its messages; and whether some messages are sent only in certain steps, as
        with gradient accumulation.
    """
    rows = _first_rows(data, batch)
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, rows)
    # One tower needs neither NCCL nor a second GPU.
    model = nccl_parallel(towers=1, backend="cpu", **options)(factory)()
    towers = towers_of(model)
    assert towers is not None
    with towers:
        session = towers.session
        session.target = dataclasses.replace(session.target, passes=())  # packed, as on GPUs
        program = ModelStep(model, towers, "train_step").step.programs.of(specs)
        stages: list[Stage] = []
        segments = tuple(_recorded(segment, batch, stages) for segment in program.segments)
        recorded = dataclasses.replace(program, segments=segments)
        for _, variable in program.variables:
            towers.replicas.of(variable)
        lay_out(recorded, towers, rows, Rollback(recorded, towers))
    total = sum(stage.share for stage in stages)
    conditional = any(bucket.when for segment in program.segments for bucket in segment.outgoing)
    return tuple(_in_shares(stage, total) for stage in stages), conditional


def _in_shares(stage: Stage, total: float) -> Stage:
    """Return a stage in shares of the total work, given the stage in work."""
    work = stage.share
    ready = [min(1.0, message.ready / work) if work else 1.0 for message in stage.messages]
    messages = zip(stage.messages, ready, strict=True)
    return Stage(work / total, tuple(dataclasses.replace(message, ready=share) for message, share in messages))


def _recorded(segment: Segment, batch: int, stages: list[Stage]) -> Segment:
    """Return a segment that, when it runs, adds a stage, in work, with its messages to `stages`.

    A segment that waits for no exchange extends the last stage: messages travel meanwhile.
    """

    def run(*arguments: Any) -> Outcome:
        outcome = segment.function(*arguments)
        ready, work = _work(segment.function, arguments, len(segment.fetches))
        before = stages.pop() if stages and not segment.incoming else Stage(0.0)
        messages = [*before.messages]
        for bucket, (tensor,), done in zip(segment.outgoing, outcome.sent, ready, strict=True):
            size_bytes = float(tf.size(tensor)) * tensor.dtype.size
            grows = bucket.wire.kind == CollectiveKind.ALL_GATHER
            sizes = (0.0, size_bytes / batch) if grows else (size_bytes, 0.0)
            messages.append(Message(bucket.wire.kind.value, before.share + done, *sizes))
        stages.append(Stage(before.share + work, tuple(messages)))
        return outcome

    return dataclasses.replace(segment, function=run)


def _work(function: Any, arguments: Sequence[Any], skip: int) -> tuple[list[float], float]:
    """Return the work before each of a segment's buckets, and in all, for arguments of these shapes."""
    definition = function.graph.as_graph_def()
    given = [*arguments, *function.captured_inputs]
    names = [tensor.name for tensor in function.graph.outputs[skip:-1]]

    def again() -> list[Any]:
        tensors = (tf.identity(tensor) for tensor in given)  # of this graph
        inputs = dict(zip((tensor.name for tensor in function.graph.inputs), tensors, strict=True))
        return tf.graph_util.import_graph_def(definition, input_map=inputs, return_elements=names)

    graph = tf.function(again, autograph=False).get_concrete_function().graph
    return work_before(graph.outputs if names else [], graph)


def work_before(outputs: Sequence[Any], graph: tf.Graph) -> tuple[list[float], float]:
    """Return the work that a graph has done when each output is complete, and its whole work.

    Work is in bytes moved, or arithmetic that takes the same time.

    Args:
        outputs: tensors of the graph, in the order of their use.
        graph: with static shapes; an unknown dimension counts as 1.
    """
    functions = Functions(graph.as_graph_def().library.function, graph)
    roofline = Roofline(functions, Axes(functions, {}))
    work = {}
    for op in graph.get_operations():
        multiplications, moved, _ = roofline.work(op).sum(axis=1).tolist()
        work[op.name] = max(moved, 2 * multiplications / GPU.operations_per_byte)
    done: set[OpName] = set()
    found, spent = [], 0.0
    for output in outputs:
        queue = [output.op]
        while queue:
            op = queue.pop()
            if op.name not in done:
                done.add(op.name)
                spent += work[op.name]
                queue += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        found.append(spent)
    return found, sum(work.values())
