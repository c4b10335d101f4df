"""What processes tell each other: values as they were, and nothing else than an error of what is no message."""

import math
import random

import numpy as np
import pytest

from ncclsync.communicator import messages
from ncclsync.communicator.messages import MessageError

VALUES = (
    None,
    True,
    -(2**70),
    0.1,
    math.inf,
    "täglich \ud800",
    b"\x00\xff",
    [],
    [1, [2, [3]], "4"],
    {"epoch": 3, "": [None], "ncclsync": "0.1.0"},
    np.arange(12, dtype=np.int16).reshape(3, 4),
    np.zeros((0, 3), np.float32),
    np.float32(0.1),
    np.array([True, False]),
    np.array([[1 + 2j]]),
    np.array([b"ab", b""], object),
)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_as_they_were(value):
    """Types, shapes and bits; tuples are lists."""
    found = messages.read(messages.written([value, (value,)]))
    assert type(found) is list and type(found[1]) is list
    for one in (found[0], found[1][0]):
        assert type(one) is type(value)
        if isinstance(value, (np.ndarray, np.generic)):
            assert (one.dtype, one.shape) == (value.dtype, value.shape) and one.tolist() == value.tolist()
        else:
            assert one == value


def test_bfloat16():
    """As TensorFlow's variables have it."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    found = messages.read(messages.written(np.array([1.5, 2], ml_dtypes.bfloat16)))
    assert found.dtype == ml_dtypes.bfloat16 and found.tolist() == [1.5, 2]


def test_other_values_are_refused():
    """Where they are written: nothing is pickled."""
    for value in (object(), {2}, lambda: None, [np.datetime64("2020")], [{1: 2}], {"a": {"<bytes>": 1}}):
        with pytest.raises(TypeError, match="Expected numbers, texts, bytes"):
            messages.written(value)


def test_any_bytes_are_a_value_or_an_error():
    """Bytes that are changed, cut off or made up: never another exception, and no memory that is not there."""
    rng = random.Random(0)
    whole = [messages.written(value) for value in (VALUES, [VALUES], {"a": VALUES[10]})]
    for _ in range(20_000):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(len(data))] = rng.choice((rng.randrange(256), ord(rng.choice('[]{}",0123456789-.e'))))
        cut = rng.random()
        data = data[: rng.randrange(len(data))] if cut < 0.2 else data
        data = rng.randbytes(rng.randrange(64)) if cut > 0.95 else data
        try:
            messages.read(bytes(data))
        except MessageError as error:
            assert "Expected" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        '{"<bytes>": ["float32", [1099511627776]]}',
        '{"<bytes>": ["float32", [-1, -1]]}',
        '{"<bytes>": ["float32", [4294967296, 4294967296, 0, 1]]}',
        '{"<bytes>": ["float32", [0.5]]}',
        '{"<bytes>": ["float32", 1]}',
        '{"<bytes>": ["bytes", [-4]]}',
        '{"<bytes>": ["bytes", ["4"]]}',
        '{"<bytes>": ["object", [1000000000], []]}',
        '{"<bytes>": ["object", [1]]}',
        '{"<bytes>": ["pickle", [4]]}',
        '{"<bytes>": [["pickle"], []]}',
        '{"<bytes>": 1}',
        "[" * 100_000,
        "[]]",
        "9" * 5000,
    ],
)
def test_what_a_stranger_would_write(text):
    """Sizes that are not there, kinds that are none, depth without an end."""
    with pytest.raises(MessageError, match="Expected a message of ncclsync's"):
        messages.read(len(text).to_bytes(4, "little") + text.encode())
