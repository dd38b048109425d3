"""Who reads what the engine says: a thread of its own, or a caller that waits for just that.

A caller that reads is woken by the engine's message itself, not by a thread that the message has woken. It may while
every request in flight is its own, so that nobody else's callbacks run on its thread.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atom.errors import EngineDeadError
from atom.model_engine.engine_client import EngineClient
from atom.model_engine.messages import FromEngine
from atom.utils.logging import init_logger

logger = init_logger(__name__)

POLL_S = 0.2
PARKED_S = 0.05  # so long after a caller has read, the thread leaves the next one its place
SPIN_S = 0.02  # a caller looks for the first answer so long without sleeping
_INTERRUPTING = ("SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")


class OutputReader:
    """Hands every message of ``client`` to ``handle``, one after the other.

    Args:
        handle: called with each message, by the thread or the caller that reads.
        fail: called once, by the thread, when the engine is gone.
    """

    def __init__(
        self,
        client: EngineClient,
        handle: Callable[[FromEngine], None],
        fail: Callable[[EngineDeadError], None],
    ):
        self.may_spin = False  # whether there are cores to spare
        self._client = client
        self._handle: Callable[[FromEngine], None] | None = handle
        self._fail: Callable[[EngineDeadError], None] | None = fail
        self._turn = threading.Lock()  # of whoever reads
        self._state = threading.Lock()  # of what follows
        self._is_lent = False
        self._is_needed = False  # lent, and others wait for what is to be read
        self._goes_on = threading.Event()  # the thread is not to wait
        self._goes_on.set()
        self._is_closing = False
        self._left: list[FromEngine] = []  # by a caller, for the thread
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine-output", daemon=True)
        self._thread.start()

    def attend(self) -> None:
        """Something was sent by one who does not read: what comes back is to be read in time."""
        with self._state:
            self._is_needed = True
            if not self._is_lent:
                self._goes_on.set()
                return
        self._client.wake()

    def stop(self, timeout_s: float) -> None:
        """End the thread, waiting up to ``timeout_s`` seconds for it."""
        self._is_closing = True
        self.attend()
        self._thread.join(timeout_s)
        self._handle = self._fail = None  # they would keep their owner alive

    # -- a caller

    def read_until(self, is_over: Callable[[], bool], is_own: Callable[[], bool]) -> None:
        """Read on this thread until ``is_over``; not at all, or less, where that has to be left to the thread.

        Args:
            is_own: whether nobody else waits for what the engine says; asked before messages are handled.
        """
        if not (self._client.may_change_readers and is_own()):
            return
        with _interrupts_put_off() as interrupts:
            if interrupts is None or not self._borrow():
                return
            try:
                self._read_until(is_over, is_own, interrupts)
            finally:
                self._give_back()
        if interrupts:
            raise KeyboardInterrupt

    def _borrow(self) -> bool:
        with self._state:
            if self._is_lent or self._is_closing:
                return False
            self._is_lent, self._is_needed = True, False
            is_reading = self._goes_on.is_set()
            self._goes_on.clear()
        if is_reading:
            self._client.wake()
        self._turn.acquire()
        return True

    def _give_back(self) -> None:
        self._turn.release()
        with self._state:
            self._is_lent = False
            if self._is_needed or self._left or self._error is not None:
                self._goes_on.set()

    def _read_until(
        self, is_over: Callable[[], bool], is_own: Callable[[], bool], interrupts: list[int]
    ) -> None:
        spin_end = time.monotonic() + SPIN_S if self.may_spin else 0.0
        try:
            while not (is_over() or interrupts or self._left or self._error or self._is_closing):
                spin_s = max(0.0, spin_end - time.monotonic()) if spin_end else 0.0
                messages = self._client.receive(POLL_S, spin_s)
                if not is_own():
                    self._left = messages
                    self._is_needed = True
                    return
                if messages:
                    spin_end = 0.0
                for message in messages:
                    self._handle(message)
        except Exception as error:  # what it means is told by the thread, as ever
            self._error = error

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                if not self._goes_on.wait(PARKED_S) and self._is_lent:
                    continue
                with self._turn:
                    self._read()
        except EngineDeadError as error:
            if not self._is_closing:
                self._fail(error)
        except Exception as error:
            logger.exception("the output thread failed")
            self._fail(EngineDeadError(f"the output thread failed: {error}"))

    def _read(self) -> None:
        if self._error is not None:
            raise self._error
        messages, self._left = self._left, []
        if not messages:
            with self._state:
                if self._is_lent:
                    return
                self._goes_on.set()  # it reads again: a caller has to ask
            messages = self._client.receive(POLL_S)
        for message in messages:
            self._handle(message)


@contextmanager
def _interrupts_put_off() -> Iterator[list[int] | None]:
    """Ctrl-C inside is only noted, in what this gives: half a message read would be the end of a connection.

    None where it cannot be put off: another handler of signals may raise on this thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    others = (getattr(signal, name, None) for name in _INTERRUPTING)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or any(
        callable(signal.getsignal(number)) for number in others if number is not None
    ):
        yield None
        return
    noted: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
