"""NVLS is kept out of communicators whose sums must be repeatable, before NCCL makes them."""

import os
import subprocess
import sys

import pytest

from ncclsync.communicator import CpuCommunicator, NcclCommunicator, nvls

pytestmark = pytest.mark.timeout(60)


def given(**variables):
    return nvls.in_force(variables.get, True)


@pytest.mark.parametrize(
    "variables, variable",
    [
        ({}, None),
        ({"NCCL_NVLS_ENABLE": ""}, None),
        ({"NCCL_NVLS_ENABLE": "0"}, None),
        ({"NCCL_NVLS_ENABLE": "0x0", "NCCL_ALGO": "NVLS"}, None),
        ({"NCCL_ALGO": "Ring,Tree"}, None),
        ({"NCCL_ALGO": "^NVLS,NVLSTree"}, None),
        ({"NCCL_ALGO": "allreduce:^tree,nvls"}, None),
        ({"NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE=1"),
        ({"NCCL_NVLS_ENABLE": "2", "NCCL_ALGO": "Ring"}, "NCCL_NVLS_ENABLE=2"),
        ({"NCCL_NVLS_ENABLE": "yes"}, "NCCL_NVLS_ENABLE=yes"),
        ({"NCCL_ALGO": "ring, NVLS"}, "NCCL_ALGO=ring, NVLS"),
        ({"NCCL_ALGO": "^tree;allreduce:nvlstree"}, "NCCL_ALGO=^tree;allreduce:nvlstree"),
    ],
)
def test_what_the_user_has_set(variables, variable):
    """What asks for NVLS stays and is named; all else leaves it to be kept out."""
    found = given(**variables)
    assert (found.allowed, found.variable) == (variable is not None, variable)
    if variable is not None:
        assert variable in found.reason


def test_allowed_where_nobody_asks_for_equal_bits():
    """It is NCCL's choice then, unless the user has turned it off."""
    assert nvls.in_force({}.get, False) == nvls.Nvls(True, "op determinism is off")
    assert nvls.in_force({"NCCL_ALGO": "nvls"}.get, False) == nvls.Nvls(True, "NCCL_ALGO=nvls is set")
    assert nvls.in_force({nvls.VARIABLE: "0"}.get, False) == nvls.Nvls(False, "NCCL_NVLS_ENABLE=0 is set")


MAKE = """
import logging, os, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
from ncclsync.communicator import NcclCommunicator
for repeatable in {repeatable}:
    with NcclCommunicator([0, 1], preflight=False, repeatable=repeatable) as comm:
        assert comm.repeatable is repeatable
"""


@pytest.fixture
def make(built_standin, tmp_path):
    """Return a function that makes communicators in a process of its own, one after another.

    It returns what each rank's NCCL found in the variable as it was created, and what was logged.
    """

    def make_all(*repeatable, **variables):
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
        environ |= {**built_standin.environment, "STANDIN_LOG": str(calls), **variables}
        command = [sys.executable, "-c", MAKE.format(repeatable=repeatable)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [*calls.read_text().splitlines(), ""]
        created = [i for i, line in enumerate(lines) if line.startswith("ncclCommInitRankConfig")]
        found = [lines[i + 1].partition("NCCL_NVLS_ENABLE ")[2] or None for i in created]
        return found, done.stdout.splitlines()

    return make_all


def test_kept_out_before_the_communicator_is_made(make):
    """Each rank's NCCL finds the variable; it is logged once, for all communicators of the process."""
    found, logged = make(True, True)
    assert found == ["0"] * 4
    (line,) = logged
    assert line.startswith("INFO NVLS is kept out of NCCL's communicators (NCCL_NVLS_ENABLE=0)")


def test_nothing_is_set_otherwise(make):
    """NCCL decides by itself."""
    assert make(False) == ([None] * 2, [])


def test_what_the_user_has_set_stays(make):
    """A warning names what contradicts; what does not is not spoken of."""
    found, (line,) = make(True, True, NCCL_NVLS_ENABLE="1")
    assert found == ["1"] * 4
    assert line.startswith("WARNING ") and "NCCL_NVLS_ENABLE=1 asks for NVLS" in line
    found, (line,) = make(True, NCCL_ALGO="nvls,ring")
    assert found == [None] * 2 and "NCCL_ALGO=nvls,ring asks for NVLS" in line
    assert make(True, NCCL_NVLS_ENABLE="0") == (["0"] * 2, [])
    found, (line,) = make(True, NCCL_ALGO="^NVLS")
    assert found == ["0"] * 2 and line.startswith("INFO ")


def test_too_late(make):
    """NCCL has read the variable for an earlier communicator: a warning, and nothing that looks as if it helped."""
    found, (line,) = make(False, True)
    assert found == [None] * 4
    assert line.startswith("WARNING ") and "before op determinism was on" in line


def test_bad_argument():
    """Before anything is made."""
    with pytest.raises(TypeError, match=r"Expected repeatable to be a bool\. Received: 1"):
        NcclCommunicator([0, 1], repeatable=1)


def test_the_cpus_sums_are_repeatable():
    """Without being asked."""
    with CpuCommunicator(2) as comm:
        assert comm.repeatable
