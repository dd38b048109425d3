"""Grammars by xgrammar. Importing it imports torch: in the engine and the compile worker only."""

import re
from typing import Any

import msgspec
import numpy as np
import xgrammar as xgr

from atom.guide import Guide, Tag
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
                return compiler.compile_regex(_REGEX_PARTS.sub(_exclude_newline, guide.text))
            case "grammar":
                return compiler.compile_grammar(guide.text)
            case "choice":
                options = [{"type": "const_string", "value": text} for text in guide.choices]
                return self._compile_format({"type": "or", "elements": options})
            case "structural":
                return self._compile_format(self._tags_format(guide))

    def _compile_schema(self, text: str) -> xgr.CompiledGrammar:
        return self._compiler.compile_json_schema(_explicit(text), strict_mode=False)

    def _compile_format(self, format_: dict[str, Any]) -> xgr.CompiledGrammar:
        return self._compiler.compile_structural_tag({"type": "structural_tag", "format": format_})

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
        content: dict[str, Any] = {"type": "any_text"}
        if tag.schema:
            schema = msgspec.json.decode(_explicit(tag.schema))
            content = {"type": "json_schema", "json_schema": schema, "style": tag.style}
        begin, *after = self._index.pieces(tag.begin)
        *before, end = self._index.pieces(tag.end) or [""]
        if after or before:
            content = {"type": "sequence", "elements": [*map(_piece, after), content, *map(_piece, before)]}
        return {"type": "tag", "begin": _end_of_tag(begin), "content": content, "end": _end_of_tag(end)}

    def load(self, data: bytes) -> Grammar:
        return _Grammar(xgr.CompiledGrammar.deserialize_json(data.decode(), self._info))


def _explicit(schema: str) -> str:
    return msgspec.json.encode(lengths_as_patterns(make_explicit(msgspec.json.decode(schema)))).decode()


def _exclude_newline(match: re.Match[str]) -> str:
    """A dot is any character but a newline, as everywhere; the library takes that one as well."""
    part = match.group()
    return r"[^\n]" if part == "." else part


def _piece(piece: str | int) -> dict[str, Any]:
    if isinstance(piece, int):
        return {"type": "token", "token": piece}
    return {"type": "const_string", "value": piece}


def _end_of_tag(piece: str | int) -> str | dict[str, Any]:
    return piece if isinstance(piece, str) else _piece(piece)
