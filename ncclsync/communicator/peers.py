"""Exchange values with the other processes, and hear which of them fail, end or go silent.

Communicators use `Peers`. `mpi.MpiPeers` builds it on MPI, `ServicePeers` on a service of keys and values.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import functools
import operator
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, NoReturn

from ncclsync.communicator import timeouts
from ncclsync.communicator.messages import MOST_BYTES, MessageError
from ncclsync.communicator.service import KeyService
from ncclsync.errors import NcclSyncError, ProcessError

SILENCE_S = 15.0  # after which a process that says nothing counts as dead
HEARTBEAT_S = 10.0  # the same, where process 0's service reports silence
MOST_TEXT = 600  # bytes of what is reported
_COUNT_BITS = 32  # of `begun`, for exchanges of a generation
_PULSE_S = 1.0
_NAP_S = 0.005
_LONG_S = 3600.0  # that a thread waits for news: the service keeps requests that were given up in memory
_ROOM = 1 << 13  # bytes around a value: what it is, a remark, a digest
# That a process waits for the service to take its report, and process 0 for each of the others to hear its end.
_END_S = 5.0


_SAME_CALLS = (
    "Let all processes make the same calls in the same order, with as many batches; within `if towers.is_chief:` only "
    "save and print"
)
_SAME_MODEL = "Let all build the same model, with the same options"
SAME_ROWS = (
    "Seed what shuffles or draws, by keras.utils.set_random_seed and tf.data's shuffle(seed=...); and divide no "
    "dataset by process, as by shard(), but for an ncclsync.Local"
)


_VARIABLE = re.compile(r"broadcast \((.+?)(?::0)?\) of ")


class Doing(NamedTuple):
    """Describe what a process is doing, for messages in other processes.

    Attributes:
        place: where it is, in a user's words, such as "`fit`, at epoch 3"; "" if unknown.
        number: of its current batch in that place, from 1.
        batch: that batch's number of rows and a digest of some of them, equal in all processes; "" without a batch.
        text: its call.
    """

    place: str
    number: int
    batch: str
    text: str

    def words(self, *, with_text: bool) -> str:
        """Return where it is; and its call, if `with_text` or if nothing else is known."""
        words = [f"in {self.place}"] if self.place else []
        words += [f"batch {self.number}"] if self.batch else []
        if with_text or not words:
            words.append(self.text)
        return ", ".join(words) if self.place else f"at {', '.join(words)}"


class Peers(abc.ABC):
    """Know the processes that train together.

    A process that fails reports it to the others, which raise an error once; then all may go on together. A process
    that ends or goes silent ends the agreement for good.

    Attributes:
        rank: this process' number.
        size: how many there are.
        hosts: [size] their names.
        failure: what has ended the agreement, for good.
        raised: an error of another process that may not have reached the user yet.
        lost: numbers of the processes that have ended or are silent.
        remark: is added to messages about this process.
        place, number, batch: as of `Doing`.
        failures: [size] how often each process is known to have failed.
        reported: [size] how many of these have been raised here.
        begun: how often this process has begun to meet the others.
        files: [size] the last known file of each process, as two counts: how often the process had begun to meet
            the others, and how many files it has written since, or left to process 0.
        silence_s: after which a process that says nothing counts as dead.
        by_notice: True if the agreement was ended by a notice rather than in a call that all processes had entered.
    """

    silence_s = SILENCE_S

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.hosts = [""] * size
        self.failure: ProcessError | None = None
        self.raised: ProcessError | None = None
        self.lost: set[int] = set()
        self.remark = self.place = self.batch = ""
        self.number = 0
        self.failures, self.reported = [0] * size, [0] * size
        self.begun = 0
        self.files = [(0, 0)] * size
        self._words = [""] * size  # of the last failure
        # `failures` and `generation` when the processes last agreed on them.
        self._agreed, self._generations = [0] * size, 0
        self._ended = [""] * size  # of those that have, why
        self.by_notice = False

    @abc.abstractmethod
    def exchange(
        self, value: Any, text: str, timeout_s: float | None = None, *, heeds: bool = True, most_bytes: int = MOST_BYTES
    ) -> list[Any]:
        """Return [size] what each process gives, as `messages.written` takes it. Collective.

        Args:
            value: this process'.
            text: what it is, for messages; equal in all processes.
            timeout_s: see `timeouts.wait`.
            heeds: whether a failure of another process ends the exchange.
            most_bytes: that a process may give.

        Raises:
            ProcessError: another process fails, ends, is silent, does something else, or gives an invalid value.
            NcclTimeoutError, NcclSyncError: as `timeouts.wait`.
        """

    @abc.abstractmethod
    def _end(self, words: str) -> None:
        """See `end`."""

    @abc.abstractmethod
    def _report(self, words: str, ended: bool) -> None:
        """Tell the others that this process has failed or ended, without waiting for them."""

    @abc.abstractmethod
    def _silent(self) -> list[int]:
        """Return the processes that have not been heard of for too long."""

    def _listen_now(self) -> None:
        """Ask for the others' reports soon."""
        return

    def _has_passed(self, begun: int) -> bool:
        """Return whether process 0 is known to have begun to meet the others more often than that."""
        return False

    def fail(self, words: str, *, by_notice: bool = False) -> NoReturn:
        """End the agreement for good, and raise a ProcessError that says why."""
        self.raised = self.failure = ProcessError(words)
        self.by_notice = by_notice
        raise self.failure

    def name(self, rank: int) -> str:
        """Return a process' name in messages."""
        return f"process {rank} on {self.hosts[rank]}" if self.hosts[rank] else f"process {rank}"

    def doing(self, text: str) -> Doing:
        """Return what this process is doing in the call `text`."""
        return Doing(self.place, self.number, self.batch, text + self.remark)

    def difference(self, each: Sequence[Doing]) -> str:
        """Return an error's words for [size] processes that do different things."""
        first, places = each[0], {(one.place, bool(one.batch)) for one in each}
        other = next((i for i, one in enumerate(each) if one.batch != first.batch), None)
        if len(places) == 1 and other is not None:
            rows = [one.batch.split()[0] for one in (first, each[other])]
            names = [self.name(i) for i in (0, other)]
            found = f"{rows[0]} rows in {names[0]} and {rows[1]} in {names[1]}"
            if rows[0] == rows[1]:
                found = f"other rows in {names[1]} than in {names[0]}"
            where = each[other].words(with_text=False)
            return f"Expected all processes to read the same batches. Received: {found}, {where}. {SAME_ROWS}"
        writers = [_VARIABLE.match(one.text) for one in each]
        if len({one.place for one in each}) == 1 and any(writers) and not all(writers):
            i, written = next((i, found[1]) for i, found in enumerate(writers) if found)
            where = f" ({each[i].words(with_text=False)})" if first.place else ""
            return (
                f"Expected all processes to write variables alike. Received: {written}, written in {self.name(i)}"
                f"{where}, not in {self.name(writers.index(None))}. Write it in all, as load_weights does"
            )
        # Collectives of other tensors at the same point.
        is_model = len(places) == 1 and len({one.text.split(" (")[0] for one in each}) == 1
        by_text = len({one.place for one in each}) == 1
        said = [
            f"{self.name(i)} is {one.words(with_text=is_model or (by_text and not one.batch))}"
            for i, one in enumerate(each)
        ]
        remedy = _SAME_MODEL if is_model else _SAME_CALLS
        return f"Expected all processes to do the same. Received: {'; '.join(said)}. {remedy}"

    def report(self, words: str) -> None:
        """Tell the others that something has failed in this process; whatever they wait for raises it."""
        self.failures[self.rank] += 1
        self.reported[self.rank] += 1
        self._words[self.rank] = words
        with contextlib.suppress(NcclSyncError):
            self._report(words, False)

    def end(self, words: str) -> None:
        """Tell the others that this process ends, and why; wait until they have heard of it."""
        failed, is_known = self._words[self.rank], self.failures[self.rank] == self._agreed[self.rank]
        # They may hear of a failure and of the end at once.
        self._end(words if is_known or failed in words else f"{words}, after {failed}")

    def report_file(self) -> None:
        """Tell the others that this process has written a file, or failed to, without waiting for them."""
        self._count_file()
        with contextlib.suppress(NcclSyncError):
            self._report(self._words[self.rank], False)

    def wait_for_file(self, timeout_s: float | None) -> None:
        """Wait until process 0 has written the file that this process leaves to it, or has gone on without it.

        Raises as `exchange`.
        """
        wanted = self._count_file()
        if self.failure is not None:  # process 0 writes no more files
            return

        def is_there() -> bool:
            return self.files[0] >= wanted or self._has_passed(wanted[0])

        def poll(slice_s: float) -> bool:
            until = time.monotonic() + slice_s
            while not is_there() and time.monotonic() < until:
                self._listen_now()
                time.sleep(_NAP_S)
            return is_there()

        def check(what: str) -> None:
            try:
                self.check(what)
            except ProcessError:
                if self.failure is None or not is_there():  # process 0 may have written it, and ended
                    raise

        timeouts.wait(
            poll,
            call="save",
            what=lambda: "a file that process 0 writes",
            timeout_s=timeout_s,
            arrived=lambda: f"{self.name(0)} has not written it",
            check=check,
        )

    def _count_file(self) -> tuple[int, int]:
        begun, count = self.files[self.rank]
        self.files[self.rank] = self.begun, count + 1 if begun == self.begun else 1
        return self.files[self.rank]

    def check(self, what: str, given: Container[int] = ()) -> None:
        """Raise ProcessError if waiting for the others has become futile: one has failed, ended or gone silent.

        Each failure is raised once.

        Args:
            what: is waited for, for messages.
            given: processes that have done their part already, and may have ended since.
        """
        if self.failure is not None:
            raise self.failure
        ended = [i for i in self._others_ended() if i not in given]
        if ended:
            self.lost = set(self._others_ended())
            words = ", ".join(f"{self.name(i)} {self._ended[i]}" for i in ended)
            self.fail(f"Expected {what} to end. Received: {words}", by_notice=True)
        self.check_silence(what)
        failed = [i for i, (n, reported) in enumerate(zip(self.failures, self.reported, strict=True)) if n > reported]
        if failed:
            before, self.reported = self.generation, list(self.failures)
            if self.generation == before:  # another has failed as often since they met, or this process has
                return
            said = "; ".join(f"{self.name(i)}: {self._words[i]}" for i in failed)
            self.raised = ProcessError(f"Expected all processes to make this step. Received: {said}")
            raise self.raised

    def have_ended(self) -> bool:
        """Return whether another process has ended, or gone silent."""
        return self.failure is not None or bool(self._others_ended() or self._silent())

    def _others_ended(self) -> list[int]:
        return [i for i, words in enumerate(self._ended) if words and i != self.rank]

    def check_silence(self, what: str) -> None:
        """Raise ProcessError, for good, if a process is silent; see `check`."""
        silent = self._silent()
        if silent:
            self.lost = set(silent)
            self.fail(
                f"Expected {what} to end. Received: nothing for {self.silence_s:g} s from "
                f"{', '.join(map(self.name, silent))}, which is stopped, killed or cut off",
                by_notice=True,
            )

    @property
    def generation(self) -> int:
        """Return how often all processes have started over after failures."""
        return self._generations + max(map(operator.sub, self.reported, self._agreed))

    def agree_on_failures(self, each: Sequence[Sequence[int]]) -> None:
        """Take over [size][size] what each process knows of failures; all of these count as raised."""
        self.failures = [max(column) for column in zip(*each, strict=True)]
        self.reported = list(self.failures)
        self._agreed, self._generations = list(self.failures), self.generation

    def hear(self, rank: int, failures: int, words: str, ended: str, files: Sequence[int]) -> None:
        """Take over a process' report."""
        begun, count = files
        self.files[rank] = max(self.files[rank], (begun, count))
        if ended:
            self._ended[rank] = ended
        if failures > self.failures[rank]:
            self._words[rank] = words
            self.failures[rank] = failures


