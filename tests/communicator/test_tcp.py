"""Ranks of several processes, here threads of one, in host memory: by the service of process 0."""

import time
import unittest.mock
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ncclsync.communicator import (
    AllGather,
    AllReduce,
    Broadcast,
    CpuCommunicator,
    ReduceScatter,
    TcpCommunicator,
    native,
)
from ncclsync.communicator.introductions import Introduction
from ncclsync.communicator.peers import Peers
from ncclsync.errors import NcclTimeoutError, ProcessError

pytestmark = pytest.mark.timeout(60)

LARGE = 300_001  # elements, more than a socket holds


@pytest.fixture
def threads():
    """One for each process."""
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture
def joined(threads, monkeypatch):
    """A function that returns the communicators of processes with so many ranks each, which wait for 20 s."""
    monkeypatch.setattr(native, "_share", 0)

    service = pytest.importorskip("ncclsync.communicator.service")
    services = []

    def join(*sizes, timeout_s=20):
        told = []
        by = Introduction(told.append, lambda: told[-1] if told else None, "")
        services[:] = [service.Service(rank, len(sizes), by, join_s=20) for rank in range(len(sizes))]

        def one(rank):
            peers = Peers(services[rank], rank, len(sizes), 20)
            return TcpCommunicator(peers, sizes[rank], timeout_s=timeout_s)

        return [found.result() for found in [threads.submit(one, rank) for rank in range(len(sizes))]]

    yield join
    for one in reversed(services):
        one.close()


def together(threads, *tasks):
    """What each process' task returns, or raises."""
    found = [threads.submit(task) for task in tasks]
    return [one.exception(50) or one.result() for one in found]


def group_of(communicator):
    """Collectives of all kinds, small and large, whose inputs name their ranks; and what they write."""
    ranks, world, group, written = communicator.ranks, communicator.world_size, [], []
    for count in (0, 3, LARGE):
        whole = np.random.default_rng(count).normal(size=(world, world * count)).astype("float32")[list(ranks)]
        parts = [row[:count].copy() for row in whole]
        sums, blocks, gathered = ([np.zeros(size, "float32") for _ in ranks] for size in (count, count, world * count))
        in_place, copied = ([part.copy() for part in parts] for _ in range(2))
        group += [AllReduce(parts, sums), AllReduce(in_place, in_place, "max"), Broadcast(copied, world - 1)]
        group += [ReduceScatter(list(whole), blocks), AllGather(parts, gathered)]
        # In place: a rank's own block of what is gathered, or scattered.
        there, rows = [np.zeros(world * count, "float32") for _ in ranks], [row.copy() for row in whole]
        own = [slice(rank * count, (rank + 1) * count) for rank in ranks]
        for row, block, part in zip(there, own, parts, strict=True):
            row[block] = part
        scattered = [row[block] for row, block in zip(rows, own, strict=True)]
        group += [AllGather([row[block] for row, block in zip(there, own, strict=True)], there)]
        group += [ReduceScatter(rows, scattered)]
        written += [sums, in_place, copied, blocks, gathered, there, scattered]
    return group, written


def test_as_in_one_process(threads, joined):
    """A group of all collectives has the bits of one process, whatever its processes have of the ranks."""
    communicators = joined(2, 1, 1)
    assert [list(one.ranks) for one in communicators] == [[0, 1], [2], [3]]
    groups = [group_of(one) for one in communicators]
    tasks = [lambda one=one, of=of: one.run_group(of[0]) for one, of in zip(communicators, groups, strict=True)]
    assert together(threads, *tasks) == [None] * 3
    alone, expected = group_of(CpuCommunicator(4))
    CpuCommunicator(4).run_group(alone)
    for one, (_, written) in zip(communicators, groups, strict=True):
        for found, buffers in zip(written, expected, strict=True):
            assert [a.tobytes() for a in found] == [buffers[rank].tobytes() for rank in one.ranks]


def test_all_go_on_after_a_failure(threads, joined):
    """One that has failed is named by all others, and takes nothing of what they have sent along."""
    first, second, third = joined(1, 1, 1)
    data = [np.full(LARGE, rank, "float32") for rank in range(3)]
    sums = [np.zeros_like(one) for one in data]
    for _ in range(2):
        found = together(
            threads,
            lambda: first.all_reduce(data[:1], sums[:1]),
            lambda: second.report_failure(ValueError("told to fail")),
            lambda: third.all_reduce(data[2:], sums[2:]),
        )
        for one, error in ((first, found[0]), (third, found[2])):
            assert isinstance(error, ProcessError) and "process 1 on" in str(error) and "told to fail" in str(error)
            assert one.failure is None
        assert not any(one.any() for one in sums)
    tasks = [
        lambda i=i, one=one: one.all_reduce(data[i : i + 1], sums[i : i + 1])
        for i, one in enumerate((first, second, third))
    ]
    assert together(threads, *tasks) == [None] * 3
    assert all((one == 3).all() for one in sums)
    tasks = [lambda one=one: one.exchange(one.ranks[0], "a value") for one in (first, second, third)]
    assert together(threads, *tasks) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda one, x: one.all_reduce([x[:5]], [x[:5]], label="a"), "of 300001 .* of 5 .*all build the same model"),
        (lambda one, x: one.exchange(None, "the end of fit"), "is at all-reduce .* is at the end of fit.*same calls"),
        (lambda one, x: TcpCommunicator(one.peers, 2), "is at all-reduce .* is at the joining of ranks"),
        (lambda one, x: one.run_group([AllReduce([x], [x]), Broadcast([x[:2]])]), "is at all-reduce .*and 1 more"),
    ],
)
def test_something_else(threads, joined, other, words):
    """An error in both, for good, with what each does."""
    both, x = joined(1, 1), np.zeros(LARGE, "float32")
    found = together(threads, lambda: both[0].all_reduce([x], [x.copy()], label="a"), lambda: other(both[1], x))
    for one, error in zip(both, found, strict=True):
        with pytest.raises(ProcessError, match=words):
            raise error
        with pytest.raises(ProcessError, match=words):
            one.all_reduce([x], [x])


