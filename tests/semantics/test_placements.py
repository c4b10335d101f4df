"""Placements are compared as rules and conversions need it, and are told as they always were."""

import dataclasses

import pytest

from ncclsync.semantics.placements import (
    COUNTER,
    EACH,
    LOCAL,
    REPLICATE,
    SEEDED,
    SPLITS,
    SUM,
    Counts,
    EachRow,
    Indices,
    Places,
    Shard,
    has,
    only,
    rows,
)


def test_what_is_compared():
    """How many rows a sample has is not: tensors that one op takes together have equally many. All else is."""
    assert Shard(0, 1, 2) == Shard(0, 1, None) and EachRow(2) == EACH
    assert hash(Shard(0, 1, 2)) == hash(Shard())  # they are one key of what was converted
    others = [REPLICATE, LOCAL, SEEDED, EACH, COUNTER, SUM, SPLITS, Places(1, 1), Indices(1, 1), Counts((1,))]
    others += [Shard(), Shard(1), Shard(0, 2), Shard(alike=True), Shard(unit="values:0"), Counts((1,), unit="values:0")]
    assert len(set(others)) == len(others)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Shard().axis = 1


def test_how_they_are_told():
    told = [REPLICATE, LOCAL, SEEDED, EACH, SUM, SPLITS, Shard(1), Shard(0, 2), Shard(alike=True)]
    names = "Replicate Local Local Local Partial(sum) Piece Shard(1) Shard(0,blocks=2) Shard(0)"
    assert [str(one).replace(" ", "") for one in told] == names.split()


def test_counts_of_nothing_are_whole():
    """A number that is not known counts rows; 0 counts none."""
    assert rows((0, 0)) == REPLICATE and rows((0, None)) == Counts((0, None))


def test_sorting_by_classes():
    assert has([REPLICATE, SEEDED], type(LOCAL)) and not has([REPLICATE], Shard, Counts)
    assert only([SEEDED, EACH], type(LOCAL)) and not only([SEEDED, SUM], type(LOCAL), Shard)
