"""Prepares a machine with one GPU and runs everything there: tests/gpu, then the comparison with plain C.

    python3 tests/gpu/run.py --wheels WHEELS --out OUT

It needs Python with venv, a C compiler, and a folder of wheels; no network. Without ``--wheels`` it takes the
environment that it runs in, where ncclsync is installed from this checkout. ``--minutes 15`` runs what tells most in so
many minutes instead, once prepared: `parts.py`, in order of value, then the training. A wheel may be in pieces,
``NAME.whl.part00``, ``NAME.whl.part01`` and so on. All that comes out is in OUT; begin with `summary.txt`.
"""

import argparse
import ctypes
import os
import pathlib
import re
import shutil
import sys
import time
import xml.etree.ElementTree

import isolated

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# A venv may bring a setuptools of its own, too old; ranks share a GPU since NCCL 2.30.
NEEDED = ("cffi>=1.17", "numpy", "ml_dtypes", "pytest>=8", "setuptools>=77", "nvidia-nccl-cu12>=2.30")
RUNTIME = "nvidia-cuda-runtime-cu12"
# Installed where there is a wheel: what gives buffers, and what trains.
WELCOME = {"cupy-cuda12x": ["cupy-cuda12x"], "torch": ["torch"], "tensorflow": ["tensorflow[and-cuda]", "rich"]}
SOURCE = ("csrc", "ncclsync", "tests", "pyproject.toml", "README.md", "LICENSE")
SUITE_LIMIT_S, COMPARISON_LIMIT_S, PIP_LIMIT_S = 1500.0, 480.0, 600.0


class CannotRun(Exception):
    """What is missing on this machine, in words for who runs the script."""


def join_pieces(wheels: pathlib.Path, joined: pathlib.Path) -> list[pathlib.Path]:
    """Write the wheels that lie in pieces in a folder, whole, into another; return them."""
    joined.mkdir(parents=True, exist_ok=True)
    pieces: dict[str, dict[int, pathlib.Path]] = {}
    for path in wheels.iterdir():
        found = re.fullmatch(r"(.+\.whl)\.part(\d+)", path.name)
        if found:
            pieces.setdefault(found[1], {})[int(found[2])] = path
    for name, parts in pieces.items():
        lacking = sorted(set(range(max(parts) + 1)) - set(parts))
        if lacking:
            raise CannotRun(f"Expected all pieces of {name}. Received: none numbered {lacking}")
        with open(joined / name, "wb") as whole:
            for number in sorted(parts):
                with open(parts[number], "rb") as part:
                    shutil.copyfileobj(part, whole)
    return [joined / name for name in sorted(pieces)]


def normal(name: str) -> str:
    """Return a project's name as package indexes compare them, without the versions that are asked for."""
    return re.sub(r"[-_.]+", "-", name.partition(">")[0]).lower()


def projects(*folders: pathlib.Path) -> set[str]:
    """Return of which projects there are wheels."""
    return {normal(path.name.split("-")[0]) for folder in folders for path in folder.glob("*.whl")}


def to_install(available: set[str]) -> list[str]:
    """Return what to install from the wheels.

    Raises:
        CannotRun: something is missing; names all of it.
    """
    needed = list(NEEDED)
    try:
        ctypes.CDLL("libcudart.so.12")
    except OSError:
        needed.append(RUNTIME)
    missing = [name for name in needed if normal(name) not in available]
    if missing:
        raise CannotRun(f"Expected wheels of {', '.join(needed)}. Received: none of {', '.join(missing)}")
    for name, requirements in WELCOME.items():
        needed += requirements if name in available else []
    return needed


