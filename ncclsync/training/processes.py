"""Keep a model in step with the processes that train it together: one writes files and the screen, all see the same.

Every process runs the same script. Without this module each would write the same files, and a file read in process 0
alone would not reach the others. A model's methods, and its callbacks during `fit`, are replaced.
"""

import collections
import contextlib
import contextvars
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ncclsync.communicator.peers import Peers
from ncclsync.compat import keras as keras_compat
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import ProcessError
from ncclsync.training.arguments import named_arguments, takes
from ncclsync.training.callbacks.backup import BackupAndRestore
from ncclsync.training.callbacks.shuffled import Shuffled
from ncclsync.training.callbacks.timeline import Timeline
from ncclsync.training.local import Local, LocalRows, check_alone
from ncclsync.training.loop import Towers, towers_of

# Callbacks that write files or send logs, for which one process is enough.
_WRITERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor, Timeline)
_SHOWS = keras.callbacks.ProgbarLogger
_DECIDE_NOTHING = (*_WRITERS, _SHOWS, keras.callbacks.History, keras.callbacks.ModelCheckpoint)


def keep_in_step(model: keras.Model, towers: Towers) -> None:
    """Replace the methods of a model on the towers of several processes.

    In process 0 alone `fit`, `evaluate` and `predict` print and run callbacks that write, and `save`, `save_weights`,
    `export` and Keras' functions that save a model write. There `load_weights`, and the restoring of a backup, read;
    all processes get what was read.
    """
    read = model.load_weights
    methods: dict[str, Callable[..., Any]] = {"load_weights": _read_once(model, towers, read)}
    for name in ("fit", "evaluate", "predict"):
        methods[name] = _telling(towers, _in_step(model, towers, getattr(model, name), read))
    for name in ("train_on_batch", "test_on_batch", "predict_on_batch"):
        methods[name] = _telling(towers, getattr(model, name))
    for name in ("save", "save_weights", "export"):
        methods[name] = _written_once(towers, getattr(model, name))
    keras_compat.replace_methods(model, methods)
    keras_compat.write_models_by(_write_model)


def _peers(towers: Towers) -> Peers:
    peers = towers.communicator.peers
    assert peers is not None  # there are several processes
    return peers


def _telling(towers: Towers, method: Callable) -> Callable:
    """Let the other processes know of an error of the method."""

    @functools.wraps(method)
    def telling(*args, **kwargs):
        towers.session.require_open()
        with towers.telling():
            return method(*args, **kwargs)

    return telling


def _in_step(model: keras.Model, towers: Towers, method: Callable, read: Callable) -> Callable:
    """Let a method run with this process' callbacks and its part of the data; all processes meet at its end."""

    @functools.wraps(method)
    def in_step(*args, **kwargs):
        peers = _peers(towers)
        with contextlib.ExitStack() as stack:
            within = f", within {peers.place}" if peers.place else ""
            stack.callback(peers.at, *peers.at(f"`{method.__name__}`{within}"))
            args, kwargs = named_arguments(method, args, kwargs)
            callbacks: Any = kwargs.pop("callbacks", None) or []
            for name in ("x", "validation_data"):
                check_alone(kwargs.get(name))
                if isinstance(kwargs.get(name), Local):
                    kwargs[name] = _local_rows(kwargs[name], method.__name__, model, towers, kwargs)
                    if method.__name__ == "predict":
                        stack.enter_context(towers.given_rows_of(kwargs[name]))
                # `predict`, and a step that runs line by line, take whole batches.
                elif isinstance(kwargs.get(name), Shuffled) and method.__name__ != "predict" and not model.run_eagerly:
                    kwargs[name] = kwargs[name].of_process(towers.layout)
            is_list = isinstance(callbacks, keras.callbacks.CallbackList)
            each = callbacks.callbacks if is_list else keras.tree.flatten(callbacks)
            if method.__name__ == "fit" or not is_list:  # `evaluate` may be given the list of the `fit` that calls it
                _arrange(each, method.__name__, model, towers)
            if method.__name__ == "fit":
                stack.callback(setattr, peers, "remark", "")  # what stopped this `fit` says nothing of later calls
                for one in each:
                    if isinstance(one, (_Watch, _Compare)):
                        one.set_model(model)  # a CallbackList does this only when it is made
                    stack.enter_context(_written_by_first(one, model, towers, read))
            if not towers.is_chief:
                if takes(method, "verbose"):
                    kwargs["verbose"] = 0
                if keras.config.is_interactive_logging_enabled():
                    keras.config.disable_interactive_logging()
                    stack.callback(keras.config.enable_interactive_logging)
            results = method(*args, **kwargs, callbacks=callbacks if is_list else each)
            towers.communicator.exchange(None, f"the end of {method.__name__}")
        return results

    return in_step


