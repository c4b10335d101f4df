"""`Layout` by hand: which shard is whose, and with which rows, without towers."""

import pytest
import tensorflow as tf

from ncclsync.towers.layout import Layout


def of_all(layouts):
    """What layouts of several processes say together, by shard: the tower, its place among all, its device."""
    return [
        (shard, layout.ranks[tower], device)
        for layout in layouts
        for shard, tower, device in zip(layout.own_shards, layout.tower_places, layout.shard_devices, strict=True)
    ]


def test_a_shard_for_each_tower():
    """Of one process, and of two with 2 and 3 towers: each shard is computed once, by the tower of its number."""
    alone = Layout(("GPU:0", "GPU:1"), range(2), 2)
    assert of_all([alone]) == [(0, 0, "GPU:0"), (1, 1, "GPU:1")] and alone.owners == range(2)
    assert alone.is_chief and not alone.meets_processes and alone.shards == 2 and alone.shares is None
    first, second = Layout(("A", "B"), range(2), 5), Layout(("A", "B", "C"), range(2, 5), 5)
    assert of_all([first, second]) == [(0, 0, "A"), (1, 1, "B"), (2, 2, "A"), (3, 3, "B"), (4, 4, "C")]
    assert [one.is_chief for one in (first, second)] == [True, False]
    for one in (first, second):
        assert one.meets_processes and one.owners == range(5) and one.sizes_of(12) == (3, 3, 2, 2, 2)
    assert first.places == (range(1), range(1, 2)) and second.places == (range(1), range(1, 2), range(2, 3))


def test_several_shards_of_a_tower():
    """In their order; a split makes another layout, of twice as many, whose bits belong to no number of shards."""
    given = Layout(("A", "B", "C"), range(3), 3, divided=8)
    assert given.places == (range(3), range(3, 6), range(6, 8)) and given.owners == (0, 0, 0, 1, 1, 1, 2, 2)
    assert given.own_shards == range(8) == range(given.shards) and not given.adds_up
    assert given.shard_devices == ["A", "A", "A", "B", "B", "B", "C", "C"] and given.sizes_of(9) == (2, *[1] * 7)
    plain = Layout(("A", "B"), range(2), 2)
    divided = plain.split()
    assert (plain.shards, plain.divided, plain.adds_up) == (2, None, False)
    assert divided.adds_up and divided.places == (range(2), range(2, 4)) and divided.split().shards == 8
    assert divided.split().places == (range(4), range(4, 8))


def test_shares():
    """Other weights are seen at once, in the layout that is there."""
    weights = tf.Variable([1, 3], trainable=False)
    layout = Layout(("A", "B"), range(2), 2, weights=weights)
    assert layout.shares == (1, 3) and layout.sizes_of(8) == (2, 6)
    assert [one.numpy().tolist() for one in layout.read([])] == [[1, 3]]
    weights.assign([3, 1])
    assert layout.shares == (3, 1) and layout.sizes_of(8) == (6, 2)


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 11])
def test_rows_of_a_process(rows):
    """A graph knows the rows that `sizes_of` says; the processes' follow each other."""
    layouts = [Layout(("A", "B"), range(2), 5), Layout(("A",), range(2, 3), 5), Layout(("A", "B"), range(3, 5), 5)]
    begin = 0
    for layout in layouts:
        own = layout.own_rows(tf.constant(rows, tf.int64))
        end = begin + sum(layout.sizes_of(rows)[shard] for shard in layout.own_shards)
        assert [int(one) for one in own] == [begin, end] and own[0].dtype == tf.int64
        begin = end
    assert begin == rows
