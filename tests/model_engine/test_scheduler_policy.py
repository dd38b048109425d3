"""Who runs when: order, chunks, delay, priority, rows, lists that are reused, and what a commit says."""

import pytest
from scheduler_harness import Driver, full, make_scheduler, make_seq, sliding

from atom.core import BatchOutput, TokenLogprobs
from atom.model_engine.scheduler import Scheduler, SchedulerConfig, StepResult
from atom.model_engine.scheduling.chunking import chunk_size
from atom.sampling_params import SamplingParams


def ids(length: int, start: int = 1) -> list[int]:
    return [(start * 17 + i) % 50 for i in range(length)]


def answer(batch, token: int = 1) -> BatchOutput:
    return BatchOutput([token] * len(batch.seqs))


@pytest.mark.parametrize(
    "new, budget, options, size",
    [
        (30, 100, {}, 30),
        (300, 200, {}, 192),  # floored to 64s
        (300, 60, {}, 60),  # nothing aligned fits, but the batch is empty
        (300, 60, dict(is_first_in_batch=False), 0),
        (300, 200, dict(threshold=130), 128),
        (300, 200, dict(is_chunked=False), 0),
        (300, 400, dict(is_chunked=False, threshold=100), 300),
    ],
)
def test_chunk_size(new, budget, options, size):
    assert chunk_size(new, budget, 16, **options) == size
    if size not in (0, new, 60):
        assert chunk_size(new, budget, 32, **options) % 32 == 0


def test_prefill_comes_first_and_is_never_mixed_with_decode():
    scheduler = make_scheduler(max_num_batched_tokens=128)
    scheduler.add(make_seq(1, ids(10)))
    batch = scheduler.schedule()
    assert batch.num_prefill_seqs == 1 and batch.new_seqs == batch.seqs and batch.samples == [True]
    scheduler.commit(batch, answer(batch))
    scheduler.add_all([make_seq(2, ids(100, 2)), make_seq(3, ids(100, 3))])
    batch = scheduler.schedule()
    # The second prompt gets what is left of the budget only where an aligned chunk fits: it does not.
    assert [seq.id for seq in batch.seqs] == [2] and batch.num_prefill_seqs == 1
    scheduler.commit(batch, answer(batch))
    batch = scheduler.schedule()
    assert [seq.id for seq in batch.seqs] == [3]
    scheduler.commit(batch, answer(batch))
    batch = scheduler.schedule()
    assert [seq.id for seq in batch.seqs] == [1, 2, 3] and batch.num_prefill_seqs == 0
    assert batch.num_scheduled == [1, 1, 1] and batch.starts == [10, 100, 100]


def test_steady_decode_reuses_its_lists():
    scheduler = make_scheduler([full(64)], block_size=16)
    driver = Driver(scheduler, overlapped=True)
    driver.add(*[make_seq(i, ids(5, i), 40, stop=False) for i in range(4)])
    for _ in range(20):
        driver.step()
    last = driver.device.launched[-10:]
    for name in ("seqs", "rows", "epochs", "num_scheduled", "samples"):
        assert len({id(getattr(batch, name)) for batch in last}) == 1, name
    assert sum(any(batch.patches) for batch in last) <= 1  # a block lasts 16 steps


def test_waiting_is_first_come_first_served_within_a_priority():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_all(
        [make_seq(1, ids(4)), make_seq(2, ids(4)), make_seq(3, ids(4), priority=-1), make_seq(4, ids(4))]
    )
    order = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        order += [seq.id for seq in batch.new_seqs]
        scheduler.commit(batch, answer(batch, 7))
    assert order == [3, 1, 2, 4]


def test_the_head_of_the_queue_blocks_those_behind_it():
    scheduler = make_scheduler([full(10)], max_model_len=40)
    scheduler.add_all([make_seq(1, ids(20), 4), make_seq(2, ids(24, 2), 4), make_seq(3, ids(4, 3), 4)])
    batch = scheduler.schedule()
    assert [seq.id for seq in batch.seqs] == [1]  # 2 needs six blocks, five are left; 3 would fit
    assert scheduler.num_waiting == 2


def test_delay_factor_lets_prompts_gather():
    now = [0.0]
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=4, scheduler_delay_factor=2.0
    )
    scheduler = Scheduler(config, [full(64)], clock=lambda: now[0])
    now[0] = 100.0
    scheduler.add(make_seq(1, ids(4), arrival_time=100.0))
    batch = scheduler.schedule()  # nothing runs: admitted at once
    now[0] = 103.0
    scheduler.commit(batch, answer(batch))
    batch = scheduler.schedule()  # the prompt took three seconds
    assert batch.num_prefill_seqs == 0
    scheduler.commit(batch, answer(batch))
    scheduler.add(make_seq(2, ids(4, 2), arrival_time=103.0))
    now[0] = 108.9
    batch = scheduler.schedule()
    assert batch.num_prefill_seqs == 0
    scheduler.commit(batch, answer(batch))
    now[0] = 109.1
    assert scheduler.schedule().num_prefill_seqs == 1


