"""Split each batch and bring every tower its part; on GPUs ahead of the step that computes on it.

A copy to a GPU waits, in TensorFlow, for all work that the GPU had when the copy was asked for, and kernels that use
the copy are launched only when it has ended. So the copies of a batch have to be asked for before the kernels of the
step that they are to overlap with. A `Feeder` is `AHEAD` batches ahead of the batch that is trained. With one batch,
its copies might be asked for only after that step's first kernel; with two that does not matter, and no copy waits for
a kernel that waits for a copy.
"""

import collections
import concurrent.futures
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import Share
from ncclsync.ops.spans import COPY, SHARD, Meter, begin, delay
from ncclsync.sharding.shards import Shards, components_of, divide_rows, packed, shard_batch
from ncclsync.towers.layout import Layout

AHEAD = 2  # batches, besides the one that is trained

# Dtypes that a GPU's kernels take from the host's memory.
_ON_HOST = (tf.int32, tf.string, tf.resource, tf.variant)


def split_batch(
    batch: Any,
    layout: Layout,
    meter: Meter | None,
    after: Sequence[Any] = (),
    *,
    copies: bool = False,
    divided: Sequence[tf.Tensor] | None = None,
) -> Shards:
    """Split a batch, in the host's memory, in the graph that is being built if there is one.

    Args:
        batch: see `shard_batch`.
        layout: says which shards are made, and where.
        meter: records the splitting and the copying; then parts are copied to their devices.
        after: ops and tensors to wait for.
        copies: whether to copy each tower's part to its device. Otherwise TensorFlow copies it when it is used.
        divided: what `layout.read` has returned for this batch; None: it is read now.
    """
    spans = [begin(meter, shard, SHARD, after) for shard in layout.own_shards]
    with tf.device("/CPU:0"):
        given = delay(batch, [op for span in spans for op in span.ops])
        (value,) = (layout.read(components_of(given)) if divided is None else divided) or [None]
        weights, sizes = (value, None) if layout.sizes is None else (None, value)
        shards = shard_batch(given, layout.shards, layout.own_shards, weights, sizes)
    batches, shares = [], list(shards.shares)
    for i, (shard, device) in enumerate(zip(layout.own_shards, layout.shard_devices, strict=True)):
        batch, share = shards.batches[i], shares[shard]
        with tf.device("/CPU:0"):
            batch = delay(batch, spans[i].end(components_of(batch)))
        if (copies or meter is not None) and device != "CPU:0":
            batch, fraction = _copied((batch, share.fraction), shard, device, meter)
            shares[shard] = Share(fraction, *share[1:])
        batches.append(batch)
    return Shards(batches, shards.sizes, shares)


def _copied(part: Any, tower: int, device: str, meter: Meter | None) -> Any:
    """Return a tower's part of a batch on its device."""
    copying = begin(meter, tower, COPY, components_of(part))

    def copied(leaf: Any) -> Any:
        if leaf is None:
            return None
        with tf.device("/CPU:0" if leaf.dtype in _ON_HOST else f"/{device}"), tf.control_dependencies(copying.ops):
            return tf.identity(leaf)

    part = tf.nest.map_structure(copied, part, expand_composites=True)
    return delay(part, copying.end(components_of(part)))


class Staging:
    """Fetch an iterator's next batch, and bring each tower its part: two graph functions."""

    def __init__(self, fetch: Callable[[tf.Tensor], Any], specs: Any, layout: Layout, meter: Meter | None) -> None:
        """Make the graph functions; `fetch` returns the next batch, of these specs, given an iterator's handle."""
        self._specs, self._layout = specs, layout
        self.total = layout.shards  # of a batch

        def next_batch(handle: tf.Tensor) -> list[tf.Tensor]:
            components = components_of(fetch(handle))
            return [*components, *layout.read(components)]  # now: the next batch may be divided otherwise

        def bring(*components: tf.Tensor) -> list[tf.Tensor]:
            divided = components[len(components_of(specs)) :]
            shards = split_batch(packed(specs, components), layout, meter, copies=True, divided=divided)
            with tf.device("/CPU:0"):
                parts = [tf.stack(shards.sizes)]
            for batch, shard in zip(shards.batches, layout.own_shards, strict=True):
                parts += [shards.shares[shard].fraction, *components_of(batch)]
            return parts

        # Given an iterator's handle, returns the components of its next batch, in the host's memory. Raises an
        # OutOfRangeError if there is none, and whatever the iterator raises.
        self.fetch = tf.compat.v1.wrap_function(next_batch, [tf.TensorSpec([], tf.resource)])
        leaves = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in self.fetch.structured_outputs]
        # Not by tf.function, which would return copies, by ops without a device: all on one GPU.
        made = tf.compat.v1.wrap_function(bring, leaves)
        # Given these components, returns the tensors that a step takes: each tower's part on its device. Waits for the
        # copies. Raises an InvalidArgumentError if the rows differ in number.
        self.bring = lambda components: made(*components)
        self.signature = [tf.TensorSpec(one.shape, one.dtype) for one in made.structured_outputs]  # what a step takes

    def shards(self, parts: Sequence[tf.Tensor]) -> Shards:
        """Return the shards that a step's arguments, of `signature`, stand for; in the graph of the step."""
        given, *rest = parts
        with tf.device("/CPU:0"):
            sizes, shares = divide_rows(tf.reduce_sum(given), given)
        batches, width = [], len(rest) // len(self._layout.own_shards)
        for i, shard in enumerate(self._layout.own_shards):
            fraction, *components = rest[i * width : (i + 1) * width]
            shares[shard] = Share(fraction, *shares[shard][1:])
            batches.append(packed(self._specs, components))
        return Shards(batches, sizes, shares)


