"""Every Python example of the README runs as it stands there, in a process in which no other one has run.

What an example takes for granted, such as `x` and `model`, a small setting provides. `diff` blocks run in
`test_coming_from.py`; of `sh` blocks, the commands are parsed.
"""

import argparse
import ast
import builtins
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from ncclsync.tools import cli

ROOT = pathlib.Path(__file__).parent.parent
READMES = sorted(
    path
    for path in ROOT.rglob("README*.md")
    if not any(part[0] == "." for part in path.relative_to(ROOT).parts)
)


def blocks(language):
    """By name, `README.md: Use` for the first of a section: (section, text) of each block of a language."""
    found = {}
    for path in READMES:
        for text in f"\n{path.read_text(encoding='utf-8')}".split("\n## ")[1:]:
            section = text.partition("\n")[0]
            for block in re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
                name = f"{path.relative_to(ROOT)}: {section}"
                while name in found:
                    name += "'"
                found[name] = section, block
    return found


EXAMPLES = blocks("python")
USE = EXAMPLES["README.md: Use"][1]

# What an example may take for granted. A model, and how it is built, are those of the README's first example.
SETTING = {
    "keras": "import keras",
    "ncclsync": "import ncclsync",
    "nccl_parallel": "from ncclsync import nccl_parallel",
    "x": "import numpy\nx = numpy.random.default_rng(0).standard_normal((60, 8)).astype('float32')",
    "y": "import numpy\ny = numpy.random.default_rng(1).integers(0, 10, 60)",
    "build_model": USE[: USE.index("model = build_model()")],
    "model": USE[: USE.index("model.fit(")],
    "optimizer": "import keras\noptimizer = keras.optimizers.SGD(0.1)",
    "loss_fn": "import keras\nloss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)",
    "dataset": "import tensorflow\ndataset = tensorflow.data.Dataset.from_tensor_slices((x, y)).batch(20)",
}
NEEDED = {"dataset": ("x", "y")}  # before

# The body of a `build_model` that is `...` in an example; else that of the first example.
RESIDUAL = """
inputs = keras.Input((8,))
branch = keras.layers.BatchNormalization()(keras.layers.Dense(8)(inputs))
model = keras.Model(inputs, keras.layers.Dense(10)(inputs + branch))
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
return model
"""

# What is looked at when an example has run; by section. Every other one has only to run.
LOOKED_AT = {
    "Use": "assert model.towers.divergence() == 0.0 and int(model.optimizer.iterations) == 5",
    "Your own loop": "assert set(logs) == {'loss', 'largest'} and len(model.weights) == 4",
    "Large batches": (
        "import os\nassert os.path.getsize('rate.png') and 'effective_learning_rate' in history.history"
    ),
    "Stop and go on": (
        "import os\nassert int(model.optimizer.iterations) == 300 and not os.path.exists('backup')"
    ),
    "Watch": "model = build_model()\nmodel.fit(x, y)\nassert model.towers.divergence() == 0.0",
    "See a step": "import os\nassert os.path.getsize('trace.json')",
}

# Small ones, but for what a section tells of: a backup every 100 batches of 256.
SIZES = {"Stop and go on": 256 * 60}

# A process imports the package, and forks one for each program, in turn: (name, source, folder) on stdin.
# Where no number of towers is told, there are two, as on a host with two GPUs.
RUNNER = """
import json, os, sys, tempfile, traceback
import keras, tensorflow, ncclsync
from ncclsync.towers import state
from ncclsync.towers.placement import Placement

chosen = state.choose_placement
state.choose_placement = lambda count, devices, backend: (
    chosen(count, devices, backend) if count or devices else Placement(("CPU:0",) * 2, "cpu", "")
)
# As in conftest.py: an iterator's end may else be waited for up to a minute.
options, make_iterator = tensorflow.data.Options(), tensorflow.data.Dataset.__iter__
options.autotune.enabled = False
tensorflow.data.Dataset.__iter__ = lambda self: make_iterator(self.with_options(options))

results = {}
for name, source, folder in json.load(sys.stdin):
    output = tempfile.TemporaryFile("w+")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.makedirs(folder, exist_ok=True)
            os.chdir(folder)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            keras.utils.set_random_seed(1)
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output.seek(0)
    results[name] = code, output.read()
json.dump(results, open(sys.argv[1], "w"))
"""

