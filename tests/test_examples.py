"""The examples and the documents' programs run as a user runs them, and hold what they promise."""

import ast
import builtins
import json
import os
import pathlib
import re
import runpy
import shutil
import socket
import subprocess
import sys
import types

import numpy as np
import pytest
from documents import PAGES, ROOT, blocks, read
from forked import run_programs

from ncclsync.communicator.introductions import listen
from ncclsync.communicator.processes import find_process

EXAMPLES = ROOT / "examples"
NOTEBOOKS = ("quickstart.ipynb", "two_gpus.ipynb")
SCRIPTS = ("large_batches.py", "own_loop.py", "stop_and_go_on.py", "two_gpus.py", "watch.py")

# The Python blocks of all documents but the examples' pages, which show parts of programs.
LOOSE = {block.name: block.text for block in blocks("python") if block.page.parts[0] != "examples"}
USE = LOOSE["README.md: Use"]

# What a block may take for granted. A model, and how it is built, are those of the README. Where no number of
# towers is told, there are two, as on a host with two GPUs.
SETTING = {
    "x": "import numpy\nx = numpy.random.default_rng(0).standard_normal((60, 8)).astype('float32')",
    "y": "import numpy\ny = numpy.random.default_rng(1).integers(0, 10, 60)",
    "build_model": USE[: USE.index("model = build_model()")],
    **dict.fromkeys(
        ("SUM", "Shard", "rule_for"),
        "from ncclsync.semantics.placements import SUM, Shard\nfrom ncclsync.semantics.rules import rule_for",
    ),
}
TWO_TOWERS = """
from ncclsync.towers import session
from ncclsync.towers.placement import Choice
chosen = session.choose_devices
session.choose_devices = lambda count, devices, backend, *_: (
    chosen(count, devices, backend) if count or devices else Choice(("CPU:0",) * 2, "cpu", "")
)
"""
LOOKED_AT = {"README.md: Use": "assert model.towers.divergence() == 0.0 and int(model.optimizer.iterations) == 5"}

# Runs a notebook's cells in turn, as its kernel does. Its outputs have the form of those that it was committed with.
NOTEBOOK = """
import json, sys
sys.path.insert(0, {support!r})
from notebooks import form, run
cells = [cell for cell in json.loads({text!r})["cells"] if cell["cell_type"] == "code"]
cells = [cell for cell in cells if not cell["source"][0].startswith("%")]
outputs, names = run(cells)
for cell, found in zip(cells, outputs, strict=True):
    assert not cell["outputs"] or form(found) == form(cell["outputs"]), (found, cell["outputs"])
assert names["accuracy"] >= 0.95, names["accuracy"]
assert names["difference"] < 1e-6
assert 0.0 in [value for value in names["Out"].values() if isinstance(value, float)]
"""

# Counts a run's batches, and ends it after batch LAST as a kill does.
COUNTED = """
import os, ncclsync
seen = 0

class Counts(ncclsync.BackupAndRestore):
    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        global seen
        seen += 1
        if seen == LAST:
            os._exit(9)

ncclsync.BackupAndRestore = Counts
"""
SAVED = "\nimport numpy\nif 'model' in globals(): numpy.savez('weights.npz', *model.get_weights())\n"

# As much of CuPy as the program for several hosts uses, over the stand-in's memory, which is the host's.
CUPY = """
import contextlib, sys, types
import numpy

def buffer(array):
    held.append(array)
    return Buffer((array.ctypes.data, array.size, array.dtype))

class Buffer(tuple):
    def __getitem__(self, index):
        return held[[a.ctypes.data for a in held].index(tuple.__getitem__(self, 0))][index]

held = []
cupy = types.ModuleType("cupy")
cupy.full = lambda count, value, dtype: buffer(numpy.full(count, value, dtype))
cupy.empty = lambda count, dtype: buffer(numpy.empty(count, dtype))
cupy.cuda = types.SimpleNamespace(Device=contextlib.nullcontext)
sys.modules["cupy"] = cupy
"""


