"""Cases of users, at scheduler level: preemption, stop strings, leaks, limits, disconnects."""

import pytest
from scheduler_harness import EOS, Driver, expected_answer, full, make_scheduler, make_seq, sliding

from atom.errors import ConfigError
from atom.sampling_params import SamplingParams


def prompt(start: int, length: int) -> list[int]:
    return [(start * 31 + i * 7) % 50 for i in range(length)]


@pytest.mark.parametrize("overlapped", [False, True])
def test_P3_preempted_requests_hit_the_cache_when_they_return(overlapped):
    scheduler = make_scheduler([full(12)], max_model_len=40)
    driver = Driver(scheduler, overlapped)
    driver.add(*[make_seq(i, prompt(i, 9), 14, stop=False) for i in range(6)])
    driver.run()
    readmitted = [s for s in driver.seqs.values() if s.num_preemptions]
    assert readmitted
    # The device saw a readmission start past position 0: the blocks of the first life were hit.
    starts = [
        batch.starts[batch.seqs.index(seq)]
        for batch in driver.device.launched
        for seq in batch.new_seqs
        if seq in readmitted
    ]
    assert max(starts) > 0
    driver.check_answers()
    driver.check_idle()


@pytest.mark.parametrize("overlapped", [False, True])
def test_P4_long_answers_make_progress_and_preemptions_are_bounded(overlapped):
    scheduler = make_scheduler([full(40)], max_num_seqs=16, max_model_len=160)
    driver = Driver(scheduler, overlapped)
    # n = 2: pairs with the same prompt.
    driver.add(*[make_seq(i, prompt(i // 2, 20), 120, stop=False) for i in range(16)])
    driver.run()
    driver.check_answers()
    driver.check_idle()
    counts = [seq.num_preemptions for seq in driver.seqs.values()]
    assert sum(counts) > 0
    assert max(counts) <= 4  # room grows 4, 16, 64, 256 tokens: the last covers any answer here
    computed = sum(batch.num_tokens for batch in driver.device.launched)
    assert computed < 3 * 16 * 140, "most of the work is done twice"


def test_P2_tokens_after_a_stop_string_leave_the_cache():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    first = make_seq(1, prompt(3, 10), 30, stop=False)
    driver.add(first)
    while len(driver.answers[1]) < 20:
        driver.step()
    generated = list(first.token_ids)
    kept = 10 + 7  # the front end found the stop string after 7 answer tokens
    assert driver.abort(1, kept, "stop_sequence")
    assert driver.reasons[1] == "stop_sequence"
    for seq_id, length in ((2, 17), (3, 28)):
        probe = make_seq(seq_id, [*generated[:length], 1], 1, stop=False)
        driver.add(probe)
        driver.run()
        assert driver.cached[seq_id] == 16  # four blocks of the answered text, none of what was cut off
    driver.check_idle()


def test_P2_holds_for_a_request_that_is_waiting_after_preemption():
    scheduler = make_scheduler([full(9)], max_model_len=36)
    driver = Driver(scheduler)
    driver.add(make_seq(1, prompt(1, 8), 28, stop=False), make_seq(2, prompt(2, 8), 28, stop=False))
    second = driver.seqs[2]
    while not second.num_preemptions:
        driver.step()
    assert second.num_output_tokens >= 5
    assert driver.abort(2, 8, "stop_sequence")
    assert driver.abort(1, -1)
    driver.add(make_seq(3, [*second.token_ids, 1], 1, stop=False))
    driver.run()
    assert driver.cached[3] == 8
    driver.check_idle()


def test_P2_blocks_that_another_request_matched_stay():
    driver = Driver(make_scheduler())
    driver.add(make_seq(1, prompt(1, 18), 60, stop=False))
    driver.step()
    driver.add(make_seq(2, prompt(1, 18), 60, stop=False))
    driver.step()
    assert driver.seqs[2].num_cached_tokens == 16
    driver.abort(1, 4, "stop_sequence")  # its client got one block; the other prompt holds all four
    driver.add(make_seq(3, prompt(1, 18), 1, stop=False))
    driver.run()
    assert driver.cached[3] == 16
    driver.check_idle()


def test_M2_books_are_right_after_a_storm_of_aborts():
    scheduler = make_scheduler([full(300), sliding(150, 9)], max_num_seqs=64, max_num_batched_tokens=256)
    driver = Driver(scheduler, overlapped=True)
    driver.add(*[make_seq(i, prompt(i % 7, 5 + i % 40), 20) for i in range(256)])
    gone = set()
    for step in range(60):
        driver.step()
        for seq_id in range(step * 3, step * 3 + 2):
            if driver.abort(seq_id):
                gone.add(seq_id)
    driver.run()
    assert len(gone) > 20
    driver.check_answers(frozenset(gone))
    driver.check_idle()


def test_M2_a_lost_block_is_reported_counted_and_repaired():
    scheduler = make_scheduler([full(10)])
    driver = Driver(scheduler)
    driver.add(make_seq(1, prompt(1, 9), 4, stop=False))
    driver.step()
    pool = scheduler.groups[0].pool
    lost = pool.allocate()  # nobody owns it: this is the leak
    faults = scheduler.check_integrity()
    assert len(faults) == 1 and f"block {lost} " in faults[0]
    assert scheduler.check_integrity(repair=True)
    assert scheduler.check_integrity() == []
    assert scheduler.stats()["integrity_faults"] == 2
    driver.run()  # the running request never noticed
    driver.check_answers()
    driver.check_idle()


def test_D1_abort_gives_everything_back_at_once():
    scheduler = make_scheduler()
    driver = Driver(scheduler, overlapped=True)
    driver.add(make_seq(1, prompt(1, 30), 100, stop=False), make_seq(2, prompt(2, 6), 100, stop=False))
    for _ in range(6):
        driver.step()
    driver.abort(1)
    driver.abort(2)
    assert scheduler.num_running == 0 and scheduler.stats()["kv_blocks_used"] == 0
    assert driver.abort(2) is False
    driver.run()
    driver.check_idle()


def test_D1_a_long_prompt_lets_a_short_stream_go_on():
    scheduler = make_scheduler([full(200)], max_model_len=700, max_consecutive_prefill_steps=1)
    driver = Driver(scheduler)
    driver.add(make_seq(1, prompt(1, 5), 40, stop=False))
    driver.step()
    driver.add(make_seq(2, prompt(2, 600), 4, stop=False))
    gap = longest = 0
    while 1 not in driver.reasons:
        before = len(driver.answers[1])
        driver.step()
        gap = 0 if len(driver.answers[1]) > before else gap + 1
        longest = max(longest, gap)
    assert longest <= 1  # never more than one chunk between two tokens
    driver.run()
    driver.check_answers()


@pytest.mark.parametrize(
    "groups, options, length, words",
    [
        ([full(64)], dict(max_model_len=64), 70, "70 tokens exceed max_model_len (64)"),
        ([full(4)], {}, 17, "17 tokens need 5 cache blocks, there are 4"),
        ([full(64), sliding(3, 9)], {}, 40, "need"),
        ([full(64)], dict(enable_chunked_prefill=False), 65, "max_num_batched_tokens (64)"),
        ([full(64)], {}, 0, "no tokens"),
    ],
)
def test_L4_what_can_never_run_ends_with_a_reason_and_blocks_nobody(groups, options, length, words):
    driver = Driver(make_scheduler(groups, **options))
    driver.add(make_seq(1, prompt(1, length), 5), make_seq(2, prompt(2, 8), 5))
    assert driver.reasons[1].startswith("unschedulable: ") and words in driver.reasons[1]
    driver.run()
    driver.check_answers()
    driver.check_idle()


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64])
def test_I7_the_longest_prompt_and_answer_fit_a_pool_of_exactly_their_size(length, overlapped):
    scheduler = make_scheduler([full(16), sliding(6, 9)], max_model_len=64)
    driver = Driver(scheduler, overlapped)
    driver.add(make_seq(1, prompt(1, length), 200, stop=False))
    driver.run()
    assert driver.reasons[1] == "max_tokens"
    assert len(driver.seqs[1].token_ids) == max(64, length + 1)
    driver.check_answers()
    driver.check_idle()


def test_I7_an_answer_ends_where_the_pool_does():
    driver = Driver(make_scheduler([full(4)]))
    driver.add(make_seq(1, prompt(1, 6), 400, stop=False), make_seq(2, prompt(2, 6), 400, stop=False))
    driver.run()
    assert [len(seq.token_ids) for seq in driver.seqs.values()] == [17, 17]  # 16 positions and a last id
    driver.check_answers()
    driver.check_idle()


def test_T3_stop_ids_are_named_and_eos_is_eos():
    def reason_of(stop_ids, **kwargs):
        driver = Driver(make_scheduler([full(128)]))
        seq = make_seq(1, prompt(5, 6), 300, **kwargs)
        seq.stop_ids = frozenset(stop_ids)
        driver.add(seq)
        driver.run()
        return driver.reasons[1], driver.answers[1]

    answer = expected_answer(prompt(5, 6), 300, frozenset(), 512)
    other = answer[10]
    reason, ids = reason_of({EOS})
    assert reason == "eos" and ids == answer[: answer.index(EOS) + 1]
    reason, ids = reason_of({other})
    assert reason == f"stop_{other}" and ids == answer[: answer.index(other) + 1]
    reason, ids = reason_of(())
    assert reason == "max_tokens" and ids == answer
    reason, _ = reason_of({EOS}, params=SamplingParams(max_tokens=300, ignore_eos=True))
    assert reason == f"stop_{EOS}"  # the user's own stop id


@pytest.mark.parametrize(
    "field, value", [("max_num_seqs", 0), ("max_num_batched_tokens", 2), ("block_size", 0)]
)
def test_limits_are_checked_with_their_names(field, value):
    with pytest.raises(ConfigError, match=f"{field} must be at least .*, got {value}"):
        make_scheduler(**{"num_draft_tokens": 3, field: value})
