"""The C library by itself: under sanitizers, and without warnings."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = [ROOT / "csrc" / name for name in ("pool.c", "cpu.c")]
FLAGS = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fno-strict-aliasing"]

compiler = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(compiler is None, reason="no C compiler on the PATH")


def compile_c(*arguments: object) -> None:
    """Compile, with the compiler's own words if it fails."""
    done = subprocess.run([compiler, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_cpu_collectives_are_clean_under_sanitizer(sanitizer, tmp_path):
    """Every dtype, operation and level, concurrent callers, pools made and ended."""
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    probe = [compiler, f"-fsanitize={sanitizer}", str(empty), "-o", str(tmp_path / "empty")]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip(f"the compiler has no runtime for -fsanitize={sanitizer}")
    program = tmp_path / "check_cpu"
    options = ["-g", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", *FLAGS]
    check = ROOT / "tests" / "csrc" / "check_cpu.c"
    compile_c(*options, f"-I{ROOT / 'csrc'}", check, *SOURCES, "-o", program, "-lpthread", "-lm")
    done = subprocess.run([program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_sources_compile_without_warnings(tmp_path):
    """With the flags of the package's build, warnings being errors."""
    for source in sorted((ROOT / "csrc").glob("*.c")):
        compile_c("-O3", *FLAGS, "-c", source, "-o", tmp_path / "object.o")
