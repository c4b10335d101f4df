"""Two processes joined by a unique id: a rank of each on one GPU; of four GPUs, two for the ranks of each."""

import concurrent.futures
import os
import pathlib
import time

import isolated
import numpy as np
from device_memory import RuntimeMemory, count_gpus

from ncclsync.communicator import AllGather, AllReduce, Broadcast, NcclCommunicator, ReduceScatter
from ncclsync.errors import NcclSyncError

COUNT = 1000


def joined(index, folder):
    """One process' communicator; process 0 makes the unique id."""
    told = pathlib.Path(folder, "unique_id")
    if index == 0:
        unfinished = told.with_suffix(".unfinished")
        unfinished.write_bytes(NcclCommunicator.unique_id())
        unfinished.rename(told)
    while not told.exists():
        time.sleep(0.01)
    n_gpus = count_gpus()
    world_size = 4 if n_gpus >= 4 else 2
    ranks = list(range(index, world_size, 2))[::-1]
    devices = [rank % n_gpus for rank in ranks]
    return NcclCommunicator.from_unique_id(told.read_bytes(), world_size, ranks, devices, timeout_s=60.0)


def reduce_ranks(comm, memory):
    """One of each collective, as one group: the ranks' numbers are added up, rank 1's go to all, each gets
    its block of the largest ones, and all get all ranks' blocks, in place; check all four.
    """
    world_size = comm.world_size
    shares = list(zip(comm.ranks, comm.devices, strict=True))
    sends = [memory.put(np.full(COUNT, rank + 1, np.float32), device) for rank, device in shares]
    recvs = [memory.put(np.zeros(COUNT, np.float32), device) for _, device in shares]
    sent = [memory.put(np.full(7, rank, np.int64), device) for rank, device in shares]
    blocks = np.repeat(np.arange(world_size, dtype=np.int32), 5)  # the sender's rank is added
    whole = [memory.put(blocks + rank, device) for rank, device in shares]
    parts = [memory.put(np.zeros(5, np.int32), device) for _, device in shares]
    gathered = [memory.put(np.where(blocks == rank, rank, -1), device) for rank, device in shares]
    own = [(g.pointer + 40 * rank, 5, "int64") for g, rank in zip(gathered, comm.ranks, strict=True)]
    group = [[one.buffer for one in side] for side in (sends, recvs, sent, whole, parts, gathered)]
    scatter, gather = ReduceScatter(group[3], group[4], "max"), AllGather(own, group[5])
    comm.run_group([AllReduce(*group[:2]), Broadcast(group[2], 1), scatter, gather])
    for i, rank in enumerate(comm.ranks):
        np.testing.assert_array_equal(recvs[i].get(), world_size * (world_size + 1) / 2)
        np.testing.assert_array_equal(sends[i].get(), rank + 1)
        np.testing.assert_array_equal(sent[i].get(), 1)
        np.testing.assert_array_equal(parts[i].get(), rank + world_size - 1)
        np.testing.assert_array_equal(gathered[i].get(), blocks)


def take_part(index, folder):
    """Some groups, and the end together; the preflight is in the joining."""
    with joined(index, folder) as comm, RuntimeMemory() as memory:
        for _ in range(3):
            reduce_ranks(comm, memory)
        assert comm.size * 2 == comm.world_size


def lose_the_other(index, folder):
    """Process 1 dies between two groups: the other's next one is an error within its limit."""
    comm = joined(index, folder)
    with RuntimeMemory() as memory:
        reduce_ranks(comm, memory)
        if index == 1:
            os._exit(0)
        comm.timeout_s = 2.0
        began = time.monotonic()
        try:
            reduce_ranks(comm, memory)
        except NcclSyncError as error:  # NCCL may notice, or it is given up
            assert "all-reduce 5 of 4000 bytes" in str(error), error
        else:
            raise AssertionError("a group has ended without the other process")
        assert comm.closed and time.monotonic() - began < 20


def both(function, folder):
    """Run it in two processes at once."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(isolated.run, function, index=i, folder=str(folder)) for i in range(2)]
        for run in runs:
            run.result()


def test_two_processes(tmp_path):
    """Sums and copies over all ranks, whoever has them."""
    both(take_part, tmp_path)


def test_a_lost_process(tmp_path):
    """Is an error of the other one, and no hang."""
    both(lose_the_other, tmp_path)
