"""`python -m ncclsync run`: what is started again and what is not, and what a script and its user notice of it."""

import contextlib
import json
import os
import pathlib
import pty
import random
import re
import select
import signal
import subprocess
import sys
import termios
import textwrap
import time

import numpy as np
import psutil
import pytest
import tensorflow as tf
from processes import SCRIPTS, environment

import ncclsync
from ncclsync.communicator import native
from ncclsync.errors import NcclPreflightError
from ncclsync.tools import cli
from ncclsync.tools.doctor import health, probes
from ncclsync.tools.run.script import is_of_device
from ncclsync.training import progress

GPU = "GPU-00000000-0000-0000-0000-00000000000"  # the stand-in's, and a number
# How often the script has been started, from 0.
COUNTED = """
import os, pathlib, signal, subprocess, sys, time
count = pathlib.Path("count")
start = int(count.read_text()) if count.exists() else 0
count.write_text(str(start + 1))
"""
DIES = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script, and returns the command that supervises it."""

    def write(source, *options, counted=True):
        (tmp_path / "train.py").write_text((COUNTED if counted else "") + textwrap.dedent(source))
        return [sys.executable, "-m", "ncclsync", "run", "--report", "report.jsonl", *options, "train.py"]

    return write


def heed_signals():
    """Let a process start as in a shell, though the tests ignore a signal, as behind nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def begin(tmp_path):
    """Return a function that begins a command; what it has begun is killed at the end."""
    begun = []

    def begin_one(command, **options):
        hidden = environment(CUDA_VISIBLE_DEVICES="-1")
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": hidden, **options}
        begun.append(subprocess.Popen(command, cwd=tmp_path, text=True, preexec_fn=heed_signals, **options))
        return begun[-1]

    yield begin_one
    for process in begun:
        process.kill()
        process.wait()


@pytest.fixture
def run(tmp_path, begin):
    """Return a function that runs a command; returns exit code, stdout, stderr and the report's lines."""

    def run_one(command, **environ):
        process = begin(command, **({"env": environment(**environ)} if environ else {}))
        out, err = process.communicate(timeout=280)
        report = tmp_path / "report.jsonl"
        lines = report.read_text().splitlines() if report.exists() else []
        return process.returncode, out, err, [json.loads(line) for line in lines]

    return run_one


def tuned(command, **constants):
    """Return a command that runs with other constants of the supervisor's."""
    code = "import sys; from ncclsync.tools.run import supervisor; from ncclsync.tools import cli; "
    code += f"vars(supervisor).update({constants}); sys.exit(cli.main(sys.argv[1:]))"
    return [sys.executable, "-c", code, *command[3:]]


def there(pid):
    """Return whether a process runs."""
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def soon(check, timeout_s=250):
    """Wait until something is so."""
    until = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)


# ---- A script's own end ----

