"""Tokenize a long prompt again without encoding again what was encoded before; the ids are the encoder's own.

A chat template separates messages with added tokens, and the text between two of them is encoded on its own.
So a prompt is cut at its added tokens, and two things are kept under one byte budget, oldest out first:

* the ids of every *segment* between two added tokens, by its text. The segments that are missing are encoded
  in one parallel batch;
* every *prompt* with its ids up to its last added token, so that the next turn of a conversation takes over
  all ids up to the last added token that both share.

The work left is linear in the prompt: comparing, hashing and copying. That this is exact is a property of the
tokenizer (:func:`why_inexact`), and the first prompts are compared with the plain encoder besides.
"""

import json
import logging
import re
import sys
import threading
import weakref
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from atom.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from atom.model_loader.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MIN_CHARS = 100_000  # shorter prompts are encoded whole, which takes a few milliseconds
_NUM_CHECKS = 2  # prompts compared with the plain encoder, of each kind: all new, and continuing an old one
_MAX_TOKEN_CHARS = 256
_ENTRY_BYTES = 200  # of the tables, for an entry beside its text and ids

# Steps that treat every piece between added tokens on its own, whatever stands around it.
_NORMALIZERS = {
    "BertNormalizer",
    "ByteLevel",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
}
_NORMALIZERS |= {"Prepend", "Replace", "Strip", "StripAccents"}
_PRE_TOKENIZERS = {
    "BertPreTokenizer",
    "ByteLevel",
    "CharDelimiterSplit",
    "Digits",
    "Metaspace",
    "Punctuation",
}
_PRE_TOKENIZERS |= {"Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}


def enable_tokenize_cache(tokenizer: "Tokenizer", max_mb: int) -> None:
    """Let ``tokenizer`` keep up to ``max_mb`` MB for the prompts it may see again, where that is exact."""
    backend = getattr(tokenizer, "backend", None)
    if max_mb <= 0 or backend is None:
        return
    reason = why_inexact(backend)
    if reason is None and (wrapping := _find_wrapping(tokenizer)) is None:
        reason = "what it puts around a text cannot be told"
    if reason is not None:
        logger.info("Tokenization cache: not for this tokenizer: %s", reason)
        return
    # The tokenizer owns its cache; a reference back would keep both until a full collection.
    tokenizer.cache = TokenizeCache(weakref.proxy(tokenizer), max_mb << 20, wrapping)


def why_inexact(backend: "Backend") -> str | None:
    """Why a text cut at this tokenizer's added tokens might be encoded differently; None if it never is."""
    texts = _cutting_tokens(backend)
    if not texts:
        return "it has no added tokens"
    if backend.encode_special_tokens:
        return "it encodes special tokens as text"
    if (longest := max(map(len, texts))) > _MAX_TOKEN_CHARS:
        return f"it has an added token of {longest} characters"
    for token in backend.get_added_tokens_decoder().values():
        if not token.normalized and (token.lstrip or token.rstrip or token.single_word):
            return f"its added token {token.content!r} depends on what stands beside it"
    if getattr(backend.model, "dropout", None):
        return "its merges are random (dropout)"
    try:
        normalizers, pre_tokenizers = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    except Exception as error:  # a step written in Python has no state; the library raises bare Exception
        return f"a step cannot be inspected ({error})"
    for step in normalizers:
        if step["type"] not in _NORMALIZERS:
            return f"its normalizer {step['type']} is not known to work piece by piece"
    for step in pre_tokenizers:
        if step["type"] not in _PRE_TOKENIZERS:
            return f"its pre-tokenizer {step['type']} is not known to work piece by piece"
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") == "first":
            return "its pre-tokenizer treats the start of a text differently"
    return None


def _steps(component: Any) -> list[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, of each member where it is a sequence."""
    if component is None:
        return []
    waiting, steps = [json.loads(component.__getstate__())], []
    while waiting:
        spec = waiting.pop()
        if spec["type"] == "Sequence":
            waiting += spec.get("normalizers") or spec.get("pretokenizers") or []
        else:
            steps.append(spec)
    return steps


def _cutting_tokens(backend: "Backend") -> dict[str, int]:
    """Added tokens that are found in the raw text, before anything else happens to it: text -> id."""
    added = backend.get_added_tokens_decoder().items()
    return {token.content: i for i, token in added if token.content and not token.normalized}


def _find_wrapping(tokenizer: "Tokenizer") -> tuple[list[int], list[int]] | None:
    """Ids that the tokenizer puts before and after every text (BOS and the like)."""
    found: set[tuple[tuple[int, ...], tuple[int, ...]]] | None = None
    probes = ["a", "b c", "The end."]
    plain_ids = tokenizer.encode_batch(probes, add_special_tokens=False)
    for plain, full in zip(plain_ids, tokenizer.encode_batch(probes), strict=True):
        size = len(plain)
        starts = [i for i in range(len(full) - size + 1) if full[i : i + size] == plain]
        possible = {(tuple(full[:i]), tuple(full[i + size :])) for i in starts}
        found = possible if found is None else found & possible
    if not found or len(found) > 1:
        return None
    before, after = found.pop()
    return list(before), list(after)


def longest_match_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds, at each place, the longest of ``texts``: a prefix tree, quick for thousands."""
    root: dict[str, dict] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}

    def write(node: dict[str, dict]) -> str:
        branches = []
        for char, child in node.items():
            if char:
                text = re.escape(char)
                while len(child) == 1 and "" not in child:  # a run without branches, at one level of nesting
                    char, child = next(iter(child.items()))
                    text += re.escape(char)
                branches.append(text + write(child))
        if not branches:
            return ""
        joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
        return joined + "?" if "" in node else joined

    return re.compile(write(root))


class _StoredPrompt:
    """The start of a prompt up to its last added token.

    Attributes:
        text: that start, and ``lookahead`` characters more where the prompt had them.
        ids: its ids, int32.
        ends: character offset of the end of every added token.
        counts: number of ids up to there.
        blocks: keys of the text's blocks in the index.
    """

    __slots__ = ("text", "ids", "ends", "counts", "blocks", "num_bytes")

    def __init__(self, text: str, ids: bytes, ends: array, counts: array, blocks: Sequence[int]):
        self.text = text
        self.ids = ids
        self.ends = ends
        self.counts = counts
        self.blocks = blocks
        parts = (text, ids, ends, counts)
        self.num_bytes = sum(map(sys.getsizeof, parts)) + _ENTRY_BYTES * (1 + len(blocks))


class TokenizeCache:
    """Encodes long texts through what is remembered of earlier ones. Safe to use from several threads.

    Args:
        tokenizer: encodes what is missing (``encode_batch``).
        max_bytes: bound on everything kept.
        wrapping: ids that the tokenizer puts before and after a text.
        min_chars: the tokenizer asks the cache from this length on.
        block_chars: step in which the shared start of two prompts is looked up.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        max_bytes: int,
        wrapping: tuple[list[int], list[int]],
        min_chars: int = MIN_CHARS,
        block_chars: int = 4096,
    ):
        self.min_chars = min_chars
        self.num_bytes = 0
        self.is_on = True
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._before, self._after = wrapping
        self._block_chars = block_chars
        self._tokens = _cutting_tokens(tokenizer.backend)
        self._pattern = longest_match_pattern(self._tokens)
        # A token inside a longer one is only certain once the longer one is excluded.
        containing = [len(text) - 1 for text in self._tokens if self._pattern.search(text[:-1])]
        self._lookahead = max(containing, default=0)
        self._entries: OrderedDict[str | _StoredPrompt, bytes | None] = OrderedDict()
        self._prompt_of_block: dict[int, _StoredPrompt] = {}
        self._checks_left = {False: _NUM_CHECKS, True: _NUM_CHECKS}  # by whether an old prompt was continued
        self._lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of ``text``, as ``tokenizer.encode_batch`` gives them. Raises as it does."""
        if not self.is_on:
            return self._encode_plainly(text, add_special_tokens)
        try:
            ids, has_continued = self._encode(text)
        except RequestError:  # its place in the text is told from the whole
            return self._encode_plainly(text, add_special_tokens)
        if add_special_tokens:
            ids = [*self._before, *ids, *self._after]
        if self._checks_left[has_continued] > 0:
            self._checks_left[has_continued] -= 1
            plain = self._encode_plainly(text, add_special_tokens)
            if ids != plain:
                self._turn_off()
            return plain
        return ids

    def _encode_plainly(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode_batch([text], add_special_tokens)[0]

    def _encode(self, text: str) -> tuple[list[int], bool]:
        """The ids without wrapping, and whether an earlier prompt gave the first of them."""
        blocks = self._block_keys(text)
        with self._lock:
            prompt, mark = self._find_prompt(text, blocks)
            if prompt is not None:
                self._entries.move_to_end(prompt)
        ids, ends, counts = array("i"), array("i"), array("i")
        if prompt is not None:
            ends.extend(prompt.ends[:mark])
            counts.extend(prompt.counts[:mark])
            ids.frombytes(prompt.ids[: counts[-1] * ids.itemsize])
        start = ends[-1] if ends else 0

        cuts = list(self._pattern.finditer(text, start))
        edges = [start, *(cut.end() for cut in cuts)]
        segments = [text[a : cut.start()] for a, cut in zip(edges, cuts, strict=False)]
        segments.append(text[edges[-1] :])
        ids_of = self._ids_of_segments(segments)
        for segment, cut in zip(segments, cuts, strict=False):
            ids.frombytes(ids_of[segment])
            ids.append(self._tokens[cut.group()])
            ends.append(cut.end())
            counts.append(len(ids))
        if ends:
            self._store_prompt(text, ids, ends, counts, blocks, superseded=prompt)
        ids.frombytes(ids_of[segments[-1]])
        return ids.tolist(), prompt is not None

    # -- segments

    def _ids_of_segments(self, segments: list[str]) -> dict[str, bytes]:
        """int32 ids of every segment, the missing ones encoded together."""
        ids_of: dict[str, bytes] = {"": b""}
        missing = []
        with self._lock:
            for segment in dict.fromkeys(filter(None, segments)):
                ids = self._entries.get(segment)
                if ids is None:
                    missing.append(segment)
                else:
                    self._entries.move_to_end(segment)
                    ids_of[segment] = ids
        if missing:
            encoded = self._tokenizer.encode_batch(missing, add_special_tokens=False)
            new = {text: array("i", ids).tobytes() for text, ids in zip(missing, encoded, strict=True)}
            ids_of |= new
            with self._lock:
                for segment, ids in new.items():
                    self._keep(segment, ids)
        return ids_of

    # -- prompts

    def _block_keys(self, text: str) -> list[int]:
        """A chained hash for every whole block of the text: equal keys, equal starts (as good as always)."""
        size, key, keys = self._block_chars, 0, []
        for start in range(0, len(text) - size + 1, size):
            key = hash((key, text[start : start + size]))
            keys.append(key)
        return keys

    def _find_prompt(self, text: str, blocks: list[int]) -> tuple[_StoredPrompt | None, int]:
        """The kept prompt that shares most with ``text``, and how many of its added tokens are shared."""
        for key in reversed(blocks):
            prompt = self._prompt_of_block.get(key)
            if prompt is not None:
                common = _common_length(text, prompt.text)
                if common < len(text):
                    common -= self._lookahead
                mark = bisect_right(prompt.ends, common)
                return (prompt, mark) if mark else (None, 0)
        return None, 0

    def _store_prompt(
        self,
        text: str,
        ids: array,
        ends: array,
        counts: array,
        blocks: list[int],
        superseded: _StoredPrompt | None,
    ) -> None:
        kept = text[: ends[-1] + self._lookahead]
        prompt = _StoredPrompt(
            kept, ids.tobytes(), ends[:], counts[:], blocks[: len(kept) // self._block_chars]
        )
        with self._lock:
            if superseded in self._entries and text.startswith(superseded.text[: superseded.ends[-1]]):
                self._drop(superseded)  # the new one gives all that it gave
            self._keep(prompt, None)
            if prompt in self._entries:
                self._prompt_of_block.update(dict.fromkeys(prompt.blocks, prompt))

    # -- budget; the caller holds the lock

    def _keep(self, key: str | _StoredPrompt, ids: bytes | None) -> None:
        num_bytes = _num_bytes(key, ids)
        if num_bytes > self._max_bytes or key in self._entries or not self.is_on:
            return
        while self.num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[key] = ids
        self.num_bytes += num_bytes

    def _drop(self, key: str | _StoredPrompt) -> None:
        self.num_bytes -= _num_bytes(key, self._entries.pop(key))
        if isinstance(key, _StoredPrompt):
            for block in key.blocks:
                if self._prompt_of_block.get(block) is key:
                    del self._prompt_of_block[block]

    def _turn_off(self) -> None:
        logger.error("Tokenization cache: ids differ from the tokenizer's; it is off from now on")
        with self._lock:
            self.is_on = False
            self._entries.clear()
            self._prompt_of_block.clear()
            self.num_bytes = 0

    def check_integrity(self) -> None:
        """Raises AssertionError when the tables contradict each other."""
        with self._lock:
            total = sum(_num_bytes(key, ids) for key, ids in self._entries.items())
            assert total == self.num_bytes <= self._max_bytes, (total, self.num_bytes, self._max_bytes)
            assert all(prompt in self._entries for prompt in self._prompt_of_block.values())


def _num_bytes(key: str | _StoredPrompt, ids: bytes | None) -> int:
    """Memory that an entry retains."""
    if isinstance(key, _StoredPrompt):
        return key.num_bytes
    return sys.getsizeof(key) + sys.getsizeof(ids) + _ENTRY_BYTES


def _common_length(left: str, right: str) -> int:
    """Number of characters that both texts start with."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
