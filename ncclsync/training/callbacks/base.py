"""Watch steps for a callback."""

import abc
from typing import Any

import keras

from ncclsync.ops.spans import Measured
from ncclsync.training.keras_model import is_plain, maker
from ncclsync.training.loop import Towers, towers_of

_PLAIN = "_ncclsync_plain"  # a model's attribute: its own train function, and the watched function in its place


class StepWatcher(keras.callbacks.Callback, abc.ABC):
    """A base of callbacks that watch when the parts of training steps begin and end.

    A single tower, otherwise trained by plain Keras, is trained by a step of towers while it is watched.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Prepare.

        Raises:
            ValueError: the model is not on towers, or runs eagerly.
            NcclSyncError: its towers are closed.
        """
        name, model = type(self).__name__, self.model
        towers = towers_of(model)
        if towers is None:
            raise ValueError(f"Expected a model of an @nccl_parallel factory for {name}. Received: {model!r}")
        towers.session.require_open()
        if model.run_eagerly:
            raise ValueError(f"Expected a step that is traced for {name}. Received: run_eagerly=True")
        # Unless another watcher, of this `fit` or an interrupted one, has replaced it already.
        if is_plain(towers) and model.train_function is not model.__dict__.get(_PLAIN, ("", ""))[1]:
            plain = model.train_function
            maker(model, towers, "train")(force=True)
            model.__dict__[_PLAIN] = plain, model.train_function

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the model as it was."""
        plain, watched = self.model.__dict__.pop(_PLAIN, (None, ""))
        if self.model.train_function is watched:
            self.model.train_function = plain

    @property
    def towers(self) -> Towers:
        """Return the towers of the model that trains."""
        towers = towers_of(self.model)
        assert towers is not None  # `on_train_begin` has seen them
        return towers

    def watch_next(self) -> None:
        """Let `measure` receive the timestamps of the step's next call."""
        self.towers.watch.watch_next(self._measure)

    @abc.abstractmethod
    def measure(self, measured: Measured) -> None:
        """Receive the timestamps of a watched call, in the thread of `fit`, also if the call failed."""

    def _measure(self, measured: Measured) -> None:
        self.measure(measured)
        if measured.failed:  # `fit` ends here, without on_train_end
            StepWatcher.on_train_end(self)
