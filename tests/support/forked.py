"""Run programs as users do, each in a process of its own; TensorFlow and Keras are imported once for all."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]

# A process imports the packages, and forks one for each program, in turn: (name, source, folder) on stdin.
RUNNER = """
import json, os, sys, tempfile, traceback
import keras, tensorflow, ncclsync.parallel

results = {}
for name, source, folder in json.load(sys.stdin):
    output = tempfile.TemporaryFile("w+")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.makedirs(folder, exist_ok=True)
            os.chdir(folder)
            tempfile.tempdir = folder
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


def run_programs(programs: Sequence[tuple[str, str, str]], folder: pathlib.Path) -> None:
    """Run (name, source, folder) one after the other; write {name: (exit code, output)} to `results.json`."""
    command = [sys.executable, "-c", RUNNER, str(folder / "results.json")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, input=json.dumps(programs), capture_output=True, text=True, cwd=folder, env=environment, timeout=550
    )
    assert done.returncode == 0, done.stderr[-2000:]
