"""The fault tests of CPU towers once more, on virtual GPUs: errors, hangs and Ctrl-C in the midst of training."""

import pathlib

import pytest
from test_virtual_host import AHEAD, on_virtual_gpus  # noqa: F401
from thorough import some

TESTS = pathlib.Path(__file__).parents[1]
NCCL, STEPS, THREADS = (f"towers/test_{name}.py" for name in ("nccl_training", "step_errors", "threads"))
FAULTS = ["-k", "fail or faults or divided or thread"]
# What is left out there, and why.
LEFT_OUT = {
    **{
        f"{NCCL}::test_failure_within_fit[cudaStreamWaitEvent:2-NcclError-told to fail-.weights.h5-{xla}]": (
            "TensorFlow makes that call on a GPU, too; the second is not ncclsync's"
        )
        for xla in (False, True)
    },
    f"{THREADS}::test_an_op_runs_on_one_thread_where_towers_fill_the_cores": "it is about the cores of CPU towers",
}
# What is left out where kernels are only enqueued.
LEFT_OUT_AHEAD = {STEPS: "what a kernel finds in its numbers, such as a label that is none, a later op raises, or none"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "options, chosen",
    [
        (["--delay-us", "100", "--seed", "1"], some([NCCL, THREADS, *FAULTS], [NCCL, THREADS])),
        (["--delay-us", "100", "--seed", "1"], [STEPS]),
        ([*AHEAD, "--seed", "2"], [NCCL, *FAULTS]),
    ],
    ids=["collectives", "steps", "ahead"],
)
def test_faults_of_cpu_towers(on_virtual_gpus, options, chosen):  # noqa: F811
    """They end on GPUs as they do on the CPU, whatever the streams' delays."""
    arguments = [TESTS / one if one.endswith(".py") else one for one in chosen]
    left_out = [test for test in LEFT_OUT if test.partition("::")[0] in chosen]
    for test in left_out:
        arguments += ["--deselect", f"tests/{test}"]
    pytest_ = ["-m", "pytest", "--all", "-q", "-p", "no:cacheprovider"]
    printed = on_virtual_gpus("--gpus", "8", *options, *pytest_, *arguments)
    assert " passed" in printed
    assert "-k" in chosen or not left_out or f" {len(left_out)} deselected" in printed, printed


@pytest.mark.parametrize("test", [*LEFT_OUT, *LEFT_OUT_AHEAD])
def test_left_out(test):
    """Say which and why."""
    pytest.skip(f"not on virtual GPUs: {test}: {(LEFT_OUT | LEFT_OUT_AHEAD)[test]}")
