"""How large the CPU's steps become: measured with a fake clock, kept by key, and obeyed by the scheduler."""

import json

import pytest

from atom.config import Config
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.runner import calibration
from atom.model_engine.runner.calibration import (
    BUDGET_SECONDS,
    CHUNK_SECONDS,
    DEFAULT_CHUNK_TOKENS,
    MAX_CHUNK_TOKENS,
    MIN_NUM_SEQS,
    StepTimes,
    calibrated,
    half_chunk_depth,
    measure_steps,
)
from atom.model_engine.scheduler import SchedulerConfig
from tests.helpers.tiny_model import make_tiny_model
from tests.model_engine.scheduler_harness import FakeDevice, full, make_scheduler, make_seq

TIMES = StepTimes(((64, 0.05), (128, 0.1)), ((1, 0.02), (16, 0.05)))


class FakeMachine:
    """Steps that take ``fixed_s`` plus so much a token, on a clock of its own; some of it in other hands."""

    def __init__(
        self, prefill_tok_s: float, fixed_s: float = 0.0, row_s: float = 0.0, our_share: float = 1.0
    ):
        self.now, self.cpu = 100.0, 5.0
        self.prefills: list[int] = []
        self.decodes: list[int] = []
        self._token_s, self._fixed_s, self._row_s, self._share = 1 / prefill_tok_s, fixed_s, row_s, our_share

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += 2 * seconds * self._share

    def prefill(self, size: int) -> None:
        self.prefills.append(size)
        self._pass(self._fixed_s + size * self._token_s)

    def decode(self, size: int) -> None:
        self.decodes.append(size)
        self._pass(self._fixed_s + size * self._row_s)

    def measure(self, max_tokens: int = 2048, max_rows: int = 512) -> StepTimes:
        return measure_steps(
            self.prefill,
            self.decode,
            max_tokens=max_tokens,
            max_rows=max_rows,
            num_threads=2,
            clock=lambda: self.now,
            cpu_clock=lambda: self.cpu,
        )


@pytest.mark.parametrize(("tok_s", "chunk", "idle"), [(700, 128, 512), (1700, 256, 1024), (3000, 512, 2048)])
def test_a_chunk_takes_about_as_long_as_it_should(tok_s, chunk, idle):
    limits = FakeMachine(tok_s, fixed_s=0.005, row_s=0.001).measure().limits()
    assert (limits.chunk_tokens, limits.idle_chunk_tokens) == (chunk, idle)
    assert limits.chunk_tokens / tok_s <= CHUNK_SECONDS


@pytest.mark.parametrize("tok_s", [50, 700, 1700, 50_000])
def test_the_measurement_ends_in_time_on_any_machine(tok_s):
    machine = FakeMachine(tok_s, fixed_s=0.005, row_s=0.001)
    machine.measure()
    smallest = (16 + 64) / tok_s  # these two prefills are run whatever they take
    assert machine.now - 100.0 <= max(BUDGET_SECONDS, smallest + 5 * 0.005 + 20 * 0.001) + 1e-6


def test_a_fast_machine_is_not_asked_for_more_than_memory_is_planned_for():
    limits = FakeMachine(1e6, row_s=1e-6).measure().limits()
    assert limits.chunk_tokens == limits.idle_chunk_tokens == MAX_CHUNK_TOKENS


def test_decode_batches_are_bounded_by_time_but_stay_batches():
    assert FakeMachine(3000, fixed_s=0.01, row_s=0.001).measure().limits().num_seqs == pytest.approx(
        190, abs=1
    )
    assert FakeMachine(3000, fixed_s=0.03, row_s=0.005).measure().limits().num_seqs == MIN_NUM_SEQS


def test_a_short_context_and_a_small_cache_bound_what_is_run():
    machine = FakeMachine(1e5, row_s=1e-5)
    times = machine.measure(max_tokens=20, max_rows=4)
    assert max(machine.prefills) == 20 and max(machine.decodes) == 1
    assert times.limits().num_seqs is None  # one row says nothing of many


def test_a_machine_that_others_use_is_noticed():
    assert FakeMachine(1000).measure().is_quiet
    assert not FakeMachine(1000, our_share=0.5).measure().is_quiet


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "atom" / "calibration"


def not_again() -> StepTimes:
    raise AssertionError("measured again")


def test_times_are_measured_once_for_a_key(cache):
    assert calibrated({"model": "a"}, lambda: TIMES) == TIMES
    assert calibrated({"model": "a"}, not_again) == TIMES
    assert cache.stat().st_mode & 0o777 == 0o700
    other = StepTimes(((64, 1.0),), ((1, 1.0),))
    assert calibrated({"model": "b"}, lambda: other) == other
    assert len(list(cache.iterdir())) == 2


def test_times_of_a_busy_machine_are_measured_once_more(cache):
    busy = StepTimes(((64, 0.2),), ((1, 0.01), (16, 0.03)), is_quiet=False)
    assert calibrated({"model": "a"}, lambda: busy) == busy
    slower_rows = StepTimes(TIMES.prefill, ((1, 0.1),), is_quiet=False)
    best = StepTimes(TIMES.prefill, busy.decode)
    assert calibrated({"model": "a"}, lambda: slower_rows) == best
    assert calibrated({"model": "a"}, not_again) == best


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"key": 1}',
        '{"key": KEY, "prefill": [], "decode": [], "is_quiet": true}',
        '{"key": KEY, "prefill": [[1]]}',
    ],
)
def test_a_damaged_file_costs_a_measurement(cache, text):
    calibrated({"model": "a"}, lambda: TIMES)
    (file,) = cache.iterdir()
    key = json.loads(file.read_text())["key"]
    file.write_text(text.replace("KEY", json.dumps(key)))
    assert calibrated({"model": "a"}, lambda: TIMES) == TIMES
    assert calibrated({"model": "a"}, not_again) == TIMES


