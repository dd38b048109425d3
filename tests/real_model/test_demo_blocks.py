"""The demo model with its GGUF blocks kept packed says what it says when they are widened, where that is clear."""

import pytest

from atom import LLMEngine, SamplingParams
from atom.kernels.cpu.native.library import native_library

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(native_library() is None, reason="no compiler here"),
]
PROMPTS = [
    "The capital of France is",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is the largest planet?\nA:",
    "To make a good omelette you need eggs, butter and",
]
CLEAR = 0.5  # by which log-probability the best token leads; rounding of activations may turn what is closer


def greedy_answers(gguf_dtype: str) -> list[dict]:
    fields = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 512, "enable_prefix_caching": False}
    with LLMEngine("demo", in_process=True, gguf_dtype=gguf_dtype, **fields) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2, ignore_eos=True)
        return engine.generate(PROMPTS, params, use_tqdm=False)


def test_kept_blocks_differ_only_where_two_tokens_are_close():
    num_equal = 0
    for mine, theirs in zip(greedy_answers("keep"), greedy_answers("dequantize"), strict=True):
        for place, (token, expected) in enumerate(zip(mine["token_ids"], theirs["token_ids"], strict=True)):
            if token != expected:
                best, second = theirs["logprobs"][place].top_logprobs[:2]
                assert best - second < CLEAR, f"token {place} of {mine['text']!r}, not {theirs['text']!r}"
                break  # the texts are different from here on
            num_equal += 1
    assert num_equal >= 24  # of 64
