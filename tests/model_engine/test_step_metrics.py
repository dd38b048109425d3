"""Histograms that the engine fills, and the timer of device work."""

import time

import pytest
import torch

from atom.core import ScheduledBatch, Sequence
from atom.model_engine.runner import device_timer
from atom.model_engine.runner.device_timer import DeviceTimer, make_device_timer
from atom.model_engine.step_metrics import StepMetrics
from atom.runtime.histogram import unflatten
from atom.sampling_params import SamplingParams

NAME = "gpu_forward_seconds"


def make_batch(starts: list[int], counts: list[int], num_prefill: int) -> ScheduledBatch:
    seqs = [Sequence(i, [0] * 4096, SamplingParams(), max_output_tokens=8) for i in range(len(starts))]
    return ScheduledBatch(
        step=0,
        seqs=seqs,
        epochs=[0] * len(seqs),
        rows=list(range(len(seqs))),
        starts=starts,
        num_scheduled=counts,
        samples=[True] * len(seqs),
        num_prefill_seqs=num_prefill,
        num_tokens=sum(counts),
        new_seqs=[],
        patches=[],
    )


def count_and_sum(values: dict[str, float], name: str) -> tuple[float, float]:
    buckets, total = unflatten(name, values)
    assert buckets[-1][0] == "+Inf"
    return buckets[-1][1], total


def test_steps_are_counted_by_what_they_hold():
    metrics = StepMetrics()
    metrics.observe(make_batch([0, 64], [100, 28], 2))  # a prefill, its second request a later chunk
    metrics.observe(make_batch([100, 92], [1, 1], 0))  # a decode
    metrics.observe(make_batch([0, 102], [10, 1], 1))  # both in one step
    values = metrics.values()
    assert count_and_sum(values, "prefill_request_tokens") == (3, 138)
    assert count_and_sum(values, "prefill_batch_tokens") == (2, 138)
    assert count_and_sum(values, "prefill_context_tokens") == (2, 100 + 92 + 10)
    assert count_and_sum(values, "decode_batch_size") == (2, 3)
    assert count_and_sum(values, "decode_context_tokens") == (2, 101 + 93 + 103)


def test_counting_a_large_step_costs_microseconds():
    metrics, batch = StepMetrics(), make_batch([1000] * 256, [1] * 256, 0)
    best = min(_time_of(lambda: metrics.observe(batch)) for _ in range(50))
    assert best < 50e-6, best


def _time_of(action) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def test_the_timer_is_made_only_when_asked_for(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv("ATOM_ENABLE_METRICS_DEVICE_TIMER", raising=False)
    timer = make_device_timer(cpu, NAME)
    timer.start(NAME)()
    assert timer.values() == {}
    monkeypatch.setenv("ATOM_ENABLE_METRICS_DEVICE_TIMER", "1")
    timer = make_device_timer(cpu, NAME)
    stop = timer.start(NAME)
    time.sleep(0.02)
    stop()
    count, total = count_and_sum(timer.values(), NAME)
    assert count == 1 and 0.02 <= total < 1


class FakeEvent:
    """A device event; ``clock`` is the device's own time in ms."""

    clock = 0.0
    num_made = 0

    def __init__(self, enable_timing: bool):
        assert enable_timing
        FakeEvent.num_made += 1
        self.is_done = False

    def record(self) -> None:
        self.is_done, self.at = False, FakeEvent.clock

    def query(self) -> bool:
        return self.is_done

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at - self.at


@pytest.fixture
def timer(monkeypatch) -> DeviceTimer:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "num_made", 0)
    return DeviceTimer(torch.device("cuda"), NAME)


def run_span(timer: DeviceTimer, ms: float) -> None:
    stop = timer.start(NAME)
    FakeEvent.clock += ms
    stop()


def test_device_spans_are_read_in_order_once_they_have_passed(timer):
    run_span(timer, 3.0)
    run_span(timer, 5.0)
    first, second = timer._pending
    second[2].is_done = True
    assert count_and_sum(timer.values(), NAME) == (0, 0)  # the first has not passed: nothing waits for it
    first[2].is_done = True
    assert count_and_sum(timer.values(), NAME) == (2, pytest.approx(0.008))
    run_span(timer, 1.0)
    assert FakeEvent.num_made == 4  # events are used again


def test_a_device_that_is_far_behind_costs_no_memory(timer):
    for _ in range(2 * device_timer.MAX_PENDING):
        run_span(timer, 1.0)
    assert len(timer._pending) == device_timer.MAX_PENDING == FakeEvent.num_made / 2
    for _, _, end in timer._pending:
        end.is_done = True
    run_span(timer, 1.0)
    assert count_and_sum(timer.values(), NAME)[0] == device_timer.MAX_PENDING
