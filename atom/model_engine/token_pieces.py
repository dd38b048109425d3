"""What each token id stands for on its own, read off a tokenizer's decoder: bytes, text, or one byte of a run."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Piece = bytes | str | int | None


class Pieces(dict):
    """Token id -> its piece: ``bytes`` (byte-level), or ``str``, ``int`` (one byte) or None (skipped)."""

    def __init__(self, piece_of: Callable[[int], Piece]):
        super().__init__()
        self._piece_of = piece_of

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._piece_of(token_id)
        return piece


@dataclass(frozen=True, slots=True)
class PieceTable:
    """How a decoder's text is put together.

    Attributes:
        is_byte_level: every piece is ``bytes``; otherwise text, single bytes and None.
        strip_char, num_strip: so many of this character are dropped at the start of the whole text.
    """

    pieces: Pieces
    is_byte_level: bool
    strip_char: str = " "
    num_strip: int = 0


def read_piece_table(backend: Any, skip_special_tokens: bool) -> PieceTable | None:
    """The pieces of a ``tokenizers.Tokenizer``; None when its decoder is of another kind."""
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
        return PieceTable(Pieces(lambda i: _bytes_of_token(token_of(i))), is_byte_level=True)

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
    return PieceTable(pieces, False, strip["content"], strip["start"])


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _text_or_byte(token: str | None, replacements: list[tuple[str, str]]) -> Piece:
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
