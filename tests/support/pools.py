"""Worker pools of a test's own, in place of the one that the process' communicators share."""

import contextlib
import itertools
from collections.abc import Iterator

from ncclsync.communicator import native
from ncclsync.communicator.native import ffi, lib
from ncclsync.errors import NcclError


@contextlib.contextmanager
def pool(threads: int, instruction_set: int = lib.NCS_INSTRUCTION_SET_BEST) -> Iterator[None]:
    """Let communicators run on so many threads, with these instructions. Raises NcclError if there is no such pool."""
    handle = ffi.new("ncs_pool**")
    native.check(lib.ncs_pool_create(threads, instruction_set, handle), "ncs_pool_create")
    before, native._process_pool = native._process_pool, handle[0]
    try:
        yield
    finally:
        native._process_pool = before
        native.check(lib.ncs_pool_destroy(handle[0]), "ncs_pool_destroy")


def instruction_sets() -> range:
    """Return what the C library can use on this machine, the best last."""
    for best in itertools.count():
        try:
            with pool(1, best):
                pass
        except NcclError:
            return range(best)