def free_names(text):
    """Names that a program uses and neither defines nor imports."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
    return {node.id for node in names} - defined - set(dir(builtins))


def program_of(name):
    """A loose block with what it takes for granted before it, and what is looked at after it."""
    setting = [SETTING[one] for one in sorted(free_names(LOOSE[name]))]
    return "\n".join([TWO_TOWERS, *setting, LOOSE[name], LOOKED_AT.get(name, "")])


def script(name):
    """The source of an example, run under its own file's name."""
    return f"import runpy\nglobals().update(runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__'))\n"


@pytest.fixture(scope="session")
def ran(made_once):
    """The folder with what all programs have left, and their exit codes and outputs."""

    def run_all(folder):
        support = str(ROOT / "tests/support")
        texts = {name: read(pathlib.Path("examples", name)) for name in NOTEBOOKS}
        programs = [
            *((name, program_of(name)) for name in LOOSE),
            *((name, script(name) + SAVED) for name in SCRIPTS),
            *((name, NOTEBOOK.format(text=text, support=support)) for name, text in texts.items()),
        ]
        stopped = f"{COUNTED}{script('stop_and_go_on.py')}{SAVED}print('batches:', seen)"
        run_programs(
            [
                *((name, source, str(folder / name.replace("/", "."))) for name, source in programs),
                ("killed", stopped.replace("LAST", "130"), str(folder / "again")),
                ("repeated", stopped.replace("LAST", "None"), str(folder / "again")),
            ],
            folder,
        )

    folder = made_once("examples", run_all)
    return folder, json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*LOOSE, *SCRIPTS, *NOTEBOOKS])
def test_program(ran, name):
    """It runs to its end."""
    code, output = ran[1][name]
    assert code == 0, output[-3000:]


