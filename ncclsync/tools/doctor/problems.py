"""Find problems of a host's software, drivers and libraries, given the facts, with remedies.

Each rule is a small generator over `Host`. `hardware` and `environment` have the rules about GPUs and variables.
"""

from collections.abc import Callable, Iterable, Iterator

from ncclsync.tools.doctor import environment, hardware
from ncclsync.tools.doctor.facts import ERROR, WARNING, Host, Problem

OLDEST_TENSORFLOW, OLDEST_KERAS = (2, 20), (3, 10)  # as in pyproject.toml

_EXTENSION = "ncclsync._native"
_REINSTALL_TENSORFLOW = "pip install --force-reinstall 'tensorflow>=2.20'"
_REINSTALL_GPU = "pip install 'ncclsync[cuda]', which brings tensorflow[and-cuda]"


def find_problems(host: Host) -> list[Problem]:
    """Return the problems, errors first, otherwise in the order of the rules."""
    return by_severity([problem for rule in (*_RULES, *hardware.RULES, *environment.RULES) for problem in rule(host)])


def by_severity(problems: Iterable[Problem]) -> list[Problem]:
    """Return problems with the errors first, otherwise in their order."""
    return sorted(problems, key=lambda problem: problem.severity != ERROR)


def summarize(host: Host, problems: tuple[Problem, ...]) -> str:
    """Return the verdict in a sentence or two."""
    gpus = f"{host.gpu_count} GPU{'s' * (host.gpu_count != 1)}" if host.gpu_count else "No GPU"
    errors = sum(problem.severity == ERROR for problem in problems)
    warnings = len(problems) - errors
    counted = ", ".join(
        f"{count} {name}{'s' * (count != 1)}" for count, name in ((errors, ERROR), (warnings, WARNING)) if count
    )
    if errors:
        return f"Training would fail: {counted}. {gpus} on this machine."
    by_nccl = host.choice.backend == "nccl"
    count = len(host.choice.devices)
    library = f"{host.libraries.nccl.path}, which is not NCCL" if host.libraries.is_other_nccl else "NCCL"
    where = f"{count} of them, joined by {library}" if by_nccl else "the CPU, joined by ncclsync"
    unused = ", unused" if host.gpu_count and not by_nccl else ""
    verdict = f"Training would run, with {counted}" if counted else "Healthy"
    return f"{verdict}. {gpus} on this machine{unused}: towers stand on {where}."


def _tensorflow(host: Host) -> Iterator[Problem]:
    found = host.frameworks
    missing = "No module named 'tensorflow'" in found.tensorflow_error
    if missing:
        remedy = _REINSTALL_GPU if host.gpu_count else "pip install 'tensorflow>=2.20'"
        yield Problem("tensorflow-missing", "TensorFlow is not installed in this Python.", remedy, ERROR)
    elif found.tensorflow_error:
        text = f"TensorFlow cannot be imported: {found.tensorflow_error}"
        yield Problem("tensorflow-broken", text, _REINSTALL_TENSORFLOW, ERROR)
    elif found.tensorflow and _below(found.tensorflow, OLDEST_TENSORFLOW):
        text = f"Expected TensorFlow 2.20 or newer. Received: {found.tensorflow}"
        yield Problem("tensorflow-old", text, "pip install --upgrade 'tensorflow>=2.20'", ERROR)


def _keras(host: Host) -> Iterator[Problem]:
    found = host.frameworks
    asked = host.variable("KERAS_BACKEND")
    backend = found.keras_backend or asked
    if "No module named 'keras'" in found.keras_error:
        yield Problem("keras-missing", "Keras is not installed in this Python.", "pip install 'keras>=3.10'", ERROR)
    elif backend is not None and backend != "tensorflow":
        text = f"Expected Keras to run on the TensorFlow backend. Received: {backend!r}"
        if found.keras_error:
            text += f"; importing Keras ends in {found.keras_error}"
        where = "KERAS_BACKEND" if asked else '"backend" in ~/.keras/keras.json'
        yield Problem("keras-backend", text, f"Set {where} to tensorflow.", ERROR)
    elif found.keras_error and not (found.tensorflow_error and "tensorflow" in found.keras_error):
        text = f"Keras cannot be imported: {found.keras_error}"
        yield Problem("keras-broken", text, "pip install --force-reinstall 'keras>=3.10'", ERROR)
    elif found.keras and _below(found.keras, OLDEST_KERAS):
        severity = ERROR if _below(found.keras, (3,)) else WARNING
        text = f"Expected Keras 3.10 or newer. Received: {found.keras}"
        yield Problem("keras-old", text, "pip install --upgrade 'keras>=3.10'", severity)


