"""Wait without a hang: in slices, with a warning after a while, up to a limit, and until Ctrl-C.

Python handles signals in the main thread only, and only where that thread runs Python. `interruptible` is for
a main thread that goes into native code which waits for other threads: these see the Ctrl-C in its place.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ncclsync.communicator import native
from ncclsync.errors import NcclSyncError, NcclTimeoutError

logger = logging.getLogger("ncclsync")

DEFAULT_TIMEOUT_S = 600.0
WARN_AFTER_S = 60.0
JOIN, LATE_S = "join", 10.0
SLICE_S = 0.1  # how long Ctrl-C may go unnoticed


def check_timeout(timeout_s: float | None) -> None:
    """Raise TypeError or ValueError unless it is a positive number of seconds, or None."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"Expected timeout_s to be a number of seconds, or None. Received: {timeout_s!r}")
    if not timeout_s > 0 or math.isinf(timeout_s):
        raise ValueError(f"Expected timeout_s to be positive, or None for no limit. Received: {timeout_s!r}")


def poll(is_done: Callable[[], Any], slice_s: float) -> bool:
    """Ask whether something has ended, with naps of up to a millisecond, for so many seconds; return whether it has."""
    began = time.monotonic()
    while not is_done():
        waited_s = time.monotonic() - began
        if waited_s >= slice_s:
            return False
        if waited_s > 5e-5:  # another process may need this core
            time.sleep(min(waited_s / 8, 1e-3))
    return True


def wait(
    go_on: Callable[[float], bool],
    *,
    call: str,
    what: Callable[[], str],
    timeout_s: float | None,
    arrived: Callable[[], str],
    check: Callable[[str], None] | None = None,
    then: str = "",
) -> None:
    """Wait until something has ended; raise NcclTimeoutError if it has not within the limit.

    A Ctrl-C is a KeyboardInterrupt in the main thread, elsewhere a NcclSyncError; see `interruptible`.

    Args:
        go_on: waits for so many seconds; returns whether it has ended. Its first call may begin it.
        call: NCCL's, for messages; or `JOIN`, of processes, of which late ones are named sooner.
        what: says what it is, for messages.
        timeout_s: the limit; None for none.
        arrived: says which ranks have arrived, for messages.
        check: raises if waiting has become futile; its argument is `what()`.
        then: what the caller does after the limit, for messages.
    """
    warn_after_s = LATE_S if call == JOIN else WARN_AFTER_S
    limit_s = math.inf if timeout_s is None else timeout_s
    slice_s = min(SLICE_S, limit_s)
    began = time.monotonic()
    is_done = go_on(slice_s)
    has_warned = False
    while not is_done:
        if check is not None:
            check(what())
        waited_s = time.monotonic() - began
        if waited_s >= limit_s:
            words = f"it has not within {_told(limit_s)} s: {arrived()}{then}"
            raise NcclTimeoutError(native.TIMEOUT, call, words, "ncclTimeout", what())
        interrupts = _active
        if interrupts is not None and interrupts.has_come():
            raise NcclSyncError(f"Expected {what()} to end. Received: an interrupt (Ctrl-C) after {waited_s:.1f} s")
        if waited_s >= warn_after_s and not has_warned:
            has_warned = True
            warn_of_pending(what(), arrived(), waited_s, timeout_s)
        is_done = go_on(min(SLICE_S, limit_s - waited_s))


def _told(limit_s: float) -> str:
    return f"{limit_s:.0f}" if limit_s >= 10 else f"{limit_s:.1g}"


def warn_of_pending(what: str, arrived: str, waited_s: float, timeout_s: float | None) -> None:
    """Log that something has been pending for so many seconds."""
    limit = "there is no limit" if timeout_s is None else f"it is given up after {_told(timeout_s)} s"
    logger.warning("%s has been pending for %.0f s: %s; %s", what, waited_s, arrived, limit)


class Aside:
    """Run a task in a thread of its own, which goes on even if its caller stops waiting."""

    def __init__(self, task: Callable[[], None], name: str) -> None:
        """Begin it. An NcclSyncError that it raises is raised where it is waited for."""
        self._task = task
        self._error: NcclSyncError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._task()
        except NcclSyncError as error:
            self._error = error

    def wait(self, slice_s: float) -> bool:
        """Wait for so many seconds; return whether it has ended. Raises its error, once."""
        self._thread.join(slice_s)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return not self._thread.is_alive()


