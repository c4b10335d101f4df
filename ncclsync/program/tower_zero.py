"""Let tower 0 compute an op, for all towers or alone: its results, or what it does beside them, may not be repeated."""

from typing import Literal

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.source_lines import user_line
from ncclsync.program.conversion import Conversions, Unshared
from ncclsync.semantics import rules
from ncclsync.semantics.functions import BRANCHES, LOOPS
from ncclsync.semantics.placements import REPLICATE, Placement
from ncclsync.semantics.placing import Instead, Refused
from ncclsync.semantics.rules import Call


class TowerZero:
    """Run ops on tower 0, and give their results to all towers.

    Attributes:
        warned: what a user should know of such ops, in words.
    """

    def __init__(self, conversions: Conversions) -> None:
        """Put what that takes into a step's graph."""
        self._conversions = conversions
        self.warned: list[str] = []

    def follow(self, call: Call) -> None:
        """Give all towers what tower 0 computes: the op is appended, and its results are placed."""
        op, graph = call.op, self._conversions.graph
        graph.append(op, call.tensors)
        graph.differ(op.outputs)
        with graph.building():
            for output in op.outputs:
                sent = output.dtype not in (tf.resource, tf.variant)
                self._conversions.put(output, self._conversions.followed(output, op) if sent else output, REPLICATE)
        if op.type not in rules.DRAWS:
            self._follow_writes(op)

    def _follow_writes(self, op: tf.Operation) -> None:
        """Give all towers what an op, or a dataset that it iterates, has written to tower 0's variables."""
        graph, sources = self._conversions.graph, [op]
        for one in sources:
            sources += [t.op for t in one.inputs if t.dtype == tf.variant and t.op not in sources]
        handles = sorted({handle for one in sources for handle in graph.writes.get(one.name, ())})
        is_dataset = any(output.dtype == tf.variant for output in op.outputs) and not graph.functions.runs(op)
        if not handles or is_dataset:  # which writes when it is iterated
            return
        reads = [graph.read(handle, after=[op]) for handle in handles]
        graph.differ(reads)
        with graph.building():
            pairs = zip(handles, reads, strict=True)
            done = tf.group(*(graph.assign(handle, self._conversions.followed(read, op)) for handle, read in pairs))
        names = {one.name for one in (*sources, *(read.op for read in reads))}
        for one in sources:
            graph.replace(one.name, done.name, but_not_to=names)

    def hide(self, call: Call) -> list[Placement] | Literal[Instead.ALIKE]:
        """Run an op that changes something outside the step, on tower 0 alone: Python, an iterator, a summary, a print.

        The other towers receive its results, of any shape. A loop or a branch with such an op runs on tower 0 alone if
        it writes no variable.

        Returns:
            How its results are placed; or that every tower has to run it.
        """
        op, graph = call.op, self._conversions.graph
        for i, name in enumerate(graph.inputs[op.name]):
            try:
                call.require(i, REPLICATE)
            except Refused:
                raise Unshared({name}) from None
        unheld = {
            tensor.name for tensor in call.tensors if tensor.dtype == tf.resource
        } - graph.traced.variable_of.keys()
        if (
            unheld and graph.traced.trace.jit_compile
        ):  # in a branch, XLA would not say which such ops it does not compile
            return Instead.ALIKE
        outputs = [output for output in op.outputs if output.dtype not in (tf.resource, tf.variant)]
        others = [output for output in op.outputs if output.dtype in (tf.resource, tf.variant)]
        lazy = any(tensor.dtype == tf.variant for tensor in call.tensors)  # a dataset, which it iterates
        # A loop gives back the handles that it has been given.
        if (others and op.type not in LOOPS) or graph.writes[op.name] or lazy:
            # It writes variables, or may, and every tower must write its own: all run it, and so its effects happen N
            # times.
            self.warned.append(
                f"{op.type}, at {user_line(op.traceback)}, does something that no variable holds (it runs "
                "Python, or prints, or draws without a seed): every tower does it, with the batch's values, "
                "and tower 0's results, and what it writes to variables, are taken"
            )
            return Instead.ALIKE

        def run():
            made = tf_compat.copied_op(op, [tf.identity(tensor) for tensor in call.tensors])
            given = [made.outputs[output.value_index] for output in outputs]
            with tf.control_dependencies([made]):
                done = tf.constant(0)
            return [done, *(part for one in given for part in (tf.reshape(one, [-1]), tf.shape(one)))]

        def receive():
            nothing = (part for one in outputs for part in (tf.zeros([0], one.dtype), tf.zeros([0], tf.int32)))
            return [tf.constant(0), *nothing]

        before = len(graph.ops)
        with graph.building():
            done, *sent = tf.cond(tf.equal(self._conversions.share.tower, 0), run, receive)
            # By a result: TensorFlow prunes an op of a branch that no result needs.
            done = tf.identity(done)
        graph.runs_elsewhere(op, (made for made in graph.ops[before:] if made.type in BRANCHES))
        graph.replace(op.name, done.op.name)
        for output in others:
            self._conversions.put(output, call.tensors[output.value_index], REPLICATE)
        with graph.building():
            for output, flat, shape in zip(outputs, sent[::2], sent[1::2], strict=True):
                self._conversions.put(output, self._conversions.received_whole(flat, shape, output, op), REPLICATE)
        return [REPLICATE] * len(op.outputs)
