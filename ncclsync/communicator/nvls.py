"""Turn NVLS off in NCCL where sums must be repeatable: equal bits in every call and every run.

NVLS lets the NVSwitch add up, in an order that differs from call to call (NVIDIA/nccl#1497). NCCL reads
``NCCL_NVLS_ENABLE`` once per process, when it makes its first communicator. ``NCCL_ALGO=^NVLS`` would replace the
user's own value; NCCL_NVLS_ENABLE=0 goes with any NCCL_ALGO that allows another algorithm.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable

VARIABLE = "NCCL_NVLS_ENABLE"

logger = logging.getLogger("ncclsync")

# The value that NCCL has read for the whole process, with its first communicator; [] before.
_read: list[str | None] = []


@dataclasses.dataclass(frozen=True)
class Nvls:
    """Say whether NCCL may use NVLS in communicators that are made now."""

    allowed: bool  # it does only where the GPUs and the NVSwitch can
    reason: str  # why, as a clause
    variable: str | None = None  # "NAME=value" of the variable that asks for NVLS although sums must be repeatable


def in_force(variable: Callable[[str], str | None], repeatable: bool) -> Nvls:
    """Return whether NCCL may use NVLS, where sums must be repeatable or need not.

    `variable` returns the value of an environment variable, None if it is not set.
    """
    enabled, algorithms = variable(VARIABLE), variable("NCCL_ALGO")
    if enabled and not _number(enabled):
        return Nvls(False, f"{VARIABLE}={enabled} is set")
    asked = f"{VARIABLE}={enabled}" if enabled else f"NCCL_ALGO={algorithms}" if _names_nvls(algorithms or "") else None
    if not repeatable:
        return Nvls(True, f"{asked} is set" if asked else "op determinism is off")
    if asked:
        return Nvls(True, f"{asked} is set, although op determinism is on", asked)
    return Nvls(False, "op determinism is on")


def apply(repeatable: bool) -> None:
    """Turn NVLS off for this and all later communicators of the process, if sums must be repeatable.

    A variable that the user has set stays; if it asks for NVLS, a warning names it.
    """
    if repeatable:
        found = in_force(os.environ.get, repeatable)
        if found.variable is not None:
            _warn(
                f"Sums of NCCL's may differ in their last bits from run to run: {found.variable} asks for NVLS, "
                "although op determinism is on. Unset it, and NVLS is kept out"
            )
        elif _read and (not _read[0] or _number(_read[0])):
            _warn(
                "Sums of NCCL's may differ in their last bits from run to run: NCCL has made a communicator in this "
                "process before op determinism was on, and keeps NVLS as it was. Call "
                "tf.config.experimental.enable_op_determinism() before the first model on towers is made"
            )
        elif not os.environ.get(VARIABLE):
            os.environ[VARIABLE] = "0"
            logger.info(
                "NVLS is kept out of NCCL's communicators (%s=0), since op determinism is on and NVLS adds up in "
                "another order at each call",
                VARIABLE,
            )
    if not _read:
        _read.append(os.environ.get(VARIABLE))


@functools.cache  # once per process
def _warn(message: str) -> None:
    logger.warning("%s", message)


def _number(value: str) -> int:
    """Return the number that NCCL reads; its default, 2, if the text is not a number."""
    try:
        return int(value, 0)
    except ValueError:
        return 2


def _names_nvls(algorithms: str) -> bool:
    """Return whether a value of NCCL_ALGO, such as "ring,nvls;broadcast:^tree", asks for NVLS by its name."""
    lists = [entry.rpartition(":")[2].strip().lower() for entry in algorithms.split(";")]
    return any("nvls" in one and not one.startswith("^") for one in lists)
