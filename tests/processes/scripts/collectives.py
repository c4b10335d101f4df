"""Compare collectives over ranks of several processes with those of one process, bit for bit.

Argument: ranks each.
"""

import itertools
import sys

import ml_dtypes
import numpy as np

from ncclsync.communicator import AllGather, AllReduce, Broadcast, CpuCommunicator, ReduceScatter, TcpCommunicator
from ncclsync.communicator.joining import peers_of
from ncclsync.communicator.processes import find_process
from ncclsync.errors import ProcessError

peers = peers_of(find_process(), 60)
communicator = TcpCommunicator(peers, int(sys.argv[1].split(",")[peers.rank]))
ranks, world = communicator.ranks, communicator.world_size
alone = CpuCommunicator(world)
rng = np.random.default_rng(0)
DTYPES = ("float32", "float16", ml_dtypes.bfloat16, "float64", "int64", "uint8")


def check(name, given, size, dtype, **options):
    """Run a collective here and in one process; `given` are all ranks' buffers."""
    expected = [np.zeros(size, dtype) for _ in range(world)]
    getattr(alone, name)(given, expected, **options)
    shared = name != "reduce_scatter"
    for in_place, one in itertools.product((False, True), (False, shared)):
        if in_place and len(given[0]) != size:
            continue
        sends = [given[rank].copy() for rank in ranks]
        recvs = sends if in_place else [np.zeros(size, dtype) for _ in ranks]
        if one and not in_place:
            recvs = recvs[:1] * len(recvs)
        getattr(communicator, name)(sends, recvs, **options)
        for rank, found in zip(ranks, recvs, strict=True):
            assert found.tobytes() == expected[rank].tobytes(), (name, dtype, size, options, in_place, one)


for dtype, count in itertools.product(DTYPES, (0, 1, 7, 1000, 40_001)):
    whole = [(rng.normal(size=world * count) * 30).astype(dtype) for _ in range(world)]
    parts = [each[:count] for each in whole]
    for op in ("sum", "prod", "max", "min", "avg"):
        check("all_reduce", parts, count, dtype, op=op)
        check("reduce_scatter", whole, count, dtype, op=op)
    check("all_gather", parts, world * count, dtype)
    for root in range(world):
        buffers = [parts[rank].copy() for rank in ranks]
        communicator.broadcast(buffers, root)
        assert all(buffer.tobytes() == parts[root].tobytes() for buffer in buffers)
assert communicator.exchange((peers.rank, "x"), "a value") == [[i, "x"] for i in range(peers.size)]


def grouped(join, members):
    """Run one of each kind as a group, of large buffers and small ones; return what ranks receive."""
    received = []
    group = []
    for count in (3, 200_003, 1000):
        given = np.random.default_rng(count).normal(size=(world, world * count)).astype("float32")[list(members)]
        parts = [row[:count].copy() for row in given]
        sums, lasts, blocks, gathered = (
            [np.zeros(size, "float32") for _ in members] for size in (count, count, count, world * count)
        )
        copied = [part.copy() for part in parts]
        group += [AllReduce(parts, sums), Broadcast(copied, world - 1), AllReduce(parts, lasts, "max")]
        group += [ReduceScatter(list(given), blocks), AllGather(parts, gathered)]
        received += [sums, copied, lasts, blocks, gathered]
    join.run_group(group)
    return received


for found, expected in zip(grouped(communicator, ranks), grouped(alone, range(world)), strict=True):
    for rank, buffer in zip(ranks, found, strict=True):
        assert buffer.tobytes() == expected[rank].tobytes()

# What a process has sent along is taken by nobody where another does something else: what follows gets its own.
large = [np.full(300_000, rank, "float32") for rank in ranks]
sums = [np.zeros_like(one) for one in large]
for _turn in range(3):
    if peers.rank == 0:
        communicator.report_failure(ValueError("told to fail"))
    else:
        try:
            communicator.all_reduce(large, sums)
            raise AssertionError("it has not failed")
        except ProcessError as error:
            assert "told to fail" in str(error), error
    assert not sums[0].any()
communicator.all_reduce(large, sums)
assert all((one == world * (world - 1) / 2).all() for one in sums)
communicator.close()
print(f"[{peers.rank}] equal on {world} ranks", flush=True)