def _ncclsync(host: Host) -> Iterator[Problem]:
    error = host.frameworks.ncclsync_error
    if _EXTENSION in error or _EXTENSION in (host.libraries.nccl.error or ""):
        yield Problem(
            "extension-missing",
            f"The compiled part of ncclsync cannot be loaded: {error or host.libraries.nccl.error}",
            "Install ncclsync again by pip; without a wheel for this machine that takes a C compiler.",
            ERROR,
        )
    elif error and host.frameworks.keras_backend in ("tensorflow", None) and not host.frameworks.keras_error:
        yield Problem(
            "ncclsync-broken",
            f"ncclsync does not work with this TensorFlow and Keras: {error}",
            "Install the versions that the README names as tested.",
            ERROR,
        )


def apart(words: str) -> Problem:
    """Return the problem that this process cannot be joined with others; the message's last sentence is the remedy."""
    words, _, remedy = words.rpartition(". ")
    return Problem("processes-apart", f"The processes cannot be joined: {words}.", f"{remedy.rstrip('.')}.", ERROR)


def _apart(host: Host) -> Iterator[Problem]:
    if host.frameworks.refused:
        yield apart(host.frameworks.refused)


def _troubles(host: Host) -> Iterator[Problem]:
    remedies = {
        "driver": "Look whether nvidia-smi answers, and into dmesg for Xid errors; restart the machine.",
        "libraries": "Look which library it is by LD_DEBUG=files, and install it again.",
        "frameworks": f"Run python -c 'import tensorflow, keras' to see more; {_REINSTALL_TENSORFLOW}",
    }
    for one in host.troubles:
        severity = ERROR if one.question == "frameworks" else host.severity
        remedy = remedies[one.question]
        if one.stage == "compiling by XLA":
            remedy = "Correct XLA_FLAGS, or unset it."
        words = f": {one.words}" if one.words else ""
        text = f"Expected an answer when {one.stage}. Received: {one.how}{words}"
        yield Problem(f"{one.question}-unanswered", text, remedy, severity)


def _nccl(host: Host) -> Iterator[Problem]:
    nccl, chosen = host.libraries.nccl, host.variable("NCCLSYNC_NCCL_LIBRARY")
    needed = host.choice.backend == "nccl"
    asked_for = host.frameworks.build_nccl
    if nccl.error:
        if _EXTENSION in nccl.error or not (needed or host.gpu_count or chosen):
            return
        if chosen:
            text = f"NCCLSYNC_NCCL_LIBRARY names no usable NCCL: {nccl.error}"
            remedy = "Unset NCCLSYNC_NCCL_LIBRARY, or set it to the file of a libnccl.so.2."
        else:
            text = f"NCCL cannot be loaded: {nccl.error}"
            if "undefined symbol" in nccl.error:
                text = f"NCCL cannot be used, it is too old or broken: {nccl.error}"
            remedy = "pip install --upgrade nvidia-nccl-cu12"
        code = "nccl-old" if "or newer. Received: NCCL" in nccl.error else "nccl-unusable"
        yield Problem(code, text, remedy, host.severity)
    elif host.libraries.is_other_nccl:
        if needed or chosen:
            text = f"Expected NCCL. Received: {nccl.path}, another library with its calls, version {nccl.version}."
            remedy = "Unset NCCLSYNC_NCCL_LIBRARY." if chosen else "pip install nvidia-nccl-cu12"
            yield Problem("nccl-other", text, remedy)
    elif nccl.version and asked_for and _below(nccl.version, _numbers(asked_for)):
        text = (
            f"NCCL {nccl.version} from {nccl.path} is older than {asked_for}, "
            "the oldest that this TensorFlow's package asks for."
        )
        yield Problem("nccl-older-than-tensorflow", text, _newer_nccl(host))


def _nccl_twice(host: Host) -> Iterator[Problem]:
    copies, packages = [copy for copy in host.libraries.nccl_copies if copy.cuda], host.libraries.nccl_packages
    if len(copies) > 1:
        listed = "; ".join(f"{copy.version or 'of unknown version'} in {copy.path}" for copy in copies)
        taken = host.libraries.nccl.path or "none of them"
        yield Problem(
            "nccl-twice",
            f"NCCL is there {len(copies)} times: {listed}. ncclsync takes {taken}; "
            "TensorFlow or another library may load another one into the same process.",
            "Remove all but one, or set NCCLSYNC_NCCL_LIBRARY to the one that TensorFlow loads.",
        )
    if len(packages) > 1:
        yield Problem(
            "nccl-packages",
            f"These packages write the same file, nvidia/nccl/lib/libnccl.so.2: {', '.join(packages)}. "
            "The one installed last has won.",
            "Uninstall them all, then pip install --force-reinstall nvidia-nccl-cu12.",
        )


