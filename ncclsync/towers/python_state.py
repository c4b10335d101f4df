"""Remember Python's state that a trace may change, so that it can be traced again from the same state."""

import functools
import random
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

_PLAIN = (bool, int, float, str, type(None))
_LIBRARIES = frozenset({"ncclsync", "numpy", "tensorflow", *sys.stdlib_module_names}) - {"__main__"}
_MOST = 1_000  # elements of a container that is looked into


class PythonState:
    """Python's and NumPy's global random generators, and numbers and texts among the attributes of a user's objects.

    What a trace draws from the former, and reads of the latter, all steps use that run it.
    """

    def __init__(self, owner: Any = None) -> None:
        """Remember the present state; `owner`: a model, whose layers, optimizer, losses and so on are the objects."""
        self._random = random.getstate(), np.random.get_state(legacy=False)
        objects = list(_users_objects(owner))
        self._attributes = {id(one.__dict__): (one.__dict__, _plain(one.__dict__)) for one in objects}
        self._unbuilt = {
            id(one.__dict__) for one in objects if isinstance(one, keras.Layer) and not getattr(one, "built", True)
        }

    @property
    def is_changed(self) -> bool:
        """Return whether the state is another now."""
        attributes = any(_plain(own) != before for own, before in self._attributes.values())
        return attributes or repr(self._random) != repr(PythonState()._random)

    def restore(self, since: "PythonState | None" = None) -> None:
        """Make it the state again; attributes that have not changed since another state stay.

        So do those of a layer that was built meanwhile: it is not built again.
        """
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        for key, (own, before) in self._attributes.items():
            if key in self._unbuilt and own.get("built"):
                continue
            then = {} if since is None else since._attributes.get(key, (own, {}))[1]
            now = _plain(own)
            for name in now.keys() | before.keys():
                if name in then and name in now and then[name] == now[name]:
                    continue
                if name in before:
                    own[name] = before[name]
                else:
                    del own[name]


def _plain(own: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if isinstance(value, _PLAIN) and name not in _names_of_keras()}


@functools.cache
def _names_of_keras() -> frozenset[str]:
    """Return the names of the attributes that Keras' objects have of their own."""
    made = [keras.Layer(), keras.Model(), keras.Sequential(), keras.optimizers.Optimizer(0.1), keras.metrics.Metric()]
    return frozenset(name for one in [*made, keras.losses.Loss()] for name in vars(one))


def _users_objects(owner: Any) -> Iterator[Any]:
    """Yield each object that Keras' objects lead to from this, and whose class is no library's."""
    waiting, met = [owner], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in met:
            continue
        met.add(id(one))
        if isinstance(one, (list, tuple, set, dict)):
            if len(one) <= _MOST:
                waiting += one.values() if isinstance(one, dict) else one
        elif isinstance(getattr(one, "__dict__", None), dict):
            library = type(one).__module__.partition(".")[0]
            if library not in _LIBRARIES:
                if library != "keras":
                    yield one
                waiting += one.__dict__.values()