class ServicePeers(Peers):
    """Know the other processes by a service that process 0 runs.

    All processes hear notices in one order: the n-th notice has the key n, which only one process can set.
    """

    silence_s = HEARTBEAT_S

    def __init__(self, service: KeyService, rank: int, size: int, timeout_s: float | None) -> None:
        """Learn the others' names, by the service that has joined them. Collective; `timeout_s` limits it."""
        super().__init__(rank, size)
        self._service = service
        self._lock = threading.Lock()
        self._notices = 0  # that were heard
        self._dead: set[int] = set()
        self._stop = threading.Event()
        for task in (self._listen, self._watch)[: 1 if rank else 2]:
            threading.Thread(target=task, name="ncclsync processes", daemon=True).start()
        try:
            self.hosts = self.exchange(socket.gethostname(), "the joining of processes", timeout_s)
        except BaseException:
            self._stop.set()
            raise

    def exchange(
        self, value: Any, text: str, timeout_s: float | None = None, *, heeds: bool = True, most_bytes: int = MOST_BYTES
    ) -> list[Any]:
        """Return [size] what each process gives; see `Peers.exchange`."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            # After a failure, which may have ended an exchange in some processes alone, all count anew.
            number = self.begun = max(self.begun, self.generation << _COUNT_BITS) + 1
            given = (*self.doing(text), text, value)
            received: list[Any] = []

            def run() -> None:
                self._service.put(f"ncclsync/{number}/{self.rank}", given)
                for i in range(self.size):
                    found = self._service.get(f"ncclsync/{number}/{i}", timeout_s or _LONG_S, most_bytes + _ROOM)
                    if found is None:
                        return
                    kinds = [type(one) for one in found[:-1]] if isinstance(found, tuple) else []
                    if kinds != [str, int, str, str, str]:
                        raise MessageError(f"Expected six values from {self.name(i)}. Received: others")
                    received.append(found)
                if number > 1:  # a process that has come this far has read the previous exchange
                    self._service.delete(f"ncclsync/{number - 1}/{self.rank}")

            def missing() -> str:
                late = [self.name(i) for i in range(len(received), self.size) if not self._is_there(number, i)]
                return f"{', '.join(late)} not arrived" if late else "all have arrived"

            waiting = self._waiting(run, number, text, heeds)
            try:
                timeouts.wait(waiting, call="exchange", what=lambda: text, timeout_s=timeout_s, arrived=missing)
            except NcclSyncError as error:
                # This process has lost count of the exchanges; only a new start of all processes mends that.
                if self.failure is None and error is not self.raised:
                    self.failure = error if isinstance(error, ProcessError) else ProcessError(str(error))
                raise
            if len({one[4] for one in received}) > 1:
                self.fail(self.difference([Doing(*one[:4]) for one in received]))
            return [one[5] for one in received]

    def _is_there(self, number: int, rank: int) -> bool:
        """Return whether a process has given its value of an exchange."""
        with contextlib.suppress(NcclSyncError):
            return self._service.get(f"ncclsync/{number}/{rank}", _NAP_S * 40) is not None
        return False

    def _waiting(self, run: Callable[[], None], number: int, text: str, heeds: bool) -> Callable[[float], bool]:
        """Return a function that begins an exchange, or waits for it, for so many seconds, and heeds the others."""
        task: list[timeouts.Aside] = []

        def wait(slice_s: float) -> bool:
            if not task:
                task.append(timeouts.Aside(run, "ncclsync exchange"))
            try:
                if task[0].wait(slice_s):
                    return True
            except MessageError:
                raise
            except NcclSyncError as error:  # the service is not reached: process 0 reports why, or is silent
                task[0] = timeouts.Aside(functools.partial(self._lost, error), "ncclsync exchange")
            given = {i for i in self._others_ended() if self._is_there(number, i)}
            if heeds:
                self.check(text, given)
            elif self.failure is not None or any(self._ended) or self._silent():
                self.reported = list(self.failures)
                self.check(text, given)
            return False

        return wait

    def _lost(self, error: NcclSyncError) -> None:
        """Raise an error, after the time in which a more telling one may arrive."""
        if not self._stop.wait(self.silence_s + 2 * _PULSE_S):
            raise error

    def _report(self, words: str, ended: bool) -> None:
        state = {"words": "", "ended": shortened(words)} if ended else {"words": shortened(words), "ended": ""}
        notice = {"rank": self.rank, "failures": self.failures[self.rank], "files": self.files[self.rank], **state}
        # A stopped process 0 takes no notice: do not wait for it.
        timeouts.Aside(functools.partial(self._post, notice), "ncclsync notice").wait(_END_S)

    def _post(self, notice: dict[str, Any]) -> None:
        number = self._notices
        while not self._service.put(f"ncclsync/notice/{number}", notice):
            number += 1

    def _listen(self) -> None:
        """Hear the processes' notices. Runs in a thread."""
        while not self._stop.is_set():
            try:
                notice = self._service.get(f"ncclsync/notice/{self._notices}", _LONG_S)
            except NcclSyncError:
                self._stop.wait(_PULSE_S)
                continue
            if notice is None:
                continue
            self._notices += 1
            self._dead.update(notice.pop("dead", ()))
            if not notice:
                continue
            self.hear(**notice)
            if notice["ended"] and notice["rank"] == 0 != self.rank:
                # An exchange that is not over reads what process 0 holds: let it end first.
                if self._lock.acquire(timeout=_END_S):
                    self._lock.release()
                with contextlib.suppress(NcclSyncError):
                    self._service.put(f"ncclsync/heard/{self.rank}", "")

    def _watch(self) -> None:
        """Report silent processes. Runs in a thread of process 0."""
        while not self._stop.wait(_PULSE_S):
            dead = {i for i, silent_s in enumerate(self._service.silence()) if silent_s > self.silence_s}
            if not dead <= self._dead:
                self._post({"dead": sorted(dead)})

    def _silent(self) -> list[int]:
        if self.rank > 0 and self._service.silence()[0] > self.silence_s:
            return [0]
        return sorted(self._dead - {self.rank})

    def _end(self, words: str) -> None:
        """Tell the others that this process ends; process 0 waits until they have heard of it."""
        with contextlib.suppress(NcclSyncError):
            self._report(words, True)
            for i in range(1, self.size) if self.rank == 0 else ():
                if not self._ended[i] and i not in self._dead:
                    self._service.get(f"ncclsync/heard/{i}", _END_S)
        self._stop.set()


def shortened(words: str) -> str:
    """Return words that take no more than `MOST_TEXT` bytes."""
    data = words.encode()
    return words if len(data) <= MOST_TEXT else data[: MOST_TEXT - 3].decode(errors="ignore") + "..."


_ended_by = ""  # an exception that nobody has caught


def end_with_process(end: Callable[[str], None]) -> None:
    """Call `end`, with words that say why, when this process ends."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        global _ended_by
        _ended_by = f"{kind.__name__}: {error}"
        usual(kind, error, traceback)

    sys.excepthook = hook
    pid = os.getpid()

    def at_end() -> None:
        if os.getpid() == pid:  # and not a forked child
            end(f"has ended: {_ended_by}" if _ended_by else "has ended")

    atexit.register(at_end)