def test_running_sequences_always_fit_one_decode_step():
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=10, num_draft_tokens=3)
    driver = Driver(scheduler)
    driver.add(*[make_seq(i, ids(4, i), 12, stop=False) for i in range(6)])
    most = 0
    while scheduler.has_work:
        driver.step()
        most = max(most, scheduler.num_running)
    assert most == 2  # two rows of 1 + 3 tokens
    driver.check_answers()


def test_whole_prompts_only_without_chunked_prefill():
    scheduler = make_scheduler(enable_chunked_prefill=False)
    driver = Driver(scheduler)
    driver.add(make_seq(1, ids(40), 3), make_seq(2, ids(40, 2), 3), make_seq(3, ids(64, 3), 3))
    driver.run()
    for batch in driver.device.launched:
        assert all(batch.samples)
    driver.check_answers()


def test_a_prompt_that_wants_logprobs_takes_no_prefix_hit_and_gets_them_whole():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    warm = Driver(scheduler)
    warm.add(make_seq(1, ids(20), 2, stop=False))
    warm.run()
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    seq = make_seq(2, ids(20), 3, stop=False, params=params)
    scheduler.add(seq)
    results = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        output = answer(batch)
        if batch.num_prefill_seqs:
            start, count = batch.starts[0], batch.num_scheduled[0]
            rows = [TokenLogprobs(position, -1.0, 1, [], []) for position in range(start, start + count)]
            output.prompt_logprobs = {0: rows}
        results.append(scheduler.commit(batch, output))
    assert seq.num_cached_tokens == 0
    events = [event for result in results for event in result.events]
    assert [entry.token_id for entry in events[0].prompt_logprobs] == list(range(20))
    assert all(event.prompt_logprobs is None for event in events[1:])
    assert [event.leave_reason for event in events] == ["", "max_tokens"]
    assert sum(len(result.token_ids) for result in results) == 3


def test_L3_prompt_logprobs_are_given_once_when_a_chunked_prompt_is_preempted():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    seq = make_seq(1, ids(20), 9, stop=False, params=SamplingParams(max_tokens=9, prompt_logprobs=0))
    scheduler.add(seq)
    events = []
    for step in range(10):
        batch = scheduler.schedule()
        output = answer(batch)
        if batch.num_prefill_seqs:
            start, count = batch.starts[0], batch.num_scheduled[0]
            rows = [TokenLogprobs(position, -1.0, 1, [], []) for position in range(start, start + count)]
            output.prompt_logprobs = {0: rows}
        events += scheduler.commit(batch, output).events
        if step in (1, 6):  # within its first prefill, and within the one that repeats it for the answer
            scheduler._life.preempt(seq)
    given = [[entry.token_id for entry in event.prompt_logprobs] for event in events if event.prompt_logprobs]
    assert given == [list(range(20))] and seq.prompt_logprobs == []


def test_a_preempted_sequence_waits_for_its_id_in_flight():
    scheduler = make_scheduler()
    seq = make_seq(1, ids(6), 5, stop=False)
    scheduler.add(seq)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler._life.preempt(seq)
    assert seq.num_inflight_samples == 2 and scheduler.schedule() is None
    assert scheduler.commit(first, answer(first, 3)).token_ids == [3]
    assert scheduler.schedule() is None
    assert scheduler.commit(second, answer(second, 4)).token_ids == [4]
    batch = scheduler.schedule()
    assert seq.token_ids == [*ids(6), 3, 4] and batch.starts[0] + batch.num_scheduled[0] == 8


def test_a_preempted_answer_is_hit_as_far_as_it_was_computed():
    driver = Driver(make_scheduler())
    seq = make_seq(1, ids(6), 40, stop=False)
    driver.add(seq, make_seq(2, ids(6, 2), 40, stop=False))
    while seq.num_output_tokens < 20:
        driver.step()
    driver.scheduler._life.preempt(seq)
    driver.run()
    again = [batch for batch in driver.device.launched if seq in batch.new_seqs][-1]
    assert again.starts == [24]  # 25 positions were computed: six blocks
    driver.check_answers()
    driver.check_idle()


def test_lists_are_rebuilt_when_the_same_sequences_have_other_rows_or_epochs():
    driver = Driver(make_scheduler())
    driver.add(*[make_seq(i, ids(6, i), 12, stop=False) for i in (1, 2)])
    for _ in range(4):
        driver.step()
    driver.scheduler._life.preempt(driver.seqs[2])  # readmitted before the next decode step: the set is equal
    driver.run()
    driver.check_answers()
    driver.check_idle()


def test_blocks_of_a_chunk_in_flight_are_waited_for_not_preempted():
    scheduler = make_scheduler([sliding(10, 4)], max_num_batched_tokens=100, num_draft_tokens=5)
    driver = Driver(scheduler, overlapped=1)
    driver.add(make_seq(1, ids(38), 30, stop=False))
    driver.run()
    assert scheduler.stats()["preemptions"] == 0
    driver.check_answers()
    driver.check_idle()


