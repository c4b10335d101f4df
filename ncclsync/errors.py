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
        during: what was under way, e.g. which collective; may be empty.
    """

    def __init__(
        self,
        status: int,
        call: str,
        last_error: str = "",
        status_name: str = "unknown status",
        during: str = "",
    ) -> None:
        self.status = status
        self.call = call
        self.last_error = last_error
        self.status_name = status_name
        self.during = during
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        words = f": {self.last_error}" if self.last_error else ""
        during = f", during {self.during}" if self.during else ""
        return f"{self.call} returned {self.status_name} ({self.status}){words}{during}"

    def within(self, during: str) -> NcclError:
        """Return the same error, with what was under way, if it does not tell that already."""
        return type(self)(self.status, self.call, self.last_error, self.status_name, self.during or during)

    def __reduce__(self):
        """Pickle by the attributes: ``Exception`` would pass the message alone."""
        return type(self), (self.status, self.call, self.last_error, self.status_name, self.during)


class NcclTimeoutError(NcclError):
    """A collective, or the joining of ranks, did not end within ``timeout_s``.

    Attributes:
        during: what did not end: the collective, its running number, its bytes.
        last_error: for how long it was waited, and which ranks had arrived.
    """

    def _sentence(self) -> str:
        return f"Expected {self.during} to end. Received: {self.last_error}"


class NcclPreflightError(NcclError):
    """Every call succeeded, and yet a GPU did not receive what another one sent.

    Attributes:
        last_error: between which ranks, and the usual causes.
    """

    def _sentence(self) -> str:
        return f"Expected each GPU to receive what the others sent it. Received: {self.last_error}"
