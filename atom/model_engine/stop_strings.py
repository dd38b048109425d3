"""Stop strings: cut an answer's text just before the stop string that completes first.

Generation ends where a stop string is complete, so the one whose *last* character comes first wins; of
several that end on the same character it is the longest, which starts first. The rule depends on the text
alone, so streamed and one-shot answers are cut alike, however the text is split into deltas.
"""

from collections import deque
from functools import lru_cache
from typing import NamedTuple


class _Node(NamedTuple):
    """A state of the automaton: the longest end of the text that is the start of a stop string."""

    depth: int  # length of that end
    next: dict[str, int]  # states one character on
    fallback: list[int]  # [the longest proper end of this one that is a start as well]
    match: list[str]  # [the longest stop string that ends here], or empty


@lru_cache(maxsize=256)
def _build_automaton(stops: tuple[str, ...]) -> list[_Node]:
    """The Aho-Corasick automaton of ``stops``; state 0 is the empty string."""
    nodes = [_Node(0, {}, [0], [])]
    for stop in stops:
        state = 0
        for char in stop:
            node = nodes[state]
            if char not in node.next:
                node.next[char] = len(nodes)
                nodes.append(_Node(node.depth + 1, {}, [0], []))
            state = node.next[char]
        nodes[state].match[:] = [stop]
    queue = deque(nodes[0].next.values())
    while queue:  # breadth first: the fallback of a state is shorter, so it is complete already
        node = nodes[queue.popleft()]
        for char, child in node.next.items():
            fallback = _step(nodes, node.fallback[0], char) if node.depth else 0
            nodes[child].fallback[0] = fallback
            if not nodes[child].match:
                nodes[child].match[:] = nodes[fallback].match
            queue.append(child)
    return nodes


def _step(nodes: list[_Node], state: int, char: str) -> int:
    while True:
        following = nodes[state].next.get(char)
        if following is not None:
            return following
        if state == 0:
            return 0
        state = nodes[state].fallback[0]


class StopChecker:
    """Cuts the text of one answer at its first stop string; holds back only what may become one.

    A character costs O(1) amortised whatever the number and the length of the stop strings.
    """

    __slots__ = ("_nodes", "_state", "_held", "matched")

    def __init__(self, stops: list[str] | tuple[str, ...] | None):
        self._nodes = _build_automaton(tuple(stops)) if stops else None
        self._state = 0
        self._held = ""  # seen, not handed out: the characters of the current state
        self.matched: str | None = None

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Text that is safe to hand out now, and the stop string if one is complete.

        After a match the text has ended: what follows, also within ``delta``, is dropped.
        """
        nodes = self._nodes
        if nodes is None:
            return delta, None
        if self.matched is not None:
            return "", self.matched
        state = self._state
        if state == 0 and nodes[0].next.keys().isdisjoint(delta):
            return delta, None
        for position, char in enumerate(delta):
            following = nodes[state].next.get(char)
            state = following if following is not None else _step(nodes, state, char)
            if state and nodes[state].match:
                self.matched = nodes[state].match[0]
                seen = self._held + delta[: position + 1]
                self._held, self._state = "", 0
                return seen[: len(seen) - len(self.matched)], self.matched
        seen = self._held + delta
        cut = len(seen) - nodes[state].depth
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
