"""Join the tensors of all towers in one graph, by ops in C that only enqueue: arrive, pass, launch, deliver.

``csrc/README.md`` describes the steps, ``csrc/nccl/launcher.c`` does the work, ``csrc/tf/exchange.c`` declares the ops.
None of them runs Python. None waits for a GPU or for another tower, unless it is asked to (`Launched.ended`, `waits`).

Tokens in the host's memory join them. A control dependency from one device to another would go through the GPU's memory
and its stream, and TensorFlow would wait for the GPU. So towers wait for each other by these ops alone: a launch
without tensors is a barrier on the host.

Several processes have a launch each for the GPUs that they have, and NCCL joins the launches in the order in which each
process makes them: so a graph's launches follow each other (`group_ops.Turns`).
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import (
    AllGather,
    AllReduce,
    AnyCollective,
    Broadcast,
    Communicator,
    NcclCommunicator,
    ReduceScatter,
)
from ncclsync.communicator.nccl import kind_op_root
from ncclsync.ops import gpu_streams, host_ops

_UNKNOWN = 2**18  # elements, where a shape does not tell


class Launched:
    """Hold a launched group, in the graph that is being built; `token` is of the op that launches it, on the host."""

    def __init__(
        self,
        arrivals: Sequence[tf.Tensor],
        token: tf.Tensor,
        columns: Sequence[Sequence[tf.Tensor]],
        devices: Sequence[str],
        shapes: Any,
    ) -> None:
        self._arrivals, self.token = arrivals, token
        self._columns, self._devices, self._shapes = columns, devices, shapes
        self._delivered: dict[int, list[tf.Tensor]] = {}

    def arrived(self, tower: int) -> tf.Operation:
        """Return an op on a tower's device that runs once all towers have arrived; it waits for no GPU, no launch."""
        return self._pass(tower, self._arrivals)

    def passed(self, tower: int) -> tf.Operation:
        """Return an op on a tower's device that runs once the group is launched; it waits for no GPU."""
        return self._pass(tower, [self.token])

    def _pass(self, tower: int, tokens: Sequence[tf.Tensor]) -> tf.Operation:
        return host_ops.create("NcclsyncPass", tokens, [], {"ranks": len(tokens)}, self._devices[tower])

    def ended(self) -> tf.Operation:
        """Return an op on the CPU that ends with the group; it blocks its thread until then."""
        return self._deliver(0, [], "CPU:0", waits=1, only_waits=1)

    def deliver(self, tower: int, after: Sequence[Any] = (), *, waits: bool = False) -> list[tf.Tensor]:
        """Return the tensors that a tower receives, [B]; later calls return the same tensors.

        Args:
            tower: the tower's number.
            after: ops and tensors on its device; work enqueued before them does not wait for the group.
            waits: whether the host waits for the group's end, and the op fails if the group has failed; on the CPU it
                always does.
        """
        if tower not in self._delivered:
            device, dtypes = self._devices[tower], [column[tower].dtype for column in self._columns]
            with tf.control_dependencies(after):
                op = self._deliver(tower, dtypes, device, waits=int(waits or "CPU" in device))
            for result, shape in zip(op.outputs, self._shapes, strict=True):
                result.set_shape(shape)
            self._delivered[tower] = list(op.outputs)
        return self._delivered[tower]

    def _deliver(
        self, tower: int, dtypes: list[tf.DType], device: str, *, waits: int = 0, only_waits: int = 0
    ) -> tf.Operation:
        attributes = {"rank": tower, "waits": waits, "only_waits": only_waits, "T": dtypes}
        return host_ops.create("NcclsyncDeliver", [self.token], dtypes, attributes, device)


def default_device() -> str:
    """Return the device on which TensorFlow runs an op without a device."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def launch(
    columns: Sequence[Sequence[tf.Tensor]],
    communicator: Communicator,
    collectives: Sequence[AnyCollective],
    devices: Sequence[str],
    after: Sequence[Sequence[Any]] = (),
    launched_after: Sequence[Any] = (),
    *,
    in_place: Sequence[bool] | None = None,
) -> Launched:
    """Launch one group of collectives, in a graph.

    Args:
        columns: [B][n] tensors, tensor i on tower i's device. Of no column: a barrier of these towers.
        communicator: of n ranks here, by NCCL.
        collectives: [B] the collective of each column.
        devices: [n] the towers', such as "GPU:0".
        after: [n] for each tower, ops and tensors on its device that it arrives after.
        launched_after: what the launch waits for: ops and tensors on the CPU, such as an earlier launch's token.
        in_place: [B] whether an all-reduce writes into its tensors, and a broadcast into those of the towers other than
            the root; None: none does. These tensors must share their memory with nothing else.
    """
    assert isinstance(communicator, NcclCommunicator)
    after = after or [()] * len(devices)
    on_host = any("CPU" in device for device in devices)
    launcher = communicator.launcher(on_host=on_host)
    if not on_host and (reason := gpu_streams.missing()):  # looks for them, once
        communicator.require_context_events(reason)
    dtypes = [host_ops.dtype_code(column[0].dtype) for column in columns]
    communicator.connect(
        collectives, dtypes, [_block(*pair, communicator) for pair in zip(collectives, columns, strict=True)]
    )
    attributes = {"launcher": launcher.address, "ranks": communicator.world_size}
    tokens = []
    for tower, (device, number) in enumerate(zip(devices, communicator.ranks, strict=True)):
        sends = [column[tower] for column in columns]
        given = zip(collectives, sends, in_place or [False] * len(sends), strict=True)
        each = [(*kind_op_root(one), host_ops.dtype_code(send.dtype), int(inside)) for one, send, inside in given]
        what = [number for numbers in each for number in numbers]
        own = {"rank": tower, "number": number, "what": what, "T": [send.dtype for send in sends]}
        with tf.control_dependencies(after[tower]):
            tokens += host_ops.create("NcclsyncArrive", sends, [tf.int64], attributes | own, device).outputs
    label = communicator.label(collectives) if collectives else 0
    own = {"launcher": launcher.address, "ranks": len(devices), "label": label}
    with tf.control_dependencies(launched_after):
        op = host_ops.create("NcclsyncLaunch", tokens, [tf.int64], own, "CPU:0")
    pairs = zip(columns, collectives, strict=True)
    shapes = [shape_received(collective, column[0].shape, communicator.world_size) for column, collective in pairs]
    return Launched(tokens, op.outputs[0], columns, devices, shapes)


def _block(collective: AnyCollective, column: Sequence[tf.Tensor], communicator: Communicator) -> int:
    """Return how many elements the smaller buffer of a collective has, or may have if the shape is not known."""
    count = column[0].shape.num_elements()
    ranks = communicator.world_size if isinstance(collective, ReduceScatter) else 1
    return _UNKNOWN if count is None else count // ranks


def shape_received(collective: AnyCollective, sent: tf.TensorShape, ranks: int) -> tf.TensorShape:
    """Return the shape that a rank receives, as far as the sent shape is known."""
    if isinstance(collective, AllReduce | Broadcast) or not sent.rank or sent[0] is None:
        return sent
    rows = sent[0] * ranks if isinstance(collective, AllGather) else sent[0] // ranks
    return tf.TensorShape([rows, *sent[1:]])
