"""Join the tensors of all towers in one graph, by a communicator: at once, where they are needed at once.

On NCCL by the ops of `device_ops`; by py ops over the CPU's communicator, and where TensorFlow does not take ours.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from ncclsync.communicator import (
    AllGather,
    AllReduce,
    AnyCollective,
    Broadcast,
    Communicator,
    NcclCommunicator,
    ReduceScatter,
    empty_aligned,
)
from ncclsync.errors import NcclSyncError
from ncclsync.ops import device_ops
from ncclsync.ops.device_ops import shape_received

# These take a tensor from each tower and give each one.
Joining: TypeAlias = AllReduce | ReduceScatter | AllGather


def group_exchange(
    columns: Sequence[Sequence[tf.Tensor]], communicator: Communicator, collectives: Sequence[Joining]
) -> list[list[tf.Tensor]]:
    """Join B tensors of each tower, in a graph, by ops that wait for nothing but their inputs.

    Args:
        columns: [B][N] tensors; those of one column of one shape and dtype, tensor i on tower i's device.
            Of a reduce-scatter a multiple of N rows: tower i receives the i-th part of them. Of an
            all-gather any number of rows: each tower receives N times as many.
        communicator: of N ranks. NCCL's runs all columns as one group.
        collectives: [B] what happens to each column; `sends` and `recvs` are filled in when it happens.

    Returns:
        [B][N] tensors on the same devices. Towers that share the host's memory, and receive the same, get
        the same one.
    """
    if not columns:
        return []
    if not isinstance(communicator, NcclCommunicator):
        pairs = zip(columns, collectives, strict=True)
        return [_join_on_host(column, communicator, collective) for column, collective in pairs]
    if device_ops.takes(communicator):
        return _enqueued(columns, communicator, collectives)
    return exchange_by_py_ops(columns, communicator, collectives)


def _enqueued(
    columns: Sequence[Sequence[tf.Tensor]], communicator: NcclCommunicator, collectives: Sequence[AnyCollective]
) -> list[list[tf.Tensor]]:
    """Join tensors by the ops that only enqueue, and deliver them at once."""
    usual = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    devices = [tensor.device or usual for tensor in columns[0]]

    def join(*flat):
        given = iter(flat)
        rows = [[next(given) for _ in column] for column in columns]
        launched = device_ops.launch(rows, communicator, collectives, devices)
        towers = [launched.deliver(tower) for tower in range(len(devices))]
        return [tensor for column in zip(*towers, strict=True) for tensor in column]

    flat = [tensor for column in columns for tensor in column]
    received = iter(tf.function(join, autograph=False)(*flat) if tf.executing_eagerly() else join(*flat))
    return [[next(received) for _ in column] for column in columns]


def exchange_by_py_ops(
    columns: Sequence[Sequence[tf.Tensor]], communicator: Communicator, collectives: Sequence[Joining]
) -> list[list[tf.Tensor]]:
    """Join tensors on devices as `group_exchange` does, by py ops: each waits for its GPU, and for the group."""
    # TensorFlow keeps every py op's function for good, and what that refers to.
    borrowed: weakref.ref[Communicator] = weakref.ref(communicator)
    ranks = len(columns[0])

    def join_on_devices(sends, recvs):
        rows = zip(collectives, sends, recvs, strict=True)
        _alive(borrowed).run_group([_filled(*row) for row in rows])

    def shape_of(column: int, sent: tf.TensorShape) -> tf.TensorShape:
        return shape_received(collectives[column], sent, ranks)

    return _group_on_devices(columns, join_on_devices, shape_of)


def group_all_reduce(
    tensors: Sequence[tf.Tensor], communicator: Communicator, op: str = "sum", label: str = ""
) -> list[tf.Tensor]:
    """Reduce one tensor per tower; `group_exchange` of one column: [N] in, [N] out."""
    return group_exchange([tensors], communicator, [AllReduce((), (), op, label)])[0]


def _filled(collective: Joining, sends: Sequence[Any], recvs: Sequence[Any]) -> Joining:
    """Return the same with buffers."""
    return type(collective)(sends, recvs, *collective[2:])


def _join_on_host(tensors: Sequence[tf.Tensor], communicator: Communicator, collective: Joining) -> list[tf.Tensor]:
    borrowed, ranks = weakref.ref(communicator), len(tensors)
    differ = isinstance(collective, ReduceScatter)  # else all receive the same

    def join_on_host(*sends):
        shape = shape_received(collective, tf.TensorShape(sends[0].shape), ranks)
        recvs = [empty_aligned(tuple(shape), sends[0].dtype) for _ in range(ranks if differ else 1)]
        _alive(borrowed).run_group([_filled(collective, sends, recvs if differ else recvs * ranks)])
        return recvs

    # Stateless, so that automatic control dependencies do not chain it with unrelated ops. It cannot be
    # merged with another call: every py op carries a token of its own.
    dtypes = [tensors[0].dtype] * (ranks if differ else 1)
    with tf.device("/CPU:0"):
        # Outside a graph one result comes as itself, not in a list.
        results = tf.nest.flatten(tf.numpy_function(join_on_host, list(tensors), dtypes, stateful=False))
    for result in results:
        result.set_shape(shape_received(collective, tensors[0].shape, ranks))
    return results if differ else results * ranks


def group_broadcast(
    tensors: Sequence[tf.Tensor], communicator: Communicator, root: int = 0, label: str = ""
) -> list[tf.Tensor]:
    """Give every tower tensor `root` of one tensor per tower, in a graph; as `group_all_reduce`."""
    borrowed = weakref.ref(communicator)
    if device_ops.takes(communicator):
        assert isinstance(communicator, NcclCommunicator)
        return _enqueued([tensors], communicator, [Broadcast((), root, label)])[0]
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
        dtypes = [sent.dtype] * (len(tensors) - 1)
        received = tf.nest.flatten(tf.numpy_function(broadcast_on_host, [sent], dtypes, stateful=False))
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
    shape_received: Callable[[int, tf.TensorShape], tf.TensorShape] = lambda _, sent: sent,
) -> list[list[tf.Tensor]]:
    """Run a group of collectives over tensors that stay in their devices' memory: [B][N] in, [B][N] out.

    One py op takes all its inputs on one device, so three kinds of op share the work, and none of them
    waits for another: per tower an op that takes the inputs and allocates the outputs; one op on the host
    that runs the group; per tower an op that hands the outputs out. The tokens between them are what makes
    the order right: copying a tower's token to the host waits for that tower's compute stream, after which
    its inputs are ready and its outputs' memory is free. That wait is TensorFlow's, and has no limit. The
    communicator's own wait (`ncs_nccl_wait_for_devices`) is then for what other streams still do on its GPUs:
    little here, but all that orders the buffers of callers who have no tokens. The group blocks until it is
    complete, so that whatever follows it finds the results.

    Args:
        columns: tensors of B collectives of N towers.
        run: runs all of them, given what to send and what to write into, both [B][N].
        shape_received: of a column's index and the shape of what a tower sends: that of what it receives.
    """
    towers = list(zip(*(map(_as_carried, column) for column in columns), strict=True))  # [N][B]
    rounds: dict[int, list] = {}
    lock = threading.Lock()

    def take(index):
        def stage(*sends):
            # The same op may run again (steps_per_execution) only after its outputs were handed out.
            shapes = [shape_received(b, send.shape) for b, send in enumerate(sends)]
            # A py op's function runs in no device's scope: by default that would be the first GPU.
            with tf.device(sends[0].backing_device):
                recvs = [
                    tf.raw_ops.Empty(shape=tf.constant(list(shape), tf.int32), dtype=send.dtype, init=False)
                    for shape, send in zip(shapes, sends, strict=True)
                ]
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
        for b, (result, column) in enumerate(zip(results[-1], columns, strict=True)):
            result.set_shape(shape_received(b, column[i].shape))
    return [list(column) for column in zip(*results, strict=True)]


def _as_carried(tensor: tf.Tensor) -> tf.Tensor:
    """Return it as a py op on a GPU can take it: one int32 among its tensors would put all on the host.

    A sum or a product that is made in int64 and cut off wraps as in int32.
    """
    if tensor.dtype != tf.int32:
        return tensor
    with tf.device(tensor.device):
        return tf.cast(tensor, tf.int64)
