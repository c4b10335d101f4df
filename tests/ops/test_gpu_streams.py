"""How exchanges get to know TensorFlow's streams; that they use them is seen on virtual GPUs."""

import logging
import pathlib
import subprocess

import pytest

from ncclsync import NcclSyncError
from ncclsync.ops import gpu_streams


@pytest.fixture(autouse=True)
def forgotten(monkeypatch, tmp_path):
    """What was found is forgotten before and after, and nothing is kept in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(gpu_streams.VARIABLE, raising=False)
    gpu_streams.find.cache_clear()
    yield
    gpu_streams.find.cache_clear()


@pytest.mark.slow
def test_compiles_once_for_the_installed_tensorflow(tmp_path, caplog, monkeypatch):
    """It loads; the next process finds it compiled, without a compiler."""
    with caplog.at_level(logging.INFO, "ncclsync"):
        assert gpu_streams.find()
        assert [path.suffix for path in (tmp_path / "ncclsync").iterdir()] == [".so"]
        gpu_streams.find.cache_clear()
        monkeypatch.setenv("PATH", "")
        assert gpu_streams.find()
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
        assert not gpu_streams.find()
        assert not gpu_streams.find()
    assert caplog.text.count("wait for all streams of their GPUs") == 1 and words in caplog.text


def test_what_is_no_library_is_said(monkeypatch, caplog, tmp_path):
    """Such as a file that was cut off."""
    broken = pathlib.Path(tmp_path, "broken.so")
    broken.write_bytes(b"\x7fELF")
    monkeypatch.setattr(gpu_streams, "compiled", lambda _: broken)
    with caplog.at_level(logging.INFO, "ncclsync"):
        assert not gpu_streams.find()
    assert "broken.so" in caplog.text


def test_choice_by_environment(monkeypatch, caplog):
    """`context` compiles nothing; another word is refused."""
    monkeypatch.setenv(gpu_streams.VARIABLE, "context")
    monkeypatch.setattr(gpu_streams, "compiled", None)
    with caplog.at_level(logging.INFO, "ncclsync"):
        assert not gpu_streams.find()
    assert "NCCLSYNC_GPU_EVENTS=context" in caplog.text
    gpu_streams.find.cache_clear()
    monkeypatch.setenv(gpu_streams.VARIABLE, "events")
    with pytest.raises(NcclSyncError, match=r"NCCLSYNC_GPU_EVENTS to be stream or context\. Received: events"):
        gpu_streams.find()
