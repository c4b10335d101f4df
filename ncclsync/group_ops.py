"""Collectives between the tensors of all towers in one graph: py ops over a communicator."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import AllReduce, Communicator, NcclCommunicator, empty_aligned
from ncclsync.errors import NcclSyncError


def group_exchange(
    columns: Sequence[Sequence[tf.Tensor]],
    communicator: Communicator,
    ops: Sequence[str],
    labels: Sequence[str],
) -> list[list[tf.Tensor]]:
    """Reduce B tensors of each tower, in a graph, by py ops that wait for nothing but their inputs.

    Args:
        columns: [B][N] tensors; those of one column of one shape and dtype, tensor i on tower i's device.
        communicator: of N ranks. NCCL's runs all columns as one group.
        ops: [B] "sum", "prod", "max", "min" or "avg".
        labels: [B] what each column is, for NCCL's messages, such as "bucket 2 of 5".

    Returns:
        [B][N] tensors on the same devices. Towers that share the host's memory get the same one.
    """
    if not columns:
        return []
    if not isinstance(communicator, NcclCommunicator):
        pairs = zip(columns, ops, strict=True)
        return [_reduce_on_host(column, communicator, op) for column, op in pairs]
    # TensorFlow keeps every py op's function for good.
    borrowed: weakref.ref[Communicator] = weakref.ref(communicator)

    def reduce_on_devices(sends, recvs):
        rows = zip(sends, recvs, ops, labels, strict=True)
        _alive(borrowed).run_group([AllReduce(*row) for row in rows])

    return _group_on_devices(columns, reduce_on_devices)


def group_all_reduce(
    tensors: Sequence[tf.Tensor], communicator: Communicator, op: str = "sum", label: str = ""
) -> list[tf.Tensor]:
    """Reduce one tensor per tower; `group_exchange` of one column: [N] in, [N] out."""
    return group_exchange([tensors], communicator, [op], [label])[0]


def _reduce_on_host(tensors: Sequence[tf.Tensor], communicator: Communicator, op: str) -> list[tf.Tensor]:
    borrowed = weakref.ref(communicator)

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
            buffers = [*recvs[0]]
            buffers[root] = sends[0][root]
            _alive(borrowed).broadcast(buffers, root, label=label)

        received = _group_on_devices([tensors], broadcast_on_devices)[0]
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
    columns: Sequence[Sequence[tf.Tensor]],
    run: Callable[[Sequence[Sequence[Any]], Sequence[Sequence[Any]]], None],
) -> list[list[tf.Tensor]]:
    """Run a group of collectives over tensors that stay in their devices' memory: [B][N] in, [B][N] out.

    One py op takes all its inputs on one device, so three kinds of op share the work, and none of them
    waits for another: per tower an op that takes the inputs and allocates the outputs; one op on the host
    that runs the group; per tower an op that hands the outputs out. The tokens between them are what makes
    the order right: copying a tower's token to the host waits for that tower's compute stream, behind which
    its inputs are ready and its outputs' memory is free. That wait is TensorFlow's, and has no limit. What is
    left for the communicator's own (`ncs_nccl_wait_for_devices`) is what other streams still do on its GPUs:
    little here, but all that orders the buffers of callers who have no tokens. The group blocks until it is
    complete, so that whatever follows it finds the results.

    Args:
        columns: tensors of B collectives of N towers.
        run: runs all of them, given what to send and what to write into, both [B][N].
    """
    towers = list(zip(*(map(_as_carried, column) for column in columns), strict=True))  # [N][B]
    rounds: dict[int, list] = {}
    lock = threading.Lock()

    def take(index):
        def stage(*sends):
            # The same op may run again (steps_per_execution) only after its outputs were handed out.
            recvs = [tf.raw_ops.Empty(shape=tf.shape(s), dtype=s.dtype, init=False) for s in sends]
            with lock:
                rounds[index] = [sends, recvs]
            return tf.zeros([], tf.float32)

        return stage

    def run_group(*_tokens):
        with lock:
            pairs = [rounds[i] for i in range(len(towers))]
        try:
            run(*([list(column) for column in zip(*side, strict=True)] for side in zip(*pairs, strict=True)))
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
    for i, sends in enumerate(towers):
        with tf.device(sends[0].device):
            tokens.append(tf.py_function(take(i), sends, tf.float32))
    with tf.device("/CPU:0"):
        done = tf.py_function(run_group, tokens, tf.float32)
    results = []
    for i, sends in enumerate(towers):
        with tf.device(sends[0].device):
            recvs = tf.py_function(hand_out(i), [done], [send.dtype for send in sends])
            results.append([tf.cast(r, column[i].dtype) for r, column in zip(recvs, columns, strict=True)])
        for result, column in zip(results[-1], columns, strict=True):
            result.set_shape(column[i].shape)
    return [list(column) for column in zip(*results, strict=True)]


def _as_carried(tensor: tf.Tensor) -> tf.Tensor:
    """Return it as a py op on a GPU can take it: one int32 among its tensors would put all on the host.

    A sum or a product that is made in int64 and cut off wraps as in int32.
    """
    if tensor.dtype != tf.int32:
        return tensor
    with tf.device(tensor.device):
        return tf.cast(tensor, tf.int64)