class _Interrupts:
    """Collect the signals that Python's handler has seen while it could not run: it writes them to a pipe.

    The pipe is never closed: a thread that still waits might read from whatever gets its number next.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self.write_end, False)
        self.received = bytearray()  # by any thread that looks: it only grows, by single calls
        threading.Thread(target=self._watch, name="ncclsync interrupts", daemon=True).start()

    def has_come(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.received.extend(os.read(self._read_end, 64))
        return signal.SIGINT in self.received

    def _watch(self) -> None:
        """Pass a Ctrl-C on to native code that does not wait in slices."""
        while True:
            select.select([self._read_end], [], [])
            if self.has_come() and _active is self and _on_interrupt is not None:
                _on_interrupt()
            time.sleep(SLICE_S)  # code that waits in slices reads it first


_active: _Interrupts | None = None  # while the main thread is in `interruptible`
_kept: _Interrupts | None = None
_on_interrupt: Callable[[], None] | None = None  # is called by a Ctrl-C meanwhile


def _takes_ctrl_c() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) == signal.default_int_handler


@contextlib.contextmanager
def interruptible(on_interrupt: Callable[[], None] | None = None) -> Iterator[None]:
    """Let `wait` see Ctrl-C while the main thread runs native code that waits for other threads; lose none.

    Args:
        on_interrupt: is called at a Ctrl-C, in a thread of its own, for native code that waits without `wait`.

    In any other thread, and where Python itself does not handle Ctrl-C, this does nothing.

    Raises:
        KeyboardInterrupt: somebody has pressed Ctrl-C, and what runs within has lost Python's KeyboardInterrupt or has
            raised another error after it. Keras and TensorFlow have bare `except`s; native code may run Python and
            drop what that raises.
    """
    global _active, _kept, _on_interrupt
    if not _takes_ctrl_c():
        yield
        return
    if _active:  # within another
        outer, _on_interrupt = _on_interrupt, on_interrupt or _on_interrupt
        try:
            yield
        finally:
            _on_interrupt = outer
        return
    _kept = _kept or _Interrupts()
    _kept.has_come()  # signals that came in between
    _kept.received.clear()
    before = signal.set_wakeup_fd(_kept.write_end, warn_on_full_buffer=False)
    _active, _on_interrupt = _kept, on_interrupt
    try:
        yield
        if _kept.has_come():
            raise KeyboardInterrupt
    except Exception as error:  # raised again, if not as the Ctrl-C that it hides
        if _kept.has_come():
            raise KeyboardInterrupt from error
        raise
    finally:
        _active = _on_interrupt = None
        signal.set_wakeup_fd(before)
        _kept.has_come()
        if before != -1 and _kept.received:  # wake the previous owner of the descriptor, such as an event loop
            os.write(before, bytes(_kept.received))


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let what runs within be complete: a Ctrl-C meanwhile is raised at its end. For the main thread and short work.

    Also if it ends by an error, which is then the Ctrl-C's context.
    """
    if not _takes_ctrl_c():
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pressed:
            raise KeyboardInterrupt


def raise_ctrl_c_again() -> None:
    """Let a KeyboardInterrupt that Python ignores, in a destructor or a callback of its collector, be raised again.

    For the rest of the process. A Ctrl-C during native work, as a long search for garbage, is raised in the first
    Python that runs after it.
    """
    before: Callable[[Any], Any] = sys.unraisablehook

    def again(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            before(ignored)
        elif _active is None:  # else `interruptible` raises it
            # Not a `threading.Thread`: its start waits, and the Ctrl-C would be raised there, and ignored again.
            ended = [False]
            _thread.start_new_thread(_press_ctrl_c, (ended,))
            ended[0] = True  # from here to its end Python looks for no signal

    if getattr(before, "__qualname__", "") != again.__qualname__:
        sys.unraisablehook = again


def _press_ctrl_c(when: list[bool]) -> None:
    """Send the main thread Ctrl-C's signal, if Python handles it, once `when` holds True.

    `_thread.interrupt_main` would not end a sleep.
    """
    while not when[0]:
        time.sleep(SLICE_S / 10)
    if callable(signal.getsignal(signal.SIGINT)):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _forget_pipe() -> None:
    """Forget the pipe in a forked child: it is the parent's."""
    global _active, _kept
    _active = _kept = None


os.register_at_fork(after_in_child=_forget_pipe)