class CountingDataset(tf_compat.SameDataset):
    """A dataset that counts the batches handed out to steps; batches fetched ahead do not count yet."""

    # [N] int32, the rows of each tower in the batch handed out last, if each process reads its own rows.
    sizes: tf.Variable | None = None

    def __init__(self, batches: tf.data.Dataset, counted: Callable[..., Any]) -> None:
        """Map `counted` over the elements after all prefetching, so that it runs when an element is handed out."""
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # it would come after `counted`
        super().__init__(batches.prefetch(tf.data.AUTOTUNE).map(counted).with_options(options))

    def fetching(self, feeder: object) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which `feeder` fetches a batch; alone, if that moves a position."""
        return contextlib.nullcontext()

    def fetched(self) -> Any:
        """Return the position after the batch fetched last; None if data cannot be resumed in the middle of a pass."""

    def hand_out(self, place: Any) -> None:
        """Let a position that `fetched` has returned count, until another iterator begins."""

    def digest(self) -> bytes | None:
        """Return a digest that processes compare in place of a batch's rows; None: they compare the rows."""
        return None


class _Ahead:
    """A batch that a thread fetches, and brings to the towers."""

    def __init__(self, staging: Staging, fetch: Callable[[], tuple[list[tf.Tensor], list[Any]]]) -> None:
        self.staging = staging
        self.fetch = fetch  # returns its components, in the host's memory, and each counting dataset's place after it
        # Both, and the tensors that a step takes; None in their stead: they could not be made.
        self.result: concurrent.futures.Future[tuple[list[tf.Tensor], list[Any], list[tf.Tensor] | None]]
        self.result = concurrent.futures.Future()


class Feeder:
    """Fetch an iterator's batches, in order, and bring them to the towers, ahead of the steps that train on them.

    `AHEAD` threads do so. Their errors are raised by the step of the batch.
    """

    def __init__(self, iterator: tf.data.Iterator) -> None:
        """Prepare; nothing is fetched before the first `take`. Ends with the iterator, which it does not keep alive."""
        (self._handle,) = tf.nest.flatten(iterator, expand_composites=True)
        made_of = tf_compat.datasets_of(iterator)
        tf_compat.let_go_of_arrays(made_of)
        self._counting = [one for one in made_of if isinstance(one, CountingDataset)]
        self._wanted: queue.SimpleQueue[_Ahead | None] = queue.SimpleQueue()
        self._ahead: collections.deque[_Ahead] = collections.deque()
        self._name = object()  # stands for the feeder in datasets that count, which must not keep it alive
        order = threading.Lock()
        for _ in range(AHEAD):
            # Daemons: a dataset that waits for ever must not keep the process from ending.
            threading.Thread(target=_work, args=(self._wanted, order), name="ncclsync feeder", daemon=True).start()
        weakref.finalize(iterator, _end, self._wanted, self._ahead).atexit = False

    def take(self, staging: Staging) -> tuple[list[tf.Tensor], list[tf.Tensor] | None]:
        """Wait for the next batch; return the results of `Staging.fetch` and `Staging.bring`. Later batches follow.

        None in place of the latter: it is to be divided anew, since steps have been split meanwhile, it did not fit the
        memory beside a step, or its rows differ in number.

        Raises:
            Exception: what `Staging` raises for this batch.
        """
        while len(self._ahead) <= AHEAD:
            fetch = functools.partial(_fetch, staging, self._handle, self._counting, self._name)
            self._ahead.append(_Ahead(staging, fetch))
            self._wanted.put(self._ahead[-1])
        ahead = self._ahead.popleft()
        components, places, parts = ahead.result.result()
        for dataset, place in zip(self._counting, places, strict=True):
            dataset.hand_out(place)
        return components, parts if ahead.staging.total == staging.total else None


def _work(wanted: "queue.SimpleQueue[_Ahead | None]", order: threading.Lock) -> None:
    """Run requests until one is None. Runs in a feeder's thread."""
    while _do_next(wanted, order):
        pass


def _do_next(wanted: "queue.SimpleQueue[_Ahead | None]", order: threading.Lock) -> bool:
    """Fetch a batch, while no other thread does, and bring it to the towers; return False at the end.

    A separate function, so that a waiting thread holds no error, whose traceback would keep all of `fit` alive.
    """
    with order:
        ahead = wanted.get()
        if ahead is None:
            return False
        if not ahead.result.set_running_or_notify_cancel():
            return True
        try:
            components, places = ahead.fetch()
        except BaseException as error:  # raised by `take`, whatever it is
            ahead.result.set_exception(error)
            return True
    try:
        ahead.result.set_result((components, places, ahead.staging.bring(components)))
    except (tf.errors.ResourceExhaustedError, tf.errors.InvalidArgumentError):
        ahead.result.set_result((components, places, None))
    except BaseException as error:  # the same
        ahead.result.set_exception(error)
    return True


def _fetch(
    staging: Staging, handle: tf.Tensor, counting: Sequence[CountingDataset], feeder: object
) -> tuple[list[tf.Tensor], list[Any]]:
    with contextlib.ExitStack() as stack:
        for dataset in counting:
            stack.enter_context(dataset.fetching(feeder))
        components = staging.fetch(handle)
        return components, [dataset.fetched() for dataset in counting]


def _end(wanted: "queue.SimpleQueue[_Ahead | None]", under_way: "collections.deque[_Ahead]") -> None:
    """End a feeder's threads, whose iterator is gone."""
    for ahead in under_way:
        ahead.result.cancel()
    for _ in range(AHEAD):
        wanted.put(None)
