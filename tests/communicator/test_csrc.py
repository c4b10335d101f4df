"""The C library by itself: which file may use which, under sanitizers, and without warnings."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest
from standin import Standin

ROOT = pathlib.Path(__file__).parents[2]
CSRC = ROOT / "csrc"
SOURCES = [CSRC / "ncclsync.c", *sorted((CSRC / "cpu").glob("*.c"))]
# A folder knows those in the rows above its own only; "." is csrc itself.
ROWS = ((".",), ("cpu", "nccl"), ("tf",))
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
needs_compiler = pytest.mark.skipif(compiler is None, reason="no C compiler on the PATH")


def read_arrows(csrc: pathlib.Path) -> dict[str, set[str]]:
    """Return for each C file or header which others it includes, or whose functions and variables it uses."""
    texts, owners = {}, {}
    for file in sorted([*csrc.rglob("*.c"), *csrc.rglob("*.h")]):
        name = file.relative_to(csrc).as_posix()
        texts[name] = re.sub(r"/\*.*?\*/", " ", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        if file.suffix == ".c":
            # At the beginning of a line, and not static: a function with a body, a variable.
            defined = r"^(?!static|typedef|extern)\w[^;{}()=]*?\b(ncs_\w+) ?(?:\([^;{}]*\) ?\{|= ?\{|;)"
            owners.update(dict.fromkeys(re.findall(defined, texts[name], re.M), name))
    arrows = {name: set(re.findall(r'#include "([^"]+)"', text)) for name, text in texts.items()}
    for name in set(owners.values()):  # a header only declares
        arrows[name] |= {owners[word] for word in re.findall(r"\bncs_\w+", texts[name]) if word in owners} - {name}
    return arrows


def faults(arrows: dict[str, set[str]]) -> set[str]:
    """Return the arrows between folders that lead to no row above, and the files that form circles."""
    row_of = {folder: row for row, folders in enumerate(ROWS) for folder in folders}
    found = set()
    for name, others in arrows.items():
        for other in others:
            own, its = (pathlib.PurePath(path).parent.as_posix() for path in (name, other))
            if own != its and row_of[its] >= row_of[own]:
                found.add(f"{name} -> {other}")
    left = dict(arrows)
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    return found | set(left)


def test_files_use_each_other_one_way_only():
    """No circle between files, by includes or by calls, and no arrow upwards between folders."""
    arrows = read_arrows(CSRC)
    assert {"cpu/pool.h", "cpu/pool.c", "ncclsync.c"} <= arrows["cpu/collectives.c"]  # it does read something
    assert {"tf/api.c", "tf/api.h", "cpu/meter.c"} <= arrows["tf/timestamp.c"]
    assert faults(arrows) == set()


@pytest.mark.parametrize(
    ("added", "file", "expected"),
    [
        ("int ncs_use(void) { return ncs_cpu_reduce != 0; }", "cpu/pool.c", {"cpu/pool.c", "cpu/collectives.c"}),
        ('#include "tf/api.h"', "nccl/api.h", {"nccl/api.h -> tf/api.h"}),
        ("void* use = &ncs_pool_instruction_set;", "nccl/group.c", {"nccl/group.c -> cpu/pool.c"}),
        ("void* use = &ncs_pool_instruction_set;", "ncclsync.c", {"ncclsync.c -> cpu/pool.c"}),
        ("void* use = &ncs_tf;", "cpu/meter.c", {"cpu/meter.c -> tf/api.c"}),
    ],
)
def test_a_circle_or_an_arrow_upwards_would_be_found(added, file, expected, tmp_path):
    """The test above can fail: by a call, an include, the address of a function, a variable."""
    shutil.copytree(CSRC, tmp_path / "csrc")
    with open(tmp_path / "csrc" / file, "a", encoding="utf-8") as changed:
        changed.write(added + "\n")
    assert expected <= faults(read_arrows(tmp_path / "csrc"))


def count_parameters(text: str) -> dict[str, int]:
    """Return for each C function with a body how many parameters it has."""
    text = re.sub(r"/\*.*?\*/|\\\n", " ", text, flags=re.DOTALL)
    counts = {}
    for body in re.finditer(r"\)\s*\{", text):
        begin, depth, commas = body.start(), 1, 0
        while depth > 0:
            begin -= 1
            depth += {")": 1, "(": -1}.get(text[begin], 0)
            commas += depth == 1 and text[begin] == ","
        name = re.search(r"\w+(?:\([\w#]+\))?\s*$", text[:begin])
        if name and name[0].strip() not in ("if", "for", "while", "switch"):
            counts[name[0].strip()] = commas + 1
    return counts


def test_functions_have_few_parameters():
    """At most 7: what belongs together is a struct."""
    assert count_parameters("int f(int a, void (*g)(int, int)) { for (;;) { if (h(1, 2, 3)) { } } }") == {"f": 2}
    counts = {}
    for file in sorted(CSRC.rglob("*.[ch]")):
        counts |= {f"{file.name}: {name}": n for name, n in count_parameters(file.read_text(encoding="utf-8")).items()}
    assert (counts["launcher.c: ncs_arrive"], counts["collectives_kernels.h: NCS_KERNEL(ours##_scale)"]) == (6, 4)
    assert {name: n for name, n in counts.items() if n > 7} == {}


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


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(120)
def test_cpu_collectives_are_clean_under_sanitizer(sanitized, tmp_path):
    """Every dtype, operation and instruction set, concurrent callers, pools made and ended."""
    program, check = tmp_path / "check_cpu", ROOT / "tests" / "support" / "csrc" / "check_cpu.c"
    libraries = ["-lpthread", "-lm"]
    compile_c(*sanitized, *FLAGS, f"-I{CSRC}", check, *SOURCES, "-o", program, *libraries)
    done = subprocess.run([program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", ["check_nccl", "check_launcher"])
def test_nccl_calls_are_clean_under_sanitizer(check, sanitized, tmp_path):
    """Every call, every failure of creation, aborts in the middle, several threads; groups that are only enqueued, and
    what fails beside a collective that somebody waits for; the stand-in too."""
    standin = Standin(tmp_path, *sanitized)
    program = tmp_path / check
    check = ROOT / "tests" / "support" / "csrc" / f"{check}.c"
    sources = [*SOURCES, *(CSRC / "nccl").glob("*.c"), standin.cudart]
    libraries = ["-lpthread", "-lm", "-ldl"]
    compile_c(*sanitized, *FLAGS, f"-I{CSRC}", check, *sources, "-o", program, *libraries)
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


@pytest.mark.slow
@needs_compiler
def test_sources_compile_without_warnings(tmp_path):
    """With the flags of the package's build, warnings being errors; nothing is read as another type than it has."""
    strict = ["-fstrict-aliasing", "-Wstrict-aliasing=2"]
    for source in [*sorted(CSRC.rglob("*.c")), ROOT / "tests" / "gpu" / "overhead.c"]:
        compile_c("-O3", *FLAGS, *strict, f"-I{CSRC}", "-c", source, "-o", tmp_path / "object.o")
