"""Token ids to text, a few at a time: the deltas joined equal the tokenizer's decode of all ids.

Two ways, chosen once per tokenizer by :class:`DetokenizerFactory`:

* *pieces*: where the tokenizer's decoder is byte-level BPE or SentencePiece with byte fallback, every id has
  a fixed piece of text or bytes. A token costs one dictionary look-up and nothing is decoded twice. Every
  so many updates one is compared with a real decode.
* *window*: any other tokenizer is only asked to ``decode`` the last few ids again.

Neither hands out part of a character: U+FFFD appears only where the decode of all ids has it as well.
"""

import codecs
import logging
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from atom.model_engine.token_pieces import PieceTable, read_piece_table
from atom.utils import envs

logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


Decode = Callable[[list[int]], str]


class Detokenizer(ABC):
    """The text of one answer, fed with its ids in order."""

    __slots__ = ()

    @abstractmethod
    def update(self, ids: Sequence[int], finished: bool = False) -> str:
        """The text that ``ids`` complete. ``finished``: these were the last, give out what was held back."""


class PieceAudit:
    """Counts the updates of all answers of a tokenizer, and says when one is compared with a real decode.

    Attributes:
        every: updates from one comparison to the next.
        num_left: updates up to the next one; 0 for good once ``is_failed``.
        is_failed: pieces and decode have differed; from then on every answer is decoded.
    """

    __slots__ = ("every", "num_left", "is_failed")

    def __init__(self, every: int):
        self.every = self.num_left = every
        self.is_failed = False

    def fail(self) -> None:
        if not self.is_failed:
            logger.error(
                "Detokenizer: a piece differs from the tokenizer's decode; decoding windows from now on"
            )
        self.is_failed, self.num_left = True, 0

    def restart(self) -> None:
        self.num_left = self.every


class PieceDetokenizer(Detokenizer):
    """Puts pieces together, and remembers enough of the last ids to have any update decoded instead."""

    __slots__ = ("_decode", "_audit", "_window", "_ids", "_num_base_ids", "_num_chars")

    MAX_IDS = 128  # remembered; beyond it all but the last few are forgotten at the next clean boundary
    OVERLAP = 16  # ids that stay, so that what a decoder does to the start of a text touches old text alone

    def __init__(self, decode: Decode, audit: PieceAudit):
        self._decode = decode
        self._audit = audit
        self._window: WindowDetokenizer | None = None  # what answers once the audit has failed
        self._ids: list[int] = []
        self._num_base_ids = 0  # of them, from before the boundary at which counting characters began
        self._num_chars = 0  # handed out since

    @abstractmethod
    def _read(self, ids: Sequence[int], finished: bool) -> str:
        """The text that the pieces of ``ids`` complete."""

    @abstractmethod
    def _held(self) -> str:
        """The text of the bytes held back, were they the last."""

    def update(self, ids: Sequence[int], finished: bool = False) -> str:
        if self._window is not None:
            return self._window.update(ids, finished)
        text = self._read(ids, finished)
        self._ids += ids
        audit = self._audit
        audit.num_left -= 1
        if audit.num_left <= 0:
            return self._compare(text, finished)
        self._num_chars += len(text)
        if len(self._ids) > self.MAX_IDS:
            self._forget()
        return text

    @abstractmethod
    def _is_boundary(self, overlap: list[int]) -> bool:
        """Whether nothing is held back, and the text after the ids ``overlap`` is decoded as ever behind them."""

    def _forget(self) -> None:
        overlap = self._ids[-self.OVERLAP :]
        if self._is_boundary(overlap):
            self._ids, self._num_base_ids, self._num_chars = overlap, len(overlap), 0

    def _compare(self, text: str, finished: bool) -> str:
        """``text`` where the tokenizer says the same, or what it says instead."""
        base = len(self._decode(self._ids[: self._num_base_ids])) if self._num_base_ids else 0
        num_emitted = base + self._num_chars
        audit = self._audit
        if not audit.is_failed:
            held = "" if finished else self._held()
            if self._decode(self._ids)[num_emitted:] == text + held:
                audit.restart()
                self._num_chars += len(text)
                return text
        audit.fail()
        self._window = WindowDetokenizer(self._decode)
        return self._window.resume(self._ids, num_emitted, finished)


class ByteLevelDetokenizer(PieceDetokenizer):
    """Byte-level BPE: ids are runs of UTF-8 bytes; at most three bytes of a character are held back."""

    __slots__ = ("_pieces", "_decoder")

    def __init__(self, table: PieceTable, decode: Decode, audit: PieceAudit):
        super().__init__(decode, audit)
        self._pieces = table.pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _read(self, ids: Sequence[int], finished: bool) -> str:
        pieces = self._pieces
        return self._decoder.decode(b"".join([pieces[i] for i in ids]), finished)

    def _held(self) -> str:
        return self._decoder.getstate()[0].decode("utf-8", "replace")

    def _is_boundary(self, overlap: list[int]) -> bool:
        return not self._decoder.getstate()[0]


