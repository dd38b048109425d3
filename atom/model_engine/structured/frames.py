"""Frames between the guide compiler and its worker: a length of four bytes, then msgpack."""

import socket
import struct

import msgspec

from atom.guide import Guide

_LENGTH = struct.Struct("<I")


class Job(msgspec.Struct, array_like=True):
    backend: str
    guide: Guide
    time_limit_s: float


class Loaded(msgspec.Struct, array_like=True, tag="loaded"):
    """The library is ready; from here on the time counts."""


class Compiled(msgspec.Struct, array_like=True, tag="compiled"):
    data: bytes


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    words: str


Reply = Loaded | Compiled | Refused


def send_frame(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def read_frame(connection: socket.socket) -> bytes:
    """Raises EOFError when the other side is gone, TimeoutError as the socket's timeout says."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(min(1 << 20, length - len(data)))
        if not part:
            raise EOFError("the other side has closed the connection")
        data += part
    return bytes(data)