ENDS = {
    "well": "print(sys.argv, __name__, __file__, sys.path[0], sys.modules['__main__'].start)",
    "an exit code": "sys.exit(3)",
    "words": "sys.exit('words')",
    "an error": "def f():\n    raise ValueError('own')\nf()",
    "an error from another": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('own') from e",
    "an error, by a hook": "sys.excepthook = lambda *e: print(e[1], e[2].tb_lineno)\n1 / 0",
    "without goodbye": "os._exit(7)",
    "not Python": "1 +",
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("end", ENDS)
def test_script_ends_as_without_supervisor(script, run, tmp_path, end):
    """The same output, traceback and exit code; it is not started again."""
    command = [*script(ENDS[end]), "--epochs", "2", "-m", "--report", "x"]
    code, out, err, report = run(command)
    assert [(one["start"], one["exit_code"], one["signal"]) for one in report] == [(1, code, None)]
    (tmp_path / "count").unlink(missing_ok=True)
    plain = run([sys.executable, *command[command.index("train.py") :]])
    assert (code, out) == plain[:2]
    said = "" if code == 0 else f"ncclsync run: train.py: 1 start\n  start 1, {report[0]['began'][:10]}"
    assert err.startswith(plain[2] + said), err
    assert err == "" if code == 0 else "script's own error or exit code" in err


def test_module(script, run, tmp_path):
    """`-m` runs a module of a package, with its arguments; options of Python itself are passed on."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/mod.py").write_text("import sys\nprint(sys.argv, __name__, __package__, sys.flags.optimize)")
    plain = run([sys.executable, "-O", "-m", "package.mod", "-m", "x"])
    assert run([sys.executable, "-O", "-m", "ncclsync", "run", "-m", "package.mod", "-m", "x"])[:3] == plain[:3]
    assert plain[0] == 0


def test_folder(run, tmp_path):
    """A folder with a `__main__.py`."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/__main__.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    assert run([sys.executable, "-m", "ncclsync", "run", "folder", "x"])[:2] == (0, "__main__ ['x']\n")


# ---- Deaths ----


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_killed_script_is_started_again(script, run, name):
    """And what happened is told, by the report and at the end."""
    code, out, err, report = run(
        script(f"print('in start', start, flush=True)\nif start < 1: os.kill(os.getpid(), signal.{name})")
    )
    assert (code, out) == (0, "in start 0\nin start 1\n")
    first, last = report
    assert (first["signal"], first["exit_code"], first["moved_on"], first["gpus"]) == (name, None, False, [])
    assert first["log"][0] == "in start 0" and first["then"] == "started again"
    assert (last["start"], last["exit_code"], last["then"]) == (2, 0, "done")
    assert f"ncclsync run: start 1 killed by {name}; started again\n" in err
    for words in ("2 starts", f"s: killed by {name}\n    | in start 0\n", "ended with exit code 0\n    done"):
        assert words in err


@pytest.mark.parametrize("restarts", [0, 2])
def test_restarts_without_progress_end(script, run, restarts):
    """And the exit code is a shell's, of the last signal."""
    code, _, err, report = run(script(DIES, "--restarts", str(restarts)))
    assert (code, len(report)) == (128 + 9, restarts + 1)
    assert report[-1]["then"] == f"given up: {restarts} restarts in a row without progress"
    assert report[-1]["then"] in err


def test_progress_counts_anew(script, run):
    """A position further than any before is progress, also of a second name; the same and an earlier one are not."""
    told = ["1 9 a", "2 0 a", "1 20 a", "3 0 a", "0 1 b", "0 1 b", "0 1 a"]
    source = f"""
    from ncclsync.training import progress
    *position, name = {told}[start].split()
    progress.report(name, *map(int, position))
    {DIES}
    """
    code, _, err, report = run(script(source, "--restarts", "2"))
    assert [one["moved_on"] for one in report] == [True, True, False, True, True, False, False]
    assert (code, report[-1]["progress"]) == (137, {"a": [3, 0], "b": [0, 1]})
    assert "    a: at 3 0\n" in err and "so far: 1 of 2" in err


def test_progress_is_read_from_whole_lines(tmp_path, monkeypatch):
    """A name may have blanks; what another program has written does no harm, nor does a kill in the midst."""
    path = tmp_path / "told"
    assert progress.read(path) == {}
    progress.report("nobody asks", 1)
    monkeypatch.setenv(progress.VARIABLE, str(path))
    progress.report("my model", 2, 30)
    progress.report("my model", 2, 9)
    progress.report("", 7)
    with path.open("a") as file:
        file.write("\nwords\n-1 x\n3 my model")
    assert progress.read(path) == {"my model": (2, 30), "": (7,)}
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "no folder/told"))
    progress.report("x", 1)


def error_of(kind, *arguments, cause=None, context=None, handled=None):
    error = kind(*arguments)
    error.__cause__, error.__context__ = cause, context
    error.__suppress_context__ = handled is not None
    return error


