"""Run a script as on a host with several GPUs, on a machine without any.

    python tests/virtual_gpus/run.py --gpus 4 --delay-us 300 SCRIPT ARGS...

TensorFlow sees GPUs whose memory is the host's, whose streams are queues with threads, and whose kernels are the CPU's;
ncclsync sees the stand-in for NCCL and CUDA, on the same streams. The libraries are compiled at the first run, and kept
in the folder for temporary files.
"""

import argparse
import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
from standin import COMPILER, FLAGS, ROOT, SOURCES, Standin  # noqa: E402

CXX = shutil.which("c++") or shutil.which("g++")
# Headers that XLA's include, and TensorFlow's wheel lacks.
ABSENT = ["farmhash.h", "ynnpack/include/ynnpack.h"]
ABSENT += [f"highwayhash/{name}.h" for name in ("arch_specific", "hh_types", "highwayhash")]
MISSING = "virtual GPUs need a C++ compiler (c++ or g++) and a C compiler on the PATH; on Debian: apt-get install g++"


def parse(arguments):
    """Return the options, and the command that is to run: `-m module ARGS` or `SCRIPT ARGS`."""
    parser = argparse.ArgumentParser(description="Run a script on virtual GPUs.", allow_abbrev=False)
    parser.add_argument("--gpus", type=int, default=4, metavar="N", help="how many (1 to 8)")
    parser.add_argument(
        "--delay-us", type=int, default=0, metavar="US", help="a stream sleeps up to so long before work"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the delays")
    parser.add_argument(
        "--link", metavar="GB/s,US", help="busbw and latency of collectives; otherwise they take no time"
    )
    parser.add_argument("--copy-link", metavar="GB/s,US", help="the same of copies between host and GPU")
    parser.add_argument("--memory", type=int, default=16384, metavar="MB", help="of each GPU")
    parser.add_argument("--whole", action="store_true", help="TensorFlow takes it at once, as on a GPU")
    parser.add_argument(
        "--nccl", metavar="N,KIB", default="0,0", help="NCCL takes so much of it by each of so many channels and peer"
    )
    parser.add_argument("--driver", type=int, metavar="N", help="the driver's CUDA, such as 12020; default: 12090")
    parser.add_argument("--ahead", action="store_true", help="let the host run ahead: kernels are only enqueued")
    parser.add_argument("--kernel-ms", type=float, metavar="MS", help="what a MatMul, Conv or Einsum takes at least")
    parser.add_argument(
        "--element-ns", metavar="NS,...", help="what such a kernel takes at least for each element it reads, by GPU"
    )
    parser.add_argument(
        "--wrong", type=int, metavar="GPU", help="on it each of these flips a bit of its result; not with --ahead"
    )
    parser.add_argument("--xla", action="store_true", help="let Keras compile by XLA, as it does on GPUs")
    parser.add_argument("-m", dest="module", action="store_true", help="what follows is a module's name")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS...")
    options = parser.parse_args(arguments)
    if not options.command or not 1 <= options.gpus <= 8:
        parser.error("Expected a script, and 1 to 8 GPUs.")
    return options


def build():
    """Return the folder with the libraries, compiled once for these sources and the installed TensorFlow."""
    if CXX is None or COMPILER is None:
        sys.exit(MISSING)
    sources = [
        *sorted(HERE.glob("*.[ch]*")),
        *sorted(SOURCES.glob("standin*")),
        *sorted((ROOT / "csrc").rglob("*.[ch]")),
    ]
    key = hashlib.sha256(importlib.metadata.version("tensorflow").encode() + str(sys.prefix).encode())
    for source in (*sources, HERE / "run.py"):
        key.update(source.read_bytes())
    folder = pathlib.Path(tempfile.gettempdir(), f"ncclsync-virtual-gpus-{os.getuid()}", key.hexdigest()[:16])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not (folder / "done").exists():
            compile_into(folder)
            (folder / "done").touch()
    return folder


def compile_into(folder):
    """Compile the stand-in, and the plug-in for TensorFlow over it."""
    cudart = Standin(folder, "-O1").cudart
    tensorflow = importlib.util.find_spec("tensorflow").submodule_search_locations[0]
    include = [f"-I{tensorflow}/include", f"-I{SOURCES}"]
    objects = [str(folder / name) for name in ("device.o", "kernels.o", "xla.o")]
    subprocess.run([COMPILER, *FLAGS, "-O1", *include, "-c", HERE / "device.c", "-o", objects[0]], check=True)
    # As TensorFlow's wheel is compiled; its headers are not free of warnings.
    wheel = ["-std=c++17", "-w", "-O1", "-fPIC", "-DEIGEN_MAX_ALIGN_BYTES=64", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    subprocess.run([CXX, *wheel, *include, "-c", HERE / "kernels.cc", "-o", objects[1]], check=True)
    for name in ABSENT:
        (folder / "absent" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "absent" / name).write_text('#include "absent.h"\n', encoding="utf-8")
    absent = [f"-I{HERE}", f"-I{folder / 'absent'}"]
    subprocess.run([CXX, *wheel, *absent, *include, "-c", HERE / "xla.cc", "-o", objects[2]], check=True)
    libraries = [cudart, f"-L{tensorflow}", f"-Wl,-rpath,{tensorflow}", "-lpthread"]
    libraries += [f"-l:libtensorflow_{name}.so.2" for name in ("framework", "cc")]
    subprocess.run([CXX, "-shared", *objects, *libraries, "-o", folder / "libvirtual_gpus.so"], check=True)


def load(folder, options):
    """Give TensorFlow its GPUs, and ncclsync its NCCL, in this process."""
    libraries = {"NCCL": "libnccl.so", "CUDART": "libcudart.so", "CUDA_DRIVER": "libcudart.so"}
    os.environ.update({f"NCCLSYNC_{name}_LIBRARY": str(folder / file) for name, file in libraries.items()})
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):  # who hides real GPUs means no virtual ones
        del os.environ["CUDA_VISIBLE_DEVICES"]
    told = {
        "VIRTUAL_GPUS": options.gpus,
        "VIRTUAL_AHEAD": options.ahead or None,
        "VIRTUAL_KERNEL_MS": options.kernel_ms,
        "VIRTUAL_ELEMENT_NS": options.element_ns,
        "VIRTUAL_WRONG": options.wrong,
        "STANDIN_DELAY_US": options.delay_us,
        "STANDIN_SEED": options.seed,
        "STANDIN_LINK": options.link,
        "STANDIN_COPY_LINK": options.copy_link,
        "STANDIN_MEMORY_MB": options.memory,
        "STANDIN_NCCL": options.nccl,
        "STANDIN_DRIVER": options.driver,
        "VIRTUAL_WHOLE": options.whole or None,
    }
    os.environ.update({name: str(value) for name, value in told.items() if value is not None})
    # Grappler asks CUDA for what it does not find, at the level of errors, four lines for each function.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # TensorFlow loads it wherever it is imported: in the processes that doctor starts, too.
    os.environ["TF_PLUGGABLE_DEVICE_LIBRARY_PATH"] = str(folder / "libvirtual_gpus.so")
    from keras.src.trainers import trainer

    # Keras has a question for each: whether XLA compiles a model, and whether there is cuDNN.
    if not options.xla:
        trainer.model_supports_jit = lambda model: False
    importlib.import_module("keras.src.backend.tensorflow.rnn").cudnn_ok = lambda *_, **__: False


def main(arguments):
    """Run the command, with the options before it."""
    options = parse(arguments)
    given = arguments[: len(arguments) - len(options.command)]
    # By which a process that this one starts is on the same GPUs.
    os.environ["VIRTUAL_COMMAND"] = shlex.join([str(HERE / "run.py"), *(one for one in given if one != "-m")])
    load(build(), options)
    sys.argv = options.command
    if options.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
