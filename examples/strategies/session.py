"""What a strategy's process does when it is asked: trains, times, measures, saves."""

import functools
import json
import pathlib
import time
import zipfile

import keras
import numpy as np

from ncclsync.tools.bench.fit import status_bytes
from strategies import load
from strategies.conditions import CONDITIONS
from strategies.strategy import Sizes, make_cpus
from strategies.task import build_model, load_data


class Session:
    """One strategy and the task. Each public method answers one request, with what JSON can tell."""

    def __init__(self, name, towers, data, batch_size, steps):
        """Load the data; `steps` batches of `batch_size` rows are a round."""
        make_cpus(towers)
        self._kind, self._towers, self._batch_size, self._steps = load(name), towers, batch_size, steps
        self._x, self._x_test, self._y, self._y_test = load_data(data)
        self._strategy = None

    def start(self, folder):
        """Place the model with `BatchNormalization` on towers, and make the first step."""
        began = time.perf_counter()
        self._strategy = self._place("batch norm")
        seconds = time.perf_counter() - began
        start = self._weights(self._strategy, folder, "start")
        began = time.perf_counter()
        self._train(self._strategy, 0, 1)
        return {"first_step_s": seconds + time.perf_counter() - began, "start": start}

    def first_round(self, folder):
        """Train on what is left of the first round; return the weights' file."""
        self._train(self._strategy, 1, self._steps)
        return {"weights": self._weights(self._strategy, folder, "batch norm")}

    def round(self):
        """Train on another round; return the mean seconds of a step."""
        began = time.perf_counter()
        self._train(self._strategy, 0, self._steps)
        return {"step_s": (time.perf_counter() - began) / self._steps}

    def finish(self, folder):
        """Measure what training has come to, and save; frees the towers."""
        strategy = self._strategy
        model = strategy.model
        right = np.argmax(model.predict(self._x_test, verbose=0), axis=-1) == self._y_test
        memory = sum(status_bytes("VmHWM", process) for process in ["self", *strategy.processes()])
        trainable = sum(weight.numpy().nbytes for weight in model.trainable_variables)
        whole = sum(weight.nbytes for weight in model.get_weights())
        sizes = Sizes(trainable, whole - trainable, self._batch_size * model.output_shape[-1] * 4)
        path = pathlib.Path(folder, "saved.keras")
        strategy.save(path)
        strategy.close()
        return {
            "system": self._kind.SYSTEM,
            "through": self._kind.THROUGH,
            "formula": self._kind.FORMULA,
            "why": self._kind.WHY,
            "accuracy": float(np.mean(right)),
            "memory_bytes": memory,
            "moved_bytes": self._kind.bytes_moved(sizes, self._towers),
            "saves_plain": saves_plain(path, model),
        }

    def condition(self, name, folder, last_rows=None):
        """Train a new model for a round under a condition; return the weights' file, or what was raised.

        Args:
            name: of the condition.
            folder: where the file is put.
            last_rows: instead of the condition's.
        """
        strategy = self._place(name)
        start = self._weights(strategy, folder, f"{name} start")
        if last_rows is None:
            last_rows = CONDITIONS[name].last_rows
        try:
            self._train(strategy, 0, self._steps, last_rows)
        except Exception as error:  # what a strategy raises is what is asked for
            return {"raised": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
        weights = self._weights(strategy, folder, f"{name} {last_rows}")
        strategy.close()
        return {"start": start, "weights": weights}

    def _place(self, condition):
        normalisation = CONDITIONS[condition].normalisation
        build = functools.partial(build_model, self._x.shape[1:], normalisation)
        return self._kind(build, self._towers)

    def _train(self, strategy, first, end, last_rows=0):
        """Train on the round's batches from `first` to before `end`, and on one of `last_rows` behind
        them."""
        rows = slice(first * self._batch_size, end * self._batch_size + last_rows)
        strategy.train(self._x[rows], self._y[rows], self._batch_size)

    @staticmethod
    def _weights(strategy, folder, name):
        path = str(pathlib.Path(folder, f"{name}.npz"))
        np.savez(path, *strategy.model.get_weights())
        return path


def saves_plain(path, model):
    """Return whether a file holds nothing but this model: its layers, and its weights, bit for bit."""
    with zipfile.ZipFile(path) as archive:
        saved = json.loads(archive.read("config.json"))["config"]["layers"]
    kinds = [layer["class_name"] for layer in saved]
    if kinds != [layer["class_name"] for layer in model.get_config()["layers"]]:
        return False
    loaded = keras.models.load_model(path, compile=False).get_weights()
    return all(np.array_equal(one, other) for one, other in zip(loaded, model.get_weights(), strict=True))