CUDA = ncclsync.NcclError(native.UNHANDLED_CUDA_ERROR, "ncclAllReduce", "", "ncclUnhandledCudaError")
USAGE = ncclsync.NcclError(native.INVALID_USAGE, "ncclAllReduce", "", "ncclInvalidUsage")
LAUNCH = "CUDA error: unspecified launch failure"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CUDA, True),
        (USAGE, False),
        (ncclsync.NcclTimeoutError(native.TIMEOUT, "ncclAllReduce"), True),
        (NcclPreflightError(1, "preflight"), True),
        (ncclsync.NcclUnavailableError("no GPU"), False),
        (ncclsync.ProcessError("process 1 has ended"), False),
        (ValueError("CUDA"), False),
        (tf.errors.InternalError(None, None, LAUNCH), True),
        (tf.errors.InternalError(None, None, "Failed to launch cuDNN: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (tf.errors.InternalError(None, None, "GPU sync failed"), True),
        (tf.errors.InternalError(None, None, "failed at /job:localhost/device:GPU:0"), False),
        (tf.errors.InternalError(None, None, "CUDA_ERROR_OUT_OF_MEMORY: out of memory"), False),
        (tf.errors.InvalidArgumentError(None, None, "CUDA"), False),
        (tf.errors.ResourceExhaustedError(None, None, "CUDA"), False),
        (error_of(ncclsync.NcclSyncError, "what a step wrote is lost", context=CUDA), True),
        (error_of(RuntimeError, cause=error_of(KeyError, context=CUDA)), True),
        (error_of(ValueError, context=CUDA, handled=True), False),
    ],
    ids=lambda one: one if isinstance(one, bool) else f"{type(one).__name__}: {one}"[:60],
)
def test_errors_of_devices(error, expected):
    """NCCL's, time limits, CUDA's by TensorFlow, and what came from one; not a wrong call, nor too little memory."""
    assert is_of_device(error) is expected


HANGS = """
import ctypes, ncclsync.communicator, numpy
print("GPUs", os.environ["CUDA_VISIBLE_DEVICES"])
if start == 0:
    ctypes.CDLL(os.environ["NCCLSYNC_CUDART_LIBRARY"]).standin_fail(b"stuck:1")
arrays = [numpy.ones(4, "float32") for _ in range(4)]  # the stand-in's GPUs take the host's memory
buffers = [(array.ctypes.data, array.size, array.dtype) for array in arrays]
with ncclsync.communicator.NcclCommunicator([0, 1], timeout_s=0.3, preflight=False) as comm:
    comm.all_reduce(buffers[:2], buffers[2:])
"""


def test_time_limit_of_a_hang(script, run, built_standin):
    """It is a death, and told by its exception; GPUs that are all healthy are all given again, in their order."""
    code, out, err, report = run(script(HANGS), **built_standin.environment, CUDA_VISIBLE_DEVICES="5,2")
    assert code == 0, err
    assert [one["exit_code"] for one in report] == [1, 0]
    assert report[0]["device_error"] and report[0]["error"].startswith("NcclTimeoutError: Expected all-reduce")
    assert report[0]["gpus"] == report[1]["gpus"] == [f"{GPU}5", f"{GPU}2"] and report[0]["left_out"] == {}
    assert out == f"GPUs 5,2\nGPUs {GPU}5,{GPU}2\n"
    assert "exit code 1 (a GPU's error or a hang's time limit: NcclTimeoutError: Expected" in err


def test_error_that_does_not_end(script, run):
    """A process that has raised a GPU's error, and waits for that GPU when it ends, is killed."""
    source = """
    import atexit, ncclsync
    if start == 0:
        atexit.register(time.sleep, 60)
        raise ncclsync.NcclTimeoutError(0, "ncclAllReduce")
    """
    code, _, err, report = run(tuned(script(source), _GRACE_S=0.3))
    assert (code, [one["signal"] for one in report]) == (0, ["SIGKILL", None])
    assert "has raised a GPU's error, and not ended within 0.3 s: it is killed" in err