# Ends a run as a kill does, behind batch 130: 100 of them are in a backup.
KILLED = """
import os, ncclsync

class Dies(ncclsync.BackupAndRestore):
    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self.seen += 1
        if self.seen == 130:
            os._exit(9)

ncclsync.BackupAndRestore = Dies
"""
SAVED = "\nimport numpy\nnumpy.savez('weights.npz', *model.get_weights())\n"


def free_names(text):
    """Names that a program uses and neither defines nor imports."""
    names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            defined |= {argument.arg for argument in node.args.args}
    return {node.id for node in names} - defined - set(dir(builtins))


def program_of(section, text):
    """An example with its setting before it, and what is looked at behind it."""
    tree = ast.parse(text)
    elided = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and ast.unparse(node.body) == "..."
        and node.name == "build_model"
    ]
    for node in elided:
        body = RESIDUAL if section == "Large batches" else ast.unparse(ast.parse(USE).body[2].body)
        node.body = ast.parse(body).body
    names = free_names(ast.unparse(tree))
    names |= {"x", "y"} if "build_model()" in LOOKED_AT.get(section, "") else set()
    names |= {"keras"} if elided else set()
    needed = [one for name in sorted(names) for one in (*NEEDED.get(name, ()), name)]
    setting = "\n".join(SETTING[name] for name in dict.fromkeys(needed))
    if section in SIZES:
        setting = setting.replace("60", str(SIZES[section]))
    return f"{setting}\n{ast.unparse(tree)}\n{LOOKED_AT.get(section, '')}\n"


def run_programs(programs, folder):
    """Run (name, source, folder) each in a process of its own; write (exit code, output) by name."""
    command = [sys.executable, "-c", RUNNER, str(folder / "results.json")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command,
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="session")
def ran(made_once):
    """The folder with what all examples have left, and their exit codes and outputs."""

    def run_all(folder):
        programs = [
            (name, program_of(section, text), str(folder / str(i)))
            for i, (name, (section, text)) in enumerate(EXAMPLES.items())
        ]
        stopped = program_of(*EXAMPLES["README.md: Stop and go on"])
        programs += [
            ("killed", KILLED + stopped, str(folder / "again")),
            ("repeated", stopped + SAVED, str(folder / "again")),
            ("whole", stopped + SAVED, str(folder / "whole")),
        ]
        run_programs(programs, folder)

    folder = made_once("readme", run_all)
    return folder, json.loads((folder / "results.json").read_text())


def test_every_example_is_found():
    """In all sections that have one; no block is of a language that nobody looks at."""
    assert {section for section, _ in EXAMPLES.values()} >= {"Check your own model", *LOOKED_AT}
    for path in READMES:
        languages = re.findall(r"^```(\w*)\n.*?^```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert set(languages) <= {"python", "sh", "diff", "text"}
    assert {section for section, _ in blocks("diff").values()} == {"Coming from another library"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(ran, name):
    """It runs, and does what its section tells."""
    code, output = ran[1][name]
    assert code == 0, output[-3000:]


@pytest.mark.timeout(600)
def test_stop_and_go_on(ran):
    """The example, killed and repeated by the same lines, ends with the weights of a run nothing stopped."""
    folder, results = ran
    assert [results[name][0] for name in ("killed", "repeated", "whole")] == [9, 0, 0], results["repeated"][1]
    with np.load(folder / "again/weights.npz") as again, np.load(folder / "whole/weights.npz") as whole:
        assert len(again.files) == len(whole.files) == 4
        for name in whole.files:
            np.testing.assert_array_equal(again[name], whole[name])


def commands():
    """By block, its commands as argument lists, without comments."""
    return [
        (name, shlex.split(line, comments=True))
        for name, (_, text) in blocks("sh").items()
        for line in text.splitlines()
        if line.strip()
    ]


@pytest.mark.parametrize("name, command", [pytest.param(n, c, id=" ".join(c)[:60]) for n, c in commands()])
def test_command(monkeypatch, name, command):
    """A command of ours is understood, with its options; files that it names are there."""
    for word in command:
        if re.fullmatch(r"(examples|tests)/[\w/]+(\.py)?", word):
            assert (ROOT / word).exists()
    while "=" in command[0]:
        command = command[1:]
    if command[:3] != ["python", "-m", "ncclsync"]:
        assert command[0] in ("python3", "python", ".venv/bin/python", ".venv/bin/pip"), command
        return
    understood, parse = [], argparse.ArgumentParser.parse_args

    def parse_only(self, arguments):
        understood.append(parse(self, arguments))
        return argparse.Namespace(run=lambda given: 0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    assert cli.main(command[3:]) == 0 and understood[0].command == command[3]
