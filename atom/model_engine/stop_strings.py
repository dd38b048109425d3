"""Stop strings: cut an answer's text just before the stop string that completes first.

Generation ends where a stop string is complete, so the one whose *last* character comes first wins; of
several that end on the same character it is the longest, which starts first. The rule depends on the text
alone, so streamed and one-shot answers are cut alike, however the text is split into deltas.
"""

from collections import deque
from functools import lru_cache


class _Automaton:
    """The Aho-Corasick automaton of some stop strings.

    A state is the longest end of the text that is the start of a stop string; state 0 is the empty one.
    Lists have an entry a state.
    """

    __slots__ = ("next", "fallback", "depth", "match")

    def __init__(self, stops: tuple[str, ...]):
        self.next: list[dict[str, int]] = [{}]  # states one character on
        self.fallback = [0]  # the longest proper end of a state that is a state as well
        self.depth = [0]  # its length
        self.match: list[str | None] = [None]  # the longest stop string that ends here
        for stop in stops:
            state = 0
            for char in stop:
                state = self.next[state].get(char) or self._add(state, char)
            self.match[state] = stop
        queue = deque(self.next[0].values())
        while queue:  # breadth first: a fallback is shorter than its state, so it is complete already
            state = queue.popleft()
            for char, child in self.next[state].items():
                fallback = self.fallback[child] = self.step(self.fallback[state], char)
                self.match[child] = self.match[child] or self.match[fallback]
                queue.append(child)

    def _add(self, state: int, char: str) -> int:
        child = self.next[state][char] = len(self.next)
        self.next.append({})
        self.fallback.append(0)
        self.depth.append(self.depth[state] + 1)
        self.match.append(None)
        return child

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self.next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fallback[state]


_build = lru_cache(maxsize=32)(_Automaton)  # clients send the same stop strings over and over


class StopChecker:
    """Cuts the text of one answer at its first stop string; holds back only what may become one.

    A character costs O(1) amortised whatever the number and the length of the stop strings.
    """

    __slots__ = ("_automaton", "_state", "_held", "matched")

    def __init__(self, stops: list[str] | tuple[str, ...] | None):
        self._automaton = _build(tuple(stops)) if stops else None
        self._state = 0
        self._held = ""  # seen, not handed out: the characters of the current state
        self.matched: str | None = None

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Text that is safe to hand out now, and the stop string if one is complete.

        After a match the text has ended: what follows, also within ``delta``, is dropped.
        """
        automaton = self._automaton
        if automaton is None:
            return delta, None
        if self.matched is not None:
            return "", self.matched
        state, match = self._state, automaton.match
        if state == 0 and automaton.next[0].keys().isdisjoint(delta):
            return delta, None
        for position, char in enumerate(delta):
            state = automaton.step(state, char)
            if match[state] is not None:
                self.matched = match[state]
                seen = self._held + delta[: position + 1]
                self._held, self._state = "", 0
                return seen[: len(seen) - len(self.matched)], self.matched
        seen = self._held + delta
        cut = len(seen) - automaton.depth[state]
        self._state, self._held = state, seen[cut:]
        return seen[:cut], None

    def flush(self) -> str:
        """At the end of the answer: the text that was held back, since no stop string came of it."""
        held, self._held, self._state = self._held, "", 0
        return held


def truncate(text: str, stops: list[str] | tuple[str, ...] | None) -> tuple[str, str | None]:
    """The whole ``text`` cut by the rule of this module, and the stop string that cut it."""
    checker = StopChecker(stops)
    cut, matched = checker.feed(text)
    return (cut, matched) if matched is not None else (cut + checker.flush(), None)


def special_stop_ids(stops: list[str] | tuple[str, ...] | None, tokenizer) -> dict[int, str]:
    """Ids of the special tokens that are themselves asked for as stop strings.

    Their text never appears in an answer (special tokens are skipped), so they stop by id instead.
    ``tokenizer`` has ``token_to_id`` (or ``convert_tokens_to_ids``) and ``decode``.
    """
    find = getattr(tokenizer, "token_to_id", None) or tokenizer.convert_tokens_to_ids
    found = {}
    for stop in stops or ():
        token_id = find(stop)
        if token_id is None or tokenizer.decode([token_id], skip_special_tokens=True):
            continue
        if tokenizer.decode([token_id], skip_special_tokens=False) == stop:
            found[token_id] = stop
    return found