INTERRUPTED = SCRIPTS / "interrupted.py"
KILLS = int(os.environ.get("NCCLSYNC_KILLS", "2"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_any_moment(begin, tmp_path):
    """While it starts, in a step, in a save, or between: the bits are those of a run in one go."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    arguments = [str(INTERRUPTED), "killed", "2", "0.05"]
    process = begin([sys.executable, "-m", "ncclsync", "run", "--restarts", str(KILLS), *arguments])
    rng, backup, victim = random.Random(KILLS), tmp_path / "killed/backup/latest.weights.h5", 0
    for moment in range(KILLS):
        soon(lambda before=victim: script_of(process) not in (None, before))
        victim, before = script_of(process), modified(backup)
        if moment % 4:
            soon(lambda t=before: modified(backup) != t)
            time.sleep(rng.uniform(0, 0.8))
        else:
            time.sleep(rng.uniform(0, 6))
        os.kill(victim, signal.SIGKILL)
    err = process.communicate(timeout=600)[1]
    assert process.returncode == 0, err
    assert f"ncclsync run: {INTERRUPTED}: {KILLS + 1} starts" in err and err.count(": killed by SIGKILL\n") == KILLS
    subprocess.run([sys.executable, INTERRUPTED, tmp_path / "whole", "2", "0"], env=environment(), check=True)
    with np.load(tmp_path / "killed/end.0.npz") as killed, np.load(tmp_path / "whole/end.0.npz") as whole:
        assert len(whole.files) > 10 and killed.files == whole.files
        for name in whole.files:
            np.testing.assert_array_equal(killed[name], whole[name])


def script_of(supervisor):
    """Return the process of the script that a supervisor has started; None if there is none."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(supervisor.pid).children():
            if "ncclsync.tools.run.script" in child.cmdline():
                return child.pid
    return None


def modified(path):
    """When a file was written; 0 where there is none."""
    return path.stat().st_mtime_ns if path.exists() else 0


# ---- GPUs ----

LOSES = """
print("GPUs", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if start == 0:
    pathlib.Path(os.environ["STANDIN_LOST"]).write_text(LOST)
    os.abort()
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("given", "lost", "left"),
    [("3,1,0", "1", "30"), ("3,1,0", "35", "10"), (f"{GPU}2,{GPU}4", "4", "2"), (None, "0246", "1357")],
)
def test_lost_gpu_is_left_out(script, run, tmp_path, built_standin, given, lost, left):
    """The others are named by UUID, in the user's order: their numbers are others now."""
    variables = {**built_standin.environment, "STANDIN_LOST": str(tmp_path / "lost")}
    variables |= {"CUDA_VISIBLE_DEVICES": given} if given else {}
    code, out, err, report = run(script(LOSES.replace("LOST)", f"{lost!r})")), **variables)
    expected = [f"{GPU}{number}" for number in left]
    assert (code, out) == (0, f"GPUs {given}\nGPUs {','.join(expected)}\n"), err
    assert report[1]["gpus"] == expected
    gone = [f"{GPU}{number}" for number in lost if f"{GPU}{number}" in report[0]["gpus"]]
    assert sorted(report[0]["left_out"]) == gone and len(report[0]["gpus"]) == len(expected) + len(gone)
    assert report[0]["left_out"][gone[0]].startswith("alone: cuInit returned")
    assert f"started again on {len(expected)} of {len(report[0]['gpus'])} GPUs" in err


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("given", ["2", "2,4"])
def test_no_gpu_is_left(script, run, tmp_path, built_standin, given):
    """It does not go on on the CPU by itself."""
    variables = {**built_standin.environment, "STANDIN_LOST": str(tmp_path / "lost"), "CUDA_VISIBLE_DEVICES": given}
    code, _, err, report = run(script(LOSES.replace("LOST)", "'24')")), **variables)
    assert (code, len(report)) == (128 + 6, 1)
    assert report[0]["then"] == "given up: no GPU is healthy" and report[0]["then"] in err
    assert len(report[0]["left_out"]) == len(given.split(","))


def answering(monkeypatch, broken):
    """Have probes answer for GPUs of which some sets fail the all-reduce; return what was asked."""
    asked = []

    def ask(question, timeout_s, environ, arguments=None):
        visible = environ.get("CUDA_VISIBLE_DEVICES", "a,b,c,d").split(",")
        assert question == "all_reduce" and arguments["devices"] == [*range(len(visible))]
        asked.append("".join(visible))
        failed = {"error": "told to fail"} if len(visible) > 1 and broken(set(visible)) else {}
        ended = "hang" if visible == ["x"] else "well"
        return probes.Answer(failed, "joining", ended, "no answer within 1 s", ())

    monkeypatch.setattr(probes, "ask", ask)
    return asked


def test_link_that_fails(monkeypatch):
    """Each GPU is well alone: that one is left out without which all others are well together."""
    answering(monkeypatch, {"b", "c"}.issubset)  # of a link between two, either
    assert [*health.check_gpus("abcd", 1, {})] in (["b"], ["c"])
    answering(monkeypatch, lambda shown: "c" in shown)
    assert health.check_gpus("abcd", 1, {}) == {"c": "all-reduce, which passes without it: told to fail"}
    answering(monkeypatch, lambda shown: True)
    assert [*health.check_gpus("ab", 1, {})] == ["a"]  # one alone needs no link
    told = "all-reduce, whichever is left out: told to fail"
    assert health.check_gpus("abcd", 1, {}) == dict.fromkeys("abcd", told)


def test_gpu_that_hangs(monkeypatch):
    """It is left out, and asked no more."""
    asked = answering(monkeypatch, lambda shown: False)
    found = health.check_gpus(["a", "x", "b"], 1, {"CUDA_VISIBLE_DEVICES": "2,0,1"})
    assert found == {"x": "alone: no answer within 1 s, while joining"}
    assert sorted(asked) == ["a", "ab", "b", "x"]
    assert health.check_gpus([], 1, {}) == {}


# ---- Signals ----

HANDLES = """
signal.signal(signal.SIGTERM, lambda *_: print("TERM", flush=True) or HOW)
print("ready", os.getpid(), flush=True)
time.sleep(60)
time.sleep(60)
"""


def ready(process):
    """Wait for the script to be there; return its process."""
    words = process.stdout.readline().split()
    assert words[0] == "ready"
    return int(words[1])


@pytest.mark.parametrize(
    ("which", "how", "code"), [("SIGTERM", "sys.exit(5)", 5), ("SIGINT", "", 130), ("SIGHUP", "", 129)]
)
def test_signal_is_passed_on(script, begin, tmp_path, which, how, code):
    """The script ends as it wants, once, and is not started again."""
    process = begin(script(HANDLES.replace("HOW", how or "None")))
    ready(process)
    process.send_signal(signal.Signals[which])
    out, err = process.communicate(timeout=280)
    assert process.returncode == code, err
    assert out.count("TERM") == (which == "SIGTERM") and err.count("KeyboardInterrupt\n") == (which == "SIGINT")
    (line,) = (tmp_path / "report.jsonl").read_text().splitlines()
    assert json.loads(line)["then"] == f"not started again: {which} was received"


@pytest.mark.slow
def test_second_signal_kills(script, begin):
    """A signal to a group of processes may come twice at once: that is one; a later one is the second."""
    process = begin(tuned(script(HANDLES.replace("HOW", "None")), _ONE_REQUEST_S=3.0))
    ready(process)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "TERM\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=280)
    assert process.returncode == 128 + 9


def test_request_to_the_script_itself(script, begin):
    """A SIGTERM that somebody sends to the script ends it, and nothing else is started."""
    process = begin(script("print('ready', os.getpid(), flush=True)\ntime.sleep(60)"))
    os.kill(ready(process), signal.SIGTERM)
    err = process.communicate(timeout=280)[1]
    assert process.returncode == 128 + 15 and "this signal is a request to end" in err


def test_signal_while_gpus_are_asked(script, begin, built_standin, tmp_path):
    """The script has died, and a GPU does not answer: nobody has to wait for it."""
    fail = {"STANDIN_FAIL": "working:0", "CUDA_VISIBLE_DEVICES": "0,1"}  # its memory is never given back
    source = f"print('ready', os.getpid(), flush=True)\n{DIES}"
    process = begin(script(source), env=environment(**built_standin.environment, **fail))
    ready(process)

    def probes_of():
        lines = subprocess.run(["ps", "-ww", "-o", "args", "--ppid", str(process.pid)], capture_output=True, text=True)
        return [line for line in lines.stdout.splitlines() if "probes all_reduce" in line]

    soon(probes_of)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=280)[1]
    assert time.monotonic() - began < 20
    assert process.returncode == 137 and "a signal was received meanwhile" in err


def test_signal_that_another_thread_gets(run):
    """Of a library that was there before: it counts, and ends nothing."""
    code = "import os, signal, threading, time; from ncclsync.tools.run.supervisor import Signals\n"
    code += "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    code += "with Signals() as s: os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.1); print(s.wait(1)[0].name)"
    assert run([sys.executable, "-c", code])[:2] == (0, "SIGTERM\n")


