"""`files`: what replaces a file is whole and on the disk before it has the name."""

import errno
import os
import stat
import time

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


def test_a_link_is_not_followed(tmp_path):
    """Of the name that parts had, nor of the file's own: what it leads to stays."""
    other, path = tmp_path / "other", tmp_path / "model.keras"
    other.write_text("somebody's")
    for name in (f"part-{path.name}", path.name):
        (tmp_path / name).symlink_to(other)
    with files.replacing(path) as part:
        part.write_text("new")
    assert other.read_text() == "somebody's"
    assert path.read_text() == "new" and not path.is_symlink()


def test_two_runs_at_once(tmp_path):
    """Each writes a file of its own; whoever ends last has the name, and what it wrote is whole."""
    path = tmp_path / "model.keras"
    with files.replacing(path) as first:
        first.write_text("first")
        with files.replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second" and first.read_text() == "first"
    assert path.read_text() == "first" and [*tmp_path.iterdir()] == [path]


def test_what_a_kill_has_left_is_removed(tmp_path):
    """If nobody can still be writing it; and nothing else. A file has the rights that its owner's umask leaves."""
    path = tmp_path / "model.keras"
    left = [f"part-{'0' * 16}-model.keras", f"part-{'1' * 16}-model.keras"]
    others = [f"part-{'0' * 16}-other.keras", "part-1-model.keras", "model.keras.old"]
    for name in (*left, *others):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - 7200,) * 2)
    os.utime(tmp_path / left[1])
    with files.replacing(path) as part:
        part.write_text("new")
    assert {file.name for file in tmp_path.iterdir()} == {left[1], *others, path.name}
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


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
