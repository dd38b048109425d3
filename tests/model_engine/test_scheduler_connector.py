"""A connector that holds KV elsewhere: parking, resuming, failing, pinning, and blocks freed late."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Driver, full, make_scheduler, make_seq, sliding

from atom.kv_transfer.connector import KVConnector


class FakeConnector(KVConnector):
    """``held[seq id]`` = (tokens of the prompt that the store has, async, succeeds, polls until done)."""

    def __init__(self, held=None, keeps=(), pinned=()):
        self.held = held or {}
        self.keeps = set(keeps)  # their blocks are read for three polls after the end
        self.pinned = set(pinned)
        self.driver = None
        self.loading = {}
        self.releasing = {}
        self.finished = []
        self.meta = []

    def get_num_new_matched_tokens(self, seq, num_computed):
        if seq.id not in self.held:
            return 0, False
        tokens, is_async, _, _ = self.held[seq.id]
        return max(0, tokens - num_computed), is_async

    def update_state_after_alloc(self, seq, num_external_tokens):
        assert num_external_tokens > 0 and seq.tables and seq.row >= 0
        _, is_async, succeeds, polls = self.held[seq.id]
        if is_async:
            self.loading[seq.id] = [polls, succeeds]
        if succeeds:
            self.driver.device.external[seq.id] = seq.num_computed
        self.meta.append(("load", seq.id))

    def build_connector_meta(self):
        meta, self.meta = self.meta, []
        return meta or None

    def request_finished(self, seq):
        self.finished.append(seq.id)
        self.driver.device.external.pop(seq.id, None)
        if seq.id in self.loading or seq.id in self.keeps:
            self.releasing[seq.id] = 3
            return True
        return False

    def poll_loaded(self):
        done = []
        for seq_id, entry in list(self.loading.items()):
            entry[0] -= 1
            if entry[0] <= 0:
                done.append((seq_id, entry[1]))
                del self.loading[seq_id]
        return done

    def poll_released(self):
        self.releasing = {seq_id: left - 1 for seq_id, left in self.releasing.items()}
        done = [seq_id for seq_id, left in self.releasing.items() if left <= 0]
        for seq_id in done:
            del self.releasing[seq_id]
        return done

    def is_pinned(self, seq):
        return seq.id in self.pinned


class PatientDriver(Driver):
    """A step in which everyone waits for a load is no deadlock."""

    def step(self):
        super().step()
        return True


def make(connector, groups=None, overlapped=False, **options):
    driver = PatientDriver(make_scheduler(groups, connector, **options), overlapped)
    connector.driver = driver
    return driver


def ids(length, start=1):
    return [(start * 17 + i * i) % 50 for i in range(length)]


@pytest.mark.parametrize("groups", [[full(64)], [full(64), sliding(20, 9)]])
def test_an_async_load_parks_and_resumes_where_it_ends(groups):
    connector = FakeConnector({1: (25, True, True, 4)})
    driver = make(connector, groups)
    driver.add(make_seq(1, ids(30), 6, stop=False), make_seq(2, ids(10, 2), 6, stop=False))
    driver.step()
    stats = driver.scheduler.stats()
    assert stats["parked"] == 1 and stats["running"] == 1  # the other one does not wait for it
    driver.run()
    mine = [batch for batch in driver.device.launched if driver.seqs[1] in batch.new_seqs]
    assert len(mine) == 1 and mine[0].starts == [25] and mine[0].num_scheduled == [5]
    assert driver.cached == {1: 25, 2: 0}
    assert connector.finished and sorted(connector.finished) == [1, 2]
    driver.check_answers()
    driver.check_idle()


def test_a_load_never_covers_the_last_token():
    connector = FakeConnector({1: (30, True, True, 1)})
    driver = make(connector)
    driver.add(make_seq(1, ids(30), 3, stop=False))
    driver.run()
    assert [b.starts for b in driver.device.launched if b.num_prefill_seqs] == [[29]]
    driver.check_answers()


def test_a_sync_load_happens_in_the_step_that_carries_it():
    connector = FakeConnector({1: (16, False, True, 0)})
    driver = make(connector)
    driver.add(make_seq(1, ids(30), 3, stop=False))
    driver.run()
    first = driver.device.launched[0]
    assert first.starts == [16] and first.connector_meta == [("load", 1)]
    driver.check_answers()
    driver.check_idle()


def test_a_failed_load_is_computed_instead():
    connector = FakeConnector({1: (25, True, False, 2)})
    driver = make(connector, [full(64), sliding(20, 9)])
    driver.add(make_seq(1, ids(30), 6, stop=False))
    driver.run()
    assert driver.cached == {1: 0}
    assert [b.starts for b in driver.device.launched if b.num_prefill_seqs] == [[0]]
    driver.check_answers()
    driver.check_idle()


def test_metadata_goes_out_even_when_nobody_runs():
    connector = FakeConnector({1: (25, True, True, 3)})
    driver = make(connector)
    driver.add(make_seq(1, ids(30), 2, stop=False))
    batch = driver.scheduler.schedule()
    assert batch.num_seqs == 0 and batch.connector_meta == [("load", 1)]
    assert driver.scheduler.commit(batch, driver.device.launch(batch)).seqs == []
    assert driver.scheduler.schedule() is None and driver.scheduler.has_work
    driver.run()
    driver.check_answers()


def test_blocks_that_are_still_read_are_freed_late():
    connector = FakeConnector(keeps={1})
    driver = make(connector)
    driver.add(make_seq(1, ids(10), 2, stop=False))
    while 1 not in driver.reasons:
        driver.step()
    stats = driver.scheduler.stats()
    assert stats["deferred"] == 1 and stats["running"] == 0 and stats["kv_blocks_used"] == 3
    assert driver.scheduler.has_work and driver.scheduler.check_integrity() == []
    driver.run()
    driver.check_idle()


def test_an_aborted_load_keeps_its_blocks_until_it_is_over():
    connector = FakeConnector({1: (25, True, True, 50)})
    driver = make(connector)
    driver.add(make_seq(1, ids(30), 6))
    driver.step()
    driver.abort(1)
    assert driver.reasons == {1: "aborted"} and driver.scheduler.stats()["kv_blocks_used"] == 8
    connector.loading.clear()
    driver.run()
    driver.check_idle()
    driver.add(make_seq(2, ids(30), 1, stop=False))
    driver.run()
    assert driver.cached[2] == 0  # half-loaded blocks were not published


def test_pinned_sequences_are_not_preempted():
    connector = FakeConnector(pinned={2})
    driver = make(connector, [full(10)], max_model_len=40)
    driver.add(*[make_seq(i, ids(9, i), 16, stop=False) for i in (1, 2)])
    driver.run()
    assert driver.scheduler.stats()["preemptions"] > 0
    assert driver.seqs[2].num_preemptions == 0
    driver.check_answers()
    driver.check_idle()


loads = st.tuples(st.integers(1, 60), st.booleans(), st.booleans(), st.integers(1, 6))


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.integers(0, 7), loads),
    st.sets(st.integers(0, 7)),
    st.sampled_from([[full(30)], [full(40), sliding(14, 9)], [sliding(20, 12)]]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 30)), min_size=3, max_size=8),
)
def test_answers_are_exact_whatever_is_loaded_kept_or_failing(held, keeps, groups, overlapped, requests):
    # A synchronous load cannot fail.
    held = {i: (n, is_async, ok or not is_async, polls) for i, (n, is_async, ok, polls) in held.items()}
    driver = make(FakeConnector(held, keeps), groups, overlapped)
    aborted = set()
    for seq_id, (start, length, _) in enumerate(requests):
        driver.add(make_seq(seq_id, ids(length, start), 10))
    for step in range(30):
        for seq_id, (_, _, gone) in enumerate(requests):
            if gone == step and driver.abort(seq_id):
                aborted.add(seq_id)
        driver.step()
        assert driver.scheduler.check_integrity() == []
    driver.run()
    driver.check_answers(frozenset(aborted))
    driver.check_idle()
