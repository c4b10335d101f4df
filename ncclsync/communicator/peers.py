"""Exchange values with the other processes, and hear which of them fail, end or go silent."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ncclsync.communicator import messages, native, timeouts
from ncclsync.communicator.introductions import machine
from ncclsync.errors import NcclSyncError, ProcessError

if TYPE_CHECKING:
    from ncclsync.communicator.service import Service

SILENCE_S = 10.0  # after which a process that says nothing counts as dead
MOST_TEXT = 600  # bytes of what is reported
_COUNT_BITS = 32  # of `begun`, for exchanges of a generation
_PULSE_S = 1.0
# How long a process waits for process 0 to take its report, and process 0 for the others to hear that it ends.
_END_S = 5.0
_REPORT = "the report of a failure"
_WHO_S = 0.2  # how long process 0 may take to say who has come


_SAME_CALLS = (
    "Let all processes make the same calls in the same order, with as many batches; within `if towers.is_chief:` only "
    "save and print"
)
SAME_MODEL = "Let all build the same model, with the same options"
SAME_ROWS = (
    "Seed what shuffles or draws, by keras.utils.set_random_seed and tf.data's shuffle(seed=...); and divide no "
    "dataset by process, as by shard(), except an ncclsync.Local"
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


class Peers:
    """Know the processes that train together.

    A process that fails reports it to the others, which raise an error once; then all may go on together. A process
    that ends or goes silent ends the agreement for good.

    Attributes:
        rank: this process' number.
        size: how many there are.
        hosts: [size] their names.
        failure: what has ended the agreement, for good.
        raised: the last error of another process that was raised here.
        lost: numbers of the processes that have ended or are silent.
        given_up: by number, why a process no longer sends data, although it may be there.
        remark: is added to messages about this process, behind a semicolon.
        place, number, batch: as of `Doing`.
        generation: how often all have started over after failures, as far as these were raised here.
        failures: [size] for each process, the generation in which it goes on after its last known failure; 0: it has
            not failed.
        begun: how often this process has begun to meet the others.
        in_turn: is held by a thread while its processes are to do nothing else together.
        files: [size] for each process, two counts, which name its last known file: how often the process had begun to
            meet the others, and how many files it has written since then, or left to process 0.
    """

    def __init__(self, service: Service, rank: int, size: int, timeout_s: float | None, if_left_over: str = "") -> None:
        """Learn the others' names, by the service that has joined them. Collective; `timeout_s` limits it.

        `if_left_over`: what to do if the others were not started, for messages.
        """
        self.rank, self.size = rank, size
        self.hosts = [""] * size
        self.failure: ProcessError | None = None
        self.raised: ProcessError | None = None
        self.lost: set[int] = set()
        self.given_up: dict[int, str] = {}
        self.remark = self.place = self.batch = ""
        self._last_batch = ""  # that `on_batch` has named
        self.number = 0
        self.generation = 0
        self.failures = [0] * size
        self.begun = 0
        self.files = [(0, 0)] * size
        # Until all have joined.
        self._advice = f". Each has to make towers, and to do so in time. {if_left_over}".rstrip(". ")
        self._words = [""] * size  # of the last failure
        self._ended = [""] * size  # of those that have, why
        self._know_end = {0}  # the processes that have heard of process 0's end
        self._dead: set[int] = set()
        self.service = service
        self.in_turn = threading.RLock()
        self._stop = threading.Event()
        for task in (self._listen, self._watch)[: 1 if rank else 2]:
            threading.Thread(target=task, name="ncclsync processes", daemon=True).start()
        try:
            own = socket.gethostname(), machine(), sorted(os.sched_getaffinity(0))
            found = self.exchange(own, "the joining of processes", timeout_s)
        except BaseException:
            self._stop.set()
            raise
        self.hosts = [host for host, _, _ in found]
        native.share_cores([cores for _, where, cores in found if where == found[rank][1]])

    def exchange(self, value: Any, text: str, timeout_s: float | None, *, failed: bool = False) -> list[Any]:
        """Return [size] what each process gives, as `messages.written` takes it. Collective.

        If all have given their values before a failure or an end is known, all receive them.

        Args:
            value: this process'.
            text: what it is, for messages; equal in all processes, except those that have failed.
            timeout_s: see `timeouts.wait`.
            failed: whether this process has failed, as `text` says; no process gets values then.

        Raises:
            ProcessError: another process fails, ends, is silent, does something else, or gives what is no message.
            NcclTimeoutError, NcclSyncError: as `timeouts.wait`.
        """
        with self.in_turn:
            if self.failure is not None:
                raise self.failure
            # After a failure, which may have ended an exchange in some processes alone, all count anew.
            number = self.begun = max(self.begun, self.generation << _COUNT_BITS) + 1
            given = messages.written((*self.doing(shortened(text)), text, failed, value))
            awaited = self.service.give(number, given)

            what = _REPORT if failed else text  # no message is to wrap another

            def go_on(slice_s: float) -> bool:
                if awaited.wait(slice_s):
                    return True
                # What was complete before the news has come before it.
                if (self.have_ended() or self.failed_since(self.generation)) and not awaited.wait(0):
                    self.check(what)
                self.service.check_reached(SILENCE_S + 2 * _PULSE_S)  # a more telling error may come before
                return False

            def missing() -> str:
                here = self.service.who(number, _WHO_S)
                late = self.names({*range(self.size)} - {*here, self.rank})
                return f"{late} not arrived{'' if self.hosts[0] else self._advice}"

            try:
                call = "exchange" if self.hosts[0] else timeouts.JOIN
                timeouts.wait(go_on, call=call, what=lambda: what, timeout_s=timeout_s, arrived=missing)
                received = [messages.read(one) for one in awaited.value]
            except NcclSyncError as error:
                # This process has lost count of the exchanges; only a new start of all processes mends that.
                if self.failure is None and error is not self.raised:
                    self.failure = error if isinstance(error, ProcessError) else ProcessError(str(error))
                raise
            each = [Doing(*one[:4]) for one in received]
            if any(one[5] for one in received):
                said = [f"{self.name(i)}: {doing.text}" for i, doing in enumerate(each) if received[i][5]]
                self.raised = ProcessError(f"Expected all processes to make this step. Received: {'; '.join(said)}")
                raise self.raised
            if len({(one[2], one[4]) for one in received}) > 1:
                self.fail(self.difference(each))
            return [one[6] for one in received]

    @property
    def leads(self) -> bool:
        """Return whether this process writes files: process 0, or the first of those that are left after a failure."""
        return self.lost.issuperset(range(self.rank))

    def at(self, place: str, number: int = 0) -> tuple[str, int]:
        """Tell messages in other processes that this one is at batch `number` of a place; return the arguments before.

        See `Doing`.
        """
        before = self.place, self.number
        self.place, self.number = place, number
        return before

    @contextlib.contextmanager
    def on_batch(self, batch: str | None) -> Iterator[None]:
        """Run collectives for a batch; see `Doing`. None: the one of the previous call."""
        if batch is not None:
            self.number, self._last_batch = self.number + 1, batch
        self.batch = self._last_batch
        try:
            yield
        finally:
            self.batch = ""

    def fail(self, words: str) -> NoReturn:
        """End the agreement for good, and raise a ProcessError that says why."""
        self.raised = self.failure = ProcessError(words)
        raise self.failure

    def name(self, rank: int) -> str:
        """Return a process' name in messages."""
        return f"process {rank} on {self.hosts[rank]}" if self.hosts[rank] else f"process {rank}"

    def names(self, ranks: Iterable[int]) -> str:
        """Return processes' names in messages."""
        return ", ".join(map(self.name, sorted(ranks)))

    def doing(self, text: str) -> Doing:
        """Return what this process is doing in the call `text`."""
        return Doing(self.place, self.number, self.batch, f"{text}; {self.remark}" if self.remark else text)

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
        remedy = SAME_MODEL if is_model else _SAME_CALLS
        return f"Expected all processes to do the same. Received: {'; '.join(said)}. {remedy}"

    def report(self, words: str) -> None:
        """Tell the others that something has failed in this process; whatever they wait for raises it."""
        # Those of several processes that fail before they meet again are one failure. A process that has begun to meet
        # the others, who may do so without it, fails anew.
        self.failures[self.rank] = max(self.failures[self.rank], self._met_in()) + 1
        self.generation = max(self.generation, self.failures[self.rank])
        self._words[self.rank] = words
        self._tell({"words": shortened(words)})

    def _met_in(self) -> int:
        """Return the generation in which this process last began to meet the others."""
        return self.begun >> _COUNT_BITS

    def give_up(self, error: BaseException) -> None:
        """End the agreement because of an error; tell the others, without waiting, that this process sends no more."""
        if self.failure is None:
            self.failure = ProcessError(f"{type(error).__name__}: {error}")
        self.service.tell({"rank": self.rank, "words": shortened(str(self.failure))}, 0)

    def end(self, words: str) -> None:
        """Tell the others that this process ends, and why; process 0 waits until they have heard of it."""
        failed, is_known = self._words[self.rank], self.failures[self.rank] <= self._met_in()
        # They may hear of a failure and of the end at once.
        told = words if is_known or failed in words else f"{words}, after {failed}"
        self._tell({"ended": shortened(told)})
        if self.rank == 0:
            timeouts.poll(lambda: self._know_end.issuperset(set(range(self.size)) - self.gone().keys()), _END_S)
        self._stop.set()
        self.service.close()

    def report_file(self) -> None:
        """Tell the others that this process has written a file, or failed to, without waiting for them."""
        self._count_file()
        self._tell({})

    def _tell(self, news: dict[str, Any]) -> None:
        notice = {"rank": self.rank, "failures": self.failures[self.rank], "files": self.files[self.rank], **news}
        self.service.tell(notice, _END_S)

    def wait_for_file(self, timeout_s: float | None) -> None:
        """Wait until process 0 has written the file that this process leaves to it, or has gone on without it.

        Raises as `exchange`.
        """
        wanted = self._count_file()
        if self.failure is not None:  # process 0 writes no more files
            return

        def is_there() -> bool:
            # It has begun a collective, for which it has sent data, or an exchange.
            has_passed = not self.service.inbox[0].empty() or 0 in self.service.who(wanted[0] + 1, _WHO_S)
            return self.files[0] >= wanted or has_passed

        def check(what: str) -> None:
            try:
                self.check(what)
            except ProcessError:
                if self.failure is None or not is_there():  # process 0 may have written it, and ended
                    raise

        timeouts.wait(
            lambda slice_s: timeouts.poll(lambda: self.files[0] >= wanted, slice_s) or is_there(),
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

    def check(self, what: str) -> None:
        """Raise ProcessError if waiting for the others has become futile: one has failed, ended or gone silent.

        Each failure is raised once. `what` is waited for, for messages.
        """
        self.check_alive(what)
        failures = list(self.failures)
        failed = [i for i, generation in enumerate(failures) if generation > self.generation]
        if failed:
            self.generation = max(failures)
            said = "; ".join(f"{self.name(i)}: {self._words[i]}" for i in failed)
            self.raised = ProcessError(f"Expected all processes to make this step. Received: {said}")
            raise self.raised

    def check_alive(self, what: str) -> None:
        """Raise ProcessError, for good, if one has ended or is silent; see `check`."""
        if self.failure is not None:
            raise self.failure
        gone = self.gone()
        if gone:
            self.lost = set(gone)
            self.fail(f"Expected {what} to end. Received: {', '.join(gone.values())}")

    def failed_since(self, generation: int) -> bool:
        """Return whether a process has failed since all started over so often."""
        return max(self.failures) > generation

    def have_ended(self) -> bool:
        """Return whether another process has ended, or gone silent."""
        return self.failure is not None or bool(self.gone())

    def gone(self) -> dict[int, str]:
        """Return the other processes that have ended or are silent, with words that say so."""
        silence = f"nothing for {SILENCE_S:g} s from {{}}, which is stopped, killed or cut off"
        ended = {i: f"{self.name(i)} {words}" for i, words in enumerate(self._ended) if words and i != self.rank}
        return {i: silence.format(self.name(i)) for i in self.silent()} | ended

    def silent(self) -> list[int]:
        """Return the other processes that have not been heard of for too long."""
        if self.rank > 0 and self.service.silence()[0] > SILENCE_S:
            return [0]
        return sorted(self._dead - {self.rank})

    def _listen(self) -> None:
        """Hear the processes' notices. Runs in a thread."""
        while True:
            notice = self.service.notices.get()
            if self._stop.is_set():  # if they were not joined, the service's next `Peers` is to hear it
                self.service.notices.put(notice)
                return
            self.hear(**notice)

    def hear(
        self,
        rank: int = 0,
        failures: int = 0,
        files: Sequence[int] = (0, 0),
        words: str = "",
        ended: str = "",
        dead: Sequence[int] = (),
        knows_end: bool = False,
    ) -> None:
        """Take over a process' notice."""
        begun, count = files
        self.files[rank] = max(self.files[rank], (begun, count))
        self._dead.update(dead)
        if knows_end:
            self._know_end.add(rank)
        if words and not failures:  # by `give_up`; a report counts its failure
            self.given_up[rank] = words
        elif failures > self.failures[rank]:
            self._words[rank] = words
            self.failures[rank] = failures
        if ended:
            self._ended[rank] = ended
            if rank == 0 != self.rank:
                self.service.tell({"rank": self.rank, "knows_end": True}, 0)

    def _watch(self) -> None:
        """Report silent processes. Runs in a thread of process 0."""
        while not self._stop.wait(_PULSE_S):
            dead = {i for i, silent_s in enumerate(self.service.silence()) if silent_s > SILENCE_S}
            if not dead <= self._dead:
                self.service.tell({"dead": sorted(dead)}, 0)


def shortened(words: str) -> str:
    """Return words that take no more than `MOST_TEXT` bytes."""
    data = words.encode(errors="replace")
    return data.decode() if len(data) <= MOST_TEXT else data[: MOST_TEXT - 3].decode(errors="ignore") + "..."


_ended_by = ""  # an exception that was not caught


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