def test_a_folder_that_others_may_write_is_not_used(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert calibrated({"model": "a"}, lambda: TIMES) == TIMES
    assert not list(cache.iterdir())


def test_depth_counts_the_layers_that_see_everything():
    assert half_chunk_depth([(15, 512), (3, None)], 100_000_000, 1024) == 100_000_000 // (4 * 3 * 1024)
    assert half_chunk_depth([(18, 512)], 100_000_000, 1024) == 0


# -- the runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=65536)


def limits_of(folder, **fields) -> SchedulerConfig:
    fields = {"device": "cpu", "num_threads": 2, "kv_cache_memory": "64MiB", "max_num_seqs": 16, **fields}
    runner = ModelRunner(Config.build(str(folder), **fields))
    runner.load(lambda phase, fraction: None)
    runner.allocate(runner.cache_groups())
    return runner.scheduler_config()


def test_the_first_start_measures_and_later_ones_do_not(folder, cache, monkeypatch):
    monkeypatch.setattr(calibration, "QUIET_SHARE", 0.0)  # tests share the machine
    first = limits_of(folder)
    (file,) = cache.iterdir() or [None]
    monkeypatch.setattr(calibration, "measure_steps", lambda *_, **__: not_again())
    again = limits_of(folder)
    assert again.max_prefill_tokens == first.max_prefill_tokens
    assert set(json.loads(file.read_text())["key"]) >= {"model", "machine", "kernels", "sources", "settings"}


def test_other_settings_are_other_keys(folder, cache, monkeypatch):
    monkeypatch.setattr(calibration, "measure_steps", lambda *_, **__: TIMES)
    limits_of(folder)
    limits_of(folder, num_threads=1)
    limits_of(folder, dtype="bfloat16")
    assert len(list(cache.iterdir())) == 3


def test_the_runner_takes_what_was_measured(folder, cache, monkeypatch):
    monkeypatch.setattr(calibration, "measure_steps", lambda *_, **__: TIMES)
    limits = limits_of(folder, max_num_seqs=512)
    assert (limits.max_busy_prefill_tokens, limits.max_prefill_tokens) == (256, 1024)
    assert limits.max_num_seqs == 91
    assert limits_of(folder, max_num_seqs=100).max_num_seqs == 100  # asked for
    assert limits.half_chunk_depth > 0


def test_without_calibration_and_with_a_step_that_was_asked_for_nothing_is_run(folder, cache, monkeypatch):
    monkeypatch.setattr(calibration, "measure_steps", lambda *_, **__: not_again())
    assert limits_of(folder, cpu_calibration=False).max_prefill_tokens == DEFAULT_CHUNK_TOKENS
    asked = limits_of(folder, max_num_batched_tokens=8192)
    assert (asked.max_num_batched_tokens, asked.max_busy_prefill_tokens) == (8192, 0)
    assert not cache.exists()


# -- the scheduler


def run_scheduler(prompts: list[int], **limits) -> list[tuple[bool, int]]:
    """(is prefill, tokens) of every step; the last prompt arrives when the first has begun to decode."""
    scheduler = make_scheduler(
        [full(2000)], block_size=16, max_num_batched_tokens=2048, max_model_len=9000, **limits
    )
    device, steps = FakeDevice(scheduler), []
    *first, last = [make_seq(n, [n + 1] * size, 40, stop=False) for n, size in enumerate(prompts)]
    scheduler.add_all(first or [last])
    while (batch := scheduler.schedule()) is not None and len(steps) < 60:
        steps.append((batch.num_prefill_seqs > 0, batch.num_tokens))
        scheduler.commit(batch, device.launch(batch))
        if first and not batch.num_prefill_seqs and last.id not in scheduler._life.live and len(steps) < 10:
            scheduler.add(last)
    return steps


def test_a_prefill_step_is_larger_while_nobody_decodes():
    limits = {"max_prefill_tokens": 512, "max_busy_prefill_tokens": 128, "max_consecutive_prefill_steps": 1}
    steps = run_scheduler([1024, 512], **limits)
    assert steps[:2] == [(True, 512), (True, 512)]  # alone
    # A stream waits: small steps, and a token between them; the last is a token of both.
    assert steps[3:10] == [(True, 128), (False, 1)] * 3 + [(True, 128)]


def test_later_chunks_of_a_long_prompt_shrink_by_what_attention_costs():
    steps = run_scheduler([2048], max_prefill_tokens=512, half_chunk_depth=1024)
    chunks = [tokens for is_prefill, tokens in steps if is_prefill]
    assert sum(chunks) == 2048
    assert chunks[0] == 512 and sorted(chunks[:-1], reverse=True) == chunks[:-1]
    starts = [sum(chunks[:n]) for n in range(len(chunks))]
    costs = [size * (1 + start / 1024) for size, start in zip(chunks, starts, strict=True)]
    assert max(costs) <= 512 + 1 and min(costs[:-1]) > 512 * 0.6  # whole units of 64 tokens


def test_a_chunk_never_shrinks_to_nothing():
    steps = run_scheduler([640], max_prefill_tokens=64, half_chunk_depth=16)
    assert [tokens for is_prefill, tokens in steps if is_prefill] == [64] * 10
