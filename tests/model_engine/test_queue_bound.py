"""D3: the queue has a bound on requests and on tokens, and says when to come back."""

import pytest

from atom.errors import QueueFullError
from atom.model_engine.queue_bound import MAX_RETRY_S, QueueBound


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def full(queue: QueueBound, requests: int, tokens: int) -> QueueFullError:
    with pytest.raises(QueueFullError) as info:
        queue.enter(requests, tokens)
    assert info.value.status == 429
    return info.value


def test_D3_requests_and_tokens_are_bounded():
    queue = QueueBound(3, 100)
    queue.enter(2, 50)
    assert "max_queued_requests 3" in str(full(queue, 2, 2))
    assert "max_queued_tokens 100" in str(full(queue, 1, 51))
    queue.enter(1, 50)
    assert (queue.num_requests, queue.num_tokens, queue.num_rejected) == (3, 100, 2)
    full(queue, 1, 1)
    queue.leave(50, is_served=True)
    queue.enter(1, 50)


def test_D3_an_empty_queue_takes_what_alone_is_over_the_bound():
    queue = QueueBound(2, 10)
    queue.enter(8, 1000)
    full(queue, 1, 1)
    for _ in range(8):
        queue.leave(125, is_served=False)
    assert (queue.num_requests, queue.num_tokens) == (0, 0)


def test_D3_retry_after_is_what_the_recent_rate_needs():
    clock = Clock()
    queue = QueueBound(100, 10_000, clock)
    queue.enter(100, 10_000)
    assert full(queue, 1, 0).retry_after_s == 1.0  # no rate is known yet
    for _ in range(10):  # one request of 100 tokens each half second
        queue.leave(100, is_served=True)
        clock.now += 0.5
    queue.enter(10, 1000)
    assert full(queue, 10, 100).retry_after_s == pytest.approx(5.0)
    assert full(queue, 1, 3000).retry_after_s == pytest.approx(15.0)
    assert full(queue, 1, 10**6).retry_after_s == MAX_RETRY_S
