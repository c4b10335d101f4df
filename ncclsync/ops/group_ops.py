"""Join the tensors of all towers in one graph.

GPUs are joined by the ops of `device_ops`, CPU towers by the op of `host_ops`. Only the CPU towers of several processes
are joined by a py op, which runs their communicator.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from ncclsync.communicator import (
    AllGather,
    AnyCollective,
    Broadcast,
    Communicator,
    NcclCommunicator,
    ReduceScatter,
    empty_aligned,
    native,
)
from ncclsync.errors import NcclSyncError, ProcessError
from ncclsync.ops import device_ops, host_ops
from ncclsync.ops.carriers import carried, delivered
from ncclsync.ops.device_ops import shape_received


class Turns:
    """Keep the order in which processes join tensors in one graph: each call comes after the previous call.

    All processes build the same program's graph, and so have the same order. GPUs' launches wait for `last`; calls of
    CPU towers take it as an input: TensorFlow's optimiser drops a control dependency together with an op that it folds.

    Attributes:
        batch: tensors of the batch that processes compare.
        last: a tensor of the last call, of GPUs in the host's memory; empty before the first.
    """

    def __init__(self, batch: Sequence[tf.Tensor], describe: Callable[..., str]) -> None:
        """Begin a step; `describe` returns words of the arrays of `batch`."""
        self.batch, self.describe = batch, describe
        self.last: list[tf.Tensor] = []


def group_exchange(
    columns: Sequence[Sequence[tf.Tensor]],
    communicator: Communicator,
    collectives: Sequence[AnyCollective],
    turns: Turns | None = None,
) -> list[list[tf.Tensor]]:
    """Join B tensors of each tower, in a graph, by ops that wait only for their inputs.

    Args:
        columns: [B][N] tensors, of one shape and dtype in each column, tensor i on tower i's device. A reduce-scatter
            takes a multiple of N rows, of which tower i receives the i-th part. An all-gather takes any number of
            rows, and each tower receives N times as many.
        communicator: of N ranks. NCCL's runs all columns as one group.
        collectives: [B] the collective of each column, without buffers. A broadcast is joined alone.
        turns: the order of calls, if several processes are joined.

    Returns:
        [B][N] tensors on the same devices. Towers in the host's memory that receive equal values share one tensor.
    """
    if not columns:
        return []
    if communicator.world_size == 1:
        return [[*column] for column in columns]
    if isinstance(communicator, NcclCommunicator):
        return _enqueued(columns, communicator, collectives, turns)
    if communicator.world_size > communicator.size:
        return _join_processes(columns, communicator, collectives, turns)
    return [_join_in_memory(*pair) for pair in zip(columns, collectives, strict=True)]


def _join_in_memory(column: Sequence[tf.Tensor], collective: AnyCollective) -> list[tf.Tensor]:
    """Join one tensor of each tower of a process, [N] in, [N] out."""
    ranks = len(column)
    if isinstance(collective, Broadcast):
        return [column[collective.root]] * ranks
    if isinstance(collective, AllGather):
        return [tf.concat(column, 0)] * ranks
    weights = [tf.ones([], tf.float64)] * ranks
    (reduced,) = host_ops.all_reduce([[tensor] for tensor in column], weights, collective.op)
    return tf.split(reduced, ranks) if isinstance(collective, ReduceScatter) else [reduced] * ranks


def _enqueued(
    columns: Sequence[Sequence[tf.Tensor]],
    communicator: NcclCommunicator,
    collectives: Sequence[AnyCollective],
    turns: Turns | None,
) -> list[list[tf.Tensor]]:
    """Join tensors by the ops of `device_ops`, and deliver the results at once."""
    devices = [tensor.device or device_ops.default_device() for tensor in columns[0]]
    turns = turns if turns is not None and not tf.executing_eagerly() else Turns([], str)

    def join(columns):
        launched = device_ops.launch(columns, communicator, collectives, devices, launched_after=turns.last)
        turns.last = [launched.token]
        towers = [launched.deliver(tower) for tower in range(len(devices))]
        return [list(column) for column in zip(*towers, strict=True)]

    if not tf.executing_eagerly():
        return join(columns)
    received = tf.function(join, autograph=False)(columns)
    if communicator.world_size > communicator.size:  # another process may not come
        communicator.agree(None, collectives[0].label)
        communicator.wait()
    return received


def gather_rows(tensors: Sequence[tf.Tensor], communicator: Communicator, label: str, turns: Turns) -> list[tf.Tensor]:
    """Concatenate tensors of the towers of several processes along their first axis, in a graph; [n] in, [n] out.

    The numbers of rows are gathered, of GPUs between hosts alone, then the rows, padded to the largest number. Only the
    numbers of rows may differ between the tensors. Raises NcclSyncError if they hold no numbers, such as words.
    """
    dtype = tensors[0].dtype
    if dtype.name not in native.DTYPES:
        sent = [_in_place(carried, tensor) for tensor in tensors]
        return [_in_place(delivered, one, dtype) for one in gather_rows(sent, communicator, label, turns)]
    rows = []
    for tensor in tensors:
        with tf.device(tensor.device):
            rows.append(tf.shape(tensor, tf.int64)[:1])
    if isinstance(communicator, NcclCommunicator):
        counts = [agree(communicator, f"the numbers of rows ({label})", turns, rows)] * len(rows)
    else:
        counts = group_exchange([rows], communicator, [AllGather((), (), label)], turns)[0]
    padded = []
    for tensor, count in zip(tensors, counts, strict=True):
        with tf.device(tensor.device):
            missing = tf.reduce_max(count) - tf.shape(tensor, tf.int64)[0]
            zeros = tf.zeros(tf.concat([[missing], tf.shape(tensor, tf.int64)[1:]], 0), dtype)
            padded.append(tf.concat([tensor, zeros], 0))
    gathered = group_exchange([padded], communicator, [AllGather((), (), label)], turns)[0]
    received = []
    for tensor, count, like in zip(gathered, counts, tensors, strict=True):
        with tf.device(like.device):
            block = tf.reduce_max(count)
            pieces = [tensor[i * block : i * block + count[i]] for i in range(communicator.world_size)]
            whole = tf.concat(pieces, 0)
        received.append(whole if like.shape.rank is None else tf.ensure_shape(whole, [None, *like.shape[1:]]))
    return received


def agree(communicator: Communicator, text: str, turns: Turns, numbers: Sequence[tf.Tensor] = ()) -> tf.Tensor:
    """Return the numbers of all processes, as soon as each has launched what comes before; see `Communicator.agree`.

    `text` is what has been launched, equal in all processes; `numbers` are int64 vectors of this process, in the host's
    memory, such as sizes of tensors yet to be computed. The result is such a vector, too.
    """
    borrowed = weakref.ref(communicator)

    def meet(*own):
        with _alive(borrowed) as joined:
            each = joined.agree([int(number) for one in own for number in one], text)
        return np.array([number for one in each for number in one], np.int64)

    with tf.device("/CPU:0"), tf.control_dependencies(turns.last):
        met = tf.numpy_function(meet, numbers, tf.int64)
    met.set_shape([None])
    turns.last = [met]
    return met


def _join_processes(
    columns: Sequence[Sequence[tf.Tensor]],
    communicator: Communicator,
    collectives: Sequence[AnyCollective],
    turns: Turns | None,
) -> list[list[tf.Tensor]]:
    """Join tensors of the CPU towers of several processes by one py op; see `group_exchange`."""
    borrowed, ranks, world_size = weakref.ref(communicator), len(columns[0]), communicator.world_size
    # The number of different tensors that this process' towers receive of each column.
    counts = [ranks if isinstance(collective, ReduceScatter) else 1 for collective in collectives]
    in_step, describe = turns is not None, turns.describe if turns is not None and not turns.last else None

    def join(*flat):
        given, results = iter(flat), []
        group: list[AnyCollective] = []
        for collective, count in zip(collectives, counts, strict=True):
            sends = [next(given) for _ in range(ranks)]
            if isinstance(collective, Broadcast):
                buffers = [np.array(send) for send in sends]
                group.append(collective._replace(buffers=buffers))
                results.append(buffers[0])
                continue
            shape = shape_received(collective, tf.TensorShape(sends[0].shape), world_size)
            recvs = [empty_aligned(tuple(shape), sends[0].dtype) for _ in range(count)]
            group.append(collective._replace(sends=sends, recvs=recvs * (ranks // count)))
            results += recvs
        with _alive(borrowed) as joined:
            batch = describe(*given) if describe is not None else None
            peers = joined.peers if in_step else None
            with contextlib.nullcontext() if peers is None else peers.on_batch(batch):
                joined.run_group(group)
        return results

    # Stateful, so that it runs even if this process does not need the result.
    dtypes = [column[0].dtype for column, count in zip(columns, counts, strict=True) for _ in range(count)]
    inputs = [*tf.nest.flatten(columns), *([] if turns is None else turns.last or turns.batch)]
    with tf.device("/CPU:0"):
        # Outside a graph a single result is returned without a list.
        flat = tf.nest.flatten(tf.numpy_function(join, inputs, dtypes))
    received, joined = iter(flat), []
    for column, collective, count in zip(columns, collectives, counts, strict=True):
        results = [next(received) for _ in range(count)]
        for result in results:
            result.set_shape(shape_received(collective, column[0].shape, world_size))
        joined.append(results * (ranks // count))
    if turns is not None:
        turns.last = flat[:1]
    return joined


@contextlib.contextmanager
def _alive(borrowed: "weakref.ref[Communicator]") -> Iterator[Communicator]:
    """Yield the communicator, which a graph does not keep alive; tell its users of errors that it does not keep."""
    communicator = borrowed()
    if communicator is None:
        raise NcclSyncError("Expected an open communicator. Received: one that was deleted.")
    try:
        yield communicator
    except NcclSyncError as error:
        # What ends the agreement of CPU towers' processes, as a timeout, is their communicator's failure.
        if isinstance(error, ProcessError) or isinstance(communicator, NcclCommunicator):
            for user in [*communicator.users]:
                user.put(error)
        raise


def _in_place(function: Callable[..., tf.Tensor], tensor: tf.Tensor, *further: tf.DType) -> tf.Tensor:
    """Compute from a tensor, on its own device."""
    with tf.device(tensor.device):
        return function(tensor, *further)
