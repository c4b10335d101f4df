"""Tests of CPU towers once more, on virtual GPUs, with several seeds of delays."""

import pathlib

import pytest
from test_virtual_host import on_virtual_gpus  # noqa: F401
from thorough import some

TESTS = pathlib.Path(__file__).parents[1]
# Models and their parity, `check_every`, compression, the divided optimizer, saving and loading, own loops, calls.
FILES = [
    "parity/test_smoke.py",
    "towers/test_drift.py",
    "gradients/test_compression.py",
    "gradients/test_noise_scale.py",
    "gradients/test_sharded_optimizer.py",
    "training/test_saving.py",
    "training/test_loop.py",
    "towers/test_step_function.py",
]
MANY_SHARDS = "towers/test_many_shards.py"
WRITES = "towers/test_writes.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "seed, way, chosen",
    [
        ("1", ["--ahead"], FILES),
        ("2", ["--ahead"], some(FILES[:1], FILES)),
        ("3", [], some(FILES[:2], FILES)),
        ("6", ["--ahead"], [WRITES]),
    ],
)
def test_on_virtual_gpus(on_virtual_gpus, seed, way, chosen):  # noqa: F811
    """They pass as on the CPU, whatever the streams' delays."""
    options = ["--gpus", "8", "--delay-us", "200", "--seed", seed, *way]
    # Without --xla nothing is compiled there.
    files = [*(TESTS / file for file in chosen), "--deselect", "tests/parity/test_smoke.py::test_smoke_by_xla"]
    if way:  # with --ahead a later op raises what a kernel finds in its numbers, such as a label that is none
        files += ["--deselect", f"tests/{FILES[4]}::test_failed_step_changes_nothing"]
    printed = on_virtual_gpus(*options, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert " passed" in printed


def test_by_xla(on_virtual_gpus):  # noqa: F811
    """The same models, as Keras has XLA compile them on GPUs."""
    options = ["--gpus", "4", "--delay-us", "300", "--seed", "5", "--ahead", "--xla", "-m", "pytest", "--all", "-q"]
    assert " passed" in on_virtual_gpus(*options, "-p", "no:cacheprovider", TESTS / FILES[0])


@pytest.mark.parametrize("way", [["--ahead"], *some([], [[]])])
def test_shards_on_any_number_of_gpus(on_virtual_gpus, way):  # noqa: F811
    """8 shards give the same bits on 1, 2, 4 and 8 GPUs."""
    programs = some("any_number and (mlp or augmentation or custom)", "any_number")
    options = ["--gpus", "8", "--delay-us", "100", "--seed", "4", *way, "-m", "pytest", "--all"]
    printed = on_virtual_gpus(*options, "-q", "-p", "no:cacheprovider", TESTS / MANY_SHARDS, "-k", programs)
    assert " passed" in printed
