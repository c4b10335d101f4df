"""Encode values for other processes, and decode theirs: JSON and raw numbers. Nothing is unpickled or evaluated."""

from __future__ import annotations

import functools
import io
import json
import math
import struct
from typing import Any

import numpy as np

from ncclsync.errors import ProcessError

_MARK = "<bytes>"  # the key of what stands for an array, or for bytes
_LENGTH = struct.Struct("<I")  # of the JSON, in bytes; raw bytes follow it
# NumPy knows the last three once ml_dtypes is imported, as TensorFlow does.
_DTYPES = {*(np.dtype(kind).name for kind in "?bhilqBHILQefdFD"), "bfloat16", "float8_e4m3fn", "float8_e5m2"}


class MessageError(ProcessError):
    """Bytes from another process are not a message of this job."""


def written(value: Any) -> bytes:
    """Encode a value as bytes. Raises TypeError for others than the following.

    Args:
        value: None, bool, int, float, str, bytes, a NumPy array or scalar; lists, tuples, and dicts by str, of these.
    """
    raw: list[bytes] = []

    def encoded(one: Any) -> dict[str, Any]:
        """Return what JSON has in place of a value that is none of its own; its bytes come behind the JSON."""
        if isinstance(one, (bytes, bytearray)):
            raw.append(bytes(one))
            return {_MARK: ["bytes", [len(one)]]}
        if isinstance(one, np.ndarray) and one.dtype == object:
            return {_MARK: ["object", one.shape, list(one.flat)]}
        if isinstance(one, (np.ndarray, np.generic)) and one.dtype.name in _DTYPES:
            raw.append(np.ascontiguousarray(one).tobytes())
            return {_MARK: [one.dtype.name, one.shape]}
        raise TypeError(f"Expected numbers, texts, bytes, or lists of such. Received: {type(one).__name__}")

    _check_keys(value)
    text = json.dumps(value, default=encoded).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *raw])


def _check_keys(value: Any) -> None:
    """Raise TypeError for a dict with keys that JSON would change, or that stands for something else."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == _MARK:
                raise TypeError(f"Expected numbers, texts, bytes, or dicts by text. Received: a dict by {key!r}")
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for one in value:
        _check_keys(one)


def read(data: bytes) -> Any:
    """Decode a value that `written` has encoded; a tuple comes as a list. Raises MessageError for other bytes."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        raw = io.BytesIO(data)
        raw.seek(_LENGTH.size + length)
        text = bytes(data[_LENGTH.size : _LENGTH.size + length])
        value = json.loads(text, object_hook=functools.partial(_decoded, raw))
        if raw.read(1):
            raise ValueError("more bytes than it names")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, struct.error) as error:
        raise MessageError(f"Expected a message of ncclsync's. Received: {len(data)} others ({error})") from None
    return value


def _decoded(raw: io.BytesIO, found: dict[str, Any]) -> Any:
    """Return a dict, or the value that it stands for, by the next bytes of those that follow the JSON."""
    if _MARK not in found:
        return found
    name, shape, *rest = found[_MARK]
    if any(length < 0 for length in shape):
        raise ValueError("a negative length")
    if name == "object":
        (objects,) = rest
        array = np.empty(len(objects), object)
        array[:] = objects
        return array.reshape(shape)
    if name != "bytes" and name not in _DTYPES:
        raise ValueError("an unknown dtype")
    dtype = np.dtype(np.uint8 if name == "bytes" else name)
    size_bytes = math.prod(shape) * dtype.itemsize
    taken = raw.read(size_bytes)
    if len(taken) != size_bytes:
        raise ValueError("bytes are missing")
    return taken if name == "bytes" else np.frombuffer(taken, dtype).reshape(shape).copy()[()]