class ByteFallbackDetokenizer(PieceDetokenizer):
    """SentencePiece with byte fallback: ids are strings, or single bytes where a character has no token.

    The tokenizer reads a run of byte ids as a whole: one invalid byte makes U+FFFD of every byte of its run.
    So a run is held back until an id that is not a byte ends it.
    """

    __slots__ = ("_pieces", "_run", "_strip_char", "_num_strip", "_num_strip_at_start")

    def __init__(self, table: PieceTable, decode: Decode, audit: PieceAudit):
        super().__init__(decode, audit)
        self._pieces = table.pieces
        self._run = bytearray()
        self._strip_char = table.strip_char
        self._num_strip_at_start = table.num_strip
        self._num_strip = table.num_strip  # leading characters of the whole text that are still to be dropped

    def _read(self, ids: Sequence[int], finished: bool) -> str:
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

    def _held(self) -> str:
        return _text_of_run(self._run)

    def _is_boundary(self, overlap: list[int]) -> bool:
        if self._run:
            return False
        pieces = [self._pieces[i] for i in overlap]  # what a decoder strips must find its place in them
        return sum(len(piece) for piece in pieces if piece.__class__ is str) >= self._num_strip_at_start

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

    __slots__ = ("_decode", "_window", "_num_emitted", "_num_held", "_num_waits")

    SOFT_LIMIT = 16  # ids; beyond it the window moves on at the next clean boundary
    HARD_LIMIT = (
        96  # ids, or updates held back; beyond it the window moves on even in the middle of undecodable bytes
    )
    OVERLAP = 6  # old ids that a new window starts with

    def __init__(self, decode: Decode):
        self._decode = decode
        self._window: list[int] = []
        self._num_emitted = 0  # characters of the window's text that were handed out
        self._num_held = 0  # ids whose text was not
        self._num_waits = 0  # updates in a row that ended inside a character

    def update(self, ids: Sequence[int], finished: bool = False) -> str:
        num_old = len(self._window)
        self._window.extend(ids)
        self._num_held += len(self._window) - num_old
        if not self._num_held:
            return ""
        text = self._decode(self._window)
        # NOTE: updates are counted, not ids: a long delta that ends inside a character is no sign of broken bytes.
        if text.endswith(REPLACEMENT) and not finished and self._num_waits < self.HARD_LIMIT:
            self._num_waits += 1
            return ""
        self._num_waits = 0
        delta = text[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(text))
        self._num_held = 0
        if len(self._window) > self.SOFT_LIMIT and not finished:
            self._move_on(text)
        return delta

    def resume(self, ids: list[int], num_emitted: int, finished: bool) -> str:
        """Go on where ``num_emitted`` characters of the text of ``ids`` were handed out; what is new of it."""
        self._window, self._num_emitted, self._num_held = list(ids), num_emitted, 1
        return self.update([], finished)

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


class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer; decides how when it is built.

    ``ATOM_DETOKENIZER_DELTA_REUSE``: ``auto`` uses pieces where they equal the tokenizer's ``decode`` on random
    ids, ``on`` wherever the decoder is of a known kind, ``off`` never. ``ATOM_DETOKENIZER_AUDIT_EVERY`` updates
    one is compared with ``decode``; where they differ, all answers are decoded from then on.

    Args:
        tokenizer: an object with ``decode(ids, skip_special_tokens)`` that is, or wraps, a
            ``tokenizers.Tokenizer`` where pieces are to be used.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._mode: str = envs.ATOM_DETOKENIZER_DELTA_REUSE
        self._audit = PieceAudit(envs.ATOM_DETOKENIZER_AUDIT_EVERY)
        self._makers: dict[bool, Callable[[], Detokenizer]] = {True: self._choose(True)}

    def create(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one answer."""
        maker = self._makers.get(skip_special_tokens)
        if maker is None:
            maker = self._makers[skip_special_tokens] = self._choose(skip_special_tokens)
        return maker()

    def _choose(self, skip_special_tokens: bool) -> Callable[[], Detokenizer]:
        tokenizer = self._tokenizer  # not self: what is returned is kept by self

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        def make_window() -> Detokenizer:
            return WindowDetokenizer(decode)

        backend = None if self._mode == "off" else _find_backend(self._tokenizer)
        table = read_piece_table(backend, skip_special_tokens) if backend is not None else None
        if table is None:
            if self._mode == "on":
                logger.warning(
                    "ATOM_DETOKENIZER_DELTA_REUSE=on: this tokenizer's decoder has no fixed pieces"
                )
            return make_window
        kind = ByteLevelDetokenizer if table.is_byte_level else ByteFallbackDetokenizer
        if self._mode == "auto":
            unaudited = PieceAudit(sys.maxsize)
            if not _agrees(lambda: kind(table, decode, unaudited), decode, backend):
                logger.warning(
                    "Detokenizer: pieces differ from the tokenizer's decode; decoding windows instead"
                )
                return make_window
        audit = self._audit
        return lambda: make_window() if audit.is_failed else kind(table, decode, audit)


def _find_backend(tokenizer: object):
    """The ``tokenizers.Tokenizer`` that this object is or holds; None if there is none."""
    needed = ("id_to_token", "token_to_id", "decoder", "get_added_tokens_decoder", "get_vocab_size")
    names = ("backend", "backend_tokenizer", "tokenizer", "_tokenizer")
    for candidate in (tokenizer, *(getattr(tokenizer, name, None) for name in names)):
        if all(hasattr(candidate, name) for name in needed):
            return candidate
    return None


def _agrees(maker: Callable[[], Detokenizer], decode: Decode, backend) -> bool:
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
