"""Give a `tf.distribute.MirroredStrategy` the all-reduce of ncclsync.

The strategy keeps its replicas, variables and input; tensors that are to be reduced on all of them (the
gradients of `fit` and of `optimizer.apply`, `ReplicaContext.all_reduce`) go over our communicator.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import AllReduce, Communicator, native
from ncclsync.communicator.timeouts import DEFAULT_TIMEOUT_S
from ncclsync.compat import distribute
from ncclsync.errors import NcclSyncError
from ncclsync.ops import host_ops
from ncclsync.ops.buckets import DEFAULT_BUCKET_BYTES, fill_buckets, pack, unpack
from ncclsync.ops.group_ops import group_exchange
from ncclsync.towers.options import TowerOptions
from ncclsync.towers.placement import choose_placement, connect, reduced_on_host

_logger = logging.getLogger("ncclsync")


# This base class can do everything, if slowly: it does all that is no all-reduce.
class CrossDeviceOps(tf.distribute.ReductionToOneDevice):
    """Reduce the tensors of a `tf.distribute.MirroredStrategy` by ncclsync's all-reduce.

    ```python
    strategy = tf.distribute.MirroredStrategy(cross_device_ops=ncclsync.CrossDeviceOps())
    ```

    A context manager; `close` ends it. The devices are joined when something is first reduced on them.

    Dense tensors that are reduced on all replicas' devices, `SUM` or `MEAN`, are packed into buckets and
    all-reduced: by NCCL on GPUs, by the C all-reduce on CPUs. Meanings remain the strategy's: `MEAN` counts
    each replica the same, however many samples it had. As by `tf.distribute.ReductionToOneDevice` go: a
    reduction to fewer devices, `tf.IndexedSlices` (gathered), gathers, and, with one warning, dtypes that
    the communicator lacks. TensorFlow does not ask at all for int32, and for `strategy.reduce` on CPUs, nor,
    with a warning of its own, in a function that XLA compiles. Its `CommunicationOptions` are not used:
    `bucket_bytes` and `timeout_s` take their place.
    """

    def __init__(
        self,
        *,
        backend: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        preflight: bool = True,
    ) -> None:
        """Prepare; no device is touched.

        Args:
            backend: "nccl" or "cpu"; None follows the strategy's devices.
            bucket_bytes: tensors are all-reduced in buckets of up to this many bytes, on GPUs; on CPUs they
                are not packed.
            timeout_s: how long a collective of NCCL's may take, in seconds, before it fails with a
                `NcclTimeoutError`; None: no limit. The communicator is then aborted: make a new strategy.
            preflight: whether known numbers are sent over each pair of GPUs' path when they are joined.

        Raises:
            TypeError, ValueError: bad arguments.
        """
        super().__init__()
        self._options = TowerOptions(
            backend=backend, bucket_bytes=bucket_bytes, timeout_s=timeout_s, preflight=preflight
        )
        self._lock = threading.Lock()
        self._devices: tuple[str, ...] = ()
        self._communicator: Communicator | None = None
        self._on_host = False
        self._closed = False
        self._refused: set[str] = set()
        # Eager tensors are reduced by a graph as well: a py op that is called eagerly is kept for good.
        self._sums_of_eager = tf.function(self._sums, autograph=False, reduce_retracing=True)

    def __enter__(self) -> "CrossDeviceOps":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the communicator. Idempotent; a later reduction is a NcclSyncError."""
        self._closed = True
        if self._communicator is not None:
            self._communicator.close()

    def reduce_implementation(
        self, reduce_op: tf.distribute.ReduceOp, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        """Reduce one value; see `batch_reduce_implementation`."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: tf.distribute.ReduceOp, value_destination_pairs: Any, options: Any
    ) -> list[Any]:
        """Reduce values of all replicas, each to its destinations. Collective.

        Args:
            reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`.
            value_destination_pairs: [B] of a per-replica value (dense tensors of one shape and dtype, or
                `tf.IndexedSlices`) and of what names the devices to reduce to.
            options: not used.

        Returns:
            [B] values, mirrored on their destinations' devices, where there are several.

        Raises:
            ValueError: replicas' tensors differ in shape or dtype; other devices than before.
            NcclSyncError: `close` was called.
            NcclUnavailableError, NcclError: if NCCL was chosen and cannot be used.
        """
        devices = tf.distribute.get_strategy().extended.worker_devices
        pairs = list(value_destination_pairs)
        ours = [self._is_all_reduce(value, to, devices) for value, to in pairs]  # [B]
        columns = [distribute.replicas_of(pair[0]) for pair, our in zip(pairs, ours, strict=True) if our]
        sums: Iterator[Sequence[tf.Tensor]] = iter(())
        if columns:
            for column in columns:
                _check_alike(column)
            self._join(devices)
            sums = iter((self._sums_of_eager if tf.executing_eagerly() else self._sums)(columns))
        return [
            self._mirrored(next(sums), reduce_op)
            if our
            else super(CrossDeviceOps, self).reduce_implementation(reduce_op, *pair, options)
            for pair, our in zip(pairs, ours, strict=True)
        ]

    def _is_all_reduce(self, value: Any, destinations: Any, devices: tuple[str, ...]) -> bool:
        """Return whether the communicator that joins `devices` reduces a value, rather than one device."""
        replicas = distribute.replicas_of(value)
        if any(isinstance(replica, tf.IndexedSlices) for replica in replicas):
            return False
        # TensorFlow asks for an all-reduce by giving the value itself, whose tensors may lie anywhere.
        everywhere = destinations is value or set(distribute.devices_of(destinations)) == set(devices)
        if not everywhere:
            return False
        lacking = {replica.dtype.name for replica in replicas} - set(native.DTYPES)
        for name in lacking - self._refused:
            _logger.warning(
                "CrossDeviceOps reduces tensors of %s as tf.distribute.ReductionToOneDevice does: the "
                "communicator has only %s.",
                name,
                ", ".join(sorted(native.DTYPES)),
            )
        self._refused |= lacking
        return not lacking

    def _join(self, devices: tuple[str, ...]) -> None:
        """Create the communicator at the first reduction; later ones must be on the same devices."""
        with self._lock:
            if self._closed:
                raise NcclSyncError("Expected an open CrossDeviceOps. Received: one that was closed.")
            if self._communicator is None:
                placement = choose_placement(None, devices, self._options.backend)
                self._communicator = connect(
                    placement, timeout_s=self._options.timeout_s, preflight=self._options.preflight
                )
                self._devices = devices
                self._on_host = reduced_on_host(placement.devices, placement.backend)
        if devices != self._devices:
            raise ValueError(
                "Expected a CrossDeviceOps for each MirroredStrategy. Received: one that joins "
                f"{', '.join(self._devices)}, for {', '.join(devices)}"
            )

    def _sums(self, columns: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Add up the replicas' tensors, in a graph: [B][N] in, [B][N] out."""
        columns = [_placed(column, self._devices) for column in columns]
        if not self._on_host:
            return self._sums_of_buckets(columns)
        ones = [tf.ones([], tf.float64)] * len(self._devices)
        sums: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(column[0].dtype for column in columns):
            chosen = [i for i, column in enumerate(columns) if column[0].dtype == dtype]
            rows = [[columns[i][replica] for i in chosen] for replica in range(len(ones))]
            sums.update(zip(chosen, host_ops.all_reduce(rows, ones, "sum"), strict=True))
        return [[sums[i]] * len(ones) for i in range(len(columns))]

    def _sums_of_buckets(self, columns: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        shapes = [column[0].shape for column in columns]
        known = [shape.is_fully_defined() for shape in shapes]
        dtypes = [column[0].dtype for column in columns]
        buckets = fill_buckets(
            [s.num_elements() * d.size if k else 0 for s, d, k in zip(shapes, dtypes, known, strict=True)],
            [dtype if k else i for i, (dtype, k) in enumerate(zip(dtypes, known, strict=True))],
            self._options.bucket_bytes,
        )
        packed = []
        for bucket in buckets:
            column = []
            for replica, device in enumerate(self._devices):
                with tf.device(device):
                    parts = [columns[i][replica] for i in bucket]
                    column.append(pack(parts) if len(parts) > 1 else parts[0])
            packed.append(column)
        assert self._communicator is not None
        count = len(buckets)
        sums_of = [AllReduce((), (), "sum", f"bucket {b + 1} of {count}") for b in range(count)]
        joined = group_exchange(packed, self._communicator, sums_of)
        sums: list[list[tf.Tensor]] = [[] for _ in columns]
        for bucket, column in zip(buckets, joined, strict=True):
            for tensor, device in zip(column, self._devices, strict=True):
                with tf.device(device):
                    parts = unpack(tensor, [shapes[i] for i in bucket]) if len(bucket) > 1 else [tensor]
                for i, part in zip(bucket, parts, strict=True):
                    sums[i].append(part)
        return sums

    def _mirrored(self, sums: Sequence[tf.Tensor], reduce_op: tf.distribute.ReduceOp) -> Any:
        """Return a sum, one tensor per replica, or its mean, on the replicas' devices."""
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            sums = [total / len(sums) for total in sums]
        return distribute.mirrored(_placed(sums, self._devices))


def _placed(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Return tensors, each on its device: in a graph, one may have none, or another one's."""
    placed = []
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            placed.append(tf.identity(tensor))
    return placed


def _check_alike(column: Sequence[tf.Tensor]) -> None:
    """Raise ValueError if replicas' tensors cannot be added up, as far as is known of them."""
    first = column[0]
    for replica in column[1:]:
        if replica.dtype != first.dtype or not replica.shape.is_compatible_with(first.shape):
            raise ValueError(
                "Expected tensors of one shape and dtype on all replicas. Received: "
                + ", ".join(f"{tuple(tensor.shape)} {tensor.dtype.name}" for tensor in column)
            )