def test_groups_that_differ_behind_the_first(threads, joined):
    """The first difference is named."""
    both, x = joined(1, 1), np.zeros(LARGE, "float32")
    groups = [[AllReduce([x], [x.copy()]), AllReduce([x[:n]], [x[:n].copy()])] for n in (7, 8)]
    tasks = [lambda one=one, group=group: one.run_group(group) for one, group in zip(both, groups, strict=True)]
    for error in together(threads, *tasks):
        with pytest.raises(ProcessError, match=r"at all-reduce of 7 .* at all-reduce of 8 .*same model"):
            raise error


def test_a_process_that_does_not_come(threads, joined):
    """Is named when time is up."""
    first, _ = joined(1, 1, timeout_s=1)
    with pytest.raises(NcclTimeoutError, match=r"all-reduce of 4 .* within 1 s: process 1 on .* not arrived"):
        first.all_reduce([np.zeros(4)], [np.zeros(4)])
    with pytest.raises(ProcessError, match=r"within 1 s: process 1 on"):
        first.all_reduce([np.zeros(4)], [np.zeros(4)])


def test_a_failure_that_nobody_hears(joined):
    """The message about that does not wrap the failure's, and names who has not come, not who waits."""
    first, _ = joined(1, 1, timeout_s=1)
    first.report_failure(NcclTimeoutError(1, "save", "none", "timeout", "a file that process 0 writes"))
    with pytest.raises(ProcessError, match=r"Expected the report of a failure to end.*process 1 on [^ ]+ not arrived"):
        first.all_reduce([np.zeros(4)], [np.zeros(4)])
    assert "Expected a file" not in str(first.failure) and "process 0" not in str(first.failure)


def test_a_process_that_ends(threads, joined):
    """What it had sent is received; then it is an error, with its words. Who is left leads."""
    first, second = joined(1, 1)
    x, sums = np.ones(LARGE), [np.zeros(LARGE), np.zeros(LARGE)]

    def end():
        first.all_reduce([x], sums[:1])
        first.peers.end("has ended: ValueError: told to")

    def go_on():
        time.sleep(0.5)
        second.all_reduce([x], sums[1:])
        second.all_reduce([x], [np.zeros(LARGE)])

    _, error = together(threads, end, go_on)
    assert all((one == 2).all() for one in sums)
    with pytest.raises(ProcessError, match=r"process 0 on \S+ has ended: ValueError: told to"):
        raise error
    assert second.peers.leads and second.failure is error


def test_a_process_that_gives_up(threads, joined):
    """As by a Ctrl-C in the middle: the others do not wait for it, and are told why."""
    first, second = joined(1, 1)
    x = np.ones(LARGE)

    second.peers.service.inbox[0] = unittest.mock.Mock(get=unittest.mock.Mock(side_effect=KeyboardInterrupt))
    error, own = together(
        threads, lambda: first.all_reduce([x], [x.copy()]), lambda: second.all_reduce([x], [x.copy()])
    )
    assert isinstance(own, KeyboardInterrupt)
    with pytest.raises(ProcessError, match=r"process 1 on \S+ has given it up: KeyboardInterrupt"):
        raise error


def test_files_are_counted_between_collectives(threads, joined):
    """One that process 0 has written alone, before, is not the one that is waited for; nor does it wait for ever."""
    first, second = joined(1, 1)
    x = np.ones(4)
    first.peers.report_file()
    together(threads, *(lambda one=one: one.all_reduce([x], [np.zeros(4)]) for one in (first, second)))
    waiting = threads.submit(second.peers.wait_for_file, 20)
    time.sleep(0.5)
    assert not waiting.done()
    first.peers.report_file()
    assert waiting.result(10) is None
    going_on = threads.submit(first.all_reduce, [x], [np.zeros(4)])
    second.peers.wait_for_file(20)  # process 0 does not write it
    second.all_reduce([x], [np.zeros(4)])
    assert going_on.result(10) is None
