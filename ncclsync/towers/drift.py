"""Find towers that hold other values: by a checksum of each variable, and by the distance of two values.

It knows nothing of towers: `TowerState` gives it each variable's copies, and acts on what it finds.
"""

import collections
from collections.abc import Sequence

import numpy as np
import tensorflow as tf


class Sentinel:
    """Count training steps, and say when the towers are to be compared, or audited.

    Attributes:
        repairs: whether what differs is to be repaired; else it is an error.
        steps: counted so far.
    """

    def __init__(self, check_every: int | None, on_divergence: str, audit_every: int | None = None) -> None:
        """Start before the first step.

        Args:
            check_every, on_divergence, audit_every: see `Health`.
        """
        self._check_every, self._audit_every = check_every, audit_every
        self.repairs = on_divergence == "repair"
        self.steps = 0
        self._audited = 0  # steps, up to the last audit

    @property
    def active(self) -> bool:
        """Return whether steps are to be counted."""
        return self._check_every is not None or self._audit_every is not None

    def is_audit_due(self, steps: int) -> bool:
        """Return whether the next call, of so many steps, is to be an audit."""
        every = self._audit_every
        return every is not None and (self.steps + steps) // every > self._audited // every

    def remember_audit(self, steps: int) -> None:
        """Remember that a call has been one, of so many steps that are not counted yet."""
        self._audited = self.steps + steps

    def is_due(self, steps: int) -> bool:
        """Count `steps` more; return whether they include one after which to compare."""
        before, self.steps = self.steps, self.steps + steps
        return self._check_every is not None and self.steps // self._check_every > before // self._check_every


def checksum(value: tf.Tensor) -> tf.Tensor:
    """Return the checksum of a tensor, an int64 scalar made of all its bits, computed where it lies.

    The sum of its 8-byte words, each times the odd number 2 i + 1, modulo 2**64. An odd number times
    anything that is not 0 is not 0 modulo 2**64: so any change within one word, and any single flipped
    bit, changes the sum for certain. Several changes cancel out only by a rare chance. A NaN has bits as
    anything else.
    """
    if value.dtype == tf.string:
        value = tf.strings.to_hash_bucket_fast(value, 2**63 - 1)
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    flat = tf.reshape(value, [-1])
    if value.dtype.size > 8:
        words = tf.reshape(tf.bitcast(flat, tf.int64), [-1])
    elif value.dtype.size == 8:
        words = tf.bitcast(flat, tf.int64)
    else:
        in_word = 8 // value.dtype.size
        missing = -int(tf.size(flat)) % in_word
        if missing:
            flat = tf.concat([flat, tf.zeros([missing], flat.dtype)], 0)
        words = tf.bitcast(tf.reshape(flat, [-1, in_word]), tf.int64)
    odd = tf.range(1, 2 * tf.size(words, tf.int64) + 1, 2, dtype=tf.int64)
    return tf.reduce_sum(words * odd)


def outliers(checksums: Sequence[int]) -> tuple[int, ...]:
    """Return the towers that differ from most others; from tower 0, where no value is that of most.

    Args:
        checksums: [N] of one variable, as each tower holds it.
    """
    common, count = collections.Counter(checksums).most_common(1)[0]
    expected = common if 2 * count > len(checksums) else checksums[0]
    return tuple(tower for tower, one in enumerate(checksums) if one != expected)


def checksum_in_place(variable: tf.Variable) -> tf.Tensor:
    """Return the checksum of a variable, computed on its device."""
    with tf.device(variable.device):
        return checksum(variable.value())


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest absolute difference of two arrays of one shape; see `TowerState.divergence`."""
    if np.array_equal(one, other):
        return 0.0
    if one.dtype.kind not in "fiub" and one.dtype.name != "bfloat16":
        return float("inf")
    one, other = np.atleast_1d(one.astype(np.float64), other.astype(np.float64))
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    apart[np.isnan(apart)] = np.inf
    return float(np.max(apart, initial=0.0))


def distance_in_place(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the same of two tensors of numbers, in a graph, a float64 scalar on their device."""
    one, other = tf.cast(one, tf.float64), tf.cast(other, tf.float64)
    same = (one == other) | (tf.math.is_nan(one) & tf.math.is_nan(other))
    apart = tf.where(same, tf.zeros_like(one), tf.abs(one - other))
    apart = tf.where(tf.math.is_nan(apart), tf.fill(tf.shape(apart), tf.constant(np.inf, tf.float64)), apart)
    return tf.reduce_max(tf.concat([[tf.constant(0.0, tf.float64)], tf.reshape(apart, [-1])], 0))