def _local_rows(data: Local, name: str, model: keras.Model, towers: Towers, given: Mapping[str, Any]) -> LocalRows:
    """Return this process' rows of the batches of all processes' parts. Collective."""
    refused = {
        "run_eagerly=True": model.run_eagerly,
        "class_weight=, in whose place Local takes sample weights": given.get("class_weight") is not None,
        "predict with steps_per_execution above 1": name == "predict" and model.steps_per_execution > 1,
    }
    if any(refused.values()):
        wrong = " and ".join(one for one, is_given in refused.items() if is_given)
        raise ValueError(f"Expected Local, in several processes, without some options. Received: {wrong}")
    own = data.samples, len(towers.devices), data.batch_size
    parts = towers.communicator.exchange(own, "the parts of Local")
    return data.of_process(towers.process, parts, is_given=name == "predict")


def _arrange(callbacks: list[Any], name: str, model: keras.Model, towers: Towers) -> None:
    """Reduce a list of callbacks to those that run in this process; in `fit` add their watches. Collective.

    Raises:
        ProcessError: other processes have other callbacks.
    """
    here = [one for one in callbacks if not isinstance(one, (_Watch, _Compare))]
    _compare_classes(here, name, model, towers)
    if not towers.is_chief:
        here = [one for one in here if not isinstance(one, (*_WRITERS, _SHOWS))]
    callbacks[:] = _watched(here, towers) if name == "fit" else here


def _compare_classes(callbacks: Sequence[Any], name: str, model: keras.Model, towers: Towers) -> None:
    """Check that all processes have callbacks of the same classes, except those that only write."""
    # To save state of which towers hold parts takes all processes.
    optimizers = [one for one in vars(model).values() if isinstance(one, keras.optimizers.Optimizer)]
    accumulates = any(getattr(one, "gradient_accumulation_steps", None) for one in optimizers)
    divides = towers.replicas.sharding is not None or accumulates
    writers = _WRITERS if divides else (*_WRITERS, keras.callbacks.ModelCheckpoint)
    compared = [one for one in callbacks if not isinstance(one, (_SHOWS, keras.callbacks.History))]
    own = [(type(one).__name__, isinstance(one, writers)) for one in compared]
    first, *others = towers.communicator.exchange(own, f"the begin of {name}")
    for rank, found in enumerate(others, start=1):
        decide = [[kind for kind, writes in each if not writes] for each in (first, found)]
        here, there = (collections.Counter(kind for kind, _ in each) for each in (first, found))
        if decide[0] == decide[1] and here >= there:
            continue
        alone = [
            f"{', '.join(more)} in process {i} alone"
            for i, more in ((0, sorted(here - there)), (rank, sorted(there - here)))
            if more
        ]
        what = " and ".join(alone) or f"{', '.join(decide[0])} in process 0, {', '.join(decide[1])} in process {rank}"
        raise ProcessError(
            f"Expected the same callbacks for {name} in all processes. Received: {what}. Give all the same list; "
            f"process 0 alone may have callbacks that only write: {', '.join(one.__name__ for one in writers)}"
        )


def _written_by_first(
    callback: Any, model: keras.Model, towers: Towers, read: Callable
) -> contextlib.AbstractContextManager[None]:
    """Let a callback that saves the model write and read in process 0 alone; all go on with what it has read."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and not towers.is_chief:
        # Its decisions, and its calls of the model's methods, stay; only the folder would be made here.
        return tf_compat.members_replaced(callback, filepath=os.path.basename(callback.filepath))
    if not isinstance(callback, keras.callbacks.BackupAndRestore):
        return contextlib.nullcontext()
    restore = functools.partial(_restore, callback, model, towers, read, callback.on_train_begin)
    if towers.is_chief:
        return tf_compat.members_replaced(callback, on_train_begin=restore)
    # A backup is left to the `save_weights` of process 0.
    return tf_compat.members_replaced(
        callback,
        on_train_begin=restore,
        **keras_compat.backup_methods(write=_written_once(towers, lambda: None), read=lambda: None),
        delete_checkpoint=False,
    )


def _restore(
    callback: Any, model: keras.Model, towers: Towers, read: Callable, restore: Callable, logs: Any = None
) -> None:
    """Restore the backup that process 0 finds.

    Raises:
        ProcessError: another process cannot.
        Exception: this process cannot.
    """
    data = callback.data if isinstance(callback, BackupAndRestore) else None

    def restore_here() -> tuple[Any, ...]:
        # Process 0's own `load_weights`, not the collective: it may read one file after the other.
        with tf_compat.members_replaced(model, load_weights=read) if towers.is_chief else contextlib.nullcontext():
            restore(logs)
        built = model.optimizer is not None and model.optimizer.built
        return keras_compat.first_epoch(model), built, None if data is None else data.upcoming

    epoch, built, upcoming = _of_first(towers, restore_here, "restore a backup", everywhere=True)
    if not towers.is_chief:
        if built and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        keras_compat.begin_at(model, epoch)
    if data is not None and data.upcoming != tuple(upcoming):
        data.seek(*upcoming)
    _send(model, towers)


def _of_first(towers: Towers, read: Callable[[], Any], what: str, *, everywhere: bool = False) -> Any:
    """Return what `read` returns in process 0; `everywhere`: call it in the other processes, too.

    Raises:
        ProcessError: it has failed in another process; `what` names it.
        Exception: it has failed here.
    """
    towers.replicas.add_up_parts()  # now, so that writes of `read` to variables are no collectives
    failed, found = None, None
    if everywhere or towers.is_chief:
        try:
            found = read()
        except Exception as error:  # raised below, when the others know of it
            failed = error
    words = failed and f"{type(failed).__name__}: {failed}"
    reports = towers.communicator.exchange((words, found), what)
    if failed is not None:
        towers.communicator.mark_told(failed)
        raise failed
    for i, (words, _) in enumerate(reports):
        if words is not None:
            raise ProcessError(f"Expected process {i} to {what}. Received: {words}")
    return reports[0][1]


def _send(model: keras.Model, towers: Towers) -> None:
    """Let all processes hold what process 0 has read."""
    towers.replicas.mark_stale()
    towers.replicas.send_unused(keras_compat.variables_of(model))
    towers.replicas.sync()


_is_writing: contextvars.ContextVar[bool] = contextvars.ContextVar("ncclsync_is_writing", default=False)


@contextlib.contextmanager
def _file(towers: Towers) -> Iterator[bool]:
    """Yield whether this process is to write a file; if not, wait for process 0 to write it, unless it never will."""
    if _is_writing.get():  # a part of that file
        yield True
        return
    towers.replicas.add_up_parts()
    peers = _peers(towers)
    if not peers.leads:
        yield False
        peers.wait_for_file(towers.communicator.timeout_s)
        return
    token = _is_writing.set(True)
    try:
        yield True
    finally:
        _is_writing.reset(token)
        peers.report_file()


def _write_model(write: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Write a model's file as `_written_once` does, also by `keras.saving.save_model`."""
    towers = towers_of(model)
    if towers is not None and towers.layout.meets_processes:
        write = _written_once(towers, write)
    return write(model, *args, **kwargs)