def _driver_age(host: Host) -> Iterator[Problem]:
    """Find a driver that is too old: it serves programs of its own CUDA major version and of older ones.

    Source: CUDA compatibility, https://docs.nvidia.com/deploy/cuda-compatibility/
    """
    serves = host.driver.cuda or host.libraries.driver_cuda
    if serves is None:
        return
    driver = f"driver {host.driver.version or host.kernel_driver or 'of unknown version'}"
    for library, code, built_with in (
        ("NCCL", "driver-older-than-nccl", host.libraries.nccl.cuda),
        ("TensorFlow", "driver-older-than-tensorflow", host.frameworks.build_cuda),
    ):
        if built_with is None or not _below(serves, _numbers(built_with)[:2]):
            continue
        text = f"The {driver} serves CUDA up to {serves}, and {library} was built with CUDA {built_with}."
        remedy = f"Update the driver to one that serves CUDA {built_with}"
        if _below(serves, _numbers(built_with)[:1]):
            text += " It fails with 'CUDA driver version is insufficient for CUDA runtime version'."
            remedy += f", or install {library} for CUDA {serves.split('.')[0]}" if library == "NCCL" else ""
            yield Problem(code, text, f"{remedy}.", host.severity)
        elif library == "NCCL":
            text += " The same major version: it runs, but not on GPUs newer than the driver."
            yield Problem(code, text, f"{remedy} if anything fails.")


def _cuda_runtime(host: Host) -> Iterator[Problem]:
    chosen, runtime = host.variable("NCCLSYNC_CUDART_LIBRARY"), host.libraries.cuda_runtime
    needed = host.choice.backend == "nccl"
    if runtime.error and (chosen or needed):
        remedy = "Unset NCCLSYNC_CUDART_LIBRARY." if chosen else "pip install nvidia-cuda-runtime-cu12"
        text = f"CUDA's runtime cannot be loaded: {runtime.error}"
        yield Problem("cuda-runtime-unusable", text, remedy, host.severity)


def _all_reduce(host: Host) -> Iterator[Problem]:
    found = host.all_reduce
    if found is None or found.ok:
        return
    libraries = host.libraries
    unloaded = libraries.nccl.error or libraries.cuda_runtime.error
    if found.kind == "raised" and unloaded and (found.backend == "nccl" or _EXTENSION in found.error):
        return  # shown already
    what = f"all-reduce of {found.ranks} ranks by the {found.backend} backend"
    by_nccl = found.backend == "nccl"
    why = "Run it with NCCL_DEBUG=INFO to see why." if by_nccl else ""
    log = f" NCCL: {found.log[-1]}" if found.log else ""
    said = found.error.rstrip(".")
    peers = (
        "Try NCCL_P2P_DISABLE=1: if that helps, turn off the IOMMU or ACS in the firmware, "
        "which break direct transfers between GPUs."
    )
    again = "Install ncclsync again by pip, and check the machine's memory." if not by_nccl else ""
    problem = {
        "wrong": (f"The known-answer {what} gave wrong numbers: {said}.", peers if by_nccl else again),
        "hang": (f"The {what} hangs: {said}.{log}", f"{peers} {why}" if by_nccl else again),
        "crash": (f"The {what} ends its process: {said}.{log}", f"{why}{again}"),
        "raised": (f"The {what} fails: {said}.{log}", f"{why}{again}"),
    }[found.kind]
    yield Problem(f"all-reduce-{found.kind}", *problem, severity=ERROR)


def _newer_nccl(host: Host) -> str:
    if host.variable("NCCLSYNC_NCCL_LIBRARY"):
        return "Unset NCCLSYNC_NCCL_LIBRARY, or set it to a newer libnccl.so.2."
    return "pip install --upgrade nvidia-nccl-cu12"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers: (2, 20, 0) of "2.20.0-rc1"."""
    found = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)


def _below(version: str, least: tuple[int, ...]) -> bool:
    return _numbers(version)[: len(least)] < least


_RULES: tuple[Callable[[Host], Iterator[Problem]], ...] = (
    _tensorflow,
    _keras,
    _ncclsync,
    _apart,
    _troubles,
    _nccl,
    _nccl_twice,
    _driver_age,
    _cuda_runtime,
    _all_reduce,
)