@pytest.mark.slow
def test_nohup(script, begin):
    """A signal that is ignored stays so: it is no request to end, and the script is started again when it dies."""
    source = f"print('ready', os.getpid(), flush=True)\ntime.sleep(1)\nif start == 0: {DIES}"
    process = begin(["nohup", *script(source)])
    ready(process)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=280)
    assert process.returncode == 0


def test_script_ends_with_its_supervisor(script, begin):
    """However that ends."""
    process = begin(script("print('ready', os.getpid(), flush=True)\ntime.sleep(60)"))
    pid = ready(process)
    process.kill()
    soon(lambda: not there(pid))


@pytest.mark.slow
def test_what_a_dead_script_leaves_behind_is_ended(script, run, tmp_path):
    """Workers of its own may hold memory of a GPU; what was there before stays."""
    source = f"""
    if start == 0:
        worker = ["sh", "-c", "sleep 60 & echo $!; wait"]
        child = subprocess.Popen(worker, stdout=subprocess.PIPE, start_new_session=True)
        pathlib.Path("pids").write_text(f"{{child.pid}} {{child.stdout.readline().decode()}}")
        {DIES}
    """
    assert run(script(source))[0] == 0
    first, second = map(int, (tmp_path / "pids").read_text().split())
    assert not there(first) and not there(second)


