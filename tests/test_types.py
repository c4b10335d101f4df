"""What a type checker knows of a user's script: the factory's arguments, the model, `model.towers`."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = """
import keras
import ncclsync
from ncclsync import nccl_parallel

class Net(keras.Model):
    def width(self) -> int:
        return 3

@nccl_parallel
def bare(units: int, name: str = "net") -> Net:
    return Net()

@nccl_parallel(towers=2, exact=True)
def with_options(units: int) -> Net:
    return Net()

reveal_type(bare(3, name="a").width())
reveal_type(with_options(3).width())
bare("3")
with_options()
nccl_parallel(towers="2")
nccl_parallel(tower=2)
model = bare(3)
assert isinstance(model, ncclsync.HasTowers)
reveal_type(model.towers)
reveal_type(model.fit(1))

import keras.untyped  # as all of Keras is without types of its own

@nccl_parallel(towers=2)
def of_untyped() -> keras.untyped.Model:
    return keras.untyped.Model()

other = of_untyped()
assert isinstance(other, ncclsync.HasTowers)
reveal_type(other.towers)
reveal_type(other.fit(1))
reveal_type(other(1))
other.stop_training = True
"""
# As much of Keras as the script uses: without a py.typed of its own, mypy would take it for Any.
KERAS = """
from typing import Any

class Model:
    def fit(self, x: int) -> str: ...

def __getattr__(name: str) -> Any: ...
"""  # What ncclsync itself imports is left out: it takes mypy minutes.
CONFIG = """
[mypy]
follow_imports = silent
[mypy-tensorflow.*,numpy.*,h5py.*,rich.*,cffi.*,matplotlib.*]
follow_imports = skip
ignore_missing_imports = True
"""
FOUND = [
    'Revealed type is "int"',
    'Revealed type is "int"',
    'Argument 1 to "bare" has incompatible type "str"; expected "int"',
    'Missing positional argument "units" in call to "with_options"',
    'No overload variant of "nccl_parallel" matches argument type "str"',
    'Unexpected keyword argument "tower" for overloaded function "nccl_parallel"',
    'Revealed type is "ncclsync.training.loop.Towers"',
    'Revealed type is "str"',
    'Revealed type is "ncclsync.training.loop.Towers"',
    'Revealed type is "Any"',
    'Revealed type is "Any"',
]


@pytest.mark.slow
def test_a_users_script(tmp_path):
    """As mypy reads it."""
    pytest.importorskip("mypy", reason="pip install mypy")
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.pyi").write_text(KERAS)
    (tmp_path / "keras" / "untyped.pyi").write_text("from typing import Any\nModel: Any\n")
    (tmp_path / "mypy.ini").write_text(CONFIG)
    root = pathlib.Path(__file__).parent.parent
    command = [sys.executable, "-m", "mypy", "--config-file", str(tmp_path / "mypy.ini"), str(tmp_path / "mine.py")]
    found = {"MYPYPATH": f"{tmp_path}:{root}"}
    done = subprocess.run(command, env={**os.environ, **found}, capture_output=True, text=True, timeout=280)
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines() if ": " in line and "mine.py" in line]
    told = [line.replace("builtins.", "") for line in lines if not line.startswith("note: ") or "Revealed" in line]
    assert len(told) == len(FOUND), done.stdout
    for line, expected in zip(told, FOUND, strict=True):
        assert expected in line, done.stdout