def prepare(wheels: pathlib.Path, out: pathlib.Path) -> tuple[object, pathlib.Path]:
    """Make an environment of wheels, and in it a built copy of this checkout; return Python and the copy."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        raise CannotRun(f"Expected a C compiler. Received: none ({compiler!r} is not on the PATH)")
    if not wheels.is_dir():
        raise CannotRun(f"Expected a folder of wheels. Received: {wheels}")
    join_pieces(wheels, out / "wheels")
    requirements = to_install(projects(wheels, out / "wheels"))
    source, environment = out / "source", out / "venv"
    for name in SOURCE:
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, source / name)
    python = environment / "bin" / "python"
    offline = ["--no-index", "--find-links", wheels, "--find-links", out / "wheels", "--no-build-isolation"]
    install = [python, "-m", "pip", "install", "--disable-pip-version-check", *offline]
    for what, command in (
        ("the virtual environment", [sys.executable, "-m", "venv", "--clear", environment]),
        ("the wheels' installation", [*install, *requirements]),
        # TensorFlow is a dependency of the package, but not of what is tested without it.
        ("ncclsync's installation", [*install, "--no-deps", "--editable", source]),
    ):
        if not run_step(what, command, PIP_LIMIT_S, out, out / "prepare.log"):
            raise CannotRun(f"Expected {what} to be made. Received: see above")
    return python, source


def run_step(
    what: str, command: list[object], limit_s: float, folder: pathlib.Path, log: pathlib.Path, **further: str
) -> bool:
    """Run one step, with further variables; keep and print what it prints; return whether it succeeded."""
    print(f"=== {what}", flush=True)
    variables = further | {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or command[0] == sys.executable}
    try:
        isolated.run_command(what, command, limit_s, variables=variables, folder=folder, log=log)
        succeeded = True
    except AssertionError as error:
        with open(log, "a", encoding="utf-8") as file:
            file.write("\n" + str(error).partition("\n")[0] + "\n")
        succeeded = False
    print(log.read_text(encoding="utf-8"), flush=True)
    return succeeded


def count(report: pathlib.Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, by pytest's XML."""
    if not report.is_file():
        return {"passed": 0, "failed": 1, "skipped": 0}
    suites = list(xml.etree.ElementTree.parse(report).getroot().iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return {"passed": total - failed - errors - skipped, "failed": failed + errors, "skipped": skipped}


def run_parts(python: object, source: pathlib.Path, out: pathlib.Path, minutes: float) -> int:
    """Run the parts of parts.py in order of value, each within its limit, then the training, as far as the time goes.

    `summary.txt` has the findings of each part as soon as it has ended. Return 0 if all have succeeded.
    """
    until, gpu, succeeded = time.monotonic() + 60 * minutes, source / "tests" / "gpu", True
    (out / "summary.txt").unlink(missing_ok=True)

    def part(name: str, limit_s: float) -> list[object]:
        return [python, gpu / "isolated.py", "parts", name, "{}", limit_s]

    overhead = [python, gpu / "overhead.py", "--sizes", 2**14, 25 * 2**20, "--rounds", 3]
    training = [python, "-m", "pytest", "tests/gpu/test_gpu_training.py", "-p", "no:cacheprovider"]
    for name, command, limit_s, variables in (
        ("memory", None, 150, {}),
        ("little_memory", None, 60, {}),
        ("overhead", overhead, 150, {}),
        *((f"matmuls {ctas}", None, 40, {"NCCL_MAX_CTAS": str(ctas)}) for ctas in (1, 2, 4, 8, 16, 32)),
        ("second_thread", None, 90, {}),
        ("pool_memory", None, 40, {}),
        ("training", training, 60 * minutes, {}),
    ):
        left_s = min(limit_s, until - time.monotonic())
        log = out / f"{name.replace(' ', '-')}.log"
        done = left_s > 10 and run_step(
            name, command or part(name.split()[0], left_s), left_s, source, log, **isolated.SHARED_GPU | variables
        )
        succeeded = succeeded and done
        words = "done" if done else "not done" if left_s > 10 else "no time left"
        with open(out / "summary.txt", "a", encoding="utf-8") as summary:
            summary.write(f"== {name}: {words}\n{log.read_text(encoding='utf-8') if left_s > 10 else ''}\n")
    return 0 if succeeded else 1


def main() -> int:
    """Prepare, run, summarise; return 0 if all that could run succeeded, and something could."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a folder for everything that comes out")
    parser.add_argument("--wheels", type=pathlib.Path, help="a folder of wheels to install from")
    parser.add_argument("--sizes", nargs="+", default=[], help="of the comparison, in bytes")
    parser.add_argument("--rounds", nargs=1, default=[], help="of the comparison")
    parser.add_argument("--minutes", type=float, help="run parts.py and the training instead, within this time")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    python, source = sys.executable, ROOT
    if arguments.wheels is not None:
        try:
            python, source = prepare(arguments.wheels.resolve(), out)
        except CannotRun as error:
            print(error, file=sys.stderr)
            return 2

    if arguments.minutes is not None:
        return run_parts(python, source, out, arguments.minutes)
    report = out / "tests.xml"
    report.unlink(missing_ok=True)
    suite = [python, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", "--durations=0", f"--junitxml={report}"]
    lines, succeeded = [], run_step("tests/gpu", suite, SUITE_LIMIT_S, source, out / "tests.log")
    counts = count(report)
    lines.append(", ".join(f"{number} {word}" for word, number in counts.items()))
    lines += [line for line in (out / "tests.log").read_text().splitlines() if line.startswith("SKIPPED")]
    succeeded = succeeded and counts["passed"] > 0
    options = ["--sizes", *arguments.sizes] if arguments.sizes else []
    options += ["--rounds", *arguments.rounds] if arguments.rounds else []
    for ranks in (2, 3) if counts["passed"] > 0 else ():
        log = out / f"overhead-{ranks}.log"
        words = ["--ranks", ranks, "--json", log.with_suffix(".json"), "--limit", COMPARISON_LIMIT_S, *options]
        command = [python, source / "tests" / "gpu" / "overhead.py", *words]
        done = run_step(f"the comparison of {ranks} ranks", command, COMPARISON_LIMIT_S, source, log)
        succeeded = succeeded and done
        lines += ["", *(log.read_text().splitlines() if done else [f"no comparison of {ranks} ranks: see {log}"])]
    (out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("=== summary", *lines, sep="\n")
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
