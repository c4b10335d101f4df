"""Say which shard of a batch belongs to which tower and process, and which rows it has: one frozen object."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import tensorflow as tf

from ncclsync.sharding.shards import shard_sizes, sizes_in_graph


def is_cpu(device: str) -> bool:
    """Return whether a device is the CPU, given any of its names."""
    return "CPU" in device.upper()


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Say where a batch's shards are computed. A step that is split further gets another layout."""

    devices: tuple[str, ...] = ("CPU:0",)  # [n] of this process' towers
    ranks: range = range(1)  # [n] the numbers of these towers
    towers: int = 1  # N, in all processes
    # The number of shards of a batch, if it was given, or a step was split; all towers are then in one process. None: a
    # shard for each tower.
    divided: int | None = None
    # Whether a tower adds up its shards in turn, since a step was split for lack of memory. The bits then depend on the
    # number of towers.
    adds_up: bool = False
    weights: tf.Variable | None = None  # [N] int32, by which towers share a batch; None: evenly
    # [N] int32, how many rows each tower has of the last batch, where each process reads its own rows. None: the number
    # of the batch's rows decides it.
    sizes: tf.Variable | None = None

    @property
    def shards(self) -> int:
        """Return S, the number of shards of a batch, in all processes."""
        return self.towers if self.divided is None else self.divided

    @property
    def on_gpus(self) -> bool:
        """Return whether a tower of this process is on a GPU."""
        return not all(map(is_cpu, self.devices))

    @property
    def is_chief(self) -> bool:
        """Return whether tower 0 is this process'."""
        return self.ranks[0] == 0

    @property
    def meets_processes(self) -> bool:
        """Return whether other processes have towers, too."""
        return self.towers > len(self.devices)

    @property
    def shares_cores(self) -> bool:
        """Return whether all towers compute on the cores of one device; processes may be on several hosts."""
        return not (self.on_gpus or self.meets_processes)

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Return `weights` as they are now."""
        return None if self.weights is None else tuple(self.weights.numpy().tolist())

    @functools.cached_property
    def places(self) -> tuple[range, ...]:
        """Return [n] the places of each tower's shards among the s shards of this process."""
        ends = itertools.accumulate(shard_sizes(self.divided or len(self.devices), len(self.devices)), initial=0)
        return tuple(range(*pair) for pair in itertools.pairwise(ends))

    @functools.cached_property
    def tower_places(self) -> tuple[int, ...]:
        """Return [s] the place, among this process' n towers, of the tower that computes each shard."""
        return tuple(tower for tower, own in enumerate(self.places) for _ in own)

    @property
    def own_shards(self) -> range:
        """Return [s] the numbers of this process' shards."""
        return self.ranks if self.divided is None else range(self.divided)

    @property
    def shard_devices(self) -> list[str]:
        """Return [s] the device of each shard of this process."""
        return [self.devices[tower] for tower in self.tower_places]

    @property
    def owners(self) -> Sequence[int]:
        """Return [S] the number of the tower that computes each shard, in all processes."""
        return range(self.towers) if self.divided is None else self.tower_places

    def sizes_of(self, rows: int) -> tuple[int, ...]:
        """Return [S] how many rows of a batch each shard has."""
        return shard_sizes(rows, self.shards, self.shares)

    def own_rows(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return, in a graph, where this process' rows begin and end in a batch that is divided evenly."""
        first, last, sizes = self.own_shards[0], self.own_shards[-1] + 1, sizes_in_graph(rows, self.shards)
        return tf.reduce_sum(sizes[:first]), tf.reduce_sum(sizes[:last])

    def split(self) -> "Layout":
        """Return a layout of twice as many shards."""
        return dataclasses.replace(self, divided=2 * self.shards, adds_up=True)

    def read(self, batch: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return, in a graph, the value of `weights` or `sizes`, if there is one, for a batch of these components."""
        with tf.device("/CPU:0"), tf.control_dependencies(batch):  # handing out the batch may write them
            return [one.read_value() for one in (self.weights, self.sizes) if one is not None]
