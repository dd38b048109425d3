"""Merging of deltas that their reader has not taken yet."""

from atom.core import TokenLogprobs
from atom.model_engine.outputs import FirstTimes, RequestOutput
from atom.model_engine.streams import merge

TIMES = FirstTimes(1.0, 1.25, 2.0)


def test_a_merged_delta_tells_everything_that_its_parts_told():
    scores = [TokenLogprobs(token, -1.0, 1, [], []) for token in (5, 6, 7)]
    first = RequestOutput("r", 0, "he", [5, 6], num_output_tokens=2, num_cached_tokens=16)
    first.logprobs, first.prompt_logprobs, first.first_times = scores[:2], [None, scores[0]], TIMES
    last = RequestOutput("r", 0, "y", [7], True, "stop", "!", num_output_tokens=3, num_cached_tokens=16)
    last.logprobs = scores[2:]
    whole = merge(first, last)
    assert (whole.text, whole.output_tokens, whole.logprobs) == ("hey", [5, 6, 7], scores)
    assert (whole.prompt_logprobs, whole.first_times) == ([None, scores[0]], TIMES)
    assert (whole.finished, whole.finish_reason, whole.stop_reason) == (True, "stop", "!")
    assert (whole.num_output_tokens, whole.num_cached_tokens) == (3, 16)
