"""`files`: what replaces a file is whole and on the disk before it has the name."""

import errno
import os

import pytest

from ncclsync.training import files


def test_replaced(tmp_path, disk_events):
    """By what was written, which is flushed first; the name is flushed behind it."""
    path = tmp_path / "model.keras"
    path.write_text("old")
    with files.replacing(path) as part:
        assert (part.parent, part.suffix) == (tmp_path, ".keras")
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]
    name = f"part-{path.name}"
    assert disk_events == [("fsync", name), ("replace", name), ("fsync", tmp_path.name)]


def fail(*_, **__):
    raise OSError(errno.EIO, "of the disk")


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_the_old_file_stays(step, tmp_path, monkeypatch):
    """Whatever fails, by its own error; nothing is left beside it."""
    path = tmp_path / "model.keras"
    path.write_text("old")
    if step != "write":
        monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="of the disk"), files.replacing(path) as part:
        part.write_text("half")
        if step == "write":
            fail()
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_folders_that_cannot_be_flushed(tmp_path, monkeypatch):
    """Some file systems cannot; a disk that fails is an error."""
    answers = {}

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(answers["errno"], "of the disk")

    monkeypatch.setattr(os, "fsync", fsync)
    answers["errno"] = errno.EINVAL
    with files.replacing(tmp_path / "a") as part:
        part.touch()
    answers["errno"] = errno.EIO
    with pytest.raises(OSError, match="of the disk"):
        files.sync_folder(tmp_path)


def test_new_folders(tmp_path, disk_events):
    """The name of each is flushed; of one that is there, nothing."""
    files.make_folders(tmp_path / "a" / "b")
    files.make_folders(tmp_path / "a")
    assert (tmp_path / "a" / "b").is_dir()
    assert disk_events == [("fsync", "a"), ("fsync", tmp_path.name)]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        files.make_folders(tmp_path / "file")
