"""Grammars by xgrammar. Importing it imports torch: in the engine and the compile worker only."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import xgrammar as xgr

from atom.guide import Argument, Guide, Tag
from atom.model_engine.structured.backend import (
    JSON_OBJECT_SCHEMA,
    Grammar,
    GrammarBackend,
    GrammarError,
    Matcher,
    Vocabulary,
    VocabularyIndex,
)
from atom.model_engine.structured.schema import lengths_as_patterns, make_explicit

# Not UTF-8, so no text matches it: a special token is allowed only where a tag names it.
_SPECIAL_PREFIX = b"\xff"
_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?")
_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]|\.", re.DOTALL)


class _Matcher(Matcher):
    def __init__(self, compiled: xgr.CompiledGrammar):
        self._matcher = xgr.GrammarMatcher(compiled)

    def accept(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def fill_mask(self, bits: np.ndarray, row: int) -> None:
        self._matcher.fill_next_token_bitmask(bits, row)

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_completed() or self._matcher.is_terminated()

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)


class _Grammar(Grammar):
    def __init__(self, compiled: xgr.CompiledGrammar):
        self._compiled = compiled

    def matcher(self) -> Matcher:
        return _Matcher(self._compiled)


class Backend(GrammarBackend):
    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary):
        tokens = list(vocabulary.tokens)
        for i in vocabulary.special_ids:
            tokens[i] = _SPECIAL_PREFIX + tokens[i]
        self._info = xgr.TokenizerInfo(
            tokens, xgr.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=vocabulary.eos_ids
        )
        self._index = VocabularyIndex(vocabulary)
        self._compiler = xgr.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def compile(self, guide: Guide) -> bytes:
        try:
            return self._compile(guide).serialize_json().encode()
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(_SOURCE_LINE.sub("", str(error))) from error

    def _compile(self, guide: Guide) -> xgr.CompiledGrammar:
        compiler = self._compiler
        match guide.kind:
            case "json_object":
                return self._compile_schema(JSON_OBJECT_SCHEMA)
            case "json_schema":
                return self._compile_schema(guide.text)
            case "regex":
                return compiler.compile_regex(_library_regex(guide.text))
            case "grammar":
                return compiler.compile_grammar(guide.text)
            case _:
                return self._compile_format(self._format(guide))

    def _compile_schema(self, text: str) -> xgr.CompiledGrammar:
        return self._compiler.compile_json_schema(_explicit(text), strict_mode=False)

    def _compile_format(self, format_: dict[str, Any]) -> xgr.CompiledGrammar:
        return self._compiler.compile_structural_tag({"type": "structural_tag", "format": format_})

    def _format(self, guide: Guide) -> dict[str, Any]:
        """The guide as a part of a structural tag."""
        match guide.kind:
            case "json_object":
                return _json_format(JSON_OBJECT_SCHEMA)
            case "json_schema":
                return _json_format(guide.text)
            case "regex":
                return {"type": "regex", "pattern": _library_regex(guide.text)}
            case "grammar":
                return {"type": "grammar", "grammar": guide.text}
            case "choice":
                return _any_of([_text(choice) for choice in guide.choices])
            case "structural":
                return self._tags_format(guide)
            case "calls":
                return self._calls_format(guide)

    def _calls_format(self, guide: Guide) -> dict[str, Any]:
        one = _any_of(
            [
                _sequence(self._pieces(tag.begin), self._inside(tag), self._pieces(tag.end))
                for tag in guide.tags
            ]
        )
        calls = [one]
        if not guide.stop_after_first:
            calls.append({"type": "star", "content": _sequence(self._pieces(guide.separator), [one])})
        answer = _sequence(self._pieces(guide.opening), calls, self._pieces(guide.closing))
        return answer if guide.otherwise is None else _any_of([answer, self._format(guide.otherwise)])

    def _inside(self, tag: Tag) -> list[dict[str, Any]]:
        """What is between a tag's begin and end."""
        inside = [{"type": "regex", "pattern": "[0-9]{1,4}"}, *self._pieces(tag.number_end)]
        if not tag.number_end:
            inside = []
        if tag.schema:
            inside.append(_json_format(tag.schema, style=tag.style))
        elif tag.arguments is None:
            inside.append({"type": "any_text"})
        for argument in tag.arguments or ():
            written = _sequence(
                self._pieces(argument.begin),
                [self._value(argument, tag.forbidden)],
                self._pieces(argument.end),
            )
            inside.append({"type": "optional", "content": written} if argument.is_optional else written)
        return inside

    def _value(self, argument: Argument, forbidden: tuple[str, ...]) -> dict[str, Any]:
        if argument.schema:
            return _json_format(argument.schema, excludes=list(forbidden))
        if argument.choices:
            return _any_of([_text(choice) for choice in argument.choices])
        if any(isinstance(piece, int) for text in forbidden for piece in self._index.pieces(text)):
            # The library's any_text also takes special tokens, so it would take what ends it.
            return {"type": "grammar", "grammar": _text_without(forbidden)}
        return {"type": "any_text", "excludes": list(forbidden)}

    def _pieces(self, text: str) -> list[dict[str, Any]]:
        return [_piece(piece) for piece in self._index.pieces(text)]

    def _tags_format(self, guide: Guide) -> dict[str, Any]:
        tags = [self._tag_format(tag) for tag in guide.tags]
        by_token = [not isinstance(tag["begin"], str) for tag in tags]
        rules = {"tags": tags, "at_least_one": guide.at_least_one, "stop_after_first": guide.stop_after_first}
        if not any(by_token):
            return {"type": "triggered_tags", "triggers": list(guide.triggers), **rules}
        if not all(by_token):
            raise GrammarError("some tags begin with a special token and some with text")
        tokens = sorted({tag["begin"]["token"] for tag in tags})
        return {"type": "token_triggered_tags", "trigger_tokens": tokens, **rules}

    def _tag_format(self, tag: Tag) -> dict[str, Any]:
        begin, *after = self._index.pieces(tag.begin)
        *before, end = self._index.pieces(tag.end) or [""]
        inside = _sequence(map(_piece, after), self._inside(tag), map(_piece, before))
        return {"type": "tag", "begin": _end_of_tag(begin), "content": inside, "end": _end_of_tag(end)}

    def load(self, data: bytes) -> Grammar:
        return _Grammar(xgr.CompiledGrammar.deserialize_json(data.decode(), self._info))


