"""Token ids to text, a few at a time: the deltas joined equal the tokenizer's decode of all ids.

Two ways, chosen once per tokenizer by :class:`DetokenizerFactory`:

* *pieces*: where the tokenizer's decoder is byte-level BPE or SentencePiece with byte fallback, every id has
  a fixed piece of text or bytes. A token costs one dictionary look-up and nothing is decoded twice.
* *window*: any other tokenizer is only asked to ``decode`` the last few ids again.

Neither hands out part of a character: U+FFFD appears only where the decode of all ids has it as well.
"""

import codecs
import json
import logging
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer(ABC):
    """The text of one answer, fed with its ids in order."""

    __slots__ = ()

    @abstractmethod
    def update(self, ids: Iterable[int], finished: bool = False) -> str:
        """The text that ``ids`` complete. ``finished``: these were the last, give out what was held back."""


class ByteLevelDetokenizer(Detokenizer):
    """Byte-level BPE: ids are runs of UTF-8 bytes; at most three bytes of a character are held back."""

    __slots__ = ("_pieces", "_decoder")

    def __init__(self, pieces: "Pieces"):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def update(self, ids: Iterable[int], finished: bool = False) -> str:
        pieces = self._pieces
        return self._decoder.decode(b"".join([pieces[i] for i in ids]), finished)


class ByteFallbackDetokenizer(Detokenizer):
    """SentencePiece with byte fallback: ids are strings, or single bytes where a character has no token.

    The tokenizer reads a run of byte ids as a whole: one invalid byte makes U+FFFD of every byte of its run.
    So a run is held back until an id that is not a byte ends it.
    """

    __slots__ = ("_pieces", "_run", "_strip_char", "_num_strip")

    def __init__(self, pieces: "Pieces", strip_char: str, num_strip: int):
        self._pieces = pieces
        self._run = bytearray()
        self._strip_char = strip_char
        self._num_strip = num_strip  # leading characters of the whole text that are still to be dropped

    def update(self, ids: Iterable[int], finished: bool = False) -> str:
        pieces, run, parts = self._pieces, self._run, []
        for i in ids:
            piece = pieces[i]
            if piece.__class__ is int:
                run.append(piece)
            elif piece is not None:
                if run:
                    parts.append(_text_of_run(run))
                    run.clear()
                parts.append(piece)
        if finished and run:
            parts.append(_text_of_run(run))
            run.clear()
        text = "".join(parts)
        return self._strip_start(text) if self._num_strip and text else text

    def _strip_start(self, text: str) -> str:
        while self._num_strip and text:
            if not text.startswith(self._strip_char):
                self._num_strip = 0
                break
            text = text[1:]
            self._num_strip -= 1
        return text


def _text_of_run(run: bytearray) -> str:
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return REPLACEMENT * len(run)


class WindowDetokenizer(Detokenizer):
    """Any tokenizer: decode a bounded window of the last ids and hand out what is new at its end.

    The window starts at an id before which everything was handed out, and its first ids are old ones, so
    that what a tokenizer does to the start of a text (a leading space stripped) never touches new text.
    """

    __slots__ = ("_decode", "_window", "_num_emitted", "_num_held")

    SOFT_LIMIT = 16  # ids; beyond it the window moves on at the next clean boundary
    HARD_LIMIT = 96  # ids; beyond it the window moves on even in the middle of undecodable bytes
    OVERLAP = 6  # old ids that a new window starts with

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._num_emitted = 0  # characters of the window's text that were handed out
        self._num_held = 0  # ids whose text was not

    def update(self, ids: Iterable[int], finished: bool = False) -> str:
        num_old = len(self._window)
        self._window.extend(ids)
        self._num_held += len(self._window) - num_old
        if not self._num_held:
            return ""
        text = self._decode(self._window)
        overfull = self._num_held > self.HARD_LIMIT
        if text.endswith(REPLACEMENT) and not finished and not overfull:
            return ""
        delta = text[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(text))
        self._num_held = 0
        if len(self._window) > self.SOFT_LIMIT and not finished:
            self._move_on(text)
        return delta

    def _move_on(self, text: str) -> None:
        for overlap in (self.OVERLAP, 2 * self.OVERLAP):
            window = self._window[-overlap:]
            tail = self._decode(window)
            # A window that starts inside a character, or shows no text, would read what follows differently.
            if tail.strip() and not tail.startswith(REPLACEMENT) and text.endswith(tail):
                self._window, self._num_emitted = window, len(tail)
                return
        if len(self._window) > self.HARD_LIMIT:
            self._window, self._num_emitted = window, len(tail)


