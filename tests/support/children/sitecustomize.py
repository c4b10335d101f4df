"""Halve what it takes the processes that tests start to import TensorFlow and Keras.

Keras does without scikit-learn and matplotlib, as for users who have neither; whoever else asks for them gets them.
Python's collector waits until the packages are there, and passes over what their imports have made.
"""

import gc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class Quicker:
    """Finds packages, to be imported without Python's collector, and finds nothing that Keras can do without."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Raise `ModuleNotFoundError` where Keras asks for what it can do without; let others be asked of most."""
        if name in ("sklearn", "matplotlib"):
            frame = sys._getframe(1)
            while frame.f_code.co_filename.startswith("<frozen importlib"):
                frame = frame.f_back
            if frame.f_globals.get("__name__", "").startswith("keras."):
                raise ModuleNotFoundError(f"No module named {name!r}: tests leave it out for Keras", name=name)
        elif name in ("tensorflow", "keras", "ncclsync"):
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = uncollected(spec.loader.exec_module)
            return spec
        return None


def uncollected(exec_module):
    """Return the same without Python's collector."""

    def call(module):
        if not gc.isenabled():
            exec_module(module)
            return
        gc.disable()
        try:
            exec_module(module)
        finally:
            gc.freeze()
            gc.enable()

    return call


sys.meta_path.insert(0, Quicker)
