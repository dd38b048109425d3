"""Sockets between the front end and one engine process. Unix-domain ZMQ sockets in a private folder.

    input    ROUTER (front end) -> DEALER (engine)   AddRequests, Abort: an abort never overtakes its request
    control  ROUTER (front end) -> DEALER (engine)   Utility, Shutdown
    output   PUSH (engine) -> PULL (front end)       everything else

Each of the front end's sockets has one writer at a time: frames of two threads would interleave. Control is apart so
that it waits for no long prompts. The engine has no I/O threads of its own: it polls and sends from its loop.
"""

import logging
import threading
from collections.abc import Sequence

import msgspec
import zmq

logger = logging.getLogger(__name__)

_IDENTITY = b"engine"
_LINGER_MS = 4000


def _addresses(folder: str, index: int) -> tuple[str, str, str]:
    return tuple(f"ipc://{folder}/engine{index}-{kind}" for kind in ("input", "control", "output"))


class FrontSockets:
    """The front end's ends for engine ``index``. ``send`` and ``receive`` are each for one thread at a time."""

    def __init__(self, context: zmq.Context, folder: str, index: int, decoder: msgspec.msgpack.Decoder):
        input_, control, output = _addresses(folder, index)
        self._input = context.socket(zmq.ROUTER)
        self._control = context.socket(zmq.ROUTER)
        self._output = context.socket(zmq.PULL)
        for socket, address in ((self._input, input_), (self._control, control), (self._output, output)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder
        self._control_lock = threading.Lock()
        self._unheard = [self._input, self._control]

    def connect(self, timeout_s: float) -> bool:
        """Whether the engine has connected, waiting up to ``timeout_s`` seconds for each socket.

        Each of its DEALERs sends one empty frame, from which the ROUTER learns the identity.
        """
        while self._unheard:
            if not self._unheard[-1].poll(int(timeout_s * 1000)):
                return False
            self._unheard.pop().recv_multipart()
        return True

    def send(self, message: object) -> None:
        self._input.send_multipart((_IDENTITY, self._encoder.encode(message)))

    def send_control(self, message: object) -> None:
        with self._control_lock:
            self._control.send_multipart((_IDENTITY, msgspec.msgpack.encode(message)))

    def receive(self, timeout_s: float) -> list:
        """Every message that has arrived; waits up to ``timeout_s`` seconds for the first."""
        if not self._output.poll(int(timeout_s * 1000)):
            return []
        return _drain(self._output, self._decoder)

    def close(self) -> None:
        for socket in (self._input, self._control, self._output):
            socket.close(linger=0)


class EngineSockets:
    """The engine's ends. Everything is called from the engine's loop."""

    def __init__(self, folder: str, index: int, decoder: msgspec.msgpack.Decoder):
        self._context = zmq.Context()
        input_, control, output = _addresses(folder, index)
        self._dealers: Sequence[zmq.Socket] = tuple(self._context.socket(zmq.DEALER) for _ in range(2))
        for socket, address in zip(self._dealers, (input_, control), strict=True):
            socket.setsockopt(zmq.IDENTITY, _IDENTITY)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(address)
            socket.send(b"")
        self._output = self._context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, 0)
        self._output.setsockopt(zmq.LINGER, _LINGER_MS)
        self._output.connect(output)
        self._poller = zmq.Poller()
        for socket in self._dealers:
            self._poller.register(socket, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder

    def receive(self, timeout_ms: int) -> list:
        """Everything queued on both sockets. With 0 it never waits."""
        if timeout_ms and not self._poller.poll(timeout_ms):
            return []
        messages = []
        for socket in self._dealers:
            messages += _drain(socket, self._decoder)
        return messages

    def send(self, message: object) -> None:
        self._output.send(self._encoder.encode(message))

    def close(self) -> None:
        for socket in self._dealers:
            socket.close(linger=0)
        self._output.close()
        self._context.term()


def _drain(socket: zmq.Socket, decoder: msgspec.msgpack.Decoder) -> list:
    messages = []
    while True:
        try:
            frame = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return messages
        try:
            messages.append(decoder.decode(frame))
        except msgspec.MsgspecError as error:
            logger.error("dropped an unreadable message of %d bytes: %s", len(frame), error)
