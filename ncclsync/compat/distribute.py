"""Wrap the interfaces of `tf.distribute` that TensorFlow does not promise to keep.

Turns what a strategy hands to its cross-device operations into plain tensors and names, and back.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, distribute_utils, values


def replicas_of(value: Any) -> tuple[Any, ...]:
    """Return the replicas' own values, [N], of what a strategy hands over to be reduced."""
    return tuple(value.values)


def devices_of(destinations: Any) -> tuple[str, ...]:
    """Return the full names of the devices of per-replica values, of a variable, a tensor or a name."""
    return tuple(cross_device_ops.get_devices_from(destinations))


def mirrored(tensors: Sequence[tf.Tensor]) -> Any:
    """Return tensors that are equal, one on each replica's device, as the value that a strategy expects."""
    return distribute_utils.regroup(tuple(tensors), wrap_class=values.Mirrored)
