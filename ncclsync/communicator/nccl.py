"""Join ranks on GPUs by NCCL: create them, use them from one thread at a time, abort when anything fails.

A collective that does not end is ended by `timeouts`; what is sent over each pair's path at creation is
`preflight`'s matter. Nothing here knows TensorFlow.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ncclsync.communicator import native, nccl_calls, nvls, timeouts
from ncclsync.communicator.base import (
    NAMES,
    AllGather,
    AllReduce,
    AnyCollective,
    Broadcast,
    Communicator,
    ReduceScatter,
    read_buffers,
)
from ncclsync.communicator.buffers import CUDA, Buffers
from ncclsync.communicator.extents import Extent, check_apart, extents_of
from ncclsync.communicator.launcher import Launcher
from ncclsync.communicator.native import lib
from ncclsync.communicator.peers import Peers
from ncclsync.communicator.preflight import Preflight
from ncclsync.errors import NcclError, NcclSyncError, NcclTimeoutError, NcclUnavailableError, ProcessError

logger = logging.getLogger("ncclsync")

# The C library's kind of each collective.
_KINDS: dict[type, int] = {
    AllReduce: lib.NCS_ALL_REDUCE,
    Broadcast: lib.NCS_BROADCAST,
    ReduceScatter: lib.NCS_REDUCE_SCATTER,
    AllGather: lib.NCS_ALL_GATHER,
}
_PLACES = {lib.NCS_ON_HOST: "host memory", lib.NCS_NOWHERE: "memory that CUDA does not know"}
ABORT_WAIT_S = 1.0  # how long a failure waits for its abort, which then goes on by itself
_MOST = 2**31 - 1  # NCCL's ranks and CUDA's ordinals are C's int
_ABORTED = ". The communicator is aborted"  # after `timeout_s`, as after any failure
_MOST_CONNECT_BYTES = 2**25  # a collective that takes memory from NCCL for its like need not be larger than a bucket
_BUCKET_SUM = (lib.NCS_ALL_REDUCE, native.OPS["sum"], native.DTYPES["float32"], 1, _MOST_CONNECT_BYTES // 4)
_LISTED = 6  # collectives of a group that a message names


class NcclCommunicator(Communicator):
    """Join N ranks, each on a GPU of its own, by NCCL.

    A collective first waits for all work queued on its GPUs, on any stream, so buffers need not be ready when
    it is called; it has written its results, on a stream of its own, when it returns. Inputs are never
    written. It raises if the GPUs' own work, or then the collective, has not ended within ``timeout_s``. A
    failed collective aborts the communicator: it never returns quietly without having happened. Threads take
    turns.

    Attributes:
        devices: the CUDA ordinal of each rank of this process.
    """

    memory = CUDA
    _handle: Any = None
    _joined_by: bytes | None

    def __init__(
        self,
        devices: Sequence[int],
        *,
        peers: Peers | None = None,
        timeout_s: float | None = timeouts.DEFAULT_TIMEOUT_S,
        preflight: bool = True,
        repeatable: bool = False,
    ) -> None:
        """Join GPUs of this process, and of others which look after each other. Blocks until all ranks are up.

        Args:
            devices: CUDA ordinals; rank r is on ``devices[r]``, counted from the ranks of the processes before.
            peers: the processes, if there are several; then this is collective, and `timeout_s`, `preflight` and
                `repeatable` are equal in all. One that fails, ends or is silent ends what the others wait for by a
                ProcessError that names it. After a failure `reopen` joins all anew.
            timeout_s: how long joining them, then any collective, and the GPUs' own work before it, may
                take, in seconds each, before it is given up with a NcclTimeoutError; None for no limit. A
                warning is logged after 60 s.
            preflight: whether to send known numbers over each pair's path first; see `preflight`.
            repeatable: whether sums must have equal bits in every call and every run. NVLS is then kept out,
                here and in all later communicators of the process; see `nvls`.

        Raises:
            TypeError, ValueError: bad arguments.
            NcclUnavailableError: no libnccl, no driver or no such GPU.
            NcclError: NCCL could not join these GPUs, or they do not receive what was sent.
        """
        self.peers = peers
        self._set_up(_checked_numbers(devices, "devices", "CUDA ordinals"), timeout_s, preflight, repeatable)
        self._joined_by, self.world_size, self.ranks = None, self.size, tuple(range(self.size))
        if peers is not None:
            self._meet(peers)
        self._join()
        if peers is not None:
            # Before the others are told that this process ends: it does its part of what all have launched.
            atexit.register(_let_end, weakref.ref(self), os.getpid())

    @classmethod
    def from_unique_id(
        cls,
        unique_id: bytes,
        world_size: int,
        ranks: Sequence[int],
        devices: Sequence[int],
        *,
        timeout_s: float | None = timeouts.DEFAULT_TIMEOUT_S,
        preflight: bool = True,
        repeatable: bool = False,
    ) -> NcclCommunicator:
        """Join GPUs of several processes. Collective; blocks until the ranks of all are up. Raises as the class.

        Args:
            unique_id: what ``NcclCommunicator.unique_id()`` has returned in one of the processes.
            world_size: the number of ranks in all processes.
            ranks: this process' ranks; each in exactly one process.
            devices: CUDA ordinals, one for each of `ranks`.
            timeout_s, preflight, repeatable: as of the class; the last two equal in all processes.
        """
        if not isinstance(unique_id, bytes) or len(unique_id) != lib.NCS_UNIQUE_ID_BYTES:
            raise ValueError(
                f"Expected unique_id to be the {lib.NCS_UNIQUE_ID_BYTES} bytes of "
                f"NcclCommunicator.unique_id(). Received: {unique_id!r}"
            )
        local_ranks = _checked_numbers(ranks, "ranks", "ranks of this process")
        ordinals = _checked_numbers(devices, "devices", "CUDA ordinals")
        whole = isinstance(world_size, int) and not isinstance(world_size, bool)
        if not whole or not max(local_ranks) < world_size <= _MOST:
            raise ValueError(f"Expected ranks below world_size. Received: {ranks!r}, {world_size!r}")
        if len(local_ranks) != len(ordinals) or len(set(local_ranks)) != len(local_ranks):
            raise ValueError(f"Expected different ranks, each with a device. Received: {ranks!r}, {devices!r}")
        self = cls.__new__(cls)
        self._set_up(ordinals, timeout_s, preflight, repeatable)
        self._joined_by, self.world_size, self.ranks = unique_id, world_size, tuple(local_ranks)
        self._join()
        return self

    def _meet(self, peers: Peers) -> None:
        """Agree with the other processes on a unique id and on the ranks of each."""
        try:
            made = self.unique_id() if peers.rank == 0 else b""
        except NcclSyncError as error:
            peers.report(f"{type(error).__name__}: {error}")
            raise
        text = f"the joining of GPUs, preflight={self._preflight}, repeatable={self.repeatable}"
        each = peers.exchange((len(self.devices), made), text, self.timeout_s)
        self._met = peers.generation
        sizes = [size for size, _ in each]
        begin = sum(sizes[: peers.rank])
        self._joined_by, self.world_size, self.ranks = each[0][1], sum(sizes), tuple(range(begin, begin + self.size))

    @staticmethod
    def unique_id() -> bytes:
        """Return what ranks in several processes find each other by: made in one, given to all.

        NCCL then listens on a network interface (``NCCL_SOCKET_IFNAME`` chooses it). Raises NcclError if it finds none,
        NcclUnavailableError if there is no libnccl.
        """
        return nccl_calls.unique_id(native.NcclLibrary())

    def _set_up(self, devices: Sequence[int], timeout_s: float | None, preflight: bool, repeatable: bool) -> None:
        timeouts.check_timeout(timeout_s)
        for name, value in (("preflight", preflight), ("repeatable", repeatable)):
            if not isinstance(value, bool):
                raise TypeError(f"Expected {name} to be a bool. Received: {value!r}")
        self.size, self.devices = len(devices), tuple(devices)
        self.timeout_s, self._preflight, self.repeatable = timeout_s, preflight, repeatable
        self.failure: BaseException | None = None
        self.agreed = math.inf if self.peers is None else 0
        self._launcher = Launcher(self.size, timeout_s)
        self._is_launched = self._on_host = False  # whether ops launch groups; on buffers in host memory
        self._connected: set[tuple[int, int, int, int, int]] = set()  # see `connect`
        self._ending = threading.Event()
        self._labels: dict[tuple[tuple[type, str], ...], int] = {(): 0}  # of groups that ops launch, in order
        self._aborting: timeouts.Aside | None = None  # an abort that runs on by itself
        self._lock = threading.Lock()  # NCCL: never two threads at once on one communicator
        self._user: int | None = None  # the thread that has the lock, in a call
        self._library = native.NcclLibrary()

    @property
    def closed(self) -> bool:
        """Return whether the communicator has ended: by ``close`` or by a failed collective."""
        return self.find_failure() is not None or self._handle is None

    def find_failure(self) -> BaseException | None:
        """Return `failure`, after taking over that of a launched group: the launcher has aborted the communicator."""
        found = None if self._handle is None else self._launcher.failure()
        if found is not None:
            self._handle, self.failure = None, self._explain(found)
            self.failed_group, self.was_delivered = found.group, bool(found.was_delivered)
            if self.failure is not None:
                self.report_failure(self.failure)
        return self.failure

    @property
    def enqueues(self) -> bool:  # type: ignore[override]
        """Return whether groups are launched without a wait for their ends."""
        return self._is_launched and not self._on_host

    def groups(self) -> tuple[int, int]:
        """Return how many groups were launched, and how many of them are known to have ended well."""
        return self._launcher.groups()

    def launcher(self, *, on_host: bool = False) -> Launcher:
        """Return what launches groups on this communicator without waiting for them; one for its life.

        Its failure is that of the communicator: `find_failure` returns it, and raises nothing. A collective of this
        class keeps launches away until it has ended.

        Args:
            on_host: whether the buffers are in host memory, so that who takes a group's results waits for its end.
        """
        with self._lock:
            if not self._is_launched:
                self._is_launched, self._on_host = True, on_host
                every_s = timeouts.WARN_AFTER_S / 12 if self.peers is None else timeouts.SLICE_S
                arguments = (weakref.ref(self), self._ending, every_s)
                threading.Thread(target=_warn_of_pending, args=arguments, name="ncclsync pending", daemon=True).start()
            return self._launcher

    def label(self, collectives: Sequence[AnyCollective]) -> int:
        """Return a number by which a launched group is named in messages, of these collectives."""
        with self._lock:
            return self._labels.setdefault(tuple((type(one), one.label) for one in collectives), len(self._labels))

    def require_context_events(self, reason: str) -> None:
        """Raise NcclUnavailableError if the driver has none; without streams, for a `reason`, groups need them."""
        if self._handle is not None and not lib.ncs_nccl_has_context_events(self._handle):
            raise NcclUnavailableError(
                "Expected TensorFlow's streams to be known, or a driver of CUDA 12.5 (R555) or newer. Received: an "
                f"older driver, and no streams: {reason}. Install a C++ compiler (on Debian: apt-get install g++) and "
                "leave NCCLSYNC_GPU_EVENTS out, or update the driver"
            )

    def interrupt(self) -> None:
        """Give up launched groups unless one ends within a second, after Ctrl-C."""
        self._launcher.interrupt()

    def wait(self) -> None:
        """Wait until all launched groups have ended; see `Communicator.wait`. Ctrl-C ends it."""
        if not self._is_launched:
            return
        with timeouts.interruptible(self._launcher.interrupt):
            while not self._launcher.wait(timeouts.SLICE_S):
                pass
        if (failure := self.find_failure()) is not None:
            raise failure
        if self._launcher.failure() is not None:  # another thread has closed it, and given up the groups
            self.raise_closed()

    def agree(self, value: Any, what: str) -> list[Any]:
        """Return what each process gives, when each has launched what this one has. Collective; waits for no GPU.

        From then on these groups end by themselves, whatever fails in a process that lives. Groups that are launched
        later, and not by all, are given up as soon as a failure is known.

        Raises:
            ProcessError, NcclTimeoutError, NcclSyncError: as `exchange`.
        """
        launched, _ = self.groups()
        try:
            given = self.exchange(value, what)
        except NcclSyncError as error:
            self.report_failure(error)
            while not self._launcher.wait(timeouts.SLICE_S):
                pass  # what fails with it has then failed, too
            raise
        self.agreed = launched
        return given

    def _explain(self, found: Any) -> BaseException | None:
        """Return the error of a launched group's failure, in the words of one that was waited for.

        None if it was given up since this process has failed, which is known.
        """
        what, arrived = self._words_of(found)
        if found.status == native.IN_PROGRESS and self.peers is not None:
            try:
                self.peers.check(what)
            except ProcessError as error:
                return error
            if self.peers.failed_since(self._met):
                return self.peers.raised
        kinds = [*self._labels][found.label]
        usual = nccl_calls.CALLS[_KINDS[kinds[0][0]]] if kinds else "ncclGroupEnd"
        call = native.name_of_call(found.failure) or usual
        if found.status == native.IN_PROGRESS:
            return NcclSyncError(
                f"Expected {what} to end. Received: an interrupt (Ctrl-C) after {found.waited_s:.1f} s"
            )
        if found.status == native.TIMEOUT:
            words = f"it has not within {self.timeout_s:g} s: {arrived}{_ABORTED}"
            return NcclTimeoutError(native.TIMEOUT, call, words, "ncclTimeout", what)
        name = native.STATUS_NAMES.get(found.status, "unknown status")
        return nccl_calls.advised(NcclError(found.status, call, native.words(found.failure), name, what))

    def _words_of(self, found: Any) -> tuple[str, str]:
        """Return what a launched group is, and who has arrived."""
        kinds = [*self._labels][found.label]
        sizes = zip(kinds, found.counts, found.dtypes, strict=False)  # of a large group the first ones
        names = [_name(kind, found.first + i, label, *size) for i, ((kind, label), *size) in enumerate(sizes)]
        what = _list(len(names), names.__getitem__) if names else "a group of collectives"
        own_work = found.stage == lib.NCS_OWN_WORK
        what = f"the GPUs' own work before {what}" if own_work else what
        return what, self._progress_words(list(found.progress)[: self.size], own_work)

    def look_after_pending(self, warned: int) -> int:
        """Give up launched groups that other processes do not launch: they, or this one, have failed.

        Log one that has been pending for long; return its number, or that of the last one, `warned`.
        """
        pending = self._launcher.pending()
        if pending is None:
            return warned
        agreed = pending.group <= self.agreed
        if self.peers is not None and (self.peers.have_ended() or (not agreed and self.peers.failed_since(self._met))):
            self._launcher.interrupt()
        if pending.group <= warned or pending.waited_s < timeouts.WARN_AFTER_S:
            return warned
        timeouts.warn_of_pending(*self._words_of(pending), pending.waited_s, self.timeout_s)
        return pending.group

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Make calls on the communicator in turns: with other threads, and with groups that ops launch."""
        thread = threading.get_ident()
        if self._user == thread:
            raise NcclSyncError(
                "Expected no call on the communicator during another call of the same thread. Received: one, as from a "
                "signal handler. Raise an exception there, which ends the call; then close."
            )
        with self._lock, self._launcher.reserved() as is_open:
            if not is_open:
                self.find_failure()
            self._user = thread
            try:
                yield
            finally:
                self._user = None

    def reopen(self) -> None:
        """Join the same GPUs again after a failed collective. Blocks. Does nothing to an open communicator.

        Raises as the class; NcclSyncError if it was closed or joined by a unique id (its processes have to agree upon a
        new one); ProcessError if another process has failed since, which was not reported yet.
        """
        with self._lock:
            self._heed()
            if not self.closed:
                return
            if self._closed:
                self.raise_closed()
            for user in [*self.users]:
                user.keep()
            if self._joined_by is not None and self.peers is None:
                raise NcclSyncError(
                    "Expected a communicator of one process. Received: one that was joined by a unique id. "
                    "Join all processes anew, by a new unique id."
                )
            if self._aborting is not None:
                self._wait_for_abort(self._aborting.wait)
                self._aborting = None
            self._wait_for_abort(self._launcher.wait_for_abort)
            if self.peers is not None:
                self._meet(self.peers)
            self._join()

    def _heed(self) -> None:
        """Abort the communicator if a process has failed since it was joined: its ranks are not to be waited for.

        Raises ProcessError if another one has, which was not reported yet.
        """
        if self.peers is None or self._closed:
            return
        try:
            self.peers.check("the next step")
        finally:
            if self.peers.failure or self.peers.failed_since(self._met):
                # Weights rest on the groups that all processes have launched.
                while self.groups()[1] < self.agreed and not self.peers.have_ended() and not self._launcher.failure():
                    time.sleep(1e-3)
                with self._launcher.reserved() as is_open:
                    if not is_open:
                        self.find_failure()
                    handle, self._handle = self._handle, None
                    if handle is not None:
                        ended = self.groups()[1]
                        if self.peers.failure is not None or ended < self.agreed:
                            self.failure = self.peers.failure or self.peers.raised
                            # Steps may have computed with what these groups should have brought.
                            self.failed_group, self.was_delivered = ended + 1, ended < self.agreed
                        self._abort(handle, self.peers.failure)

    def close(self) -> None:
        """End the communicator, on all ranks. Blocks. Idempotent; collectives then raise NcclSyncError."""
        with self._exclusive():
            handle, self._handle = self._handle, None
            self._closed = True
            self._ending.set()
            if handle is None:
                return
            self._launcher.close()
            # Another process that has ended, or failed, leaves nothing to be ended in order.
            with contextlib.suppress(ProcessError):
                with self._aborted_on_error(handle):
                    self._finalize(handle)
                native.call(lib.ncs_nccl_destroy, [handle])

    def _finalize(self, handle: Any) -> None:
        begin = functools.partial(native.call, lib.ncs_nccl_finalize, [handle])
        self._launch(handle, lambda: "the end of a communicator", "ncclCommFinalize", begin)

    def connect(self, collectives: Sequence[AnyCollective], dtypes: Sequence[int], counts: Sequence[int]) -> None:
        """Run collectives of these sorts and sizes, unless such have run: NCCL takes the memory that they need once.

        So it does so now, and not in the midst of a step. In one process; in several, joining has done it for the
        sum of a bucket, and the first step does it for all else: no process knows when the others come here.

        Args:
            collectives: without buffers.
            dtypes, counts: of each NCCL's dtype, and how many elements the smaller of its two buffers has.

        Raises NcclError, as creation does.
        """
        if self.world_size > self.size or self._on_host:
            return
        new = set()
        for one, dtype, count in zip(collectives, dtypes, counts, strict=True):
            kind, op, _ = kind_op_root(one)
            blocks = self.world_size if isinstance(one, (AllGather, ReduceScatter)) else 1
            most = _MOST_CONNECT_BYTES // (blocks * native.DTYPE_SIZES[dtype])
            new.add((kind, op, dtype, blocks, min(most, 1 << max(count - 1, 0).bit_length())))
        if new <= self._connected:
            return
        with self._exclusive():
            handle = self._handle
            if handle is not None:
                with self._aborted_on_error(handle), self._explained():
                    self._connect(handle, new - self._connected)
                self._connected |= new

    def _connect(self, handle: Any, sorts: Iterable[tuple[int, int, int, int, int]]) -> None:
        before = max(nccl_calls.taken(handle, self.size))
        for kind, op, dtype, blocks, count in sorted(sorts):
            size_bytes, group = count * native.DTYPE_SIZES[dtype], []
            try:
                memory = [nccl_calls.scratch(handle, i, blocks * size_bytes) for i in range(self.size)]
            except NcclError as error:
                if self.world_size > self.size:  # other processes wait for this one
                    raise
                # NCCL itself may find as much as it needs, once a step sends tensors that are there anyhow.
                logger.info("NCCL takes its memory in the first step: %s", error)
                break
            for rank, scratch in zip(self.ranks, memory, strict=True):
                begin = native.ffi.cast("char*", scratch)
                own = begin + rank * size_bytes if blocks > 1 else begin
                sends, recvs = (own, begin) if kind == lib.NCS_ALL_GATHER else (begin, own)
                group.append([(kind, op, 0, sends, recvs, count, dtype)])
            call = nccl_calls.CALLS[kind]
            words: Callable[..., str] = functools.partial("the first {} of {} bytes".format, call, size_bytes)
            self._begin(handle, words, call, functools.partial(nccl_calls.launch_group, handle, group, words))
        for i in range(self.size):
            nccl_calls.scratch(handle, i, 0)
        self.taken_bytes += max(nccl_calls.taken(handle, self.size)) - before

    def _join(self) -> None:
        shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if len(set(self.devices)) != len(self.devices) and not shared:
            raise ValueError(
                f"Expected every GPU once. Received: devices={list(self.devices)}. (NCCL 2.30 and newer let "
                "ranks share a GPU, as an experiment, where NCCL_MULTI_RANK_GPU_ENABLE=1 is set.)"
            )
        nvls.apply(self.repeatable)
        joined_by = self._joined_by
        if self._preflight and self.world_size > 1:
            # A channel that connects a pair takes memory for the communicator's life: of this one, with one channel.
            with self._joined(joined_by, max_ctas=1) as (handle, check):
                joined_by = check.pairs(self._library, joined_by)
                self._finalize(handle)
            native.call(lib.ncs_nccl_destroy, [handle])
        with self._joined(joined_by) as (handle, check):
            if self._preflight:
                check.sums()
            self.taken_bytes = max(nccl_calls.taken(handle, self.size))
            self._connect(handle, [_BUCKET_SUM] if self.world_size > self.size else self._connected)
        self._handle, self.failure = handle, None
        self._launcher.open(handle)

    @contextlib.contextmanager
    def _joined(self, joined_by: bytes | None, max_ctas: int = 0) -> Iterator[tuple[Any, Preflight]]:
        """Join the ranks, and yield the handle, which an error aborts, and what checks it."""
        handle = nccl_calls.create(self._library, joined_by, self.world_size, self.ranks, self.devices, max_ctas)
        self._launcher.know(handle)
        with self._aborted_on_error(handle), self._explained():
            joining = f"the joining of {self.world_size} ranks, here {self._names(range(self.size))}"
            self._wait(handle, lambda: joining, "ncclCommInitRankConfig")
            if self._preflight:
                self._wait_for_devices(handle, lambda: "the preflight")  # which makes and copies memory
            yield handle, Preflight(handle, self.ranks, self.world_size, functools.partial(self._launch, handle))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Give an error of NCCL's advice, where there is any."""
        try:
            yield
        except NcclError as error:
            nccl_calls.raise_explained(error, self.devices)

    def _run_group(self, collectives: Sequence[AnyCollective]) -> None:
        runs = [(one, *read_buffers(one, self.memory, self.world_size)) for one in collectives]
        ranks, size = [_fields(runs, i) for i in range(self.size)], len(runs)
        with self._exclusive():
            handle = self._handle
            if handle is None:  # closed by another thread meanwhile
                self.raise_closed()
            first = self._launcher.count(0)

            def name(index: int) -> str:
                one, reads, writes = runs[index]
                return _name(type(one), first + index, one.label, max(reads.count, writes.count), reads.dtype)

            begin = functools.partial(nccl_calls.launch_group, handle, ranks, name)
            self._check_memory(handle, extents_of(runs, self.ranks, may_share=False), name if size > 1 else None)
            self._launcher.count(size)
            with self._aborted_on_error(handle):
                self._launch(handle, lambda: _list(size, name), nccl_calls.CALLS[ranks[0][0][0]], begin)

    def _check_memory(self, handle: Any, extents: Sequence[Extent], name: Callable[[int], str] | None) -> None:
        """Raise ValueError if a buffer is not on its rank's GPU, or overlaps one that is written."""
        found = nccl_calls.find_devices(handle, [one.begin for one in extents])
        for one, device in zip(extents, found, strict=True):
            expected = self.devices[one.rank]
            if device not in (expected, lib.NCS_ON_ALL_GPUS):
                received = _PLACES.get(device, f"memory of GPU {device}")
                where = f", in {name(one.number)}" if name is not None else ""
                raise ValueError(f"Expected {one.name} on GPU {expected}. Received: {received}{where}")
        check_apart(extents, name)

    def _launch(self, handle: Any, what: Callable[[], str], call: str, begin: Callable[[], None]) -> None:
        """Run a task after the GPUs' own work, for which NCCL's streams do not wait."""
        self._wait_for_devices(handle, what)
        self._begin(handle, what, call, begin)

    def _begin(self, handle: Any, what: Callable[[], str], call: str, begin: Callable[[], None]) -> None:
        """Run a task on memory that the GPUs' own work does not use."""
        with _named(what):
            begin()
        self._wait(handle, what, call)

    def _wait_for_devices(self, handle: Any, what: Callable[[], str]) -> None:
        words = "the GPUs' own work before"
        self._wait(handle, lambda: f"{words} {what()}", "ncs_nccl_wait_for_devices", own_work=True)

    def _wait(self, handle: Any, what: Callable[[], str], call: str, *, own_work: bool = False) -> None:
        """Wait for the call under way, or for the GPUs' own work; an error names it."""
        go_on: Callable[[float], bool] = functools.partial(nccl_calls.wait, handle, own_work)
        if own_work and not lib.ncs_nccl_has_context_events(handle):
            go_on = timeouts.Aside(self._launcher.synchronize, "ncclsync wait").wait
        with _named(what):
            timeouts.wait(
                go_on,
                call=call,
                what=what,
                timeout_s=self.timeout_s,
                arrived=lambda: self._progress_words(nccl_calls.progress(handle, self.size), own_work),
                check=None if self.peers is None else self.peers.check,
                then=_ABORTED,
            )

    @contextlib.contextmanager
    def _aborted_on_error(self, handle: Any) -> Iterator[None]:
        """Abort the communicator on any error, also Ctrl-C: its ranks may be anywhere."""
        try:
            yield
        except BaseException as error:
            self._handle, self.failure = None, error
            self._abort(handle, error)
            self.report_failure(error)
            raise

    def _abort(self, handle: Any, cause: BaseException | None) -> None:
        """Free the communicator aside: CUDA frees memory after the GPUs' own work, which may never end."""
        self._launcher.close(getattr(cause, "status", 0) or native.INVALID_USAGE)
        aborting = timeouts.Aside(functools.partial(native.call, lib.ncs_nccl_abort, [handle]), "ncclsync abort")
        try:
            self._aborting = None if aborting.wait(ABORT_WAIT_S) else aborting
        except NcclError as error:
            raise error from cause

    def _wait_for_abort(self, wait: Callable[[float], bool]) -> None:
        """Wait until the abort after an earlier failure has freed the communicator."""
        timeouts.wait(
            wait,
            call="ncclCommAbort",
            what=lambda: f"the abort of the earlier communicator on GPUs {list(self.devices)}",
            timeout_s=self.timeout_s,
            arrived=lambda: "the GPUs' own work has to end first",
        )

    def _progress_words(self, states: Sequence[int], own_work: bool) -> str:
        """Return a phrase that says which ranks have arrived, or whose own work has not ended, as far as is known."""
        if own_work:
            busy = [i for i, reached in enumerate(states) if reached == lib.NCS_ABSENT]
            return f"{self._names(busy) or 'no rank any more'} still busy"
        words = []
        for state, verb in (
            (lib.NCS_DONE, "done"),
            (lib.NCS_LAUNCHED, "arrived, waiting for the others"),
            (lib.NCS_ABSENT, "not arrived"),
        ):
            indices = [i for i, reached in enumerate(states) if reached == state]
            if indices:
                words.append(f"{self._names(indices)} {verb}")
        others = sorted(set(range(self.world_size)) - set(self.ranks))
        if others:
            words.append(f"rank {', '.join(map(str, others))} of other processes: not known here")
        return "; ".join(words)

    def _names(self, indices: Sequence[int]) -> str:
        return ", ".join(f"rank {self.ranks[i]} (GPU {self.devices[i]})" for i in indices)

    def __del__(self) -> None:
        # Only a warning: destroying may block, and the collector may run in any thread.
        if getattr(self, "_handle", None) is not None:
            warnings.warn(
                f"an NcclCommunicator on devices {self.devices} was not closed",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )


