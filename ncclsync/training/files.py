"""Write a file so that it is there whole, or as it was before: also after a crash of the machine."""

import contextlib
import errno
import glob
import os
import pathlib
import secrets
import time
from collections.abc import Iterator

# Errors of file systems that cannot sync a folder, as over some networks, and of folders that may be written but not
# read. Other errors are the disk's.
_NO_SYNC_OF_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
_ABANDONED_S = 3600.0  # a part unchanged for this long was left by a killed process


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yield a new, empty file of the same folder and suffix, to be written; then rename it to `path`.

    Its own name is random, so that it is neither a planted link nor another run's file. The file is flushed to the disk
    before it is renamed, and its folder afterwards: after a crash of the machine `path` has the old content or the new
    content, never a part. If the body raises, the old file stays and the new file is removed.

    Raises:
        OSError: it cannot be written.
    """
    path = pathlib.Path(path)
    part = path.with_name(f"part-{secrets.token_hex(8)}-{path.name}")
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # less the umask; follows no link
    try:
        _remove_abandoned(path)
        yield part
        _sync(part)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is raised
            part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _remove_abandoned(path: pathlib.Path) -> None:
    """Remove the parts beside `path` that killed processes have left."""
    with contextlib.suppress(OSError):  # a folder may be written, not read
        for part in path.parent.glob(f"part-{'[0-9a-f]' * 16}-{glob.escape(path.name)}"):
            if time.time() - part.lstat().st_mtime > _ABANDONED_S:
                part.unlink()


def make_folders(path: str | os.PathLike[str]) -> None:
    """Make a folder and its missing parents; flush the name of each new folder to the disk.

    Raises:
        OSError: it cannot be made, or is a file.
    """
    path = pathlib.Path(path).absolute()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Flush a folder's list of files to the disk, if its file system can do so.

    Raises:
        OSError: the disk's own errors.
    """
    try:
        _sync(path)
    except OSError as error:
        if error.errno not in _NO_SYNC_OF_FOLDERS:
            raise


def _sync(path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
