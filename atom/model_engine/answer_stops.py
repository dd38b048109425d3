"""Stop strings that apply to the answer alone: they sleep while a model thinks.

Clients send stop strings for the answer they want; in the thinking before it they would only cut it short.
"""

import re
from dataclasses import dataclass

from atom.model_engine.stop_strings import StopChecker

MAX_LEAD_CHARS = 100  # white space before an opener


@dataclass(frozen=True)
class StopGate:
    """What tells thinking and answer apart in one request's texts.

    Args:
        opener: begins the thinking, after white space at most.
        answer_mark: the answer begins right after it.
        is_thinking: the prompt has written the opener already, so the text begins as thinking.
    """

    opener: str
    answer_mark: str
    is_thinking: bool = False


class AnswerStopChecker:
    """A ``StopChecker`` that lets everything pass up to the answer; the same interface.

    Where the text does not begin with the opener (and ``is_thinking`` is False) it is all answer. Nothing is
    held back of the thinking; of the first characters only what may become the opener.
    """

    __slots__ = ("_checker", "_gate", "_mark", "_state", "_seen")

    def __init__(self, stops: list[str] | tuple[str, ...] | None, gate: StopGate):
        self._checker = StopChecker(stops)
        self._gate = gate
        self._mark = re.compile(re.escape(gate.answer_mark))
        self._state = "thinking" if gate.is_thinking else "undecided"
        self._seen = ""  # undecided: what is held back; thinking: the end of what was handed out

    @property
    def matched(self) -> str | None:
        return self._checker.matched

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Text that is safe to hand out now, and the stop string if one is complete."""
        if self._state == "answer":
            return self._checker.feed(delta)
        if self._state == "undecided":
            delta = self._seen + delta
            begin, opener = delta.lstrip(), self._gate.opener
            may_think = len(delta) - len(begin) <= MAX_LEAD_CHARS
            if may_think and len(begin) < len(opener) and opener.startswith(begin):
                self._seen = delta
                return "", None
            self._seen = ""
            if not may_think or not begin.startswith(opener):
                self._state = "answer"
                return self._checker.feed(delta)
            self._state = "thinking"
        seen = self._seen + delta
        found = self._mark.search(seen)
        if found is None:
            keep = len(self._gate.answer_mark) - 1
            self._seen = seen[-keep:] if keep else ""
            return delta, None
        self._state = "answer"
        cut = found.end() - len(self._seen)  # in delta: the mark is never complete within ``_seen``
        self._seen = ""
        text, matched = self._checker.feed(delta[cut:])
        return delta[:cut] + text, matched

    def flush(self) -> str:
        """At the end of the text: what was held back, since no stop string came of it."""
        if self._state != "undecided":
            return self._checker.flush()
        text, _ = self._checker.feed(self._seen)
        self._seen = ""
        return text + self._checker.flush()