def _explicit(schema: str) -> str:
    return msgspec.json.encode(lengths_as_patterns(make_explicit(msgspec.json.decode(schema)))).decode()


def _json_format(schema: str, **options: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": msgspec.json.decode(_explicit(schema)), **options}


def _text(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _any_of(formats: list[dict[str, Any]]) -> dict[str, Any]:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def _sequence(*parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    elements = [format_ for part in parts for format_ in part]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _text_without(forbidden: tuple[str, ...]) -> str:
    """An EBNF grammar of all texts in which none of some texts appears: a rule for each beginning of one, which is
    the longest that the text so far ends with (the automaton of Aho and Corasick)."""
    beginnings = sorted({text[:size] for text in forbidden for size in range(len(text))}, key=len)
    rules = []
    for beginning in beginnings:
        onward: dict[str, list[str]] = {}
        special = []  # what leads elsewhere than to the first rule
        for char in sorted(set("".join(forbidden))):
            ending = beginning + char
            if any(text in ending for text in forbidden):
                special.append(char)
                continue
            while ending not in beginnings:
                ending = ending[1:]
            if ending:
                special.append(char)
                onward.setdefault(ending, []).append(char)
        moves = [f"[{_class(chars)}] s{beginnings.index(ending)}" for ending, chars in onward.items()]
        moves += [f"[^{_class(special)}] s0", '""']
        rules.append(f"s{beginnings.index(beginning)} ::= {' | '.join(moves)}")
    return "root ::= s0\n" + "\n".join(rules) + "\n"


def _class(chars: list[str]) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in chars)


def _library_regex(pattern: str) -> str:
    return _REGEX_PARTS.sub(_exclude_newline, pattern)


def _exclude_newline(match: re.Match[str]) -> str:
    """A dot is any character but a newline, as everywhere; the library takes that one as well."""
    part = match.group()
    return r"[^\n]" if part == "." else part


def _piece(piece: str | int) -> dict[str, Any]:
    if isinstance(piece, int):
        return {"type": "token", "token": piece}
    return _text(piece)


def _end_of_tag(piece: str | int) -> str | dict[str, Any]:
    return piece if isinstance(piece, str) else _piece(piece)
