"""Encode values for other processes, and decode theirs: JSON and raw numbers, of limited size, with a keyed digest.

Nothing is unpickled, so a stranger who reaches a port cannot run code. Without the job's secret nobody can change,
repeat or reorder the processes' messages.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import math
import os
import secrets
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from ncclsync.errors import NcclSyncError, ProcessError

VARIABLE = "NCCLSYNC_SECRET"
MOST_BYTES = 1 << 20  # of a message, where its reader expects no arrays
SEAL_BYTES = 16
_LEAST_SECRET = 16  # characters
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
    text = json.dumps(_plain(value, raw)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *raw])


def read(data: bytes, most_bytes: int = MOST_BYTES) -> Any:
    """Decode a value that `written` has encoded, of at most so many bytes.

    Raises MessageError if there are more bytes, or `written` has not made them.
    """
    if len(data) > most_bytes:
        raise MessageError(f"Expected at most {most_bytes} bytes. Received: {len(data)}")
    try:
        (length,) = _LENGTH.unpack_from(data)
        end = _LENGTH.size + length
        if end > len(data):
            raise ValueError("its end is missing")
        raw = io.BytesIO(data)
        raw.seek(end)
        value = _value(json.loads(bytes(data[_LENGTH.size : end])), raw)
        if raw.read(1):
            raise ValueError("more bytes than it names")
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as error:
        raise MessageError(f"Expected a message of ncclsync's. Received: {len(data)} others ({error})") from None
    return value


def _plain(value: Any, raw: list[bytes]) -> Any:
    """Return a value as JSON has it. A value that is not a scalar becomes a list that begins with its kind."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        raw.append(bytes(value))
        return ["bytes", len(value)]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__ if type(value) in (list, tuple) else "tuple", *(_plain(one, raw) for one in value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", *([key, _plain(one, raw)] for key, one in value.items())]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return ["objects", list(value.shape), *(_plain(one, raw) for one in value.flat)]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in _DTYPES:
        raw.append(np.ascontiguousarray(value).tobytes())
        return ["array", value.dtype.name, list(value.shape)]
    raise TypeError(f"Expected numbers, texts, bytes, or lists of such. Received: {type(value).__name__}")


def _taken(raw: io.BytesIO, count: int) -> bytes:
    """Return the next bytes of those that follow the JSON."""
    taken = raw.read(count) if count >= 0 else b""
    if len(taken) != count:
        raise ValueError("bytes are missing")
    return taken


def _value(plain: Any, raw: io.BytesIO) -> Any:
    if not isinstance(plain, list):
        if isinstance(plain, dict):
            raise ValueError("an object of JSON")
        return plain
    kind, *rest = plain
    if kind in ("list", "tuple"):
        found = [_value(one, raw) for one in rest]
        return found if kind == "list" else tuple(found)
    if kind == "dict":
        return {_checked(key, str): _value(one, raw) for key, one in rest}
    if kind == "bytes":
        (count,) = rest
        return _taken(raw, _checked(count, int))
    if kind == "array":
        name, shape = rest
        if name not in _DTYPES:
            raise ValueError("an unknown dtype")
        dtype = np.dtype(name)
        count = math.prod(_shape(shape))
        return np.frombuffer(_taken(raw, count * dtype.itemsize), dtype).reshape(shape).copy()[()]
    if kind == "objects":
        shape, *given = rest
        if math.prod(_shape(shape)) != len(given):
            raise ValueError("another number of objects")
        objects = np.empty(len(given), object)
        for i, one in enumerate(given):
            objects[i] = _value(one, raw)
        return objects.reshape(shape)
    raise ValueError("an unknown kind")


def _shape(shape: Any) -> Iterator[int]:
    for length in _checked(shape, list):
        if _checked(length, int) < 0:
            raise ValueError("a negative length")
        yield length


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"no {kind.__name__}")
    return value


def given_secret() -> bytes | None:
    """Return the job's secret from the environment; None if not set. Raises NcclSyncError if it is too short."""
    given = os.environ.get(VARIABLE, "")
    if given and len(given) < _LEAST_SECRET:
        raise NcclSyncError(
            f"Expected {VARIABLE} to have at least {_LEAST_SECRET} characters. Received: {len(given)}. Set it for all "
            "processes by such as: export NCCLSYNC_SECRET=$(openssl rand -hex 32)"
        )
    return given.encode() or None


OFFER_BYTES = 32


def new_offer() -> bytes:
    """Return process 0's part of the key, for `Seal`: whether it has a secret, and random bytes."""
    return bytes([given_secret() is not None]) + secrets.token_bytes(OFFER_BYTES - 1)


class Seal:
    """Put a digest before each message; making it takes the job's secret."""

    def __init__(self, offer: bytes) -> None:
        """Derive the key from process 0's `new_offer`, and from the secret if the environment has one.

        Raises NcclSyncError if only some of the processes have a secret.
        """
        given = given_secret()
        if len(offer) != OFFER_BYTES or bool(offer[0]) != (given is not None):
            there, here = ("set", "not set") if given is None else ("not set", "set")
            raise NcclSyncError(
                f"Expected {VARIABLE} in all processes, or in none. Received: {here} in this process, {there} in "
                f"process 0. Pass it on to all, as by mpirun -x {VARIABLE}"
            )
        self._key = hashlib.blake2b(offer, key=hashlib.sha512(given or b"").digest(), digest_size=32).digest()

    def sealed(self, about: str, data: bytes) -> bytes:
        """Return a message; `about` names its sender and the message, unlike all others."""
        return self._digest(about, data) + data

    def opened(self, about: str, message: bytes | bytearray) -> bytes:
        """Return the data of a message; see `sealed`. Raises MessageError if its digest is another one."""
        data = bytes(message[SEAL_BYTES:])
        if not hmac.compare_digest(self._digest(about, data), bytes(message[:SEAL_BYTES])):
            raise MessageError(
                f"Expected a message with the digest of this job's secret ({about}). Received: another digest. Give "
                f"all processes the same {VARIABLE}; if they have it, somebody else sends to this job's ports"
            )
        return data

    def _digest(self, about: str, data: bytes) -> bytes:
        # The length separates `about` from the data.
        keyed = hashlib.blake2b(f"{len(about)} {about}".encode(), key=self._key, digest_size=SEAL_BYTES)
        keyed.update(data)
        return keyed.digest()
