"""What a tower sends and takes apart again, by hand-made buckets: with samples and without."""

import numpy as np
import pytest
import tensorflow as tf

from ncclsync.ops import Collective
from ncclsync.program.packing import pack_all, unpack_all
from ncclsync.program.program import Bucket, Exchange

A, B = np.arange(6, dtype="float32").reshape(2, 3) + 1, np.array([7, np.nan], "float32")


def bucket(collective, packed=True, dtype=tf.float32, wire=None):
    exchanges = tuple(
        Exchange(name, f"{name} joined", collective, tf.TensorShape(value.shape), dtype)
        for name, value in (("a", A), ("b", B))
    )
    return Bucket(wire or collective, exchanges, packed)


def packed_by(given, fraction, dtype="float32"):
    """[B][E] what a tower sends that has this share of the samples: alike by selects and by slices."""
    selected, sliced = packed_in(True, given, fraction, dtype), packed_in(False, given, fraction, dtype)
    for one, other in zip(selected, sliced, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    return sliced


def packed_in(selects, given, fraction, dtype):
    """As `packed_by`, in one of these ways."""

    @tf.function(autograph=False)
    def graph():
        values = {"a": tf.constant(A.astype(dtype)), "b": tf.constant(np.nan_to_num(B).astype(dtype))}
        if dtype == "float32":
            values["b"] = tf.constant(B)
        share = tf.constant(fraction, tf.float64)
        sent, _ = pack_all(given, values, share, tf.constant(int(fraction > 0)), selects)
        return sent

    return [[tensor.numpy() for tensor in each] for each in graph()]


def test_a_bucket_holds_its_tensors_in_order():
    """Flat, one after the other; a mean's weighted by the tower's share, a sum's as they are."""
    summed, meant = packed_by([bucket(Collective("all_reduce", "sum")), bucket(Collective("all_reduce", "mean"))], 0.25)
    flat = np.concatenate([A.ravel(), B])
    np.testing.assert_array_equal(summed, [flat])
    np.testing.assert_array_equal(meant, [flat / 4])


@pytest.mark.parametrize(
    ("op", "dtype", "neutral"),
    [
        ("sum", "float32", 0.0),
        ("prod", "float32", 1.0),
        ("max", "float32", -np.inf),
        ("min", "float32", np.inf),
        ("max", "int32", np.iinfo("int32").min),
        ("min", "int32", np.iinfo("int32").max),
    ],
)
def test_a_tower_without_samples_changes_nothing(op, dtype, neutral):
    """It sends the operation's neutral element, whatever it has computed: a NaN as well."""
    given = bucket(Collective("all_reduce", op), dtype=tf.as_dtype(dtype))
    ((sent,),) = packed_by([given], 0.0, dtype)
    np.testing.assert_array_equal(sent, np.full(A.size + B.size, neutral, dtype))


def test_a_tower_without_samples_has_no_rows():
    """Of what is gathered it sends none; what is broadcast, or added up without regard to samples, as it is."""
    gathered = bucket(Collective("all_gather"), packed=False)
    root = bucket(Collective("broadcast"))
    running = bucket(Collective("all_reduce", "sum", empty_too=True))
    rows, sent, added = packed_by([gathered, root, running], 0.0)
    assert [len(each) for each in rows] == [0, 0]
    np.testing.assert_array_equal(sent[0][:6], A.ravel())
    np.testing.assert_array_equal(added[0][:6], A.ravel())


def test_unpacked_as_packed():
    """Each exchange's result has its name and its shape, from a packed bucket and from one that is not."""
    joined = bucket(Collective("all_reduce", "sum"))
    other = bucket(Collective("all_reduce", "max"), packed=False)

    @tf.function(autograph=False)
    def graph():
        (flat,), apart = pack_all(
            [joined, other], {"a": tf.constant(A), "b": tf.constant(B)}, tf.constant(1.0, tf.float64), tf.constant(1)
        )[0]
        assert flat.shape == [A.size + B.size] and len(apart) == 2
        first, second = unpack_all([joined], [[flat]]), unpack_all([other], [apart])
        assert list(first) == list(second) == ["a joined", "b joined"]
        return first, second

    for found in graph():
        np.testing.assert_array_equal(found["a joined"], A)
        np.testing.assert_array_equal(found["b joined"], B)


def test_a_bucket_takes_one_select():
    """Of its tensors together, after they are joined: on a GPU each select is a kernel, and a pass over memory."""

    @tf.function(autograph=False)
    def graph(a, b, share):
        joined = bucket(Collective("all_reduce", "sum"))
        return pack_all([joined, joined], {"a": a, "b": b}, share, tf.constant(1))[0]

    ops = graph.get_concrete_function(A, B, tf.constant(1.0, tf.float64)).graph.get_operations()
    assert [op.type for op in ops].count("SelectV2") == 2


@pytest.mark.parametrize("selects", [True, False])
def test_a_tensor_of_another_size_than_the_trace_says_is_an_error(selects):
    """Such as a gradient that Python computes: it is not cut to size."""

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)])
    def graph(a, b):
        joined = bucket(Collective("all_reduce", "sum"))
        ((flat,),) = pack_all([joined], {"a": a, "b": b}, tf.constant(1.0, tf.float64), tf.constant(1), selects)[0]
        return unpack_all([joined], [[flat]])["b joined"]

    np.testing.assert_array_equal(graph(A, B), B)
    with pytest.raises(tf.errors.InvalidArgumentError):
        graph(A, np.ones(3, "float32"))
