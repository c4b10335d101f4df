"""Add up the shards' values in one tree, the same for any distribution of shards over towers.

The tree's leaves are the shards, in order. At every height above, two neighbours make one node, and a last
node without a neighbour goes up as it is: five leaves make ((0 + 1) + (2 + 3)) + 4. A tower adds up the nodes that lie
in its own shards; all towers compute the rest of the tree alike.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple):
    """Name a node: it joins the leaves `place * 2**height` to `(place + 1) * 2**height - 1`, as far as they exist."""

    height: int
    place: int


def nodes_within(leaves: int, begin: int, end: int) -> list[Node]:
    """Return the largest nodes of a tree of so many leaves that lie in `begin` to `end` - 1, in order."""
    found = []
    queue = [_root(leaves)]
    while queue:
        node = queue.pop()
        first, last = _span(node, leaves)
        if first >= begin and last <= end:
            found.append(node)
        elif first < end and last > begin:
            queue += reversed(_children(node, leaves))
    return found


def reduce_nodes(
    combine: Callable[[Value, Value], Value], leaves: int, begin: int, values: Sequence[Value]
) -> dict[Node, Value]:
    """Combine the values of neighbouring leaves, from the leaf `begin` on, as far as the tree does without others.

    Returns the values of `nodes_within`, in a tree of so many leaves.
    """
    given = {Node(0, begin + i): value for i, value in enumerate(values)}
    return {node: _value(combine, leaves, node, given) for node in nodes_within(leaves, begin, begin + len(values))}


def reduce_tree(combine: Callable[[Value, Value], Value], leaves: int, values: Mapping[Node, Value]) -> Value:
    """Combine the results of `reduce_nodes` for all leaves, in the same tree."""
    return _value(combine, leaves, _root(leaves), values)


def _value(combine: Callable[[Value, Value], Value], leaves: int, node: Node, given: Mapping[Node, Value]) -> Value:
    if node in given:
        return given[node]
    left, *right = (_value(combine, leaves, child, given) for child in _children(node, leaves))
    return combine(left, right[0]) if right else left


def _root(leaves: int) -> Node:
    return Node((leaves - 1).bit_length(), 0)


def _span(node: Node, leaves: int) -> tuple[int, int]:
    width = 2**node.height
    return node.place * width, min((node.place + 1) * width, leaves)


def _children(node: Node, leaves: int) -> list[Node]:
    children = (Node(node.height - 1, 2 * node.place + side) for side in (0, 1))
    return [child for child in children if _span(child, leaves)[0] < leaves]
