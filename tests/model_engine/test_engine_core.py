"""The engine core by messages: both loops, stops, aborts, utilities, failures that stay alone."""

import gc
import weakref

import pytest

from atom.config import Config
from atom.core import BatchOutput
from atom.errors import AtomError, ConfigError
from atom.model_engine import engine_core
from atom.model_engine.engine_core import load_worker_class
from atom.model_engine.messages import Abort, Metrics, Ready, Utility, UtilityResponse
from atom.model_engine.runner.scripted_worker import ScriptedWorker
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import CoreDriver

EOS = 1
PARAMS = SamplingParams(temperature=0.0, max_tokens=50)


def make_driver(loop="plain", worker_class=ScriptedWorker, **fields):
    fields = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kvcache_blocks": 64, **fields}
    config = Config.build("scripted", loop=loop, prefix_hash_seed=7, **fields)
    return CoreDriver(config, worker_class(config))


@pytest.fixture(params=["plain", "overlapped"])
def loop(request):
    return request.param


def test_start_reports_limits_and_phases():
    driver = make_driver()
    ready = driver.others[-1]
    assert isinstance(ready, Ready)
    assert list(ready.phases) == ["load weights", "allocate cache", "warm up", "record graphs"]
    assert ready.info["max_model_len"] == 4096


def test_every_request_gets_its_script_whatever_runs_beside_it(loop):
    driver = make_driver(loop)
    prompts = {i: [100 * i + j for j in range(1, 3 + 7 * i)] for i in range(1, 12)}
    driver.add(prompts, PARAMS, [EOS])
    driver.run()
    for seq_id, ids in prompts.items():
        expected = [*ids, EOS] if len(ids) < 50 else ids[:50]
        assert driver.tokens[seq_id] == expected[:50]
        assert driver.leave_reason(seq_id) == (f"stop_{EOS}" if len(ids) < 50 else "max_tokens")
    driver.check_idle()


def test_prompts_that_arrive_together_meet_in_one_step(loop):
    driver = make_driver(loop)
    driver.add({i: [i] * 4 for i in range(1, 9)}, SamplingParams(temperature=0.0, max_tokens=2))
    driver.run()
    # One prefill step and one decode step (and, overlapped, the turn that reads the last one back).
    assert driver.core.scheduler.stats()["steps"] == 2


def test_abort_frees_everything_at_once(loop):
    driver = make_driver(loop)
    driver.add({1: list(range(10, 30)), 2: list(range(50, 60))}, PARAMS, [EOS])
    for _ in range(4):
        driver.core.step()
    driver.core.handle(Abort([1], [-1], ["aborted"]))
    driver.run()
    assert driver.leave_reason(1) == "aborted"
    assert len(driver.tokens[1]) < 20
    assert driver.tokens[2] == [*range(50, 60), EOS]
    driver.check_idle()


def test_answers_to_prompts_are_out_before_the_books_over_their_blocks(loop, monkeypatch):
    driver = make_driver(loop)
    driver.add({1: [5, 6], 2: [7, 8]}, SamplingParams(temperature=0.0, max_tokens=1))

    def fail(*args, **kwargs):
        raise RuntimeError("the books are wrong")

    monkeypatch.setattr(driver.core.scheduler._life, "finish", fail)
    with pytest.raises(RuntimeError, match="the books are wrong"):
        driver.run()
    assert driver.tokens == {1: [5], 2: [7]}
    assert driver.leave_reason(1) == driver.leave_reason(2) == "max_tokens"


def test_what_ends_without_a_step_is_told_at_once(loop):
    driver = make_driver(loop)
    driver.add({1: [7] * 5000, 2: [7] * 4}, PARAMS)
    assert driver.leave_reason(1).startswith("unschedulable: 5000 tokens exceed")
    driver.core.handle(Abort([2], [-1], ["aborted"]))
    assert driver.leave_reason(2) == "aborted" and not driver.core.has_work


def test_abort_of_an_unknown_request_is_ignored(loop):
    driver = make_driver(loop)
    driver.core.handle(Abort([99], [-1], ["aborted"]))
    assert not driver.core.has_work


def test_one_failing_row_leaves_its_neighbours_alone(loop):
    class Failing(ScriptedWorker):
        def wait(self, handle):
            output = super().wait(handle)
            bad = [i for i, seq in enumerate(handle.seqs) if seq.id == 2 and handle.samples[i]]
            return BatchOutput(output.token_ids, errors=dict.fromkeys(bad, "numbers went bad"))

    driver = make_driver(loop, Failing)
    driver.add({1: [5, 6, 7], 2: [8, 9], 3: [10, 11]}, PARAMS, [EOS])
    driver.run()
    assert driver.leave_reason(2) == "error: numbers went bad"
    assert driver.tokens[1] == [5, 6, 7, EOS]
    assert driver.tokens[3] == [10, 11, EOS]
    driver.check_idle()


