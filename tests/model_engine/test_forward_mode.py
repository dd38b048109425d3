"""How a step runs is decided from host data, once, and alike on every data-parallel rank."""

import timeit

import pytest

from atom.config_parts import CUDAGraphMode
from atom.errors import ConfigError
from atom.model_engine.runner.forward_mode import (
    ForwardMode,
    GraphTables,
    StepFacts,
    capture_sizes,
    token_graph_sizes,
)

SIZES = (1, 2, 4, 8)
NONE, TR, FULL = CUDAGraphMode.NONE, CUDAGraphMode.TR_HYBRID, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_TR_HYBRID


def tables(mode, **fields):
    """What a runner of ``mode`` records for SIZES without a drafter."""
    if mode.uses_tr_hybrid():
        fields.setdefault("decode_tokens", SIZES)
    elif mode is not NONE:
        fields.setdefault("request_sizes", {1: SIZES})
    return GraphTables(mode=mode, **fields)


def decode(batch_size, max_seqlen_q=1, num_tokens=None):
    return StepFacts(
        False, batch_size, batch_size * max_seqlen_q if num_tokens is None else num_tokens, max_seqlen_q
    )


def prefill(num_tokens, batch_size=1):
    return StepFacts(True, batch_size, num_tokens, num_tokens)


IDLE = StepFacts(False, 0, 0, 0)


@pytest.mark.parametrize(
    ("mode", "step", "kind", "running_bs", "running_tokens"),
    [
        (NONE, decode(3), "eager", 3, 3),
        (NONE, prefill(10), "eager", 1, 10),
        (FULL, decode(3), "request", 4, 4),
        (FULL, decode(8), "request", 8, 8),
        (FULL, decode(9), "eager", 9, 9),
        (FULL, prefill(4), "eager", 1, 4),
        (DECODE_ONLY, decode(5), "request", 8, 8),
        (DECODE_ONLY, prefill(4), "eager", 1, 4),
        (TR, decode(3), "token", 4, 4),
        (TR, decode(9), "eager", 9, 9),
        (TR, prefill(4), "eager", 1, 4),
        (BOTH, decode(3), "token", 4, 4),
        (BOTH, prefill(4), "eager", 1, 4),
    ],
)
def test_each_mode_without_speculation(mode, step, kind, running_bs, running_tokens):
    decided = ForwardMode.decide(step, tables(mode))
    assert (decided.kind, decided.running_bs, decided.running_tokens) == (kind, running_bs, running_tokens)
    assert decided.token_graph is (kind == "token")
    assert decided.tr_graph == ("replay" if kind == "token" else None)


@pytest.mark.parametrize("mode", [TR, FULL, DECODE_ONLY, BOTH])
def test_a_prefill_replays_recorded_prefill_buckets_in_any_mode(mode):
    recorded = tables(mode, prefill_tokens=(256, 512))
    assert ForwardMode.decide(prefill(200, batch_size=3), recorded) == ForwardMode("token", 3, 256)
    assert ForwardMode.decide(prefill(257), recorded) == ForwardMode("token", 1, 512)
    assert ForwardMode.decide(prefill(513), recorded) == ForwardMode("eager", 1, 513)


@pytest.mark.parametrize("mode", [TR, FULL])
def test_enforce_eager_wins_over_what_is_recorded(mode):
    recorded = tables(mode, prefill_tokens=(256,), enforce_eager=True)
    assert ForwardMode.decide(decode(3), recorded) == ForwardMode("eager", 3, 3)
    assert ForwardMode.decide(prefill(100), recorded) == ForwardMode("eager", 1, 100)


def test_a_verifying_step_goes_by_its_own_request_buckets():
    recorded = tables(FULL, request_sizes={3: (2, 4)})
    assert ForwardMode.decide(decode(3, 3), recorded) == ForwardMode("request", 4, 12)
    assert ForwardMode.decide(decode(3, 1), recorded) == ForwardMode("eager", 3, 3)
    ragged = decode(3, 3, num_tokens=7)
    assert ForwardMode.decide(ragged, recorded) == ForwardMode("eager", 3, 7)


def test_a_verifying_step_pads_to_a_token_bucket_and_whole_requests():
    recorded = tables(TR, decode_tokens=(3, 6, 12))
    assert ForwardMode.decide(decode(3, 3), recorded) == ForwardMode("token", 4, 12)
    ragged = decode(3, 3, num_tokens=5)
    assert ForwardMode.decide(ragged, recorded) == ForwardMode("token", 3, 6)
    not_whole = tables(TR, decode_tokens=(4,))
    assert ForwardMode.decide(decode(1, 3), not_whole) == ForwardMode("token", 1, 4)


def test_two_batch_overlap_splits_recorded_decodes_of_more_than_two_requests():
    recorded = tables(FULL, splits_decode=True)
    assert ForwardMode.decide(decode(2), recorded).ubatch_split_bs is None
    assert ForwardMode.decide(decode(3), recorded).ubatch_split_bs == 4
    assert ForwardMode.decide(decode(9), recorded).ubatch_split_bs is None
    assert ForwardMode.decide(decode(3), tables(TR, splits_decode=True)).ubatch_split_bs is None