def test_an_id_in_flight_may_end_a_preempted_sequence():
    scheduler = make_scheduler()
    seq = make_seq(1, ids(6), 5)
    scheduler.add(seq)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler._life.preempt(seq)
    scheduler.commit(first, answer(first, 3))
    result = scheduler.commit(second, answer(second, 7))
    assert result.events[0].leave_reason == "eos" and not scheduler.has_work
    assert scheduler.check_integrity() == []


def test_one_failing_row_ends_alone():
    scheduler = make_scheduler()
    scheduler.add_all([make_seq(1, ids(4)), make_seq(2, ids(4, 2))])
    batch = scheduler.schedule()
    output = answer(batch)
    output.errors = {0: "logits are not finite"}
    result = scheduler.commit(batch, output)
    assert [seq.id for seq in result.seqs] == [1, 2] and result.counts == [0, 1]
    assert result.events[0].leave_reason == "error: logits are not finite"
    assert scheduler.num_running == 1 and scheduler.check_integrity() == []
    probe = make_seq(3, [*ids(4), 1])
    assert scheduler.manager.is_caching
    scheduler.add(probe)
    batch = scheduler.schedule()
    assert probe.num_cached_tokens == 0  # nothing of a failed step is trusted


def test_tokens_past_a_stop_are_cut_from_sequence_delta_and_logprobs():
    scheduler = make_scheduler(num_draft_tokens=3)
    seq = make_seq(1, ids(4), 20)
    scheduler.add(seq)
    batch = scheduler.schedule()
    scheduler.commit(batch, BatchOutput([1], [[1]]))
    batch = scheduler.schedule()
    assert batch.num_scheduled == [4]
    entries = [TokenLogprobs(t, -0.5, 1, [], []) for t in (2, 7, 3, 4)]
    result = scheduler.commit(batch, BatchOutput([4], [[2, 7, 3, 4]], logprobs={0: entries}))
    assert result.token_ids == [2, 7] and result.counts == [2]
    assert [entry.token_id for entry in result.events[0].logprobs] == [2, 7]
    assert seq.token_ids == [*ids(4), 1, 2, 7] and seq.leave_reason == "eos"
    assert scheduler.check_integrity() == []


def test_the_message_holds_what_the_result_says():
    scheduler = make_scheduler()
    scheduler.add_all([make_seq(5, ids(4)), make_seq(6, ids(4, 2))])
    batch = scheduler.schedule()
    message = scheduler.commit(batch, BatchOutput([3, 7])).to_message()
    assert memoryview(message.ids).cast("q").tolist() == [5, 6]
    assert memoryview(message.token_ids).cast("i").tolist() == [3, 7]
    assert message.counts == b""
    assert [(event.index, event.leave_reason) for event in message.events] == [(0, ""), (1, "eos")]
    assert all(event.num_cached_tokens == 0 for event in message.events)
    scheduler.abort(5)
    ended = StepResult.of_ended(scheduler.take_rejected()).to_message()
    assert memoryview(ended.ids).cast("q").tolist() == [5] and ended.token_ids == b""
    assert memoryview(ended.counts).cast("i").tolist() == [0]
    assert ended.events[0].leave_reason == "aborted"


def test_steps_are_committed_in_order_and_ids_are_unique():
    scheduler = make_scheduler()
    scheduler.add(make_seq(1, ids(4)))
    with pytest.raises(ValueError, match="sequence 1 is already scheduled"):
        scheduler.add(make_seq(1, ids(4)))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.num_prefill_seqs == 0 and second.starts == [4]  # decodes an id that the host has not seen
    with pytest.raises(ValueError, match="not the oldest"):
        scheduler.commit(second, answer(second))
    scheduler.commit(first, answer(first))
    scheduler.commit(second, answer(second))


def test_nothing_is_scheduled_past_a_known_length():
    scheduler = make_scheduler()
    scheduler.add(make_seq(1, ids(4), 2, stop=False))
    batches = [scheduler.schedule(), scheduler.schedule()]
    assert scheduler.schedule() is None  # both ids are in flight
    for batch in batches:
        result = scheduler.commit(batch, answer(batch))
    assert result.events[0].leave_reason == "max_tokens" and not scheduler.has_work


def test_a_decode_limit_never_exceeds_what_is_reserved():
    scheduler = make_scheduler([full(40)])
    driver = Driver(scheduler, overlapped=True)
    driver.add(*[make_seq(i, ids(7 + i, i), 30, stop=False) for i in range(3)])
    for _ in range(25):
        driver.step()
        for seq in scheduler._roster.running:
            assert seq.num_scheduled <= seq.decode_limit <= 4 * len(seq.tables[0])
            assert seq.num_inflight_tokens == (1 if seq.num_output_tokens else 7 + seq.id)