# ---- Output ----


def test_lines_stay_in_their_order(script, begin):
    """Where stdout and stderr are one file, in a pipe too; and nothing is lost at the end."""
    source = "for i in range(3000): print(i, file=sys.stderr if i % 2 else sys.stdout, flush=True)\nos._exit(0)"
    process = begin(script(source), stderr=subprocess.STDOUT)
    assert process.communicate(timeout=280)[0] == "".join(f"{i}\n" for i in range(3000))


@pytest.mark.slow
def test_log_of_a_progress_bar(script, run):
    """Its last state is in the report, without what moves the cursor; the last twenty lines of all are."""
    bar = r"print('1/2\r\x1b[1m2/2\x1b[0m', end='', flush=True)"
    source = f"for i in range(30): print(i)\n{bar}\nif start == 0: {DIES}"
    _, out, _, report = run(script(source))
    assert report[0]["log"] == [*(str(i) for i in range(12, 30)), "1/2", "2/2"]
    assert out.count("1/2\n\x1b[1m2/2\x1b[0m") == 2  # read as text, in which \r is a line's end


def test_reader_that_goes_away(script, begin):
    """Is the script's matter, as without a supervisor."""
    process = begin(
        script("print('ready', 0, flush=True)\ntry:\n    while True: print('x' * 1000)\nfinally: os._exit(4)")
    )
    ready(process)
    process.stdout.close()
    assert process.wait(60) == 4


def test_terminal(script, begin):
    """The script has a terminal, of the same size; Ctrl-C, which goes to both, comes once."""
    source = """
    print(*(os.isatty(i) for i in range(3)), os.get_terminal_size().columns, end="\\n", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    print("ready", flush=True)
    while signal.sigtimedwait([signal.SIGINT], 2):
        print("INT", flush=True)
    sys.exit(6)
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 97)) if hasattr(termios, "tcsetwinsize") else None
    command = [sys.executable, "-c", "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
               "os.execv(sys.argv[1], sys.argv[1:])", *script(source)]  # fmt: skip
    process = begin(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    printed, is_pressed = b"", False
    while select.select([ours], [], [], 30)[0]:
        try:
            printed += os.read(ours, 1000)
        except OSError:
            break
        if b"ready\r\n" in printed and not is_pressed:  # the whole line: the terminal echoes ^C at once
            os.write(ours, b"\x03")
            is_pressed = True
    os.close(ours)
    assert process.wait(60) == 6, printed
    columns = 97 if hasattr(termios, "tcsetwinsize") else r"\d+"
    assert re.match(rf"True True True {columns}\r\nready\r\n", printed.decode()), printed
    assert printed.count(b"INT\r\n") == 1


# ---- Arguments ----


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            "2 processes of",
        ),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "4 processes of torchrun"),
        ({"RANK": "0"}, "WORLD_SIZE"),
    ],
)
def test_several_processes_are_refused(monkeypatch, capsys, tmp_path, variables, words):
    """Their launcher has to start all of them again."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", str(tmp_path / "train.py")]) == 2
    assert words in capsys.readouterr().err


def test_arguments_that_are_wrong(capsys, tmp_path):
    """Exit code 2, before anything is started."""
    (tmp_path / "train.py").touch()
    assert cli.main(["run", str(tmp_path / "no.py")]) == 2
    assert "Expected a script's file, or -m and a module. Received:" in capsys.readouterr().err
    assert cli.main(["run", "--report", str(tmp_path), str(tmp_path / "train.py")]) == 2
    assert "Expected a file that can be written as the report" in capsys.readouterr().err
    for arguments in (["run"], ["run", "--restarts", "-1", "x.py"], ["run", "--restart", "1", "x.py"]):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 2