def test_the_mono_router_is_asked_for_decodes_of_a_single_rank():
    asked = []

    def router(step):
        asked.append(step)
        return step.num_tokens <= 2

    recorded = tables(FULL, takes_mono=router, enforce_eager=True)
    assert ForwardMode.decide(decode(2), recorded) == ForwardMode("mono", 2, 2)
    assert ForwardMode.decide(decode(3), recorded).kind == "eager"
    assert ForwardMode.decide(prefill(2), recorded).kind == "eager"
    assert ForwardMode.decide(decode(2), recorded, [decode(2), decode(1)]).kind == "eager"
    assert asked == [decode(2), decode(3)]


@pytest.mark.parametrize(
    ("mode", "group", "expected"),
    [
        (FULL, [decode(1), decode(5), IDLE], ForwardMode("request", 8, 8)),
        (TR, [decode(1), decode(5), IDLE], ForwardMode("token", 8, 8)),
        (TR, [decode(1), decode(9), IDLE], ForwardMode("eager", 9, 9)),
        (FULL, [prefill(100), prefill(300), IDLE], ForwardMode("token", 1, 512)),
        (TR, [prefill(100), prefill(600), IDLE], ForwardMode("eager", 1, 600)),
        (TR, [prefill(100), decode(5), IDLE], ForwardMode("eager", 5, 100)),
        (FULL, [decode(2, 2), decode(1, 1), IDLE], ForwardMode("eager", 2, 4)),
        (TR, [decode(2, 2), decode(1, 1), IDLE], ForwardMode("token", 2, 4)),
        (TR, [IDLE, IDLE], ForwardMode("eager", 0, 0)),
    ],
)
def test_every_rank_of_a_group_comes_to_the_same_decision(mode, group, expected):
    recorded = tables(mode, prefill_tokens=(256, 512))
    assert [ForwardMode.decide(step, recorded, group) for step in group] == [expected] * len(group)


def test_deciding_costs_microseconds():
    recorded = tables(TR, decode_tokens=tuple(range(1, 513)))
    step, group = decode(300), [decode(n) for n in range(1, 9)]
    alone = min(timeit.repeat(lambda: ForwardMode.decide(step, recorded), number=2000, repeat=5)) / 2000
    among = min(timeit.repeat(lambda: ForwardMode.decide(step, recorded, group), number=500, repeat=5)) / 500
    assert alone < 10e-6  # 1 us on a quiet core
    assert among < 60e-6


def test_capture_sizes_are_descending_and_within_what_a_step_can_have():
    assert capture_sizes((4, 1, 2, 4), 512, 8192) == (4, 2, 1)
    assert capture_sizes((1, 2, 4, 8, 16), 12, 8192) == (12, 8, 4, 2, 1)
    assert capture_sizes((1, 2, 4, 8), 512, 20, max_seqlen_q=4) == (5, 4, 2, 1)
    assert capture_sizes((8, 16), 4, 8192) == (4,)


def test_one_capture_size_means_itself():
    assert capture_sizes((64,), 256, 8192) == (64,)


@pytest.mark.parametrize("sizes", [(), (0, 1), (-3,)])
def test_a_bad_capture_size_is_named(sizes):
    with pytest.raises(ConfigError, match=r"at least 1, got \["):
        capture_sizes(sizes, 8, 64)
    with pytest.raises(ConfigError, match="max_seqlen_q must be at least 1, got 0"):
        capture_sizes((8,), 8, 64, max_seqlen_q=0)


@pytest.mark.parametrize(
    ("text", "sizes"), [("", ()), (" ", ()), ("512,256, 512", (256, 512)), ("1024,", (1024,))]
)
def test_prefill_token_buckets_come_from_the_environment(monkeypatch, text, sizes):
    monkeypatch.setenv("ATOM_TOKEN_GRAPH_SIZES", text)
    assert token_graph_sizes() == sizes


def test_prefill_token_buckets_default(monkeypatch):
    monkeypatch.delenv("ATOM_TOKEN_GRAPH_SIZES", raising=False)
    assert token_graph_sizes() == (256, 512, 1024, 2048, 3072)
    fine = token_graph_sizes(in_eighths=True)
    assert fine[:10] == (256, 288, 320, 352, 384, 416, 448, 480, 512, 576)
    assert fine[-2:] == (3840, 4096) and len(fine) == 33
    monkeypatch.setenv("ATOM_TOKEN_GRAPH_SIZES", "512")
    assert token_graph_sizes(in_eighths=True) == (512,)


@pytest.mark.parametrize("text", ["256;512", "0", "-4", "1e3", "a"])
def test_a_bad_prefill_token_bucket_is_named(monkeypatch, text):
    monkeypatch.setenv("ATOM_TOKEN_GRAPH_SIZES", text)
    with pytest.raises(ConfigError, match="ATOM_TOKEN_GRAPH_SIZES"):
        token_graph_sizes()