def _written_once(towers: Towers, write: Callable) -> Callable:
    @functools.wraps(write)
    def written_once(*args, **kwargs):
        with _file(towers) as writes:
            return write(*args, **kwargs) if writes else None

    return written_once


def _read_once(model: keras.Model, towers: Towers, read: Callable) -> Callable:
    @functools.wraps(read)
    def read_once(*args, **kwargs):
        def read_here() -> None:
            read(*args, **kwargs)

        _of_first(towers, read_here, "load weights")
        _send(model, towers)

    return read_once


def _watched(callbacks: Sequence[Any], towers: Towers) -> list[Any]:
    """Return the callbacks, each followed by a `_Watch`, and at the end `_Compare`."""
    watched: list[Any] = []
    decisions: list[tuple[str, bool, float]] = []
    for callback in callbacks:
        watched.append(callback)
        if not isinstance(callback, _DECIDE_NOTHING):
            watched.append(_Watch(type(callback).__name__, decisions, _peers(towers)))
    return [*watched, _Compare(decisions, towers)]


class _Watch(keras.callbacks.Callback):
    """Record the decisions of the callback before it: whether training stops, and the learning rate."""

    def __init__(self, name: str, decisions: list[tuple[str, bool, float]], peers: Peers) -> None:
        super().__init__()
        self._name, self._decisions, self._peers = name, decisions, peers

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Record for `_Compare`."""
        self._remark()
        self._decisions.append((self._name, bool(self.model.stop_training), _learning_rate(self.model)))

    def _remark(self, *_: Any, **__: Any) -> None:
        """Name the first callback after which training is to stop, for messages of other processes."""
        before = self._peers.remark
        self._peers.remark = (before or f"{self._name} has set stop_training") if self.model.stop_training else ""

    on_train_begin = on_train_batch_end = _remark  # at the begin it forgets the fit before


class _Compare(keras.callbacks.Callback):
    """Compare, after each epoch, the decisions of the callbacks in all processes."""

    def __init__(self, decisions: list[tuple[str, bool, float]], towers: Towers) -> None:
        super().__init__()
        self._decisions, self._towers = decisions, towers

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tell other processes where this process is, for their messages."""
        _peers(self._towers).at(f"`fit`, at epoch {epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compare.

        Raises:
            ProcessError: a callback has decided differently.
        """
        each = self._towers.communicator.exchange(tuple(self._decisions), f"the end of epoch {epoch + 1}")
        self._decisions.clear()
        for rows in zip(*each, strict=False):
            rank = next((i for i, row in enumerate(rows) if repr(row) != repr(rows[0])), None)
            if rank is not None:
                words = [f"stop_training={rows[i][1]}, learning rate {rows[i][2]:g}" for i in (0, rank)]
                raise ProcessError(
                    f"Expected the callback {rows[0][0]} to decide the same in all processes. Received, at the end of "
                    f"epoch {epoch + 1}: {words[0]} in process 0, {words[1]} in process {rank}. Let it decide by "
                    "the epoch and the logs, and not by random numbers or the time"
                )


def _learning_rate(model: keras.Model) -> float:
    rate = getattr(getattr(model, "optimizer", None), "learning_rate", None)
    if not isinstance(rate, (keras.Variable, tf.Variable)):
        return math.nan
    return float(tf_compat.backend_variable(rate).numpy())
