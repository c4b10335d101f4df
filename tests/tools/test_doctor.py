"""`python -m ncclsync doctor` as a user runs it; its questions to stand-ins, fakes and broken packages."""

import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
import tensorflow as tf
from hosts import GPUS
from rich.console import Console

import ncclsync
from ncclsync.tools import cli
from ncclsync.tools.doctor import examination, libraries, probes
from ncclsync.tools.doctor.facts import Choice, Frameworks, from_json
from ncclsync.tools.doctor.problems import find_problems
from ncclsync.tools.doctor.screen import render

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
FAKES = SUPPORT / "fakes"


def run_doctor(*arguments, **environ):
    """Run the command; variables that are set here by chance do not count."""
    kept = {"PATH", "HOME", "PYTHONPATH", "LANG"} | {name for name in os.environ if name.startswith("COV")}
    variables = {name: value for name, value in os.environ.items() if name in kept}
    return subprocess.run(
        [sys.executable, "-m", "ncclsync", "doctor", *arguments],
        env={**variables, **environ},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=280,
    )


def first_on_path(*folders):
    """PYTHONPATH with these before what it is."""
    return os.pathsep.join([*map(str, folders), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH", "")])


needs_no_gpu = pytest.mark.skipif(
    pathlib.Path("/proc/driver/nvidia").exists(), reason="the fake GPUs and the real GPU would be mixed up"
)


@pytest.mark.slow
@needs_no_gpu
def test_machine_without_gpu():
    """It says so, checks the CPU backend, is healthy; the screen and --json tell the same."""
    done = run_doctor("--json", PYTHONPATH=first_on_path(FAKES), FAKE_NVML="no library")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report = json.loads(done.stdout)
    assert report["healthy"] and report["problems"] == [] and report["gpus"] == []
    assert report["summary"].startswith("Healthy. No GPU on this machine: towers stand on the CPU")
    versions = {one["component"]: one for one in report["versions"]}
    for name in ("Python", "TensorFlow", "Keras", "ncclsync"):
        assert versions[name]["version"] and os.path.exists(versions[name]["source"].split(",")[0])
    assert versions["ncclsync"]["source"] == os.path.dirname(ncclsync.__file__)
    assert {"CUDA", "cuDNN", "driver", "NCCL"} <= set(versions)
    assert (report["backend"]["backend"], report["backend"]["devices"]) == ("cpu", ["CPU:0"])
    assert "no GPU is visible" in report["backend"]["reason"]
    reduced = report["all_reduce"]
    assert (reduced["backend"], reduced["ranks"], reduced["ok"]) == ("cpu", 4, True)
    assert reduced["seconds"] > 0


@pytest.mark.slow
@needs_no_gpu
def test_processes_that_training_refuses():
    """Of a launcher that joins none, or one whose variables contradict each other: an error, as training says it."""
    given = ({"PMI_SIZE": "2"}, {"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    for environ, words in zip(given, ("PMI_SIZE=2.", "RANK=3, WORLD_SIZE=2"), strict=True):
        done = run_doctor("--json", PYTHONPATH=first_on_path(FAKES), FAKE_NVML="no library", **environ)
        assert (done.returncode, done.stderr) == (1, ""), done.stdout
        report = json.loads(done.stdout)
        (problem,) = report["problems"]
        assert problem["code"] == "processes-apart" and words in problem["text"], problem
        assert "write processes=False" in problem["text"] + problem["remedy"]
        assert report["summary"] == "Training would fail: 1 error. No GPU on this machine."


def test_too_few_gpus_for_processes(monkeypatch):
    """That, and what hides more of them, is the problem: not the version of TensorFlow."""
    gpus = [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(2)]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: gpus)
    environ = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "a"}
    for name, value in {**environ, "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "0,1"}.items():
        monkeypatch.setenv(name, value)
    facts = {}
    probes.PROBES["frameworks"](lambda **some: facts.update(some))
    assert {"reason", "ncclsync_error"}.isdisjoint(facts)
    host = dataclasses.replace(GPUS, frameworks=from_json(Frameworks, facts), choice=Choice())
    (problem,) = (one for one in find_problems(host) if one.severity == "error")
    assert problem.code == "processes-apart" and "Received: 2 GPUs, for process 2" in problem.text
    assert problem.text.endswith(" CUDA_VISIBLE_DEVICES='0,1' hides all others.")
    assert problem.remedy == "Start fewer processes, or name devices=."


@pytest.mark.slow
@needs_no_gpu
def test_gpus_that_tensorflow_cannot_use():
    """The screen of a host with GPUs, links and variables; it would train, on the CPU."""
    environ = {"CUDA_VISIBLE_DEVICES": "", "NCCL_ALGO": "Tree", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ["TF_DETERMINISTIC_OPS"] = "1"
    done = run_doctor(PYTHONPATH=first_on_path(FAKES), FAKE_NVML="pairs", FAKE_CUDA="11040", **environ)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    text = " ".join(done.stdout.split())
    for part in (
        "4 GPUs on this machine, unused: towers stand on the CPU",
        "driver 550.54.15 NVML, serves CUDA up to 11.4",
        "0 NVIDIA A100-SXM4-80GB 80.0 GiB 0.5 GiB 8.0 00000000:0a:00.0",
        "0 · NV4 SYS SYS",
        "3 SYS SYS NV4 ·",
        "Known-answer all-reduce, cpu backend, 4 ranks × 1048576 numbers: right",
        "NVLS, sums within the NVSwitch that differ from call to call: kept out, since op determinism is on",
        "CUDA_VISIBLE_DEVICES (empty) the GPUs that this process may use",
        "NCCL_ALGO Tree overrides NCCL's choice of algorithm",
        "TF_CPP_MIN_LOG_LEVEL 3 ",
        "warning: CUDA_VISIBLE_DEVICES='' hides all 4 GPU(s). Training runs on the CPU.",
        "Remedy: Unset CUDA_VISIBLE_DEVICES",
    ):
        assert part in text, done.stdout
    # A path stays whole, to be copied, however long; nothing else is wider than the screen.
    paths = [line for line in done.stdout.splitlines() if "/" in line or set(line) == {"─"}]
    others = [line for line in done.stdout.splitlines() if line not in paths]
    assert max(map(len, others)) <= 110, done.stdout
    assert all(len(line.split()[-1]) > 60 for line in paths if len(line) > 110), done.stdout
    assert len(done.stdout.splitlines()) < 70  # paths of different lengths wrap
    assert not [line for line in done.stdout.splitlines() if line != line.rstrip()]


TENSORFLOW = """
import types
__version__ = "2.21.0"
config = types.SimpleNamespace(list_physical_devices=lambda kind: [])
sysconfig = types.SimpleNamespace(get_build_info=lambda: {"is_cuda_build": False})
"""
MISSING = "raise ModuleNotFoundError(\"No module named 'tensorflow'\", name='tensorflow')"
NO_JAX = "raise ModuleNotFoundError(\"No module named 'jax'\", name='jax')"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("tensorflow", "environ", "expected", "words"),
    [
        (MISSING, {}, "tensorflow-missing", "pip install 'tensorflow>=2.20'"),
        ("import os; os.abort()", {}, "frameworks-unanswered", "killed by SIGABRT"),
        ("", {}, "tensorflow-broken", "has no attribute '__version__'"),
        (TENSORFLOW, {"KERAS_BACKEND": "jax"}, "keras-backend", "No module named 'jax'"),
        (TENSORFLOW, {"KERAS_HOME": "."}, "keras-backend", "keras.json"),
    ],
)
def test_broken_frameworks(tmp_path, tensorflow, environ, expected, words):
    """Reported with a remedy, without a traceback; all else is examined as usual."""
    for package, source in (("tensorflow", tensorflow), ("jax", NO_JAX)):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(source)
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    environ = {name: value.replace(".", str(tmp_path)) for name, value in environ.items()}
    done = run_doctor("--json", PYTHONPATH=first_on_path(tmp_path, FAKES), **environ)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    report = json.loads(done.stdout)
    (error,) = (problem for problem in report["problems"] if problem["severity"] == "error")
    assert error["code"] == expected
    assert words in error["text"] + error["remedy"]
    assert not report["healthy"] and report["backend"]["backend"] is None
    assert report["summary"].startswith("Training would fail: 1 error")
    assert report["all_reduce"]["ok"] is True


CANNED = {
    "tensorflow": "2.21.0",
    "tensorflow_path": "/tf",
    "keras": "3.15.1",
    "keras_path": "/keras",
    "keras_backend": "tensorflow",
    "cuda_build": True,
    "build_capabilities": ["8.0"],
    "gpus": [f"GPU:{index}" for index in range(4)],
    "backend": "nccl",
    "devices": [f"GPU:{index}" for index in range(4)],
    "reason": "4 tower(s)",
}


@pytest.fixture
def gpu_host(built_standin, monkeypatch):
    """Return a function that examines a host of four GPUs, by fakes of all that takes a GPU."""

    def examine(host="pairs", timeout_s=30.0, frameworks=CANNED, **environ):
        def ask(question, limit, environ, arguments=None):
            if question == "frameworks":
                return probes.Answer(dict(frameworks), "done", "well", "", ())
            return real_ask(question, limit, environ, arguments)

        real_ask = probes.ask
        monkeypatch.syspath_prepend(str(FAKES))
        monkeypatch.setattr(probes, "ask", ask)
        monkeypatch.setattr(libraries, "_cached", lambda *_: [])
        variables = {"PATH": os.environ["PATH"], "FAKE_NVML": host, **built_standin.environment}
        monkeypatch.setattr(os, "environ", {**variables, **environ})
        return examination.examine(timeout_s)

    return examine


def serious(report):
    """Codes of the errors; that NCCL is there twice, in the stand-in and the wheel, is a warning."""
    return [problem.code for problem in report.problems if problem.severity == "error"]


def test_healthy_gpus(gpu_host, built_standin):
    """All GPUs are joined and the sums are right; versions come from the libraries themselves.

    The stand-in, which has NCCL's calls, is not called NCCL.
    """
    report = gpu_host()
    assert report.healthy, report.problems
    reduced = report.host.all_reduce
    assert (reduced.backend, reduced.ranks, reduced.ok, reduced.error) == ("nccl", 4, True, "")
    # A tree, which takes two peers, and a ring: what training takes, by 16 channels.
    assert reduced.taken_bytes == 16 * (2 + 1) * 12 * 2**20
    console = Console(width=200, file=io.StringIO())
    console.print(render(report))
    assert "; NCCL has taken 576 MiB of each GPU" in console.file.getvalue()
    stands = "4 GPUs on this machine: towers stand on 4 of them, joined by"
    assert report.summary.endswith(f"{stands} {built_standin.nccl}, which is not NCCL.")
    versions = {one.component: one for one in report.versions}
    assert versions["NCCL"].version is None
    assert versions["NCCL"].source == f"{built_standin.nccl}, another library with its calls, version 2.32.3"
    assert "libcudart.so" in versions["CUDA"].source
    (other,) = (one for one in report.problems if one.code == "nccl-other")
    assert (other.severity, other.remedy) == ("warning", "Unset NCCLSYNC_NCCL_LIBRARY.")


def test_gpus_without_tensorflow(gpu_host):
    """The GPUs are tried all the same: those that the variable leaves."""
    missing = {"tensorflow_error": "ModuleNotFoundError: No module named 'tensorflow'"}
    report = gpu_host(frameworks=missing, CUDA_VISIBLE_DEVICES="3,1,0")
    assert serious(report) == ["tensorflow-missing"]
    reduced = report.host.all_reduce
    assert (reduced.backend, reduced.ranks, reduced.ok) == ("nccl", 3, True)
    assert "No module named 'tensorflow'" in report.host.choice.reason


@pytest.mark.slow
def test_a_single_gpu(gpu_host):
    """Numbers are copied to it and back, and it sends itself some."""
    one = {"frameworks": {"tensorflow_error": "No module named 'tensorflow'"}, "CUDA_VISIBLE_DEVICES": "2"}
    reduced = gpu_host(**one).host.all_reduce
    assert (reduced.backend, reduced.ranks, reduced.ok) == ("nccl", 1, True)
    failed = gpu_host(**one, STANDIN_FAIL="cudaMemcpy:1=2").host.all_reduce
    assert (failed.ok, failed.kind) == (False, "raised") and "cudaMemcpy returned" in failed.error


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("fail", "kind", "words", "told"),
    [
        ("corrupt:0:2", "wrong", "other numbers from rank 0 to rank 2", "wrong numbers"),
        ("cudaMalloc:2=2", "raised", "cudaMalloc", "fails"),
        ("stuck:1", "hang", "rank", "hangs"),
        ("stuck_init:1", "hang", "4 ranks", "hangs"),
    ],
)
def test_all_reduce_that_fails(gpu_host, fail, kind, words, told):
    """Wrong numbers, an error, a hang: each is told of, with what it was about."""
    report = gpu_host(timeout_s=3, STANDIN_FAIL=fail)
    assert serious(report) == [f"all-reduce-{kind}"]
    assert report.host.all_reduce.ok is False
    assert words in report.host.all_reduce.error
    console = Console(width=110, file=io.StringIO())
    console.print(render(report))
    screen = " ".join(console.file.getvalue().split())
    assert f"4 ranks × 4096 numbers: {told}; see below" in screen
    assert f"error: {report.problems[0].text}" in screen


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("environ", "expected", "words"),
    [
        ({"NCCLSYNC_NCCL_LIBRARY": "/nowhere/libnccl.so.2"}, "nccl-unusable", "names no usable NCCL"),
        ({"NCCLSYNC_NCCL_LIBRARY": "libm.so.6"}, "nccl-unusable", "ncclGetVersion"),
        ({"STANDIN_VERSION": "2804"}, "nccl-old", "Received: NCCL 2.8.4"),
    ],
)
def test_unusable_nccl(gpu_host, environ, expected, words):
    """Named once, whatever else fails because of it."""
    report = gpu_host(**environ)
    assert serious(report) == [expected]
    (problem,) = (one for one in report.problems if one.code == expected)
    assert words in problem.text and "NCCLSYNC_NCCL_LIBRARY" in problem.remedy


def test_old_driver(gpu_host):
    """It serves, and what it lacks is named once."""
    report = gpu_host(STANDIN_DRIVER="12040")
    assert serious(report) == [] and report.host.all_reduce.ok
    assert "driver-old" in [one.code for one in report.problems]


def test_nccl_that_fails(gpu_host):
    """NCCL's own error is in the report."""
    report = gpu_host(STANDIN_FAIL="ncclCommInitRankConfig")
    assert serious(report) == ["all-reduce-raised"]
    assert "ncclCommInitRankConfig returned ncclSystemError" in report.host.all_reduce.error


@pytest.mark.slow
def test_driver_that_hangs(gpu_host):
    """The rest is examined as usual."""
    report = gpu_host(host="hang", timeout_s=3)
    assert "driver-unanswered" in serious(report)
    assert report.host.all_reduce.ok
    assert "asking the driver by NVML" in report.problems[0].text


def test_libraries_by_the_loader(built_standin, tmp_path, monkeypatch):
    """A second libnccl is found on LD_LIBRARY_PATH, once, whichever links point to it."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libnccl.so.2").symlink_to(built_standin.nccl)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'a'}::{tmp_path / 'b'}:/nowhere")
    monkeypatch.delenv("NCCLSYNC_NCCL_LIBRARY", raising=False)
    found = libraries.nccl_files(ldconfig="/nowhere/ldconfig")
    assert found[-1] == str(tmp_path / "a" / "libnccl.so.2")
    assert sum(str(tmp_path) in path for path in found) == 1
    monkeypatch.setenv("NCCLSYNC_NCCL_LIBRARY", built_standin.cudart)
    assert libraries.nccl_files(ldconfig="/nowhere/ldconfig")[0] == built_standin.cudart


def test_real_nccl_tells_its_cuda():
    """The wheel's libnccl names the CUDA it was built with."""
    paths = libraries.wheel_files("nccl", "libnccl.so.2")
    if not paths:
        pytest.skip("nvidia-nccl-cu12 is not installed")
    assert libraries._built_with(paths[0]).split(".")[0] == "12"


@pytest.mark.parametrize(
    ("number", "nccl", "cudnn"), [(23203, "2.32.3", "23.2.3"), (2408, "2.4.8", "2.4.8"), (91002, "9.10.2", "9.10.2")]
)
def test_numbers_of_versions(number, nccl, cudnn):
    """The libraries' own codes, old and new."""
    assert libraries.version_text("ncclGetVersion", number) == nccl
    assert libraries.version_text("cudnnGetVersion", number) == cudnn


def test_crash_keeps_what_was_known(monkeypatch, tmp_path):
    """A probe that dies has told what it knew, by which signal it died, and its last words."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tensorflow.py").write_text("__version__ = '2.21.0'")
    (tmp_path / "keras.py").write_text("import os, sys; print('last words', flush=True); os.kill(os.getpid(), 11)")
    answer = probes.ask("frameworks", 30, dict(os.environ))
    assert (answer.ended, answer.how, answer.stage) == ("crash", "killed by SIGSEGV", "importing Keras")
    assert answer.facts["tensorflow"] == "2.21.0"
    assert answer.output[-1] == "last words"


def test_a_probe_finds_modules_as_its_process_does(tmp_path):
    """In the same order: of two TensorFlows it asks the one that a script imports."""
    for folder in ("first", "installed"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tensorflow.py").write_text(f"__version__ = {folder!r}")
    (tmp_path / "installed" / "ncclsync").symlink_to(pathlib.Path(ncclsync.__file__).parent)
    code = "import os; from ncclsync.tools.doctor.probes import ask; print(ask('frameworks', 60, os.environ).facts)"
    path = os.pathsep.join(str(tmp_path / folder) for folder in ("first", "installed"))
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd="/", capture_output=True, text=True)
    assert "'tensorflow': 'first'" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("named", "expected"),
    [(["sm_60", "compute_90"], ("6.0", "9.0")), (["sm_90a", "sm_120f"], ("9.0", "12.0")), (["8.0"], ("8.0",))],
)
def test_capabilities_of_tensorflow(monkeypatch, named, expected):
    """However its build names them; a GPU is compared with them."""
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"cuda_compute_capabilities": named})
    facts = {}
    probes.PROBES["frameworks"](lambda **some: facts.update(some))
    assert tuple(facts["build_capabilities"]) == expected


@pytest.mark.slow
def test_processes_of_a_probe_end_with_it(monkeypatch, tmp_path):
    """At the time limit all that a probe has started is killed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tensorflow.py").write_text(
        "import subprocess, pathlib\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(child.pid))\n"
        "child.wait()"
    )
    answer = probes.ask("frameworks", 4, dict(os.environ))
    assert (answer.ended, answer.stage) == ("hang", "importing TensorFlow")
    child = pathlib.Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = time.monotonic() + 30  # it has its signal; when it runs to meet it is the machine's business
    while child.exists() and " Z " not in child.read_text():
        assert time.monotonic() < deadline, child.read_text()
        time.sleep(0.01)


