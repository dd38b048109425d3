"""Stop strings that sleep while a model thinks, however the text is cut (case T5)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_engine.answer_stops import AnswerStopChecker, StopGate
from atom.model_engine.stop_strings import truncate

THINKING = StopGate("<think>", "</think>", is_thinking=True)
UNDECIDED = StopGate("<think>", "</think>")


def stream(gate, stops, pieces):
    checker = AnswerStopChecker(stops, gate)
    out = ""
    for piece in pieces:
        delta, matched = checker.feed(piece)
        out += delta
        if matched is not None:
            assert checker.matched == matched
            return out, matched
    return out + checker.flush(), None


def expected(gate, stops, text):
    """The rule, told of the whole text."""
    if not gate.is_thinking and not text.lstrip().startswith(gate.opener):
        return truncate(text, stops)
    before, mark, answer = text.partition(gate.answer_mark)
    cut, matched = truncate(answer, stops)
    return before + mark + cut, matched


@pytest.mark.parametrize("gate", [THINKING, UNDECIDED])
@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<th", "k>", " ", "\n", "ab", "a", "b", "c"]), max_size=12
    ),
    stops=st.lists(st.sampled_from(["ab", "b", "aa", "k>a", "\n\n"]), min_size=1, max_size=2),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_T5_any_cut_stops_where_the_whole_text_does(gate, parts, stops, cuts):
    text = "".join(parts)
    want = expected(gate, stops, text)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for pieces in ([text], list(text), [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]):
        got = stream(gate, stops, pieces)
        if got != want:  # a text that ends undecided is cut by flush, which cannot name the stop string
            assert want[1] and (got[0], got[1]) == (want[0], None) and "<think>".startswith(text.lstrip())


def test_T5_thinking_is_never_held_back():
    checker = AnswerStopChecker(["Question:"], THINKING)
    assert checker.feed("Question: Quest") == ("Question: Quest", None)
    assert checker.feed("</thi") == ("</thi", None)
    assert checker.feed("nk>Quest") == ("nk>", None)
    assert checker.feed("ion: x") == ("", "Question:")


def test_an_answer_without_thinking_waits_for_no_more_than_the_opener():
    checker = AnswerStopChecker(["stop"], UNDECIDED)
    assert checker.feed("<thi") == ("", None)
    assert checker.feed("s is st") == ("<this is ", None)
    assert checker.flush() == "st"


def test_white_space_without_end_is_an_answer():
    for pieces in ([" " * 300 + "<think>ab"], [" "] * 300 + ["<think>ab"]):
        assert stream(UNDECIDED, ["ab"], pieces) == (" " * 300 + "<think>", "ab")


def test_without_stop_strings_everything_passes():
    checker = AnswerStopChecker(None, THINKING)
    assert checker.feed("a</think>b") == ("a</think>b", None)
    assert checker.matched is None
