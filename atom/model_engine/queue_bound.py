"""The bound on what waits: requests that were handed in and have not got their first token yet."""

import time
from collections import deque
from collections.abc import Callable

from atom.errors import QueueFullError

RATE_WINDOW = 64  # departures that the rate is taken from
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class QueueBound:
    """Counts waiting sequences and their prompt tokens, and refuses what would pass a limit.

    An empty queue takes whatever fits the context: what is refused may always come back. Not thread-safe.

    Args:
        max_requests: waiting sequences (a request has n).
        max_tokens: prompt tokens of them.
    """

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic):
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self.num_rejected = 0
        self._clock = clock
        self._departures: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)  # when, prompt tokens

    def enter(self, num_requests: int, num_tokens: int, *, is_bounded: bool = True) -> None:
        """Take in ``num_requests`` sequences with ``num_tokens`` prompt tokens together.

        Args:
            is_bounded: False for a caller that may queue as much as it likes: one in this very process.

        Raises:
            QueueFullError: a limit would be passed. It says after how many seconds there should be room.
        """
        requests, tokens = self.num_requests + num_requests, self.num_tokens + num_tokens
        is_over = requests > self.max_requests or tokens > self.max_tokens
        if is_bounded and is_over and self.num_requests:
            self.num_rejected += 1
            raise QueueFullError(
                f"The queue holds {self.num_requests} requests with {self.num_tokens} prompt tokens, its limits are "
                f"max_queued_requests {self.max_requests} and max_queued_tokens {self.max_tokens}: no room for "
                f"{num_requests} more with {num_tokens}",
                retry_after_s=self._seconds_until(requests - self.max_requests, tokens - self.max_tokens),
            )
        self.num_requests, self.num_tokens = requests, tokens

    def leave(self, num_tokens: int, *, is_served: bool) -> None:
        """A sequence with ``num_tokens`` prompt tokens has got its first token (``is_served``) or was given up."""
        self.num_requests -= 1
        self.num_tokens -= num_tokens
        if is_served:
            self._departures.append((self._clock(), num_tokens))

    def _seconds_until(self, num_requests: int, num_tokens: int) -> float:
        """How long the recent rate needs for so many requests and tokens to leave."""
        if len(self._departures) < 2:
            return MIN_RETRY_S
        elapsed = max(self._clock() - self._departures[0][0], 1e-3)
        tokens = sum(tokens for _, tokens in self._departures)
        seconds = max(
            elapsed * num_requests / len(self._departures), elapsed * num_tokens / max(tokens, 1), MIN_RETRY_S
        )
        return min(seconds, MAX_RETRY_S)