@contextlib.contextmanager
def _named(what: Callable[[], str]) -> Iterator[None]:
    """Let an error of NCCL's name what it came in."""
    try:
        yield
    except NcclError as error:
        if error.during:
            raise
        raise error.within(what()) from None


def kind_op_root(collective: AnyCollective) -> tuple[int, int, int]:
    """Return the C library's numbers of a collective; 0 for an operation or a root that it does not have."""
    op, root = getattr(collective, "op", "sum"), getattr(collective, "root", 0)
    return _KINDS[type(collective)], native.OPS[op], root


def _fields(runs: Sequence[tuple[AnyCollective, Buffers, Buffers]], i: int) -> list[tuple[Any, ...]]:
    """Return the fields of the i-th rank's ``ncs_buffer`` of each collective that reads and writes these."""
    return [
        (*kind_op_root(one), reads.pointers[i], writes.pointers[i], min(reads.count, writes.count), reads.dtype)
        for one, reads, writes in runs
    ]


def _checked_numbers(numbers: Any, what: str, words: str) -> list[int]:
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise TypeError(f"Expected {what} to be a list of {words}. Received: {numbers!r}")
    checked = list(numbers)
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _MOST for n in checked)
    if not checked or not whole:
        raise ValueError(f"Expected {what} to be {words}, at least one. Received: {numbers!r}")
    return checked


