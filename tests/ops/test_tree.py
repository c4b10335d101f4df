"""The tree in which shards are added up: the same whoever holds which leaves."""

import pytest

from ncclsync.ops.tree import nodes_within, reduce_nodes, reduce_tree
from ncclsync.sharding.shards import shard_sizes


def joined(leaves, towers):
    """What the tree does, in words, if so many towers divide its leaves."""
    values, begin = {}, 0
    for count in shard_sizes(leaves, towers):
        names = [str(leaf) for leaf in range(begin, begin + count)]
        values |= reduce_nodes("({}+{})".format, leaves, begin, names)
        begin += count
    return reduce_tree("({}+{})".format, leaves, values)


def test_the_tree():
    """Neighbours first; a last one without a neighbour goes up."""
    assert joined(1, 1) == "0"
    assert joined(5, 1) == "(((0+1)+(2+3))+4)"
    assert joined(8, 1) == "(((0+1)+(2+3))+((4+5)+(6+7)))"


@pytest.mark.parametrize("leaves", range(1, 18))
def test_it_does_not_depend_on_the_towers(leaves):
    """Whether they divide the leaves or not."""
    assert {joined(leaves, towers) for towers in range(1, leaves + 1)} == {joined(leaves, 1)}


def test_a_tower_of_two_to_the_power_of_k_leaves_gives_one_node():
    """Then it sends no more than without shards."""
    assert [len(nodes_within(8, begin, begin + 2)) for begin in (0, 2, 4, 6)] == [1, 1, 1, 1]
    assert len(nodes_within(6, 0, 3)) == 2
