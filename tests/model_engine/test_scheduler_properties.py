"""Random arrivals, aborts, lengths and tiny pools: every answer is exact and no block or row is lost."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import Driver, full, make_scheduler, make_seq, sliding

COMMON = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

# Prompts share prefixes: one of three stems, cut, then a tail of its own.
prompts = st.builds(
    lambda stem, length, tail: [(stem * 13 + i * 3) % 50 for i in range(length)] + tail,
    st.integers(0, 2),
    st.integers(0, 40),
    st.lists(st.integers(0, 49), min_size=1, max_size=6),
)
requests = st.tuples(
    prompts,
    st.integers(1, 24),  # answer length
    st.integers(0, 12),  # arrives at this step
    st.one_of(st.none(), st.integers(0, 30)),  # aborted this many steps after
    st.integers(0, 1),  # priority
)
pools = st.sampled_from(
    [
        [full(200)],
        [full(24)],
        [full(18)],
        [full(40), sliding(14, 9)],
        [full(24), sliding(30, 6)],
        [sliding(16, 12)],
        [sliding(12, 5), full(22), full(30)],
    ]
)
limits = st.fixed_dictionaries(
    dict(
        max_num_batched_tokens=st.sampled_from([10, 64, 100]),
        max_num_seqs=st.integers(1, 6),
        long_prefill_token_threshold=st.sampled_from([0, 7, 70]),
        max_consecutive_prefill_steps=st.integers(0, 2),
        enable_prefix_caching=st.booleans(),
        max_model_len=st.sampled_from([60, 300]),
    )
)


depths = st.integers(0, 2)  # steps in flight while the next one is scheduled


def play(groups, arrivals, overlapped, options, drafts=0, salted=False):
    scheduler = make_scheduler(groups, num_draft_tokens=drafts, **options)
    driver = Driver(scheduler, overlapped)
    aborted = set()
    for step in range(50):
        for seq_id, (prompt, max_new, at, gone, priority) in enumerate(arrivals):
            if at == step:
                driver.add(make_seq(seq_id, prompt, max_new, priority=priority, cache_salted=salted))
            if gone is not None and at + gone == step and driver.abort(seq_id):
                aborted.add(seq_id)
        driver.step()
        assert scheduler.check_integrity() == []
    driver.run()
    driver.check_answers(frozenset(aborted))
    driver.check_idle()
    longest = max((s.num_preemptions for s in driver.seqs.values()), default=0)
    assert longest <= 5, "a sequence was preempted again and again"
    return driver


@settings(max_examples=150, **COMMON)
@given(pools, st.lists(requests, min_size=1, max_size=9), depths, limits)
def test_every_answer_is_exact_whatever_the_interleaving(groups, arrivals, overlapped, options):
    play(groups, arrivals, overlapped, options)


@settings(max_examples=100, **COMMON)
@given(pools, st.lists(requests, min_size=1, max_size=7), depths, limits, st.integers(1, 4))
def test_speculation_gives_the_same_answers(groups, arrivals, overlapped, options, drafts):
    play(groups, arrivals, overlapped, options, drafts)


@settings(max_examples=40, **COMMON)
@given(pools, st.lists(requests, min_size=2, max_size=7), limits)
def test_lookup_switches_change_no_hit(groups, arrivals, options):
    def hits(fast, memo, salted):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ATOM_PREFIX_FAST_WALK", fast)
            patch.setenv("ATOM_PREFIX_WALK_MEMO", memo)
            driver = play(groups, arrivals, False, options, salted=salted)
        steps = [(b.step, b.rows, b.starts, b.num_scheduled, b.patches) for b in driver.device.launched]
        return driver.cached, driver.reasons, steps

    first = hits("1", "1", False)
    assert hits("0", "1", False) == first
    assert hits("1", "0", False) == first
    assert hits("0", "0", False) == first
    assert hits("1", "1", True) == first
