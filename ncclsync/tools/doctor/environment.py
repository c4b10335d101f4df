"""Read the environment variables that matter to training."""

import contextlib
import pathlib
import re
from collections.abc import Iterator, Mapping

from ncclsync.tools.doctor.facts import Variable

# The effects of variables that a user may have set, and forgotten.
EFFECTS = {
    "NCCLSYNC_NCCL_LIBRARY": "the libnccl to use; no other is tried",
    "NCCLSYNC_CUDART_LIBRARY": "the libcudart to use; no other is tried",
    "NCCLSYNC_CUDA_DRIVER_LIBRARY": "the libcuda to use; no other is tried",
    "NCCLSYNC_SECRET": "who has it belongs to the job: connections between processes have keys that follow from it",
    "NCCLSYNC_PROGRESS": "where backups report to `python -m ncclsync run` how far they are",
    "NCCL_ALGO": "overrides NCCL's choice of algorithm; one that does not fit is an error",
    "NCCL_PROTO": "overrides NCCL's choice of protocol; the wrong one may corrupt data",
    "NCCL_BUFFSIZE": "bytes of NCCL's buffer between two GPUs",
    "NCCL_CONF_FILE": "file that NCCL reads settings from",
    "NCCL_CUMEM_ENABLE": "whether NCCL allocates by CUDA's virtual memory calls",
    "NCCL_CUMEM_HOST_ENABLE": "whether NCCL's host buffers are CUDA's instead of /dev/shm's",
    "NCCL_DEBUG": "what NCCL prints, on stdout; TRACE is slow",
    "NCCL_DEBUG_FILE": "where NCCL prints instead of stdout",
    "NCCL_DEBUG_SUBSYS": "what NCCL prints about",
    "NCCL_IB_DISABLE": "no InfiniBand; of no effect within one host",
    "NCCL_LAUNCH_MODE": "how NCCL launches kernels of several GPUs",
    "NCCL_MAX_CTAS": "limits the blocks of a collective, and so its speed",
    "NCCL_MAX_NCHANNELS": "limits the channels of a collective, and so its speed",
    "NCCL_MULTI_RANK_GPU_ENABLE": "lets several ranks share a GPU, which is experimental",
    "NCCL_NTHREADS": "threads of a block of NCCL's",
    "NCCL_NVLS_ENABLE": "reductions in the NVSwitch; 0 turns them off",
    "NCCL_P2P_DISABLE": "1: no direct transfers between GPUs, all-reduce is far slower",
    "NCCL_P2P_LEVEL": "how far apart GPUs may be for direct transfers, without which all-reduce is slower",
    "NCCL_SHM_DISABLE": "1: the network in place of shared memory, where there are no direct transfers",
    "NCCL_SHM_USE_CUDA_MEMCPY": "copies through shared memory by the copy engines",
    "NCCL_SOCKET_IFNAME": "network interfaces by which ranks find each other",
    "NCCL_TOPO_FILE": "the topology, instead of what NCCL detects",
    "CUDA_CACHE_DISABLE": "1: kernels are compiled anew in every process",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues; with 1 a collective waits for kernels",
    "CUDA_DEVICE_ORDER": "FASTEST_FIRST (default) or PCI_BUS_ID, nvidia-smi's order",
    "CUDA_LAUNCH_BLOCKING": "1: the host waits for each kernel",
    "CUDA_MODULE_LOADING": "EAGER loads every kernel at the start",
    "CUDA_MPS_PIPE_DIRECTORY": "processes share GPUs by MPS",
    "CUDA_VISIBLE_DEVICES": "the GPUs that this process may use, renumbered from 0",
    "NVIDIA_TF32_OVERRIDE": "0: no TF32, slower and more exact",
    "NVIDIA_VISIBLE_DEVICES": "the GPUs that the container was given",
    "TF_CONFIG": "the processes of a cluster, which ncclsync joins",
    "TF_CPP_MIN_LOG_LEVEL": "TensorFlow's log: 1 hides infos, 2 warnings, 3 errors",
    "TF_DETERMINISTIC_OPS": "1: deterministic kernels, slower; NVLS is kept out of NCCL",
    "TF_ENABLE_ONEDNN_OPTS": "0: no oneDNN on CPUs",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true: GPU memory is taken as needed, not all at the start",
    "TF_GPU_ALLOCATOR": "how TensorFlow allocates GPU memory",
    "TF_GPU_THREAD_MODE": "which threads launch GPU kernels",
    "TF_NUM_INTEROP_THREADS": "ops that run at a time on the host",
    "TF_NUM_INTRAOP_THREADS": "threads of one op on the host",
    "TF_USE_LEGACY_KERAS": "1: tf.keras is Keras 2",
    "TF_XLA_FLAGS": "TensorFlow's own compilation by XLA",
    "XLA_FLAGS": "XLA's settings",
    "KERAS_BACKEND": "Keras' backend; ncclsync needs tensorflow",
    "KERAS_HOME": "folder of keras.json, which may set the backend",
    "LD_LIBRARY_PATH": "where the loader looks first: may bring other CUDA libraries",
    "LD_PRELOAD": "libraries loaded before all others",
}

# Further variables that are shown. Not all of TF_: Terraform keeps secrets in TF_VAR_….
_SHOWN = re.compile("(NCCLSYNC|NCCL|CUDA|TF_(CPP|CUDNN|DETERMINISTIC|DISABLE|ENABLE|FORCE|GPU|NUM|USE|XLA))_")


def read_variables(environ: Mapping[str, str]) -> tuple[Variable, ...]:
    """Return the set variables that matter, sorted by name, and then the settings of NCCL's files, if readable.

    An empty value counts as set.
    """
    own_file = environ.get("NCCL_CONF_FILE") or pathlib.Path.home() / ".nccl.conf"
    files = (pathlib.Path(own_file), pathlib.Path("/etc/nccl.conf"))  # by precedence, as NCCL reads them
    shown = [(name, environ[name], "environment") for name in sorted(environ) if name in EFFECTS or _SHOWN.match(name)]
    shown += [(*one, str(file)) for file in files for one in _settings(file) if one[0] not in environ]
    return tuple(
        Variable(name, "(hidden)" if name == "NCCLSYNC_SECRET" else value, source, EFFECTS.get(name, ""))
        for name, value, source in shown
    )


def _settings(file: pathlib.Path) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.lstrip().startswith("#"):
                yield name.strip(), value.strip()