@pytest.mark.parametrize("arguments", [["--timeout", "0"], ["--timeout", "x"], ["extra"]])
def test_bad_arguments(arguments, capsys):
    """Exit status 2, as no answer to whether training would run."""
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().out == ""


def test_a_runtime_of_cuda_13_is_found(built_standin):
    """Where there is none of CUDA 12, as ncclsync itself looks for it; else both errors are told."""
    found = libraries._read(["libcudart.so.none", built_standin.cudart], "cudaRuntimeGetVersion")
    assert found.version == "12.9"
    found = libraries._read(["libcudart.so.none", "libcudart.so.nil"], "cudaRuntimeGetVersion")
    assert "so.none" in found.error and "so.nil" in found.error


def test_the_runtimes_that_doctor_looks_for(monkeypatch):
    """Are those of ncclsync: a variable decides alone."""
    monkeypatch.delenv("NCCLSYNC_CUDART_LIBRARY", raising=False)
    names = [os.path.basename(path) for path in libraries._runtimes()]
    assert {"libcudart.so.12", "libcudart.so.13"} <= set(names) and names.index("libcudart.so.12") == 0
    monkeypatch.setenv("NCCLSYNC_CUDART_LIBRARY", "libcudart.so.99")
    assert libraries._runtimes() == ["libcudart.so.99"]
