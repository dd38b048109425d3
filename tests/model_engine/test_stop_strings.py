"""Stop strings: the same cut for any split of the text, and nothing held back that need not be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from atom.errors import RequestError
from atom.model_engine.stop_strings import StopChecker, special_stop_ids, truncate
from atom.sampling_params import MAX_STOP_CHARS, SamplingParams


def slow_truncate(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule read off its definition: smallest end; on the same end the longest stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def stream(text: str, stops: list[str], edges: list[int]) -> tuple[list[str], str | None]:
    checker, out = StopChecker(stops), []
    edges = sorted({0, len(text), *(min(e, len(text)) for e in edges)})
    for a, b in zip(edges, edges[1:], strict=False):
        emitted, matched = checker.feed(text[a:b])
        out.append(emitted)
        if matched is not None:
            return out, matched
    return [*out, checker.flush()], None


SMALL = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(text=SMALL, stops=STOPS, edges=st.lists(st.integers(0, 30), max_size=12))
def test_T1_any_split_equals_the_one_shot_cut(text, stops, edges):
    deltas, matched = stream(text, stops, edges)
    assert ("".join(deltas), matched) == truncate(text, stops) == slow_truncate(text, stops)


def test_T1_stop_string_spans_tokens():
    checker = StopChecker(["ABC"])
    assert checker.feed("xA") == ("x", None)
    assert checker.feed("B") == ("", None)
    assert checker.feed("Cy") == ("", "ABC")
    assert checker.feed("more") == ("", "ABC")


def test_T1_false_start_is_given_back():
    checker = StopChecker(["ABABC"])
    assert checker.feed("ABAB") == ("", None)
    assert checker.feed("AB") == ("AB", None)  # "ABAB" may still become the stop string
    assert checker.feed("D") == ("ABABD", None)


def test_T1_earliest_completion_wins_and_the_longest_of_one_end():
    assert truncate("xabcdef", ["abcdef", "cd"]) == ("xab", "cd")
    assert truncate("xabc", ["bc", "abc", "c"]) == ("x", "abc")
    assert truncate("abc", ["ab", "abc"]) == ("", "ab")


@settings(max_examples=300, deadline=None)
@given(text=SMALL, stops=STOPS)
def test_T2_holds_back_only_what_may_still_become_a_stop_string(text, stops):
    checker, emitted = StopChecker(stops), ""
    for i, char in enumerate(text):
        new, matched = checker.feed(char)
        emitted += new
        if matched is not None:
            return
        held = text[len(emitted) : i + 1]
        ends = [text[k : i + 1] for k in range(i + 1)]
        longest = next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")
        assert held == longest


def test_T2_text_without_a_start_passes_at_once():
    checker = StopChecker(["\n\nQuestion:"])
    assert checker.feed("a long answer. ") == ("a long answer. ", None)
    assert checker.feed("line\n") == ("line", None)
    assert checker.feed("next\n\nQ") == ("\nnext", None)
    assert checker.flush() == "\n\nQ"


def test_no_stop_strings():
    for stops in (None, [], ()):
        checker = StopChecker(stops)
        assert checker.feed("ab") == ("ab", None)
        assert checker.flush() == ""


def test_T1_special_token_as_stop_string_becomes_a_stop_id():
    vocab = {"<unk>": 0, "a": 1, "<|end|>": 2, "b": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.decoder = decoders.Fuse()
    assert special_stop_ids(["<|end|>", "a", "zzz", "<|other|>"], tokenizer) == {2: "<|end|>"}
    assert special_stop_ids(None, tokenizer) == {}


@pytest.mark.parametrize("field", ["stop_strings", "bad_words"])
def test_stop_strings_are_bounded_together(field):
    half = "x" * (MAX_STOP_CHARS // 2)
    SamplingParams(**{field: [half, half]})
    with pytest.raises(
        RequestError, match=f"{field} must be at most {MAX_STOP_CHARS} characters.*{MAX_STOP_CHARS + 1}"
    ):
        SamplingParams(**{field: [half, half, "x"]})
