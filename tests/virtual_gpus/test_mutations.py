"""What orders an exchange is needed: without it the virtual GPUs give wrong numbers, or an error."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import cffi
import pytest
from virtual_host import run

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT / "csrc"))
from cffi_build import checksum, read_cdef  # noqa: E402

LAUNCHER, GROUP, EXCHANGE = "nccl/launcher.c", "nccl/library.c", "tf/exchange.c"
RECORD = "ncs_record(cuda, launcher->contexts[rank], stream, arrival->before, failure)"
WAIT = "ncs_order(cuda, launcher->contexts[rank], stream, launched->end[rank], failure)"
# By name: the file, what stands there once, and what takes its place.
MUTATIONS = {
    "none": (LAUNCHER, "", ""),
    "none, by contexts": (LAUNCHER, "", ""),
    "without the record": (LAUNCHER, RECORD, "0"),
    "without the record, by contexts": (LAUNCHER, RECORD, "0"),
    "without the wait": (LAUNCHER, WAIT, "0"),
    "without the wait, by contexts": (LAUNCHER, WAIT, "0"),
    "buffers let go early": (
        EXCHANGE,
        "  if (arrival != NULL) hand_over(",
        "  for (int i = 0; arrival != NULL && i < 2 * all->n; i += 2) {\n"
        "    ncs_tf.TF_DeleteTensor(all->tensors[i]);\n    all->tensors[i] = NULL;\n  }\n"
        "  if (arrival != NULL) hand_over(",
    ),
    "launch before the last has arrived": (
        LAUNCHER,
        "if (made->before[r] != NULL) status = NCS_CUDA(cudaStreamWaitEvent",
        "if (made->before[r] != NULL && r < launcher->n - 1) status = NCS_CUDA(cudaStreamWaitEvent",
    ),
    "calls in different orders": (
        GROUP,
        "status = call(comm, i, of, failure);",
        "status = call(comm, (i % comm->n) % 2 ? n - comm->n - i + 2 * (i % comm->n) : i, of, failure);",
    ),
}

# By XLA a step is few pieces of work, so that random delays make GPUs drift apart less.
BY_XLA = ["none", "without the record", "without the wait", "launch before the last has arrived"]

LIBRARIES = ["-lpthread", "-lm", "-ldl"]

pytestmark = [pytest.mark.usefixtures("virtual_gpus"), pytest.mark.slow, pytest.mark.timeout(600)]


def build(folder, file, old, new):
    """Make a package whose C library is mutated; return the folder that it lies in."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copytree(ROOT / "ncclsync", folder / "ncclsync", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    mutated = folder / "csrc" / file
    text = mutated.read_text(encoding="utf-8")
    assert not old or text.count(old) == 1, old
    mutated.write_text(text.replace(old, new) if old else text, encoding="utf-8")
    ffi = cffi.FFI()
    sources = f"#define NCS_SOURCES {checksum(folder / 'csrc')}\n"
    ffi.cdef(read_cdef(ROOT / "csrc" / "ncclsync.h") + sources)
    ffi.set_source("ncclsync._native", f'#include "ncclsync.h"\n{sources}')
    ffi.emit_c_code(str(folder / "native.c"))
    sources = [*sorted((folder / "csrc").rglob("*.c")), folder / "native.c"]
    include = [f"-I{folder / 'csrc'}", f"-I{sysconfig.get_paths()['include']}"]
    made = folder / "ncclsync" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [run.COMPILER, "-O1", "-w", "-fPIC", "-shared", *include, *sources, "-o", made, *LIBRARIES]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize(("name", "xla"), [*((name, False) for name in MUTATIONS), *((name, True) for name in BY_XLA)])
def test_mutation(name, xla, made_once):
    """Without a mutation all is equal to one device; with any it is not."""
    folder = made_once(name.partition(",")[0], lambda folder: build(folder, *MUTATIONS[name]))
    arguments = ["shard_optimizer"] if MUTATIONS[name][0] == GROUP else []  # several collectives in each group
    # What would be taken too early comes late, however slow the host is: a group's end, or what one GPU computes.
    is_late = "wait" in name or "early" in name
    options = ["--link", "0.02,20000"] if is_late else ["--link", "0.02,500", "--element-ns", "0,0,0,20000"]
    options += ["--gpus", "4", "--ahead", "--delay-us", "2000", *["--xla"] * xla]
    done = subprocess.run(
        [sys.executable, HERE / "run.py", *options, HERE / "scripts" / "steps.py", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]),
            "NCCLSYNC_GPU_EVENTS": "context" if "by contexts" in name else "stream",
        },
    )
    is_equal = done.returncode == 0 and done.stdout.split("\n")[-2:] == ["equal True", ""]
    assert is_equal == ("none" in name), done.stdout + done.stderr[-2000:]
