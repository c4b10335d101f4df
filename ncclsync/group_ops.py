"""Collectives between the tensors of all towers in one graph: py ops over a communicator."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import Communicator, NcclCommunicator, empty_aligned
from ncclsync.errors import NcclSyncError


def group_all_reduce(
    tensors: Sequence[tf.Tensor], communicator: Communicator, op: str = "sum", label: str = ""
) -> list[tf.Tensor]:
    """Reduce one tensor per tower, in a graph, by py ops that wait for nothing but their inputs.

    Args:
        tensors: [N] tensors of one shape and dtype, tensor i on tower i's device.
        communicator: of N ranks.
        op: "sum", "prod", "max", "min" or "avg".
        label: what it is, for NCCL's messages, such as "bucket 2 of 5".

    Returns:
        [N] tensors on the same devices. Towers that share the host's memory get the same one.
    """
    borrowed = weakref.ref(communicator)  # TensorFlow keeps every py op's function for good
    if isinstance(communicator, NcclCommunicator):

        def reduce_on_devices(sends, recvs):
            _alive(borrowed).all_reduce(sends, recvs, op, label=label)

        return _group_on_devices(tensors, reduce_on_devices)

    def reduce_on_host(*sends):
        result = empty_aligned(sends[0].shape, sends[0].dtype)
        _alive(borrowed).all_reduce(sends, [result] * len(sends), op)
        return result

    # Stateless, so that automatic control dependencies do not chain it with unrelated ops. It cannot be
    # merged with another call: every py op carries a token of its own.
    with tf.device("/CPU:0"):
        result = tf.numpy_function(reduce_on_host, list(tensors), tensors[0].dtype, stateful=False)
    result.set_shape(tensors[0].shape)
    return [result] * len(tensors)


def group_broadcast(
    tensors: Sequence[tf.Tensor], communicator: Communicator, root: int = 0, label: str = ""
) -> list[tf.Tensor]:
    """Give every tower tensor `root` of one tensor per tower, in a graph; as `group_all_reduce`."""
    borrowed = weakref.ref(communicator)
    if isinstance(communicator, NcclCommunicator):

        def broadcast_on_devices(sends, recvs):
            _alive(borrowed).broadcast(
                [s if i == root else r for i, (s, r) in enumerate(zip(sends, recvs, strict=True))],
                root,
                label=label,
            )

        received = _group_on_devices(tensors, broadcast_on_devices)
        return [t if i == root else r for i, (t, r) in enumerate(zip(tensors, received, strict=True))]

    def broadcast_on_host(send):
        buffers = [empty_aligned(send.shape, send.dtype) for _ in tensors]
        buffers[root] = send
        _alive(borrowed).broadcast(buffers, root)
        return [buffer for i, buffer in enumerate(buffers) if i != root]

    if len(tensors) == 1:
        return list(tensors)
    sent = tensors[root]
    with tf.device("/CPU:0"):
        received = tf.numpy_function(
            broadcast_on_host, [sent], [sent.dtype] * (len(tensors) - 1), stateful=False
        )
    for tensor in received:
        tensor.set_shape(sent.shape)
    return [*received[:root], sent, *received[root:]]


def _alive(borrowed: "weakref.ref[Communicator]") -> Communicator:
    communicator = borrowed()
    if communicator is None:
        raise NcclSyncError("Expected an open communicator. Received: one that was deleted.")
    return communicator


def _group_on_devices(
    tensors: Sequence[tf.Tensor], collective: Callable[[list[Any], list[Any]], None]
) -> list[tf.Tensor]:
    """Run a collective over tensors that stay in their devices' memory.

    One py op takes all its inputs on one device, so three kinds of op share the work, and none of them
    waits for another: per tower an op that takes the input and allocates the output; one op on the host
    that runs the group; per tower an op that hands the output out. The tokens between them are what makes
    the order right: copying a tower's token to the host waits for that tower's compute stream, behind which
    its input is ready and its output's memory is free. The group blocks until it is complete.
    """
    count = len(tensors)
    rounds: dict[int, list] = {}
    lock = threading.Lock()

    def take(index):
        def stage(tensor):
            # The same op may run again (steps_per_execution) only after its outputs were handed out.
            output = tf.raw_ops.Empty(shape=tf.shape(tensor), dtype=tensor.dtype, init=False)
            with lock:
                rounds[index] = [tensor, output]
            return tf.zeros([], tf.float32)

        return stage

    def run_group(*_tokens):
        with lock:
            pairs = [rounds[i] for i in range(count)]
        try:
            collective([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        except BaseException:
            with lock:
                rounds.clear()  # nobody will fetch them: their memory is for the next attempt
            raise
        return tf.zeros([], tf.float32)

    def hand_out(index):
        def stage(_token):
            with lock:
                return rounds.pop(index)[1]

        return stage

    tokens = []
    for i, tensor in enumerate(tensors):
        with tf.device(tensor.device):
            tokens.append(tf.py_function(take(i), [tensor], tf.float32))
    with tf.device("/CPU:0"):
        done = tf.py_function(run_group, tokens, tf.float32)
    results = []
    for i, tensor in enumerate(tensors):
        with tf.device(tensor.device):
            result = tf.py_function(hand_out(i), [done], tensor.dtype)
        result.set_shape(tensor.shape)
        results.append(result)
    return results