def test_preemption_under_a_tiny_cache_changes_nothing(loop):
    driver = make_driver(loop, num_kvcache_blocks=12, max_model_len=120)
    prompts = {i: [1000 * i + j for j in range(40)] for i in range(1, 7)}
    driver.add(prompts, SamplingParams(temperature=0.0, max_tokens=40))
    driver.run()
    assert driver.core.stats()["preemptions"] > 0
    for seq_id, ids in prompts.items():
        assert driver.tokens[seq_id] == ids
    driver.check_idle()


def test_utilities_answer_and_an_unknown_one_lists_what_is_known():
    driver = make_driver()
    driver.core.handle(Utility(7, "get_metrics_statistics", {}))
    driver.core.handle(Utility(8, "no_such_thing", {}))
    good, bad = driver.others[-2:]
    assert isinstance(good, UtilityResponse) and good.call_id == 7 and good.result["requests_running"] == 0
    assert bad.call_id == 8 and "no_such_thing" in bad.error and "clear_kv_cache" in bad.error


def test_a_failing_utility_is_answered_not_raised():
    driver = make_driver()
    driver.core.handle(Utility(1, "start_profile", {}))
    assert "no profiler" in driver.others[-1].error


def test_clearing_the_cache_forgets_prefixes():
    driver = make_driver()
    prompt = list(range(100, 164))
    driver.add({1: prompt}, SamplingParams(temperature=0.0, max_tokens=1))
    driver.run()
    driver.add({2: prompt}, SamplingParams(temperature=0.0, max_tokens=1))
    driver.run()
    assert driver.events[2][0].num_cached_tokens == 48
    driver.core.handle(Utility(1, "clear_kv_cache", {}))
    driver.add({3: prompt}, SamplingParams(temperature=0.0, max_tokens=1))
    driver.run()
    assert driver.events[3][0].num_cached_tokens == 0


def test_metrics_are_pushed_on_the_engines_clock():
    driver = make_driver()
    driver.others.clear()
    driver.core.push_metrics_if_due(1000.0)
    driver.core.push_metrics_if_due(1000.5)
    driver.core.push_metrics_if_due(1001.1)
    assert [type(message) for message in driver.others] == [Metrics, Metrics]


@pytest.mark.parametrize("name", ["nonsense", "atom.config.Config", "atom.no_such_module.Worker"])
def test_a_wrong_worker_class_is_a_configuration_error(name):
    with pytest.raises(ConfigError, match="runner_qualname"):
        load_worker_class(name)


def test_a_worker_that_cannot_be_imported_is_not_the_users_mistake(tmp_path, monkeypatch):
    (tmp_path / "broken_worker.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AtomError, match="broken_worker cannot be imported: undefined symbol") as raised:
        load_worker_class("broken_worker.Worker")
    assert not isinstance(raised.value, ConfigError)


def test_the_books_are_checked_after_an_abort_that_leaves_nothing_to_do(monkeypatch):
    driver = make_driver()
    monkeypatch.setattr(engine_core, "INTEGRITY_CHECK_INTERVAL_S", 0.0)
    checks = []
    monkeypatch.setattr(driver.core.scheduler, "check_integrity", lambda repair: checks.append(repair) or [])
    driver.add({1: [5] * 40}, SamplingParams(temperature=0.0, max_tokens=50))
    driver.core.step()
    driver.core.handle(Abort([1], [-1], ["aborted"]))
    assert not driver.core.has_work and not checks
    driver.core.rest()
    driver.core.rest()
    assert checks == [True]


def test_a_core_is_gone_with_its_last_reference(loop):
    driver = make_driver(loop)
    core = weakref.ref(driver.core)
    gc.disable()
    try:
        driver.core.close()
        driver.core = None
        assert core() is None
    finally:
        gc.enable()


def test_the_engine_rests_only_after_a_wait_in_which_nothing_came():
    """What rests do would keep the request waiting that follows another at once."""
    from types import SimpleNamespace

    from atom.model_engine.engine_process import IDLE_WAIT_MS, run_loop
    from atom.model_engine.messages import Shutdown
    from atom.model_engine.step_coordinator import NullCoordinator

    events = []
    arrivals = iter([["request"], [], [], ["request"], [], [], [], [Shutdown()]])

    def receive(wait_ms):
        events.append(wait_ms)
        return next(arrivals)

    def step():
        core.has_work = False
        events.append("step")
        return True

    core = SimpleNamespace(
        has_work=False,
        coordinator=NullCoordinator(),
        handle=lambda message: setattr(core, "has_work", message == "request"),
        step=step,
        rest=lambda: events.append("rest"),
        push_metrics_if_due=lambda now: None,
    )
    run_loop(core, SimpleNamespace(receive=receive))
    busy = [
        IDLE_WAIT_MS,
        "step",
        0,
    ]  # a request comes, and afterwards it is looked for the next without waiting
    assert events == [
        *busy,
        IDLE_WAIT_MS,
        "rest",
        *busy,
        IDLE_WAIT_MS,
        "rest",
        IDLE_WAIT_MS,
        "rest",
        IDLE_WAIT_MS,
    ]
