"""The C library by itself: under sanitizers, and without warnings."""

import os
import pathlib
import shutil
import subprocess

import pytest
from standin import Standin

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = [ROOT / "csrc" / name for name in ("pool.c", "cpu.c", "arithmetic.c", "meter.c")]
FLAGS = [
    "-std=c99",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
]

compiler = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(compiler is None, reason="no C compiler on the PATH")


def compile_c(*arguments: object) -> None:
    """Compile, with the compiler's own words if it fails."""
    done = subprocess.run([compiler, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["address,undefined", "thread"])
def sanitized(request, tmp_path):
    """The options of a build with a sanitizer."""
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    probe = [compiler, f"-fsanitize={request.param}", str(empty), "-o", str(tmp_path / "empty")]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip(f"the compiler has no runtime for -fsanitize={request.param}")
    return ["-g", "-O1", f"-fsanitize={request.param}", "-fno-sanitize-recover=all"]


@pytest.mark.timeout(120)
def test_cpu_collectives_are_clean_under_sanitizer(sanitized, tmp_path):
    """Every dtype, operation and level, concurrent callers, pools made and ended."""
    program, check = tmp_path / "check_cpu", ROOT / "tests" / "support" / "csrc" / "check_cpu.c"
    libraries = ["-lpthread", "-lm"]
    compile_c(*sanitized, *FLAGS, f"-I{ROOT / 'csrc'}", check, *SOURCES, "-o", program, *libraries)
    done = subprocess.run([program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.timeout(120)
def test_nccl_calls_are_clean_under_sanitizer(sanitized, tmp_path):
    """Every call, every failure of creation, aborts in the middle, several threads; the stand-in too. Where
    threads are watched, a thread waits for the GPUs' own work."""
    older = ["-DSTANDIN_OLD_DRIVER"] if "-fsanitize=thread" in sanitized else []
    standin = Standin(tmp_path, *sanitized, *older)
    program, check = tmp_path / "check_nccl", ROOT / "tests" / "support" / "csrc" / "check_nccl.c"
    sources = [*SOURCES, *(ROOT / "csrc").glob("nccl*.c"), standin.cudart]
    libraries = ["-lpthread", "-lm", "-ldl"]
    compile_c(*sanitized, *FLAGS, f"-I{ROOT / 'csrc'}", check, *sources, "-o", program, *libraries)
    # When a thread ends, glibc frees thread-local memory of libraries that were loaded later. The sanitizer
    # does not see that a thread which had the same memory before has been joined.
    suppressions = tmp_path / "suppressions"
    suppressions.write_text("race:_dl_deallocate_tls\n")
    done = subprocess.run(
        [program, standin.nccl, standin.cudart],
        env={**os.environ, "TSAN_OPTIONS": f"suppressions={suppressions}:print_suppressions=0"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_sources_compile_without_warnings(tmp_path):
    """With the flags of the package's build, warnings being errors."""
    for source in [*sorted((ROOT / "csrc").glob("*.c")), ROOT / "tests" / "gpu" / "overhead.c"]:
        compile_c("-O3", *FLAGS, f"-I{ROOT / 'csrc'}", "-c", source, "-o", tmp_path / "object.o")
