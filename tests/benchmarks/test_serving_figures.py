"""The serving benchmark's arithmetic and data, without a server."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from atom.benchmarks.serving_client import Outcome
from atom.benchmarks.serving_data import RandomShape, random_requests, sharegpt_requests
from atom.benchmarks.serving_load import Load, Run, SpeculationStats, accepted_between
from atom.benchmarks.serving_metrics import format_summary, parse_goodput, summarize
from atom.benchmarks.serving_report import requests_over_time, tokens_over_time
from atom.benchmarks.svg_charts import histogram, line, nice_ticks
from atom.errors import ConfigError
from atom.model_loader.tokenizer import Tokenizer


def outcome(start: float, *gaps: float, tokens: int = 0, error: str = "") -> Outcome:
    times = (start + np.cumsum(gaps)).tolist()
    return Outcome(10, start, times, ["x"] * len(times), tokens or len(times), error)


RUN = Run(
    [
        outcome(0.0, 0.100, 0.010, 0.030),  # tpot 20 ms, latency 140 ms
        outcome(0.0, 0.300, 0.010),  # tpot 10 ms, latency 310 ms
        outcome(1.0, 0.200),  # one token: no tpot
        outcome(1.0, 0.100, 0.900, tokens=10),  # tpot 100 ms, latency 1 s
        outcome(0.0, error="boom"),
        outcome(0.0, error="boom"),
    ],
    start=0.0,
    duration=2.0,
)


def test_figures_by_hand():
    summary = summarize(RUN, {})
    assert (summary.completed, summary.total_input_tokens, summary.total_output_tokens) == (4, 40, 16)
    assert (summary.request_throughput, summary.output_throughput) == (2.0, 8.0)
    assert summary.total_token_throughput == 28.0
    assert summary.concurrency == pytest.approx((0.14 + 0.31 + 0.2 + 1.0) / 2)
    assert summary.values["tpot"] == pytest.approx([20, 10, 100])
    assert summary.values["itl"] == pytest.approx([10, 30, 10, 900])
    assert summary.statistics("ttft", [50, 99.5]) == pytest.approx(
        {"mean": 175, "median": 150, "std": np.std([100, 300, 200, 100]), "p50": 150, "p99.5": 298.5}
    )
    assert summary.request_goodput is None
    assert "2 x boom" in format_summary(summary, ["ttft"], [99], 1.5, 0.25)
    assert "Acceptance rate (%):                           25.00" in format_summary(
        summary, [], [], 1.5, 0.25
    )


@pytest.mark.parametrize(
    ("words", "num_good"),
    [
        (["ttft:200"], 3),
        (["ttft:200", "tpot:50"], 2),
        (["e2el:310.001"], 3),
        (["tpot:5"], 1),
        (["ttft:1"], 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(words, num_good):
    assert summarize(RUN, parse_goodput(words)).request_goodput == num_good / 2.0


def test_only_the_five_commonest_reasons_are_shown():
    failed = [outcome(0.0, error=f"reason {i}") for i in range(7) for _ in range(i + 1)]
    text = format_summary(summarize(Run(failed, 0.0, 1.0), {}), [], [], None, None)
    assert "7 x reason 6" in text and "3 x reason 2" in text and "reason 1" not in text
    assert "and 2 more reasons" in text and "Accept" not in text


def test_tokens_and_requests_over_time_add_up():
    times, rates = tokens_over_time(RUN)
    assert sum(rates) * (times[1] - times[0]) == pytest.approx(16)
    times, running = requests_over_time(RUN)
    assert running[0] == 2 and max(running) == 2 and running[-1] in (0, 1)
    assert tokens_over_time(Run([], 0.0, 1.0)) == requests_over_time(Run([], 0.0, 1.0)) == ([], [])


def test_due_times():
    rng = np.random.default_rng(0)
    assert Load().due_times(3, rng) == [0.0] * 3
    poisson = Load(50.0).due_times(5001, rng)
    gaps = np.diff(poisson)
    assert poisson[0] == 0.0 and np.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.1)
    steady = np.diff(Load(50.0, burstiness=100.0).due_times(2001, rng))
    assert np.std(steady) == pytest.approx(0.1 * np.mean(steady), rel=0.2)


def test_speculation_is_told_of_the_run_alone():
    before = SpeculationStats(True, 100, 50, {"0": 50, "1": 50})
    after = SpeculationStats(True, 200, 130, {"0": 70, "1": 130})
    assert accepted_between(before, after) == (1.8, 0.8)
    assert accepted_between(before, before) == accepted_between(None, after) == (None, None)


def test_charts_of_little_or_nothing():
    assert "nothing was measured" in histogram("t", [], "ms", {})
    assert "nothing was measured" in line("t", [], [], "s", "y")
    assert "<rect" in histogram("t", [5.0] * 3, "ms", {"median": 5.0})
    assert "NaN" not in (text := line("t", [1.0], [0.0], "s", "y")) and "nan" not in text
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10] and nice_ticks(3, 3) == [3]
    beyond = histogram("t", [*range(1000), 10**9], "ms", {})
    assert "1001 values" in beyond and "beyond the axis, up to 1e+09" in beyond


def joining_tokenizer() -> Tokenizer:
    """Neighbours join to longer tokens, so that decoding and encoding does not give the same ids."""
    chars = ["<unk>", "▁", *"abcd"]
    pairs = [(a, b) for a in "abcd" for b in "abcd" if a <= b]
    vocab = {token: i for i, token in enumerate([*chars, *(a + b for a, b in pairs)])}
    backend = Backend(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Replace("▁", " ")
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("<unk>")])
    return Tokenizer(backend)


def test_random_prompts_have_the_length_asked_for():
    tokenizer = joining_tokenizer()
    shape = RandomShape(input_len=50, output_len=8, range_ratio=0.5, prefix_len=7)
    requests = random_requests(tokenizer, 200, shape, seed=3)
    assert requests == random_requests(tokenizer, 200, shape, seed=3)
    assert requests != random_requests(tokenizer, 200, shape, seed=4)
    sizes = [len(tokenizer.encode(request.prompt)) for request in requests]
    assert sizes == [request.num_prompt_tokens for request in requests]
    assert sum(32 <= size <= 57 for size in sizes) == 200 and len(set(sizes)) > 10
    assert {request.num_output_tokens for request in requests} == set(range(4, 9))
    assert len({request.prompt[:5] for request in requests}) == 1
    exact = random_requests(tokenizer, 50, RandomShape(input_len=40), seed=0)
    assert {request.num_prompt_tokens for request in exact} == {40}


@pytest.mark.parametrize("is_rendered_here", [True, False])
def test_the_templates_tokens_are_part_of_the_length(is_rendered_here):
    tokenizer = joining_tokenizer()

    def render(text: str) -> str:
        return f"<s>a a{text}<s>"

    requests = random_requests(
        tokenizer,
        20,
        RandomShape(30),
        0,
        adds_special_tokens=False,
        render=render,
        is_rendered_here=is_rendered_here,
    )
    assert all(request.prompt.startswith("<s>") == is_rendered_here for request in requests)
    assert all(abs(request.num_prompt_tokens - 30) <= 1 for request in requests)  # the joint may join


def test_conversations(tmp_path):
    tokenizer = joining_tokenizer()
    rows = [
        ["a b c d", "d c b a a b"],
        ["a", "too short a prompt"],
        ["c c c c c", "b"],
        ["only one turn"],
        [],
    ]
    data = [
        {"id": i, "conversations": [{"from": "x", "value": v} for v in row]} for i, row in enumerate(rows)
    ]
    data.append({"conversations": [{"value": "a " * 2000}, {"value": "b c d a"}]})
    path = tmp_path / "data.json"
    path.write_text(json.dumps(data))
    (request,) = sharegpt_requests(tokenizer, path, 1, seed=0)
    assert (request.prompt, request.num_prompt_tokens) == ("a b c d", 7)
    assert request.num_output_tokens == len(tokenizer.encode("d c b a a b"))
    many = sharegpt_requests(tokenizer, path, 5, seed=0, output_len=9)
    assert {r.prompt for r in many} == {"a b c d", "c c c c c"} and {r.num_output_tokens for r in many} == {9}
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds no conversation"):
        sharegpt_requests(tokenizer, path, 5, seed=0)
    for text in ("{", '{"a": 1}', "[1]", '[{"conversations": [{}]}]'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not a list of conversations"):
            sharegpt_requests(tokenizer, path, 5, seed=0)
    with pytest.raises(ConfigError, match="cannot be read"):
        sharegpt_requests(tokenizer, tmp_path / "none", 5, seed=0)


def test_a_tokenizer_without_ordinary_tokens_is_told():
    with pytest.raises(ConfigError, match="no ordinary tokens"):
        random_requests(SimpleNamespace(vocab_size=1, special_ids={0}), 1, RandomShape(), 0)
