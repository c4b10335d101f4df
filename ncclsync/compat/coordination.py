"""Wrap TensorFlow's coordination service: keys and values of several processes, and which of them are alive.

TensorFlow offers it to its own strategies alone. They put it into the one context that all tensors of a process live
in: before the first tensor, and every device then has a job in its name. Here it is in a context of its own, which has
no GPU and runs no op. The program's context may exist already, and stays as it is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.core.protobuf import config_pb2, tensorflow_server_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import c_api_util

from ncclsync.errors import NcclSyncError

_JOB = "worker"
_LATE_S = 5.0  # that the service may take to say who has not come


class CoordinationService:
    """Join processes by TensorFlow's coordination service, which process 0 runs.

    It lasts as long as the process: a context that is freed while a thread waits in it takes the process with it.
    """

    def __init__(self, address: str, rank: int, size: int, *, join_s: float, heartbeat_s: float) -> None:
        """Join the others. Collective; Ctrl-C ends it.

        Args:
            address: "host:port", where process 0 listens.
            rank: this process' number.
            size: how many there are.
            join_s: how long to wait for the others.
            heartbeat_s: silence after which a process counts as dead.

        Raises:
            NcclSyncError: they have not come, or the port is taken.
        """
        config = config_pb2.ConfigProto(device_count={"CPU": 1, "GPU": 0})
        service = config.experimental.coordination_config
        service.service_type, service.service_leader = "standalone", f"/job:{_JOB}/replica:0/task:0"
        service.enable_health_check = True
        service.cluster_register_timeout_in_ms = round(1000 * join_s)
        service.heartbeat_timeout_in_ms = round(1000 * heartbeat_s)
        service.agent_destruction_without_shutdown = True
        service.coordinated_job_list.append(coordination_config_pb2.CoordinatedJob(name=_JOB, num_tasks=size))
        service.recoverable_jobs.append(_JOB)  # whoever dies is told of when asked for, and not logged
        server = tensorflow_server_pb2.ServerDef(protocol="grpc", job_name=_JOB, task_index=rank)
        server.default_session_config.CopyFrom(config)
        tasks = server.cluster.job.add(name=_JOB).tasks
        for i in range(size):
            tasks[i] = address if i == 0 else "localhost:0"  # nobody calls these: any free port
        self._size = size
        options = pywrap_tfe.TFE_NewContextOptions()
        try:
            pywrap_tfe.TFE_ContextOptionsSetConfig(options, config.SerializeToString())
            self._context = pywrap_tfe.TFE_NewContext(options)
        finally:
            pywrap_tfe.TFE_DeleteContextOptions(options)
        _kept.append(self)
        failed = _enable(self._context, server.SerializeToString(), join_s + _LATE_S)
        if failed:
            raise NcclSyncError(
                f"Expected {size} processes to meet at {address}, within {join_s:g} s. Received: {failed}. Check that "
                "all of them were started, that process 0's host is reached by that name, and that the port is free "
                "there"
            )

    def put(self, key: str, value: str) -> bool:
        """Give all processes a value; return False if the key has one already.

        Raises:
            NcclSyncError: process 0 is not reached.
        """
        try:
            pywrap_tfe.TFE_InsertConfigKeyValue(self._context, key, value)
        except tf.errors.AlreadyExistsError:
            return False
        except tf.errors.OpError as error:
            raise NcclSyncError(error.message.splitlines()[0]) from None
        return True

    def get(self, key: str, wait_s: float) -> str | None:
        """Return a key's value as soon as there is one; None if there is none for so many seconds.

        One that is given up stays in process 0's memory.

        Raises:
            NcclSyncError: process 0 is not reached.
        """
        try:
            with c_api_util.tf_buffer() as buffer:
                pywrap_tfe.TFE_GetConfigKeyValue(self._context, key, round(1000 * wait_s), buffer)
                return pywrap_tf_session.TF_GetBuffer(buffer).decode()
        except tf.errors.DeadlineExceededError:
            return None
        except tf.errors.OpError as error:
            raise NcclSyncError(error.message.splitlines()[0]) from None

    def delete(self, key: str) -> None:
        """Forget a key."""
        pywrap_tfe.TFE_DeleteConfigKeyValue(self._context, key)

    def alive(self) -> list[bool]:
        """Return [size] whether each process' heartbeat is heard by process 0.

        No other thread runs Python meanwhile; where process 0 is stopped that has no end.

        Raises:
            NcclSyncError: process 0 is not reached.
        """
        try:
            states = pywrap_tfe.TFE_GetTaskStates(self._context, [_JOB], [self._size])
        except tf.errors.OpError as error:
            raise NcclSyncError(error.message.splitlines()[0]) from None
        return [state is None for state in states]


_kept: list[CoordinationService] = []


def _enable(context: Any, server: bytes, limit_s: float) -> str:
    """Call TFE_EnableCollectiveOps in a thread of its own; return the words of its failure, "" if there is none.

    TensorFlow's own wrapper lets no Python run meanwhile, and process 0 waits for the others without a limit. The call
    also takes SIGTERM for itself, as a notice of preemption that nobody here reads: it is given back.
    """
    library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2"))
    library.TF_NewStatus.restype = library.TF_Message.restype = ctypes.c_void_p
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    status, handle = ctypes.c_void_p(library.TF_NewStatus()), ctypes.c_void_p(pointer(context, None))
    arguments = handle, server, ctypes.c_size_t(len(server)), status
    before = signal.getsignal(signal.SIGTERM)
    gives_back = before is not None and threading.current_thread() is threading.main_thread()
    thread = threading.Thread(target=library.TFE_EnableCollectiveOps, args=arguments, daemon=True)
    thread.start()
    until = time.monotonic() + limit_s
    while thread.is_alive() and time.monotonic() < until:
        thread.join(0.1)
        if gives_back:
            signal.signal(signal.SIGTERM, before)
    if thread.is_alive():
        return "not all of them"
    if library.TF_GetCode(status) == 0:
        return ""
    words = ctypes.string_at(library.TF_Message(status)).decode(errors="replace")
    return words.splitlines()[0].rstrip(".") if words else "an error"
