"""The parts of the determinism benchmark that need no model."""

import pytest

from atom.benchmarks import cpu_deterministic
from atom.benchmarks.cpu_deterministic import Cost, Load, Prompts, format_table, measure


def test_prompts_are_all_different():
    prompts = Prompts(30_000)
    taken = [prompts.take(64) for _ in range(200)]
    assert len({tuple(prompt[:16]) for prompt in taken}) == 200
    assert min(map(min, taken)) >= 5 and max(map(max, taken)) < 30_000


def test_engines_take_turns_and_the_best_counts(monkeypatch):
    asked = []

    def seconds(engine, prompts, new_tokens):
        asked.append((engine, new_tokens))
        return (0.1 if engine == "plain" else 0.2) * new_tokens

    monkeypatch.setattr(cpu_deterministic, "seconds_of", seconds)
    loads = [Load("prefill", 1, 50, 1), Load("decode", 2, 8, 11)]
    prefill, decode = measure(("plain", "det"), 2, loads)
    assert (prefill.plain, prefill.deterministic) == pytest.approx((500, 250))
    assert (decode.plain, decode.deterministic) == pytest.approx((20, 10))
    assert [engine for engine, n in asked if n == 11] == ["plain", "det", "det", "plain"]


def test_a_quarter_is_the_limit():
    table = format_table([Cost("a", 100.0, 75.1), Cost("b", 100.0, 74.9)]).splitlines()
    assert table[2].endswith("| 25% | good |") and table[3].endswith("| 25% | too much |")
