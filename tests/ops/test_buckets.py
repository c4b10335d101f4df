"""fill_buckets, pure algebra; pack and unpack are each other's inverse."""

import random

import numpy as np
import pytest
import tensorflow as tf

from ncclsync.ops.buckets import fill_buckets, pack, unpack


@pytest.mark.parametrize(
    "sizes, kinds, limit, expected",
    [
        ([], [], 10, ()),
        ([4], ["a"], 10, ((0,),)),
        ([4, 4, 4], "aaa", 8, ((2, 1), (0,))),
        ([4, 4, 4], "aaa", 12, ((2, 1, 0),)),
        ([4, 4, 4], "aaa", 11, ((2, 1), (0,))),
        ([4, 99, 4], "aaa", 8, ((2,), (1,), (0,))),
        ([99, 4, 4], "aaa", 8, ((2, 1), (0,))),
        ([8, 1], "aa", 8, ((1,), (0,))),
        ([4, 4, 4, 4], "abab", 100, ((3, 1), (2, 0))),
        ([4, 4, 4, 4], "abab", 4, ((3,), (2,), (1,), (0,))),
        ([0, 0, 4, 0], "aaaa", 4, ((3, 2, 1, 0),)),
        ([0, 0], "aa", 1, ((1, 0),)),
        ([1, 1, 1], [("sum", "f32"), ("sum", "f16"), ("sum", "f32")], 9, ((2, 0), (1,))),
    ],
)
def test_buckets(sizes, kinds, limit, expected):
    """Last created first; full buckets are closed; kinds do not mix; an oversized tensor travels alone."""
    assert fill_buckets(sizes, kinds, limit) == expected


def test_a_first_bucket_of_another_size():
    """Of each kind."""
    assert fill_buckets([4] * 6, "aaaaab", 12, 4) == ((5,), (4,), (3, 2, 1), (0,))


def test_properties_of_random_buckets():
    """Every index once; each bucket of one kind, in reverse order, within the limit or alone; buckets in the
    order in which their first tensor comes; and no two buckets in a row of a kind could have been one.
    """
    rng = random.Random(0)
    for _ in range(500):
        count, limit = rng.randrange(30), rng.randrange(1, 50)
        sizes = [rng.choice([0, 1, 3, 10, 49, 60]) for _ in range(count)]
        kinds = [rng.choice("abc") for _ in range(count)]
        buckets = fill_buckets(sizes, kinds, limit)
        assert sorted(index for bucket in buckets for index in bucket) == list(range(count))
        assert [bucket[0] for bucket in buckets] == sorted((bucket[0] for bucket in buckets), reverse=True)
        last_of_kind = {}
        for bucket in buckets:
            assert list(bucket) == sorted(bucket, reverse=True)
            (kind,) = {kinds[index] for index in bucket}
            filled = sum(sizes[index] for index in bucket)
            # An oversized tensor is alone but for tensors without elements.
            assert filled <= limit or sum(sizes[index] > 0 for index in bucket) == 1
            if kind in last_of_kind:
                assert last_of_kind[kind] + sizes[bucket[0]] > limit
            last_of_kind[kind] = filled


@pytest.mark.parametrize(
    "shapes",
    [[()], [(3,)], [(2, 3), (), (0,), (1, 1, 4)], [(0,)], [(2, 0), (5,)], [(1,)] * 40],
    ids=lambda shapes: f"{len(shapes)}-{shapes[0]}",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_unpack_is_the_inverse_of_pack(shapes, dtype):
    """Any shapes, scalars and empty ones among them; the bucket is flat and as long as all together."""
    start, tensors = 0, []
    for shape in shapes:
        size = int(np.prod(shape))
        tensors.append(tf.cast(tf.reshape(tf.range(start, start + size), shape), dtype))
        start += size

    @tf.function
    def there_and_back():
        bucket = pack(tensors)
        return bucket, unpack(bucket, [tf.TensorShape(shape) for shape in shapes])

    bucket, parts = there_and_back()
    assert bucket.shape == (start,) and bucket.dtype.name == dtype
    np.testing.assert_array_equal(tf.cast(bucket, tf.float64), np.arange(start))
    for part, tensor in zip(parts, tensors, strict=True):
        assert part.shape == tensor.shape and part.dtype == tensor.dtype
        np.testing.assert_array_equal(tf.cast(part, tf.float64), tf.cast(tensor, tf.float64))
