"""Find out which GPUs can still be trained on: each alone, then all together."""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence

from ncclsync.compat.host_gpus import VISIBLE
from ncclsync.tools.doctor import probes


def find_gpus(timeout_s: float, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that CUDA shows in an environment, in its order.

    A UUID names the same GPU after another GPU is lost; a number may name a different one.
    """
    return tuple(probes.ask("gpus", timeout_s, environ).facts.get("gpus", ()))


def check_gpus(
    gpus: Sequence[str], timeout_s: float, environ: Mapping[str, str], is_wanted: Callable[[], bool] = lambda: True
) -> dict[str, str]:
    """Try each GPU alone, and then all that pass, by an all-reduce of known numbers.

    If all together fail, the GPU without which they pass is left out; if there is none, all are left out.

    Args:
        gpus: UUIDs of the GPUs of `environ`, by `find_gpus`.
        timeout_s: seconds for each question.
        environ: of the processes that try them.
        is_wanted: whether to go on; after False no more questions are asked, and the result is of no use.

    Returns:
        The reason, by the UUID of each GPU that is left out. The other GPUs can train together.
    """
    if not gpus:
        return {}

    def failure(some: Sequence[str]) -> str:
        """Return why an all-reduce of some GPUs has not passed; "" if it has."""
        if not is_wanted():
            return "not asked"
        shown = {**environ, VISIBLE: ",".join(some)}
        return probes.ask_all_reduce("nccl", range(len(some)), timeout_s, shown).failure

    with concurrent.futures.ThreadPoolExecutor(len(gpus)) as pool:
        tried = zip(gpus, pool.map(lambda gpu: failure([gpu]), gpus), strict=True)
        left_out = {gpu: f"alone: {why}" for gpu, why in tried if why}
    healthy = [gpu for gpu in gpus if gpu not in left_out]
    if len(healthy) < 2 or not (failed := failure(healthy)):
        return left_out
    for gpu in healthy:
        others = [other for other in healthy if other != gpu]
        if len(others) == 1 or not failure(others):
            return {**left_out, gpu: f"all-reduce, which passes without it: {failed}"}
    return {**left_out, **dict.fromkeys(healthy, f"all-reduce, whichever is left out: {failed}")}
