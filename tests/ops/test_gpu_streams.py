"""How exchanges get to know TensorFlow's streams; that they use them is seen on virtual GPUs."""

import logging
import os
import pathlib
import subprocess

import pytest

from ncclsync import NcclSyncError
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import cpp, gpu_streams


@pytest.fixture(autouse=True)
def forgotten(monkeypatch, tmp_path):
    """What was found is forgotten before and after, and nothing is kept in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(gpu_streams.VARIABLE, raising=False)
    gpu_streams.missing.cache_clear()
    yield
    gpu_streams.missing.cache_clear()


@pytest.mark.slow
def test_compiles_once_for_the_installed_tensorflow(tmp_path, caplog, monkeypatch):
    """It loads; the next process finds it compiled, without a compiler."""
    with caplog.at_level(logging.INFO, "ncclsync"):
        assert not gpu_streams.missing()
        assert [path.suffix for path in (tmp_path / "ncclsync").iterdir()] == [".so"]
        gpu_streams.missing.cache_clear()
        monkeypatch.setenv("PATH", "")
        assert not gpu_streams.missing()
    assert caplog.text.count("the stream that TensorFlow computes on") == 2


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, "there is no C++ compiler"),
        (
            subprocess.CalledProcessError(1, ["/usr/bin/c++"], stderr="x\nfatal error: no header\n"),
            "c++ says fatal error",
        ),
        (subprocess.TimeoutExpired("c++", 300), "timed out after 300 seconds"),
    ],
)
def test_what_cannot_be_compiled_is_said_once(monkeypatch, caplog, error, words):
    """Exchanges go on without it."""

    def run(*_, **__):
        raise error

    if error is None:
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setattr(subprocess, "run", run)
    with caplog.at_level(logging.INFO, "ncclsync"):
        assert gpu_streams.missing()
        assert gpu_streams.missing()
    assert caplog.text.count("wait for all streams of their GPUs") == 1 and words in caplog.text


def test_what_does_not_load_is_compiled_once_more(monkeypatch, caplog, tmp_path):
    """Such as a kept file that was cut off; if that is no library either, it is said."""
    made = []

    def run(command, **_):
        pathlib.Path(command[-1]).write_bytes(b"\x7fELF")
        made.append(command)

    monkeypatch.setattr(subprocess, "run", run)
    with caplog.at_level(logging.INFO, "ncclsync"):
        assert gpu_streams.missing()
        assert len(made) == 1 and "gpu_stream-" in caplog.text
        cpp.compiled("gpu_stream", tf_compat.GPU_STREAM_SOURCE, tmp_path / "ncclsync")  # as another machine has left it
        gpu_streams.missing.cache_clear()
        assert gpu_streams.missing()
    assert len(made) == 3


def test_no_home_and_another_users_folder(monkeypatch, caplog, tmp_path):
    """Are no reason not to train."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.Path, "home", home)
    with caplog.at_level(logging.INFO, "ncclsync"):
        assert gpu_streams.missing()
        gpu_streams.missing.cache_clear()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        (tmp_path / "ncclsync").mkdir()
        os.chown(tmp_path / "ncclsync", 54321, -1) if os.geteuid() == 0 else None
        assert gpu_streams.missing()
    assert "Could not determine home" in caplog.text and "is another user's" in caplog.text


def test_choice_by_environment(monkeypatch, caplog):
    """`context` compiles nothing; another word is refused."""
    monkeypatch.setenv(gpu_streams.VARIABLE, "context")
    monkeypatch.setattr(cpp, "compiled", None)
    with caplog.at_level(logging.INFO, "ncclsync"):
        assert gpu_streams.missing()
    assert "NCCLSYNC_GPU_EVENTS=context" in caplog.text
    gpu_streams.missing.cache_clear()
    monkeypatch.setenv(gpu_streams.VARIABLE, "events")
    with pytest.raises(NcclSyncError, match=r"NCCLSYNC_GPU_EVENTS to be stream or context\. Received: events"):
        gpu_streams.missing()
