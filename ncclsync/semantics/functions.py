"""Hold the functions that loops, branches and calls run, as graphs: no exchange can be put into them."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
LOOPS = frozenset({"While", "StatelessWhile"})
BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
_RUNNING = CALLS | LOOPS | BRANCHES


class Functions:
    """Hold the functions of one traced step, by name, as graphs.

    Attributes:
        definitions: FunctionDefs, by name.
        made: the names of those that TensorFlow has not met yet.
        faults: what could not be divided, by ncclsync's own faults, in words.
    """

    def __init__(self, definitions: Iterable[Any], outer: Any) -> None:
        """Know the FunctionDefs, and the graph that calls them."""
        self.definitions: dict[str, Any] = {one.signature.name: one for one in definitions}
        self.made: list[str] = []
        self.faults: list[str] = []
        self._counts: dict[str, int] = {}  # nodes of functions
        self._outer = outer
        self._graphs: dict[tuple[str, tuple[str, ...]], Any] = {}

    def graph(self, name: str, inputs: Sequence[tf.Tensor]) -> Any:
        """Return a function as a graph whose inputs have the shapes of these tensors."""
        shapes = tuple(str(tensor.shape) for tensor in inputs)
        if (name, shapes) not in self._graphs:
            known = [None if tensor.dtype in (tf.resource, tf.variant) else tensor.shape for tensor in inputs]
            self._graphs[name, shapes] = tf_compat.function_as_graph(self.definitions[name], known, self._outer)
        return self._graphs[name, shapes]

    def called_by(self, op: tf.Operation) -> list[str]:
        """Return the names of the functions that a loop, a branch or a call runs."""
        if op.type in self.definitions:
            return [op.type]
        attributes = [value for _, value in sorted(op.node_def.attr.items())]
        return [f.name for value in attributes for f in (value.func, *value.list.func) if f.name]

    def taken_by(self, op: tf.Operation, chosen: Any) -> list[str]:
        """Return the names of the functions that a branch may run if it chooses by this value; None: not known."""
        names = self.called_by(op)
        if chosen is None or np.ndim(chosen) or np.asarray(chosen).dtype.kind not in "bi":
            return names
        if op.type in ("If", "StatelessIf"):  # in the order of the attributes: else, then
            return [names[bool(chosen)]]
        return [names[chosen if 0 <= chosen < len(names) else -1]]

    def runs(self, op: tf.Operation) -> bool:
        """Return whether an op is a loop, a branch or a call."""
        return op.type in _RUNNING or op.type in self.definitions

    def hides_state(self, op: tf.Operation, repeatable: frozenset[str]) -> bool:
        """Return whether an op, or what it calls, draws from a state in no variable, or runs Python."""
        return tf_compat.is_stateful(op) and any(tf_compat.hides_state(one, repeatable) for one in self.op_types(op))

    def op_types(self, op: tf.Operation) -> Iterator[str]:
        """Yield the types of an op and of all ops in the functions that it calls, some several times.

        Left out are GPUs' recurrent networks that drop nothing: TensorFlow declares them stateful for their dropout.
        """
        nodes = [op.node_def]
        for node in itertools.chain(nodes, *(self.definitions[name].node_def for name in self.reached(nodes))):
            if node.op not in self.definitions and not drops_nothing(node):
                yield node.op

    def count_nodes(self, nodes: Iterable[Any]) -> int:
        """Return how many nodes these NodeDefs are, with those of the functions that each of them calls."""
        count = 0
        for node in nodes:
            called = [f.name for value in node.attr.values() for f in (value.func, *value.list.func)]
            for name in {node.op, *called} & self.definitions.keys():
                if name not in self._counts:
                    self._counts[name] = self.count_nodes(self.definitions[name].node_def)
                count += self._counts[name]
            count += 1
        return count

    def reached(self, nodes: Iterable[Any]) -> list[str]:
        """Return the names of the functions that NodeDefs call, directly or not."""
        found: dict[str, None] = {}
        queue = list(nodes)
        while queue:
            node = queue.pop()
            called = (f.name for value in node.attr.values() for f in (value.func, *value.list.func))
            for name in (node.op, *called):
                if name in self.definitions and name not in found:
                    found[name] = None
                    queue.extend(self.definitions[name].node_def)
        return list(found)


def drops_nothing(node: Any) -> bool:
    """Return whether a NodeDef is a GPU's recurrent network without dropout: it draws nothing from its state."""
    return node.op.startswith("CudnnRNN") and not node.attr["dropout"].f


def is_compiled(function: Any) -> bool:
    """Return whether XLA compiles a FunctionDef."""
    return function.attr["_XlaMustCompile"].b


def change_functions(
    definition: tf.compat.v1.GraphDef,
    suffix: str,
    concerns: Callable[[Any], bool],
    change: Callable[[Any], None],
    but: Callable[[Any], bool] = lambda _: False,
) -> list[Any]:
    """Let a graph call changed copies of its functions, in place, if there is anything to change.

    Args:
        definition: the graph, with all functions that it calls.
        suffix: of the copies' names; TensorFlow knows a function by its name.
        concerns: whether a FunctionDef has something to change.
        change: changes a copy.
        but: functions that are called as they are, with all that they call.

    Returns:
        The copies: FunctionDefs that TensorFlow has not met yet.
    """
    functions = {function.signature.name: function for function in definition.library.function}
    added: dict[str, Any] = {}  # by the name of the function as it was traced
    queue = list(definition.node) if any(map(concerns, functions.values())) else []
    while queue:
        node = queue.pop()
        for attribute in node.attr.values():
            for called in (attribute.func, *attribute.list.func):
                function = functions.get(called.name)
                if function is None or but(function):
                    continue
                if called.name not in added:
                    copied = added[called.name] = definition.library.function.add()
                    copied.CopyFrom(function)
                    copied.signature.name += suffix
                    change(copied)
                    queue += copied.node_def
                called.name += suffix
    return list(added.values())


def parents_of(op: tf.Operation) -> list[tf.Operation]:
    """Return the ops that must run before an op."""
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]


def in_order(
    roots: Iterable[tf.Operation], needed: Callable[[tf.Operation], Iterable[tf.Operation]] = parents_of
) -> list[tf.Operation]:
    """Return ops and all that they need, inputs before consumers. Not by recursion: hundreds of ops lead to some."""
    order: dict[OpName, tf.Operation] = {}
    stack = [(root, iter(needed(root))) for root in [*roots][::-1]]
    while stack:
        op, left = stack[-1]
        ahead = None if op.name in order else next((one for one in left if one.name not in order), None)
        if ahead is not None:
            stack.append((ahead, iter(needed(ahead))))
            continue
        stack.pop()
        order.setdefault(op.name, op)
    return list(order.values())