def test_pages_show_their_programs():
    """Each page has a program, and each of its Python blocks stands in that program, word for word."""
    pages = [page for page in PAGES if page.parent.name == "examples" and page.name != "README.md"]
    assert len(pages) >= 6
    for page in pages:
        shown = [block.text for block in blocks("python") if block.page == page]
        if page.name == "coming_from.md":  # its programs are its `diff` blocks
            assert not shown
            continue
        program = (ROOT / page).with_suffix(".py").read_text(encoding="utf-8")
        assert shown
        for text in shown:
            assert text in program, text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stop_and_go_on(ran):
    """The example, killed and repeated, ends with the weights of a run that nothing stopped."""
    folder, results = ran
    assert [results[name][0] for name in ("killed", "repeated")] == [9, 0], results["repeated"][1]
    assert "batches: 185" in results["repeated"][1]  # of 5 epochs of 57, without the 100 of the backup
    whole = folder / "stop_and_go_on.py"
    assert not (whole / "backup").exists() and (whole / "digits.weights.h5").stat().st_size
    with np.load(folder / "again/weights.npz") as again, np.load(whole / "weights.npz") as expected:
        assert len(again.files) == len(expected.files) >= 4
        for name in expected.files:
            np.testing.assert_array_equal(again[name], expected[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_own_loop_learns(ran):
    """Its loss falls, on towers that agree."""
    output = ran[1]["own_loop.py"][1]
    losses = [float(loss) for loss in re.findall(r"^loss (.*)$", output, flags=re.MULTILINE)]
    assert len(losses) == 5 and losses[-1] < losses[0] / 2
    assert "divergence 0.0" in output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_large_batches_follows_its_recipe(ran):
    """Eight times the batch, eight times the rate; the block's last normalisation is found."""
    folder, results = ran
    output = results["large_batches.py"][1]
    assert "learning rate: 0.020" in output and "effective:     0.160" in output
    assert "begins as the identity: ['batch_normalization']" in output
    assert (folder / "large_batches.py/rate.png").stat().st_size


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_watch_sees_what_its_page_tells(ran):
    """The tower and the rows of the NaN, the plan's tables, the trace, the columns of the logs."""
    folder, results = ran
    output = results["watch.py"][1]
    page = read(pathlib.Path("examples/watch.md"))
    message = re.search(r"^Expected finite gradients.* rows 7 to 13, .* These rows", page, flags=re.MULTILINE)[0]
    assert message in output and "divergence 0.0" in output
    assert all(word in output for word in ("noise_scale", "samples_per_second", "0 to 21"))
    headings = re.findall(r"^ (\w.*)\n ─", page, flags=re.MULTILINE)
    assert len(headings) == 3
    for heading in headings:
        assert " ".join(heading.split()) in re.sub(r" +", " ", output)
    assert json.loads((folder / "watch.py/trace.json").read_text())


def test_more_than_one_host(built_standin, tmp_path):
    """Two processes with two ranks each: every rank has the average."""
    program = CUPY + script("more_than_one_host.py")
    environment = os.environ | built_standin.environment | {"STANDIN_FOLDER": str(tmp_path)}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    words = ("--hosts", "2", "--gpus", "2", "--folder", str(tmp_path), "--host")
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", program, *words, host],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in "01"
    ]
    try:
        outputs = [host.communicate(timeout=280)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    lines = [line for output in outputs for line in output.splitlines()]
    assert lines == [f"rank {rank} of 4: 1.5" for rank in range(4)], outputs


def run_example(name: str, *arguments: str, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    """Run an example in a Python of its own, from another folder than the source tree."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], cwd=cwd, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_digits_reaches_its_accuracy_on_two_towers(tmp_path):
    """It learns, the towers stay together, and the file it saves predicts the same."""
    done = run_example("digits.py", "--towers", "2", "--save", "digits.keras", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = dict(re.findall(r"^([a-z ]+): +(.*)$", done.stdout, flags=re.MULTILINE))
    assert results["towers"].startswith("2 on ")
    assert float(results["test accuracy"].split()[0]) >= 0.98
    assert float(results["divergence"].split()[0]) == 0.0
    assert results["reloaded"] == "predicts the same"
    assert (tmp_path / "digits.keras").stat().st_size > 0


@pytest.mark.slow
def test_digits_in_two_epochs(tmp_path):
    """They learn less, as they may: no failure."""
    done = run_example("digits.py", "--towers", "2", "--epochs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Not as it should be" not in done.stderr


@pytest.mark.slow
def test_same_bits(tmp_path):
    """On any number of towers; and the program draws what it has found."""
    done = run_example("same_bits.py", "--epochs", "1", "--plot", "same.png", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("apart 0.0e+00, equal weights: True") == 4
    assert (tmp_path / "same.png").stat().st_size > 0


@pytest.mark.slow
def test_compare_parity_tells_equal_from_wrong_from_exception(tmp_path):
    """Three rows: one that MirroredStrategy gets right with even batches, one wrong, one not at all."""
    rows = {
        "evaluate-numpy": ("exception", "equal"),
        "tf#33929_clipped_before_sum": ("wrong", "wrong"),
        "keras#17429_accumulation": ("exception", "exception"),
    }
    chosen = ("--only", "batches,peers", "--rows", ",".join(rows))
    files = ("--json", "parity.json", "--plot", "parity.svg")
    done = run_example("compare_parity.py", *chosen, *files, "--details", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = {one["row"]: one for one in json.loads((tmp_path / "parity.json").read_text())["rows"]}
    columns = ("MirroredStrategy", "MirroredStrategy, even batches")
    assert {name: tuple(one[c]["outcome"] for c in columns) for name, one in found.items()} == rows
    assert {one["ncclsync"]["outcome"] for one in found.values()} == {"equal"}
    assert found["tf#33929_clipped_before_sum"]["MirroredStrategy"]["difference"] > 0.5
    assert "merge_call" in found["keras#17429_accumulation"]["MirroredStrategy"]["detail"]
    assert (tmp_path / "parity.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_compare_parity_needs_the_tables(tmp_path):
    """Copied out of a clone it says what is missing."""
    for name in ("compare_parity.py", "parity_runs.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    command = [sys.executable, str(tmp_path / "compare_parity.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert re.match(r"Expected the tables in .*parity\. Run this from a clone", done.stderr)


def test_slurm_script():
    """A shell understands it; it has a task for each host, and runs a program that is there."""
    path = EXAMPLES / "train.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert int(options["nodes"]) > 1 and options["ntasks-per-node"] == "1" and int(options["gpus-per-node"]) > 1
    (program,) = re.findall(r"^srun \S+ (\S+\.py)$", text, re.MULTILINE)
    assert (ROOT / program).exists()


def test_ray_example_tells_what_a_launcher_does(tmp_path, monkeypatch):
    """Each worker's variables make it one of several; the program runs in them, as it is."""
    found = runpy.run_path(str(EXAMPLES / "ray_cluster.py"))
    processes = [
        find_process(found["variables_of"](rank, 3, ("10.0.0.1", 4000), "a secret of this job")) for rank in range(3)
    ]
    assert [(one.rank, one.size, one.local_size, one.address) for one in processes] == [
        (rank, 3, 1, "10.0.0.1:4000") for rank in range(3)
    ]
    ray = types.ModuleType("ray")
    ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", ray)
    keeper = found["Address"]()
    host, port = keeper.get()
    assert host == "10.0.0.1"
    for _ in range(2):  # process 0 listens there, also if it is started again
        listen(port).close()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    program = tmp_path / "program.py"
    program.write_text("import os, sys; print(__name__, sys.argv, os.environ['RANK'])")
    code = f"import runpy; runpy.run_path({str(EXAMPLES / 'ray_cluster.py')!r})['run_program']({str(program)!r}, "
    printed = subprocess.run([sys.executable, "-c", code + "{'RANK': '2'})"], capture_output=True, text=True).stdout
    assert printed == f"__main__ [{str(program)!r}] 2\n"


RAY_CLUSTER = """
import os, subprocess, sys
from ray.cluster_utils import Cluster

hosts = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**hosts, "include_dashboard": False})
cluster.add_node(**hosts)
try:
    command = [sys.executable, *sys.argv[1:], "--hosts", "2", "--gpus", "2"]
    done = subprocess.run(command, env={**os.environ, "RAY_ADDRESS": cluster.address}, timeout=280)
finally:
    cluster.shutdown()
sys.exit(done.returncode)
"""
TRAINED_BY_RAY = """
import runpy, sys

sys.argv = ["run.py", "--gpus", "2", {path!r}]
runpy.run_path({run!r}, run_name="__main__")
"""
TRAINS = """
import pathlib
import keras, numpy as np, ncclsync

@ncclsync.nccl_parallel
def build_model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model

x = np.ones((16, 6), "float32")
model = build_model()
model.fit(x, x[:, :3], batch_size=8, verbose=0)
words = f"{{len(model.towers)}} {{float(np.abs(model.get_weights()[0]).sum())!r}}"
pathlib.Path({out!r}, str(model.towers.communicator.ranks[0])).write_text(words)
"""


@pytest.mark.slow
def test_ray_example_trains_on_two_hosts(virtual_gpus, tmp_path):
    """Two Ray nodes on this machine with two virtual GPUs each: both end with the same weights, of four towers."""
    pytest.importorskip("ray", reason="pip install ray")
    for folder in ("out", "standin"):
        (tmp_path / folder).mkdir()
    trains, program, cluster = (tmp_path / name for name in ("trains.py", "program.py", "cluster.py"))
    trains.write_text(TRAINS.format(out=str(tmp_path / "out")))
    program.write_text(TRAINED_BY_RAY.format(path=str(trains), run=str(virtual_gpus)))
    cluster.write_text(RAY_CLUSTER)
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "STANDIN_FOLDER": str(tmp_path / "standin"),
    }
    command = [sys.executable, cluster, EXAMPLES / "ray_cluster.py", program]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (found.read_text() for found in (tmp_path / "out").iterdir())
    assert first == second and first.startswith("4 ")
