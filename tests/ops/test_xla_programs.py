"""Which devices share what XLA compiles; that their programs are right is seen in `towers/` and `virtual_gpus/`."""

import logging
import subprocess

import pytest
import tensorflow as tf

from ncclsync import NcclSyncError
from ncclsync.ops import cpp, xla_programs


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What was decided is forgotten before and after."""
    monkeypatch.delenv(xla_programs.VARIABLE, raising=False)
    xla_programs.share_programs.cache_clear()
    yield
    xla_programs.share_programs.cache_clear()


def kinds_of(kinds, monkeypatch):
    """Let device i be of kind `kinds[i]`; return the pairs that were joined, by numbers."""
    joined = []

    def call(_, *names):
        first, other = (int(name[-1:]) for name in names)
        if kinds[first] != kinds[other]:
            return 2
        joined.append((first, other))
        return 4 if kinds[other] == "used" else 0

    monkeypatch.setattr(cpp, "load", lambda *_: call)
    return joined


def test_devices_of_a_kind_share(monkeypatch, caplog):
    """The first of each kind gives; one without an equal has its own, and so does one that has compiled before."""
    devices = tuple(f"CPU:{i}" for i in range(4))
    joined = kinds_of("ABAB", monkeypatch)
    with caplog.at_level(logging.INFO, "ncclsync"):
        assert not xla_programs.share_programs(devices)
        assert joined == [(0, 2), (1, 3)]
        assert "XLA compiles for each device by itself: CPU:1: it is of another kind" in caplog.text
        xla_programs.share_programs.cache_clear()
        joined = kinds_of(["used"] * 2, monkeypatch)
        assert not xla_programs.share_programs(devices[:2])
        assert "CPU:1: it had compiled something before" in caplog.text
        xla_programs.share_programs.cache_clear()
        kinds_of("AAAA", monkeypatch)
        assert xla_programs.share_programs(devices)
    assert "XLA compiles once for CPU:0, CPU:1, CPU:2, CPU:3" in caplog.text
    assert xla_programs.share_programs(("CPU:0",))


def test_without_a_compiler_each_device_compiles(monkeypatch, caplog, tmp_path):
    """What cannot be had is said once; a device that is not there, and what XLA says, are no error either."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.INFO, "ncclsync"):
        for _ in range(2):
            assert not xla_programs.share_programs(("CPU:0", "CPU:1"))
        monkeypatch.setattr(subprocess, "run", None)
        assert not xla_programs.share_programs(("CPU:77", "CPU:78"))
        monkeypatch.setattr(cpp, "load", lambda *_: lambda *_: 0)

        def fails():
            raise tf.errors.InternalError(None, None, "XLA is not there")

        monkeypatch.setattr(xla_programs, "_compiles", fails)
        assert not xla_programs.share_programs(("CPU:0", "CPU:1", "CPU:2"))
    assert caplog.text.count("there is no C++ compiler") == 2 and "XLA is not there" in caplog.text


def test_choice_by_environment(monkeypatch, caplog):
    """`own` compiles nothing; another word is refused."""
    monkeypatch.setenv(xla_programs.VARIABLE, "own")
    monkeypatch.setattr(cpp, "load", None)
    with caplog.at_level(logging.INFO, "ncclsync"):
        assert not xla_programs.share_programs(("CPU:0", "CPU:1"))
    assert "NCCLSYNC_XLA_PROGRAMS=own" in caplog.text
    xla_programs.share_programs.cache_clear()
    monkeypatch.setenv(xla_programs.VARIABLE, "each")
    with pytest.raises(NcclSyncError, match=r"NCCLSYNC_XLA_PROGRAMS to be shared or own\. Received: each"):
        xla_programs.share_programs(("CPU:0", "CPU:1"))
