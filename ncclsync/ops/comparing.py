"""Compare tensors that must be equal: by a checksum of their bits, by their distance, by their first difference.

`check_every`, `divergence`, audits and `verify` are made of these three. The tensors stay where they lie.
"""

import tensorflow as tf

EQUAL = -1  # what `first_difference` returns of equal tensors


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


def distance(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the largest absolute difference of two tensors of one shape and dtype, a float64 scalar.

    Equal NaNs do not differ; a NaN against a number is infinitely far, and so are different strings.
    """
    one, other = tf.reshape(one, [-1]), tf.reshape(other, [-1])
    if one.dtype == tf.string:
        apart = tf.where(one == other, tf.constant(0.0, tf.float64), float("inf"))
    else:
        wide = tf.complex128 if one.dtype.is_complex else tf.float64
        one, other = tf.cast(one, wide), tf.cast(other, wide)
        same = (one == other) | ((one != one) & (other != other))
        apart = tf.abs(one - other)
        apart = tf.where(apart == apart, apart, float("inf"))
        apart = tf.where(same, tf.zeros_like(apart), apart)
    return tf.reduce_max(tf.concat([tf.zeros([1], tf.float64), apart], 0))


def _bits(value: tf.Tensor) -> tf.Tensor:
    """Return the bytes of each element of a vector: [elements, bytes]."""
    bits = tf.bitcast(value, tf.uint8)
    return tf.reshape(bits, [tf.size(value), value.dtype.size])


def first_difference(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the first element whose bits differ, in the order of memory; -1 if none does. In the host's memory."""
    with tf.device("/CPU:0"):
        one, other = tf.reshape(one, [-1]), tf.reshape(other, [-1])
        both = tf.minimum(tf.size(one), tf.size(other))  # rows that are sent may be as many as were computed
        is_longer = tf.size(one) != tf.size(other)
        one, other = one[:both], other[:both]
        if one.dtype == tf.string or one.dtype == tf.bool:
            differ = tf.not_equal(one, other)
        else:
            differ = tf.reduce_any(tf.not_equal(_bits(one), _bits(other)), axis=1)
        places = tf.cast(tf.where(differ)[:, 0], tf.int64)
        last = tf.where(is_longer, tf.cast(both, tf.int64), tf.constant(EQUAL, tf.int64))
        return tf.concat([places, [last]], 0)[0]
