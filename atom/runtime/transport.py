"""Messages between the front end and one engine process: one Unix-domain stream socket in a private folder.

A message is its length (uint32) and its msgpack bytes. One connection carries everything, so that each side hears
the other in the order in which it spoke, and a message wakes its reader directly: no thread stands between. Nobody
waits for the other side to read. What the kernel does not take at once stays here until this side receives again,
which is all that the engine's loop and the front end's reading thread ever do.
"""

import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress

import msgspec

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 22  # asked of the kernel, which gives less as a rule


class MessageStream:
    """One end of a connection. ``send`` and ``wake`` are for any thread, the rest for one at a time.

    Args:
        connection: a connected stream socket, which belongs to this object from now on.
        decoder: of the messages that arrive; one that it cannot read is dropped, with an error in the log.
    """

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder):
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._socket = connection
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock = threading.Lock()
        self._frame = bytearray()  # of the message being sent
        self._unsent: deque[memoryview] = deque()
        self._is_open = True  # False: the other side has left
        self._is_closed = False
        self._chunk = bytearray(_READ_BYTES)
        self._received = bytearray()  # up to the end of the last message that is not here in full
        self._wake_end, self._waker = os.pipe()
        os.set_blocking(self._wake_end, False)
        os.set_blocking(self._waker, False)
        self._poll = select.poll()
        self._poll.register(self._wake_end, select.POLLIN)
        self._poll.register(connection, select.POLLIN)

    def send(self, message: object) -> None:
        """Hand over a message; never waits. One to a side that has left is dropped."""
        with self._send_lock:
            frame = self._frame
            self._encoder.encode_into(message, frame, _LENGTH.size)
            _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
            if self._unsent:
                self._unsent.append(memoryview(bytes(frame)))
                return
            num_sent = self._write(frame)
            if num_sent == len(frame):
                return
            self._unsent.append(memoryview(bytes(frame))[num_sent:])
        self.wake()  # the reading thread waits for room from now on

    def _write(self, data: bytearray | memoryview) -> int:
        """Bytes that the kernel took; all where nobody is left to read them."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _flush(self) -> None:
        with self._send_lock:
            while self._unsent:
                rest = self._unsent[0]
                num_sent = self._write(rest)
                if num_sent < len(rest):
                    self._unsent[0] = rest[num_sent:]
                    return
                self._unsent.popleft()

    def wake(self) -> None:
        """Let ``receive`` return early."""
        with self._send_lock:
            if not self._is_closed:
                with suppress(BlockingIOError):  # it has been told often enough
                    os.write(self._waker, b"\0")

    def receive(self, timeout_s: float, spin_s: float = 0.0) -> list:
        """Every message that is here; waits up to ``timeout_s`` seconds for the first, for ``spin_s`` of them without
        sleeping: a thread that sleeps takes tens of microseconds to be back.
        """
        messages = self._read()
        if spin_s > 0 and not messages:
            end = time.monotonic() + min(spin_s, timeout_s)
            while not messages and self._is_open and time.monotonic() < end:
                messages = self._read()
        if messages or timeout_s <= 0:
            return messages
        end = time.monotonic() + timeout_s
        while not messages:
            if not self._wait(end - time.monotonic()):
                break
            messages = self._read()
        return messages

    def _wait(self, timeout_s: float) -> bool:
        """Whether it is worth reading again; False when the time is over or ``wake`` was called."""
        if timeout_s <= 0 or self._is_closed:
            return False
        if self._is_open:
            self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        ready = self._poll.poll(timeout_s * 1000)
        if any(fd == self._wake_end for fd, _ in ready):
            os.read(self._wake_end, 4096)
            return False
        return bool(ready)

    def _read(self) -> list:
        if self._unsent:
            self._flush()
        messages: list = []
        while self._is_open:
            try:
                num_read = self._socket.recv_into(self._chunk)
            except BlockingIOError:
                break
            except OSError:
                num_read = 0
            if not num_read:
                self._is_open = False
                self._poll.unregister(self._socket)
                break
            self._received += memoryview(self._chunk)[:num_read]
            self._decode(messages)
            if num_read < _READ_BYTES:
                break
        return messages

    def _decode(self, messages: list) -> None:
        """Take every whole message out of what was received."""
        at, end = 0, len(self._received)
        with memoryview(self._received) as received:
            while end - at >= _LENGTH.size:
                start = at + _LENGTH.size
                stop = start + _LENGTH.unpack_from(received, at)[0]
                if stop > end:
                    break
                at = stop
                try:
                    messages.append(self._decoder.decode(received[start:stop]))
                except msgspec.MsgspecError as error:
                    logger.error("dropped an unreadable message of %d bytes: %s", stop - start, error)
        del self._received[:at]

    def close(self, linger_s: float = 0.0) -> None:
        """End the connection; what was sent and not taken is given ``linger_s`` seconds to leave. Idempotent."""
        if self._is_closed:
            return
        end = time.monotonic() + linger_s
        self._flush()
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while self._unsent and (left := end - time.monotonic()) > 0:
            room.poll(left * 1000)
            self._flush()
        with self._send_lock:
            self._is_open, self._is_closed = False, True
            self._socket.close()
            os.close(self._waker)
            os.close(self._wake_end)
            self._waker = self._wake_end = -1


def _path(folder: str, index: int) -> str:
    return f"{folder}/engine{index}"


class Listener:
    """Where engine ``index`` finds its front end."""

    def __init__(self, folder: str, index: int):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_path(folder, index))
        self._socket.listen(1)

    def accept(self, timeout_s: float, decoder: msgspec.msgpack.Decoder) -> MessageStream | None:
        """The engine's connection, waiting up to ``timeout_s`` seconds for it."""
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        return MessageStream(connection, decoder)

    def close(self) -> None:
        self._socket.close()


def connect(folder: str, index: int, decoder: msgspec.msgpack.Decoder) -> MessageStream:
    """Engine ``index``'s end of its connection; the front end listens already."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(_path(folder, index))
    return MessageStream(connection, decoder)
