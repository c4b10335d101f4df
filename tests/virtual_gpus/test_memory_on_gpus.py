"""A batch that does not fit the memory of the GPUs is trained in more shards, where `on_oom="split"` says so."""

import pathlib
import re
import subprocess
import sys

import pytest
from virtual_host import PATH

pytestmark = pytest.mark.usefixtures("virtual_gpus")  # run by `on_gpus_of`

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "memory.py"
MODELS = SCRIPT.parent / "models_in_a_row.py"


def on_gpus_of(memory, *arguments, timeout_s=280):
    """Run the script, with options before it, on two virtual GPUs of so many MB; return what it prints."""
    command = [sys.executable, str(PATH), "--gpus", "2", "--memory", str(memory), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "shards", "options"), [(2000, "2", []), (70, "4|8|16", []), (45, "4|8|16", ["--xla"])]
)
def test_a_batch_that_does_not_fit_is_split(memory, shards, options):
    """The numbers are one device's; each doubling is warned of. With enough memory there is none."""
    printed = on_gpus_of(memory, *options, SCRIPT)
    found = re.search(r"shards (\d+) warnings (\d+) equal divergence 0\.0", printed)
    assert found and re.fullmatch(shards, found[1]), printed
    assert 2 ** int(found[2]) == int(found[1]) // 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["steps_per_execution=3"], ["audit_every=2"], ["watched=1"]])
def test_batches_that_were_fed_ahead_are_split_anew(options):
    """They were divided into fewer shards: in training and in validation, however steps are called."""
    printed = on_gpus_of(22, SCRIPT, "fed", *options)
    found = re.search(r"shards (\d+) warnings (\d+) equal divergence 0\.0", printed)
    assert found and int(found[1]) > 2 and 2 ** int(found[2]) == int(found[1]) // 2, printed


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--xla"]])
def test_a_divided_step_keeps_one_sum(options):
    """Beside the gradients of a shard, and what some of them take while they are added: not those of 16 shards."""
    printed = on_gpus_of(2000, *options, SCRIPT, "sums")
    found = re.search(r"shards 32 sets (\d+\.\d+)", printed)
    assert found and float(found[1]) < 2.5, printed
    # TensorFlow copies NumPy arrays to GPU 0 for a dataset that reads them on the host.
    assert "arrays freed" in printed


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--xla"]])
def test_a_step_keeps_one_set_of_gradients(options):
    """And, beside it, what one bucket's update takes: of each GPU at most 1.5 sets more than plain Keras takes."""
    printed = on_gpus_of(2000, *options, SCRIPT, "update")
    plain, *towers = map(float, re.search(r"^sets ([\d. ]+)$", printed, re.MULTILINE)[1].split())
    assert len(towers) == 2 and max(towers) < plain + 1.5, printed


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--xla"]])
def test_a_row_that_does_not_fit_is_the_error(options):
    """TensorFlow's, once nothing is left to divide; weights are what they were on all GPUs."""
    printed = on_gpus_of(70, *options, SCRIPT, "row")
    for rows in (8, 1):
        assert f"{rows} rows: exhausted same divergence 0.0" in printed, printed


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_models_in_a_row_leave_nothing():
    """Of 200, each trained and deleted, with one call of the garbage collector, no GPU holds more than of five."""
    printed = on_gpus_of(100, MODELS, 200, timeout_s=1100)
    assert re.search(r"after 200: as after 5", printed), printed
