"""The sampling stage: plans, tables, penalties, bans, log-probabilities, and independence of the company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.core import ScheduledBatch, Sequence
from atom.kernels.reference import sampling as reference
from atom.model_ops import logprobs, sampler_cpu
from atom.model_ops.sampler import Sampler, late_bans, to_batch_output
from atom.sampling_params import SamplingParams

VOCAB = 50
OPS = pytest.mark.parametrize("ops", [reference, sampler_cpu], ids=["reference", "cpu"])


def make_seq(seq_id: int, row: int, prompt: list[int] | None = None, output=(), **fields) -> Sequence:
    own = {name: fields.pop(name) for name in ("stop_ids", "bad_word_ids") if name in fields}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": None} | fields)
    seq = Sequence(seq_id, list(prompt or [1, 2, 3]), params, max_output_tokens=1000, **own)
    seq.token_ids += output
    seq.row = row
    return seq


def make_batch(seqs: list[Sequence], new: list[Sequence] = (), samples=None, num_prefill=0) -> ScheduledBatch:
    """A decode step, or (``num_prefill``) one whose first sequences run their last chunk."""
    return ScheduledBatch(
        step=0, seqs=seqs, epochs=[s.epoch for s in seqs], rows=[s.row for s in seqs],
        starts=[s.num_tokens - 1 for s in seqs], num_scheduled=[1] * len(seqs),
        samples=samples or [True] * len(seqs), num_prefill_seqs=num_prefill, num_tokens=len(seqs),
        new_seqs=list(new), patches=[],
    )  # fmt: skip


def run(sampler: Sampler, logits: torch.Tensor, seqs, new=(), **batch_fields):
    batch = make_batch(seqs, new, **batch_fields)
    plan = sampler.plan(batch)
    bans = late_bans(batch) if plan.needs_late_mask else None
    return to_batch_output(batch, plan, sampler.sample(logits.clone(), plan, bans))


def random_logits(num_rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_rows_take_the_lowest_of_the_best():
    sampler = Sampler(4, VOCAB)
    seqs = [make_seq(i, i) for i in range(2)]
    logits = torch.zeros(2, VOCAB)
    logits[1, [7, 9]] = 3
    output = run(sampler, logits, seqs, seqs)
    assert output.token_ids == [0, 7]
    assert output.errors is None and output.logprobs is None


def test_greedy_plan_is_reused_while_the_rows_stay():
    sampler = Sampler(4, VOCAB)
    seqs = [make_seq(i, i) for i in range(3)]
    first = sampler.plan(make_batch(seqs, seqs))
    second = sampler.plan(make_batch(seqs))
    assert second.composition is first.composition and second.is_greedy and not second.needs_late_mask
    third = sampler.plan(make_batch(seqs[:2]))
    assert third.composition is not first.composition


def test_a_row_given_to_another_request_forgets_the_first():
    sampler = Sampler(2, VOCAB)
    biased = make_seq(0, 1, logit_bias={5: 100.0})
    assert run(sampler, random_logits(1, 0), [biased], [biased]).token_ids == [5]
    plain = make_seq(1, 1)
    logits = random_logits(1, 0)
    assert run(sampler, logits, [plain], [plain]).token_ids == logits.argmax(-1).tolist()


@OPS
def test_seeded_answers_do_not_depend_on_the_company(ops):
    """Same (seed, position): same token, whatever row, order, step or neighbours."""

    def seqs_of(rows):
        return [
            make_seq(0, rows[0], temperature=1.0, seed=7),
            make_seq(1, rows[1], temperature=0.8, seed=11, top_k=5),
            make_seq(2, rows[2]),
            make_seq(3, rows[3], temperature=1.5, seed=7, top_p=0.8, min_p=0.01),
            make_seq(4, rows[4], temperature=1.0, seed=2**63 - 1, presence_penalty=1.0),
        ]

    logits = random_logits(5, 4)
    alone = []
    for i in range(5):
        seq = seqs_of(range(5))[i]
        alone += run(Sampler(8, VOCAB, ops=ops), logits[i : i + 1], [seq], [seq]).token_ids
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3], [3, 1]):
        seqs = seqs_of([6, 0, 2, 7, 1])
        sampler = Sampler(8, VOCAB, ops=ops)
        picked = [seqs[i] for i in order]
        output = run(sampler, logits[order], picked, picked)
        assert output.token_ids == [alone[i] for i in order]


def test_seeded_answer_is_the_same_after_any_chunking():
    """The random number belongs to the position of the token, not to the number of steps before it."""
    logits = random_logits(1, 9)
    ids = set()
    for start, count in ((0, 9), (4, 5), (8, 1)):
        seq = make_seq(0, 0, prompt=[1] * 9, temperature=1.0, seed=5)
        batch = make_batch([seq], [seq], num_prefill=1)
        batch.starts, batch.num_scheduled = [start], [count]
        sampler = Sampler(1, VOCAB)
        ids.add(sampler.sample(logits.clone(), sampler.plan(batch)).token_ids.item())
    assert len(ids) == 1


def test_positions_and_seeds_change_the_choice():
    logits = torch.zeros(1, VOCAB)
    tokens = set()
    for seed in range(3):
        for position in range(10):
            seq = make_seq(0, 0, prompt=[1] * (position + 1), temperature=1.0, seed=seed)
            tokens.add(run(Sampler(1, VOCAB), logits, [seq], [seq]).token_ids[0])
    assert len(tokens) > 10


def test_requests_without_a_seed_differ():
    seqs = [make_seq(i, i, temperature=1.0) for i in range(40)]
    assert len(set(run(Sampler(40, VOCAB), torch.zeros(40, VOCAB), seqs, seqs).token_ids)) > 10


@OPS
def test_tiny_temperature_is_greedy_and_never_fails(ops):
    logits = random_logits(3, 1) * 1000
    temperatures = [1e-30, 1e-5, 1e-3]
    seqs = [make_seq(i, i, temperature=t, seed=1, top_p=0.9) for i, t in enumerate(temperatures)]
    output = run(Sampler(3, VOCAB, ops=ops), logits, seqs, seqs)
    assert output.token_ids == logits.argmax(-1).tolist() and output.errors is None


def test_L5_padded_vocabulary_is_never_sampled():
    sampler = Sampler(3, VOCAB - 10)
    seqs = [
        make_seq(0, 0),
        make_seq(1, 1, temperature=1.0, seed=3),
        make_seq(2, 2, temperature=1.0, seed=3, top_k=3, logprobs=20),
    ]
    logits = random_logits(3, 2)
    logits[:, VOCAB - 10 :] = 1000
    output = run(sampler, logits, seqs, seqs)
    assert all(token < VOCAB - 10 for token in output.token_ids)
    assert max(output.logprobs[2][0].top_ids) < VOCAB - 10


def test_L5_ids_outside_the_vocabulary_do_no_harm():
    """They are refused at the door; should one come through, the row lives and so do the others."""
    seq = make_seq(
        0, 0, prompt=[VOCAB + 9], logit_bias={VOCAB + 3: 5.0}, bad_word_ids=((VOCAB + 1,), (1, VOCAB)),
        min_tokens=3, stop_ids=frozenset({VOCAB + 7}), frequency_penalty=1.0,
    )  # fmt: skip
    other = make_seq(1, 1, prompt=[6, 7], frequency_penalty=1.0)
    sampler = Sampler(2, VOCAB)
    sampler.tables.penalties.give_back(sampler.tables.penalties.acquire(make_seq(9, 0, prompt=[11, 12])))
    logits = random_logits(1, 8).repeat(2, 1)
    for step in range(2):
        output = run(sampler, logits, [seq, other], [seq, other] if step == 0 else ())
        assert output.errors is None
        for own, token in zip((seq, other), output.token_ids, strict=True):
            own.token_ids.append(token)
    # Both prompts hold none of the best ids, so both answers are penalised alike.
    assert seq.token_ids[1:] == other.token_ids[2:]
    assert seq.token_ids[1] == logits[0].argmax().item()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_penalties_equal_the_reference_step_by_step(data):
    """Several rows, some admitted again after a preemption, against dense counts rebuilt each step."""
    n = data.draw(st.integers(1, 3))
    number = st.sampled_from([-1.0, 0.0, 0.5, 2.0])
    seqs = [
        make_seq(
            i, i,
            prompt=data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=80)),
            presence_penalty=data.draw(number), frequency_penalty=data.draw(number),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.7])),
        )
        for i in range(n)
    ]  # fmt: skip
    sampler = Sampler(4, VOCAB)
    new = list(seqs)
    for step in range(data.draw(st.integers(1, 6))):
        logits = random_logits(n, step)
        counts = torch.zeros(n, VOCAB, dtype=torch.int32)
        prompt = torch.zeros(n, VOCAB, dtype=torch.bool)
        for i, seq in enumerate(seqs):
            prompt[i, seq.token_ids[: seq.num_prompt_tokens]] = True
            for token in seq.token_ids[seq.num_prompt_tokens :]:
                counts[i, token] += 1
        fields = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        penalties = (torch.tensor([getattr(s.params, f) for s in seqs]) for f in fields)
        expected = reference.apply_penalties(logits, counts, prompt, *penalties).argmax(-1).tolist()
        output = run(sampler, logits, seqs, new)
        assert output.token_ids == expected
        for seq, token in zip(seqs, output.token_ids, strict=True):
            seq.token_ids.append(token)
        new = []
        if data.draw(st.booleans()):  # preempted: another row later, counts rebuilt
            seq = data.draw(st.sampled_from(seqs))
            sampler.tables.release(seq.row)
            seq.row = next(r for r in range(4) if r not in {s.row for s in seqs})
            new = [seq]


def test_penalty_slots_are_reused():
    sampler = Sampler(4, VOCAB)
    for i in range(20):
        seq = make_seq(i, i % 4, presence_penalty=1.0)
        run(sampler, random_logits(1, i), [seq], [seq])
    assert sampler.tables.penalties.num_slots == 4


def test_bias_is_added_after_penalties():
    seq = make_seq(0, 0, prompt=[4], repetition_penalty=2.0, logit_bias={4: 1.5})
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 5] = 4.0, 3.6  # 4 / 2 + 1.5 = 3.5 < 3.6; (4 + 1.5) / 2 < 3.6 as well
    assert run(Sampler(1, VOCAB), logits, [seq], [seq]).token_ids == [5]
    logits[0, 5] = 3.4  # only the right order lets id 4 win
    assert run(Sampler(1, VOCAB), logits, [seq], [seq]).token_ids == [4]


def test_min_tokens_bans_stop_ids_until_the_count_is_reached():
    seq = make_seq(0, 0, min_tokens=2, stop_ids=frozenset({6, 7}))
    sampler = Sampler(1, VOCAB)
    logits = torch.zeros(1, VOCAB)
    logits[0, 6], logits[0, 7], logits[0, 8] = 5, 6, 4
    answer = []
    for step in range(3):
        answer += run(sampler, logits, [seq], [seq] if step == 0 else ()).token_ids
        seq.token_ids.append(answer[-1])
    assert answer == [8, 8, 7]


def test_bad_words_of_one_and_of_several_tokens():
    seq = make_seq(0, 0, prompt=[1, 9], bad_word_ids=((5,), (9, 4), (8, 9, 3)))
    sampler = Sampler(1, VOCAB)
    logits = torch.zeros(1, VOCAB)

    def next_token(ranking, new=()):
        for place, token in enumerate(ranking):
            logits[0, token] = 10 - place
        token = run(sampler, logits, [seq], new).token_ids[0]
        seq.token_ids.append(token)
        logits.zero_()
        return token

    assert next_token([5, 4], [seq]) == 4  # 5 is banned; the 9 before is the prompt's, so 4 may follow
    assert next_token([9, 4]) == 9
    assert next_token([4, 8]) == 8  # 9 4 is banned
    assert next_token([9]) == 9
    assert next_token([3, 4, 2]) == 2  # 8 9 3 and 9 4 are banned


def test_late_bans_address_logits_rows():
    """A middle chunk has no logits row: the rows after it move up."""
    chunk = make_seq(0, 0)
    word = make_seq(1, 1, output=[9], bad_word_ids=((9, 4),))
    batch = make_batch([chunk, word], samples=[False, True], num_prefill=1)
    assert late_bans(batch) == [(0, 4)]


def test_chunks_that_do_not_sample_have_no_row():
    sampler = Sampler(4, VOCAB)
    seqs = [make_seq(0, 0, temperature=1.0, seed=1, logprobs=1), make_seq(1, 1), make_seq(2, 2, logprobs=0)]
    logits = random_logits(2, 6)
    output = run(sampler, logits, seqs, seqs, samples=[False, True, True], num_prefill=2)
    assert output.token_ids[1:] == logits.argmax(-1).tolist() and len(output.token_ids) == 3
    assert list(output.logprobs) == [2]


@OPS
def test_logprobs_are_the_models_own(ops):
    """Before temperature, penalties and bias; chosen, rank and the best alternatives of each row."""
    seqs = [
        make_seq(0, 0, temperature=1.7, seed=3, logprobs=4, logit_bias={2: 50.0}),
        make_seq(1, 1),
        make_seq(2, 2, logprobs=True, repetition_penalty=1.5),
        make_seq(3, 3, logprobs=2),
    ]
    logits = random_logits(4, 5)
    output = run(Sampler(4, VOCAB, ops=ops), logits, seqs, seqs)
    assert output.token_ids[0] == 2
    assert sorted(output.logprobs) == [0, 2, 3]
    values = logits.log_softmax(-1)
    for row, num_top in ((0, 4), (2, 0), (3, 2)):
        (entry,) = output.logprobs[row]
        assert entry.token_id == output.token_ids[row]
        assert entry.logprob == pytest.approx(values[row, entry.token_id].item(), abs=1e-6)
        assert entry.rank == (values[row] > values[row, entry.token_id]).sum() + 1
        top = values[row].topk(num_top) if num_top else None
        assert entry.top_ids == (top.indices.tolist() if num_top else [])
        assert entry.top_logprobs == pytest.approx(top.values.tolist() if num_top else [], abs=1e-6)


def test_prompt_logprobs_in_chunks_equal_those_at_once(monkeypatch):
    hidden = torch.randn(23, 8, generator=torch.Generator().manual_seed(1))
    head = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(2))
    largest = []

    def compute_logits(states):
        largest.append(len(states))
        return states @ head.T

    next_ids = torch.arange(23) % (VOCAB - 5)
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * (VOCAB - 5) * 5)
    scores = logprobs.prompt_logprobs(hidden, compute_logits, next_ids, 3, VOCAB - 5, sampler_cpu)
    entries = scores.to_list()
    values = (hidden @ head.T)[:, : VOCAB - 5].log_softmax(-1)
    assert max(largest) == 5 and len(entries) == 23
    for i, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(values[i, next_ids[i]].item(), abs=1e-5)
        assert entry.top_ids == values[i].topk(3).indices.tolist()


@pytest.mark.parametrize("fields", [{}, dict(temperature=1.0, seed=1), dict(temperature=1.0, top_p=0.5)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_fails_alone(fields, bad):
    seqs = [make_seq(i, i, **fields) for i in range(3)]
    logits = random_logits(3, 7)
    healthy = run(Sampler(3, VOCAB), logits, seqs, seqs).token_ids
    logits[1, 20] = bad
    output = run(Sampler(3, VOCAB), logits, seqs, seqs)
    assert list(output.errors) == [1] and "not finite" in output.errors[1]
    if "seed" in fields or not fields:  # without a seed each sampler draws its own
        assert [output.token_ids[i] for i in (0, 2)] == [healthy[i] for i in (0, 2)]


def test_bf16_logits_of_a_model_under_inference_mode():
    sampler = Sampler(2, VOCAB)
    seqs = [make_seq(0, 0, presence_penalty=1.0), make_seq(1, 1, temperature=1.0, seed=1, top_k=3)]
    with torch.inference_mode():
        logits = random_logits(2, 3).bfloat16()
    for step in range(3):
        batch = make_batch(seqs, seqs if step == 0 else ())
        result = sampler.sample(logits, sampler.plan(batch))
        assert result.token_ids.dtype == torch.int64
        with torch.inference_mode():
            logits = random_logits(2, 4 + step)  # float32: overwritten in place