class Pieces(dict):
    """Token id -> its piece: ``bytes`` (byte-level), or ``str``, ``int`` (one byte) or None (skipped)."""

    def __init__(self, piece_of: Callable[[int], bytes | str | int | None]):
        super().__init__()
        self._piece_of = piece_of

    def __missing__(self, token_id: int) -> bytes | str | int | None:
        piece = self[token_id] = self._piece_of(token_id)
        return piece


class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer; decides how when it is built.

    Args:
        tokenizer: an object with ``decode(ids, skip_special_tokens)``. Where it is, or wraps, a
            ``tokenizers.Tokenizer`` whose decoder is known, ids are turned into pieces; the pieces are
            compared with ``decode`` on random ids first and left alone if they ever differ.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._makers: dict[bool, Callable[[], Detokenizer]] = {True: self._choose(True)}

    def create(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one answer."""
        maker = self._makers.get(skip_special_tokens)
        if maker is None:
            maker = self._makers[skip_special_tokens] = self._choose(skip_special_tokens)
        return maker()

    def _choose(self, skip_special_tokens: bool) -> Callable[[], Detokenizer]:
        def decode(ids: list[int]) -> str:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        backend = _find_backend(self._tokenizer)
        maker = _piece_maker(backend, skip_special_tokens) if backend is not None else None
        if maker is not None:
            if _agrees(maker, decode, backend):
                return maker
            logger.warning("Detokenizer: pieces differ from the tokenizer's decode; decoding windows instead")
        return lambda: WindowDetokenizer(decode)


def _find_backend(tokenizer: object):
    """The ``tokenizers.Tokenizer`` that this object is or holds; None if there is none."""
    needed = ("id_to_token", "token_to_id", "decoder", "get_added_tokens_decoder", "get_vocab_size")
    names = ("backend", "backend_tokenizer", "tokenizer", "_tokenizer")
    for candidate in (tokenizer, *(getattr(tokenizer, name, None) for name in names)):
        if all(hasattr(candidate, name) for name in needed):
            return candidate
    return None


def _piece_maker(backend, skip_special_tokens: bool) -> Callable[[], Detokenizer] | None:
    """How to build piece detokenizers for this backend, or None when its decoder is of another kind."""
    if backend.decoder is None:
        return None
    spec = json.loads(backend.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    skipped = set()
    if skip_special_tokens:
        skipped = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}

    def token_of(token_id: int) -> str | None:
        return None if token_id in skipped else backend.id_to_token(token_id)

    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        pieces = Pieces(lambda i: _bytes_of_token(token_of(i)))
        return lambda: ByteLevelDetokenizer(pieces)

    num_replace = kinds.count("Replace")
    tail = kinds[num_replace:]
    replaces = steps[:num_replace]
    if tail not in (["ByteFallback"], ["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return None
    if any(step["type"] != "Replace" or "String" not in step["pattern"] for step in replaces):
        return None
    strip = steps[-1] if tail[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    if strip["stop"]:
        return None
    replacements = [(step["pattern"]["String"], step["content"]) for step in replaces]
    pieces = Pieces(lambda i: _text_or_byte(token_of(i), replacements))
    return lambda: ByteFallbackDetokenizer(pieces, strip["content"], strip["start"])


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _text_or_byte(token: str | None, replacements: list[tuple[str, str]]) -> str | int | None:
    if token is None:
        return None
    for old, new in replacements:
        token = token.replace(old, new)
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else token


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _bytes_of_token(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _agrees(maker: Callable[[], Detokenizer], decode: Callable[[list[int]], str], backend) -> bool:
    """Whether pieces and ``decode`` say the same on random ids, added and byte tokens among them."""
    rng = random.Random(0)
    ids = range(max(1, backend.get_vocab_size()))
    unusual = list(backend.get_added_tokens_decoder())[:64]
    unusual += [i for b in range(0, 256, 5) if (i := backend.token_to_id(f"<0x{b:02X}>")) is not None]
    for round_ in range(48):
        source: Sequence[int] = unusual if unusual and round_ % 4 == 3 else ids
        probe = [rng.choice(unusual if unusual and rng.random() < 0.2 else source) for _ in range(12)]
        detokenizer = maker()
        text = detokenizer.update(probe[:5]) + detokenizer.update(probe[5:], finished=True)
        if text != decode(probe):
            return False
    return True
