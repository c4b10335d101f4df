"""Back up training, with the position in the data, to the sample: `BackupAndRestore`.

The file of the weights holds everything. It is complete or absent, also after a crash of the machine, so that weights
and position are of the same moment. The metadata beside it is for Keras' own callback.
"""

import hashlib
import json
import logging
import os
import shutil
from typing import Any

import h5py
import keras
import numpy as np

from ncclsync.compat import keras as keras_compat
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError, shown
from ncclsync.training import progress
from ncclsync.training.callbacks.shuffled import Position, Shuffled
from ncclsync.training.files import make_folders, replacing
from ncclsync.training.loop import towers_of

logger = logging.getLogger("ncclsync")

_SAME_DATA = "Pass the same data to fit as to BackupAndRestore: model.fit(data, callbacks=[...])"
_STATE = "ncclsync"  # the attribute of the weights' file that holds the other state, as JSON

# Our own true value of `stop_training`. Without it Keras would ask for as many batches as a whole pass has, and count
# the step that gets none as an iteration, which draws random numbers.
_PASS_ENDED = object()


class BackupAndRestore(keras_compat.BackupMethods):
    """Resume in the middle of an epoch: Keras' callback of this name, with its arguments.

    ```python
    data = ncclsync.Shuffled(x, y, batch_size=256, seed=1)
    model.fit(data, epochs=5, callbacks=[ncclsync.BackupAndRestore("backup", save_freq=100, data=data)])
    ```

    To resume an interrupted run, repeat the call. It goes on after the backup's last sample; the number of towers and
    the batch size may be new. On the same number of towers it ends with the weights of an uninterrupted run, bit for
    bit; on GPUs if `tf.config.experimental.enable_op_determinism()` was called before the model was made.

    A backup holds weights, optimizer, the random state of layers, and the position in the data. It does not hold the
    state of other callbacks, of `keras.random` without a seed, of `compression`, and of metrics: the logs of the
    resumed epoch cover its rest. An epoch of `fit` must be one pass over the data.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: int | str = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        data: Shuffled | None = None,
    ) -> None:
        """Prepare; `keras.callbacks.BackupAndRestore` describes the other arguments.

        Args:
            backup_dir: a local folder.
            save_freq: "epoch", or the number of batches between backups, at least 1.
            double_checkpoint, delete_checkpoint: Keras'.
            data: the data given to `fit`. None: the position is not stored, as by Keras' callback, and backups are made
                only at the end of epochs.

        Raises:
            TypeError: `data` is neither a `Shuffled` nor None.
            ValueError: `save_freq` is something else, or a number without `data`.
        """
        if data is not None and not isinstance(data, Shuffled):
            raise TypeError(f"Expected data to be an ncclsync.Shuffled or None. Received: {shown(data)}")
        if save_freq != "epoch" and (
            isinstance(save_freq, bool) or not isinstance(save_freq, (int, np.integer)) or save_freq < 1
        ):
            raise ValueError(f"Expected save_freq to be 'epoch' or at least 1. Received: {save_freq!r}")
        if save_freq != "epoch" and data is None:
            raise ValueError(
                "Expected data=, the ncclsync.Shuffled that fit is given, where save_freq is a number of "
                f"batches: other data cannot be resumed at a sample. Received: save_freq={save_freq}"
            )
        super().__init__(os.fspath(backup_dir), save_freq, double_checkpoint, delete_checkpoint)
        self.data = data
        self._epoch = 0  # of `fit`: the current epoch, or the next one
        self._begun = Position(0, 0)  # the position when that epoch began
        self._expected: Position | None = None  # the position that the number of batches implies

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the backup, if there is one.

        Raises:
            OSError: neither the backup nor the backup before it can be read.
            ValueError: the backup is of other data or of another model, or an epoch of `fit` is no pass over `data`.
        """
        self._expected = None
        steps = self.params.get("steps")
        if self.data is not None and steps != len(self.data):
            raise ValueError(
                f"Expected fit to train on the data of {type(self).__name__}, {len(self.data)} batches an epoch. "
                f"Received: {steps}. {_SAME_DATA}; not what map() makes of it, no steps_per_epoch, and no "
                "class_weight, for which Shuffled has sample_weight"
            )
        if self.data is not None and not self.model.built:
            # Now, before the backup is restored: Keras would build it in the first step.
            keras_compat.build_symbolically(self.model, self.data.element_spec)
        towers = towers_of(self.model)
        if towers is not None and towers.backend == "nccl" and not tf_compat.is_op_determinism_enabled():
            logger.info(
                "A resumed run on GPUs ends with the very weights of an uninterrupted run only if "
                "tf.config.experimental.enable_op_determinism() was called before the model was made: without it "
                "kernels, and NCCL's sums within an NVSwitch, may differ in their last bits"
            )
        super().on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record where the epoch begins."""
        self._epoch = epoch
        if self.data is not None:
            self._begun = self.data.upcoming

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Make a backup if one is due.

        Raises:
            NcclSyncError: `fit` does not train on the given data: after the first batch, too.
        """
        is_first = self._expected is None
        if self.data is not None:
            seen = self._begun.samples + (batch + 1) * self.data.batch_size
            ended = seen >= self.data.rows
            epoch = self._begun.epoch
            self._expected = Position(epoch + 1, 0) if ended else Position(epoch, seen)
            if ended and self._begun.samples and not self.model.stop_training:
                self.model.stop_training = _PASS_ENDED
        if is_first:
            self._check()
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Make a backup if one is due after each epoch.

        Raises:
            NcclSyncError: the epoch was no pass over the given data.
        """
        if self.model.stop_training is _PASS_ENDED:
            self.model.stop_training = False
        if self.data is None:
            self._epoch = epoch + 1
        else:
            if not self.model.stop_training:
                self._expected = Position(self._begun.epoch + 1, 0)
            self._check()
        super().on_epoch_end(epoch, logs)

    def _check(self) -> None:
        if self.data is not None and self.data.position != self._expected:
            raise NcclSyncError(
                f"Expected fit to train on the data of {type(self).__name__}, one pass per epoch, of which it would "
                f"have given {_words(self._expected)}. Received: {_words(self.data.position)}. {_SAME_DATA}"
            )

    def write_backup(self) -> None:
        """Make a backup; Keras calls this."""
        self._check()
        weights, previous, metadata = keras_compat.backup_files(self)
        make_folders(self.backup_dir)
        if self.double_checkpoint and os.path.exists(weights):
            with replacing(previous) as part:
                shutil.copyfile(weights, part)
        state = self._state()
        with replacing(weights) as part:
            self.model.save_weights(part, overwrite=True)
            with h5py.File(part, "a") as file:
                file.attrs[_STATE] = json.dumps({**state, "digest": _digest(state)})
        _write_metadata(metadata, state["epoch"])
        samples = state["data"]["samples"] if state["data"] else 0
        progress.report(os.path.abspath(self.backup_dir), state["epoch"], samples)

    def _state(self) -> dict[str, Any]:
        state = {"epoch": self._epoch, "seeds": [v.numpy().tolist() for v in _seeds(self.model)], "data": None}
        if self.data is not None:
            epoch, samples = self.data.position
            state["epoch"] = self._epoch + epoch - self._begun.epoch
            state["data"] = {"epoch": epoch, "samples": samples, "seed": self.data.seed, "rows": self.data.rows}
        return state

    def read_backup(self) -> None:
        """Restore a backup; Keras calls this, and after an `OSError` again for the previous backup."""
        weights, _, metadata = keras_compat.backup_files(self)
        state, variables = _read_state(weights), _seeds(self.model)
        if state is not None:
            self._check_data(state["data"])
            if [np.shape(seed) for seed in state["seeds"]] != [tuple(variable.shape) for variable in variables]:
                raise ValueError(
                    f"Expected a backup of the same model, with {len(variables)} random states. "
                    f"Received: {len(state['seeds'])} in {weights}"
                )
            # A kill between the two files leaves the metadata of the previous backup.
            _write_metadata(metadata, state["epoch"])
        super().read_backup()
        if state is None:
            return
        for variable, value in zip(variables, state["seeds"], strict=True):
            variable.assign(np.array(value, variable.dtype.as_numpy_dtype))
        if self.data is not None:
            self.data.seek(state["data"]["epoch"], state["data"]["samples"])

    def _check_data(self, stored: dict[str, int] | None) -> None:
        if self.data is None:
            if stored is not None and stored["samples"]:
                raise ValueError(
                    f"Expected data=, since the backup in {self.backup_dir} was made in the middle of an "
                    f"epoch, after {stored['samples']} samples. Received: None"
                )
            return
        ours = {"seed": self.data.seed, "rows": self.data.rows}
        theirs = None if stored is None else {name: stored[name] for name in ours}
        if theirs != ours:
            raise ValueError(f"Expected a backup of the same data, {ours}. Received: {theirs}")


def _words(position: Position | None) -> str:
    return "nothing" if position is None else f"{position.epoch} passes and {position.samples} samples"


def _seeds(model: keras.Model) -> list[Any]:
    """Return the random states of a model's layers, which files of weights do not hold."""
    layers = [model, *keras_compat.layers_of(model)]
    states = {id(one.state) for layer in layers for one in keras_compat.seed_generators_of(layer)}
    return [tf_compat.backend_variable(one) for one in model.variables if id(one) in states]


def _read_state(path: str) -> dict[str, Any] | None:
    """Read the other state in a file of weights; None if there is no file."""
    if not os.path.exists(path):
        return None
    try:
        with h5py.File(path, "r") as file:
            state = json.loads(file.attrs[_STATE])
        digest, expected = state.pop("digest"), _digest(state)
        if digest != expected:
            raise ValueError(f"{state}, of digest {expected}, where {digest} was written")
        return state
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise OSError(f"Expected a backup of ncclsync.BackupAndRestore in {path}. Received: {error!r}") from error


def _digest(state: dict[str, Any]) -> str:
    """Return a digest that shows a corrupted state, such as a wrong number of epochs."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _write_metadata(path: str, epoch: int) -> None:
    """Write the metadata that Keras' own callback reads."""
    with replacing(path) as part:
        part.write_text(json.dumps({"epoch": epoch, "batch": 0}), encoding="utf-8")
