"""The parts of the quality benchmark that need no model."""

import math
from types import SimpleNamespace

import pytest

from atom.benchmarks.cpu_quality import (
    TEXT,
    VARIANTS,
    Quality,
    agreement,
    chosen_variants,
    format_table,
    perplexity,
    text_windows,
    verdict,
)
from atom.config import Config
from atom.errors import ConfigError


def test_windows_start_afresh_and_cover_the_text():
    windows = text_windows(range(10, 31), 2, size=8)
    assert windows == [[2, *range(10, 17)], [2, *range(17, 24)], [2, *range(24, 31)]]
    assert text_windows(range(8), None, size=4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert text_windows(range(5), None, size=4) == [[0, 1, 2, 3]]  # a token alone has no likelihood


def test_perplexity_is_the_mean_over_all_tokens():
    scored = {2: [-1.0], 3: [-2.0, -3.0]}

    class Engine:
        def generate(self, prompts, params, use_tqdm):
            rows = [SimpleNamespace(logprob=value) for value in scored[len(prompts[0])]]
            return [{"prompt_logprobs": [None, *rows]}]

    assert perplexity(Engine(), [[1, 2], [1, 2, 3]]) == pytest.approx(math.exp(2.0))


def test_agreement_counts_places():
    assert agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(5 / 6)


def test_three_percent_is_the_limit():
    assert verdict(10.3, 10.0) == "good"
    assert verdict(10.31, 10.0) == "not good"
    results = [Quality("source", 20.0, 10.0, [[1, 2]]), Quality("int4", 25.0, 30.0, [[1, 3]])]
    assert "| int4 | 25.000 | +25.00% | 50% | 30.0 | not good |" in format_table(results)


def test_variants_are_configurations():
    for fields in VARIANTS.values():
        Config("m", **fields)
    assert chosen_variants("int4, keep") == ["source", "int4", "keep"]
    with pytest.raises(ConfigError, match="--variants must be among source, keep, .*got 'int3'"):
        chosen_variants("int3")


def test_the_text_is_long_enough():
    assert len(TEXT.read_text().split()) > 2000
