"""Cases of users, at scheduler level: preemption, stop strings, leaks, limits."""

import pytest
from scheduler_harness import Driver, full, make_scheduler, make_seq


def prompt(start: int, length: int) -> list[int]:
    return [(start * 31 + i * 7) % 50 for i in range(length)]


@pytest.mark.parametrize("overlapped", [False, True])
def test_P3_preempted_requests_hit_the_cache_when_they_return(overlapped):
    scheduler = make_scheduler([full(12)], max_model_len=40)
    driver = Driver(scheduler, overlapped)
    driver.add(*[make_seq(i, prompt(i, 9), 14, stop=False) for i in range(6)])
    driver.run()
    assert scheduler.stats()["preemptions"] > 0
    driver.check_answers()
    driver.check_idle()