def _warn_of_pending(find: weakref.ref[NcclCommunicator], ending: threading.Event, every_s: float) -> None:
    """Watch a communicator's launched groups until it is closed or gone: a thread's task."""
    warned = 0
    while not ending.wait(every_s):
        communicator = find()
        if communicator is None:
            return
        warned = communicator.look_after_pending(warned)
        del communicator  # no reference may keep it alive while this sleeps


def _name(kind: type, number: int, label: str, count: int, dtype: int) -> str:
    size_bytes = count * native.DTYPE_SIZES[dtype]
    return (
        f"{NAMES[kind]} {number}{f' ({label})' if label else ''} of {size_bytes} bytes "
        f"({count} × {native.DTYPE_NAMES[dtype]})"
    )


def _list(size: int, name: Callable[[int], str]) -> str:
    """Name the collectives of a group; of a large one the first ones and the last."""
    if size == 1:
        return name(0)
    names = [name(i) for i in (range(size) if size <= _LISTED else range(_LISTED - 1))]
    if size > _LISTED:
        names += [f"{size - _LISTED} more", name(size - 1)]
    return f"a group of {size} collectives ({'; '.join(names)})"


def _let_end(held: weakref.ref[NcclCommunicator], pid: int) -> None:
    """Wait for a communicator's launched groups, if it is still open, in the process that has made it."""
    communicator = held()
    if communicator is not None and not communicator.closed and pid == os.getpid():
        try:
            communicator.wait()
        except NcclSyncError:  # no caller is left to raise it to
            logger.exception("What this process had launched has not ended well, and it ends now")
