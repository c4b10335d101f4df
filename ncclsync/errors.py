"""The exceptions of ncclsync. Bad arguments are ``ValueError`` and ``TypeError`` as everywhere."""

from __future__ import annotations


class NcclSyncError(Exception):
    """Root of every error that is ncclsync's own."""


class NcclUnavailableError(NcclSyncError):
    """NCCL cannot be used on this machine: no library, no driver or no GPU."""


class NcclError(NcclSyncError):
    """A native call returned something else than ``ncclSuccess``.

    Attributes:
        status: the status as a number, e.g. 1.
        call: the call that failed, e.g. ``"ncclCommInitAll"``.
        last_error: NCCL's (or CUDA's, or the loader's) own words; may be empty.
        status_name: the status' name in ``nccl.h``, e.g. ``"ncclUnhandledCudaError"``.
    """

    def __init__(
        self, status: int, call: str, last_error: str = "", status_name: str = "unknown status"
    ) -> None:
        self.status = status
        self.call = call
        self.last_error = last_error
        self.status_name = status_name
        words = f": {last_error}" if last_error else ""
        super().__init__(f"{call} returned {status_name} ({status}){words}")

    def __reduce__(self):
        """Pickle by the attributes: ``Exception`` would pass the message alone."""
        return type(self), (self.status, self.call, self.last_error, self.status_name)
