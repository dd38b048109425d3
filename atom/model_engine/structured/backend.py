"""The interface to a grammar library. Nothing here imports one, nor torch."""

import importlib
from abc import ABC, abstractmethod
from functools import cached_property
from importlib.util import find_spec

import msgspec
import numpy as np

from atom.guide import Guide
from atom.model_engine.structured.schema import unenforced_by_xgrammar

BACKENDS = ("xgrammar", "llguidance")  # in the order in which "auto" takes them
JSON_OBJECT_SCHEMA = '{"type":"object"}'


class Vocabulary(msgspec.Struct):
    """The tokenizer as a grammar sees it. ``tokens[i]`` are the bytes of id i, a special token's its name."""

    tokens: list[bytes]
    special_ids: list[int]  # never part of guided text; a tag may name them
    eos_ids: list[int]

    def __len__(self) -> int:
        return len(self.tokens)


class VocabularyIndex:
    """Look-ups in a vocabulary that several backends need."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        specials = {vocabulary.tokens[i].decode(errors="replace"): i for i in vocabulary.special_ids}
        self._specials = {text: i for text, i in specials.items() if text}

    @cached_property
    def _longest_first(self) -> list[str]:
        return sorted(self._specials, key=len, reverse=True)

    def pieces(self, text: str) -> list[str | int]:
        """``text`` cut at the special tokens in it, which become their ids."""
        pieces: list[str | int] = []
        start = at = 0
        while at < len(text):
            name = next((name for name in self._longest_first if text.startswith(name, at)), None)
            if name is None:
                at += 1
                continue
            pieces += [text[start:at], self._specials[name]] if at > start else [self._specials[name]]
            start = at = at + len(name)
        return pieces + [text[start:]] if start < len(text) else pieces


class GrammarError(Exception):
    """A library refuses a guide; the message is its own."""


class Matcher(ABC):
    """Where one answer is in its grammar."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and nothing changes, if the grammar does not allow it here."""

    @abstractmethod
    def fill_mask(self, bits: np.ndarray, row: int) -> None:
        """Write the allowed ids into ``bits[row]``, [ceil(vocab / 32)] int32: bit ``i % 32`` of word ``i // 32``.

        Raises RuntimeError where the grammar cannot go on (a limit of the library).
        """

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether the answer so far is complete: an end token is allowed."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""


class Grammar(ABC):
    """A compiled guide; shared by the answers that it guides."""

    @abstractmethod
    def matcher(self) -> Matcher:
        """A matcher at the start of the grammar."""


class GrammarBackend(ABC):
    """A grammar library and a vocabulary.

    Raises:
        ImportError: the library is not installed.
    """

    name: str

    @abstractmethod
    def __init__(self, vocabulary: Vocabulary): ...

    @abstractmethod
    def compile(self, guide: Guide) -> bytes:
        """The guide's grammar, for :meth:`load` of another process. Raises GrammarError in the library's words."""

    @abstractmethod
    def load(self, data: bytes) -> Grammar:
        """The grammar that :meth:`compile` made. Raises RuntimeError for anything else."""


def load_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """Import the library ``name``. Slow: a second for 262,144 tokens. Raises ImportError."""
    module = importlib.import_module(f"atom.model_engine.structured.{name}")
    return module.Backend(vocabulary)


def installed_backends() -> list[str]:
    """Names of the libraries that are there; imports none."""
    return [name for name in BACKENDS if find_spec(name) is not None]


def choose_backend(guide: Guide) -> str:
    """The library that compiles ``guide``: the one it names, else the first that enforces all of it.

    Raises RequestError: none is installed, or the named one would ignore a part.
    """
    installed = installed_backends()
    wanted = installed if guide.backend == "auto" else [guide.backend]
    if not installed or wanted[0] not in installed:
        raise guide.error(
            f"needs the package {' or '.join(wanted or BACKENDS)}, which is not installed; "
            "get it with: pip install 'atom-inference-engine[structured]'"
        )
    reasons = []
    for name in wanted:
        reason = _unsupported(guide, name)
        if not reason:
            return name
        reasons.append(reason)
    raise guide.error("cannot be enforced: " + "; ".join(reasons))


def _unsupported(guide: Guide, name: str) -> str:
    """What the library would not enforce, "" if it is up to all of it."""
    if name == "llguidance":
        style = next((tag.style for tag in guide.tags if tag.style != "json"), None)
        if style:
            return f"llguidance does not write the style {style}"
        # It reads the longest word first, and the fixed text before a call's arguments is one.
        begins = [guide.opening] if guide.opening else [tag.begin for tag in guide.tags]
        if guide.otherwise and guide.otherwise.has_json and any(begin[0] in "{[" for begin in begins):
            return f"llguidance does not tell {begins[0]} from other JSON"
        return ""
    if any(argument.patterns for tag in guide.tags for argument in tag.arguments or ()):
        return "xgrammar does not keep a text with a pattern off its end mark"
    schemas = guide.schemas + (guide.otherwise.schemas if guide.otherwise else [])
    ignored = [path for text in schemas for path in unenforced_by_xgrammar(msgspec.json.decode(text))]
    return f"xgrammar ignores {', '.join(ignored[:5])}" if ignored else ""
