"""Grammars by llguidance. Its "compiled" form is its own grammar text, proven by compiling it once."""

import json
import re

import llguidance as llg
import msgspec
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

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
from atom.model_engine.structured.schema import make_explicit

_REGEX_PARTS = re.compile(r"\\.|[/\n]", re.DOTALL)
_ESCAPED = {"/": r"\/", "\n": r"\n"}


class _Words:
    """The vocabulary in the shape that the library asks for."""

    def __init__(self, vocabulary: Vocabulary):
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        specials = set(vocabulary.special_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in specials}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Ids of a text, longest token first; bytes without a token are left out."""
        ids, at = [], 0
        while at < len(text):
            for length in range(min(self._longest, len(text) - at), 0, -1):
                token = self._ids.get(text[at : at + length])
                if token is not None:
                    ids.append(token)
                    break
            at += length
        return ids


class _Matcher(Matcher):
    def __init__(self, matcher: llg.LLMatcher, eos_ids: list[int]):
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._has_ended = False

    def accept(self, token_id: int) -> bool:
        matcher = self._matcher
        if self._has_ended or matcher.try_consume_tokens([token_id]) == 1:
            return not self._has_ended
        # Where nothing else can follow, the library wants no end token; others count it.
        self._has_ended = token_id in self._eos_ids and matcher.is_stopped() and matcher.is_accepting()
        return self._has_ended

    def fill_mask(self, bits: np.ndarray, row: int) -> None:
        line = bits[row]
        self._matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error())

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_accepting()

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens - self._has_ended)
        self._has_ended = False


class _Grammar(Grammar):
    def __init__(self, prototype: llg.LLMatcher, eos_ids: list[int]):
        self._prototype = prototype
        self._eos_ids = eos_ids

    def matcher(self) -> Matcher:
        return _Matcher(self._prototype.deep_copy(), self._eos_ids)


class Backend(GrammarBackend):
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary):
        wrapper = llg.TokenizerWrapper(_Words(vocabulary))
        self._tokenizer = llg.LLTokenizer(wrapper, eos_token=vocabulary.eos_ids)
        self._index = VocabularyIndex(vocabulary)
        self._eos_ids = vocabulary.eos_ids
        self._limits = llg.LLParserLimits(verbose_errors=False)

    def compile(self, guide: Guide) -> bytes:
        try:
            grammar = self._grammar(guide)
        except Exception as error:  # the EBNF reader raises bare Exception
            raise GrammarError(str(error)) from error
        problem = llg.LLMatcher.validate_grammar(grammar, self._tokenizer, limits=self._limits)
        if problem:
            raise GrammarError(problem)
        return grammar.encode()

    def _grammar(self, guide: Guide) -> str:
        match guide.kind:
            case "json_object":
                return llg.LLMatcher.grammar_from_json_schema(JSON_OBJECT_SCHEMA)
            case "json_schema":
                return llg.LLMatcher.grammar_from_json_schema(_explicit(guide.text))
            case "regex":
                return llg.LLMatcher.grammar_from_regex(guide.text)
            case "grammar":
                return llg.LLMatcher.grammar_from_lark(any_to_lark(guide.text))
            case "choice":
                options = " | ".join(map(_quote, guide.choices))
                return llg.LLMatcher.grammar_from_lark(f"start: {options}\n")
            case "structural":
                return llg.LLMatcher.grammar_from_lark(self._tags_grammar(guide))
            case "calls":
                return llg.LLMatcher.grammar_from_lark(self._calls_grammar(guide))

    def _calls_grammar(self, guide: Guide) -> str:
        numbers = range(len(guide.tags))
        one = "(" + " | ".join(f"tag_{i}" for i in numbers) + ")"
        more = "" if guide.stop_after_first else f"({self._symbols(guide.separator)} {one})*"
        calls = f"{self._symbols(guide.opening)} {one} {more} {self._symbols(guide.closing)}"
        lines = ["%llguidance {}", "start: calls | content" if guide.otherwise else "start: calls"]
        lines += [f"calls: {calls}", r"TEXT: /(.|\n)*/"]
        if guide.otherwise:
            lines.append(f"content: {_part(guide.otherwise)}")
        for i, tag in enumerate(guide.tags):
            body, rules = self._body(tag, i)
            lines += [*rules, f"tag_{i}: {self._symbols(tag.begin)} {body}"]
        return "\n".join(lines) + "\n"

    def _tags_grammar(self, guide: Guide) -> str:
        """Each tag as two rules: alone, and after free text up to its trigger."""
        numbers = range(len(guide.tags))
        alone = "(" + " | ".join(f"tag_{i}" for i in numbers) + ")"
        later = "(" + " | ".join(f"later_{i}" for i in numbers) + ")"
        start = {
            (False, False): f"{later}* rest",
            (False, True): f"rest | {later}",
            (True, False): f"{alone} {later}* rest",
            (True, True): alone,
        }[guide.at_least_one, guide.stop_after_first]
        lines = ["%llguidance {}", f"start: {start}", "rest: TEXT", r"TEXT: /(.|\n)*/"]
        for i, tag in enumerate(guide.tags):
            lines += self._tag_rules(guide, tag, i)
        return "\n".join(lines) + "\n"

    def _tag_rules(self, guide: Guide, tag: Tag, i: int) -> list[str]:
        begin = self._index.pieces(tag.begin)
        rest, rules = self._body(tag, i)
        rules.append(f"tag_{i}: {' '.join(map(_symbol, begin))} {rest}")
        if isinstance(begin[0], int):
            rules.append(f"later_{i}: TEXT {' '.join(map(_symbol, begin))} {rest}")
            return rules
        trigger = next((t for t in guide.triggers if tag.begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"the tag {tag.begin!r} begins with none of the triggers")
        after = self._symbols(tag.begin[len(trigger) :])
        rules.append(f"trigger_{i}[lazy]: TEXT {_quote(trigger)}")
        rules.append(f"later_{i}: trigger_{i} {after} {rest}")
        return rules

    def _body(self, tag: Tag, i: int) -> tuple[str, list[str]]:
        """A tag after its begin, and the rules that this needs."""
        number = f"/[0-9]{{1,4}}/ {self._symbols(tag.number_end)} " if tag.number_end else ""
        if tag.schema:
            return f"{number}%json {_explicit(tag.schema)} {self._symbols(tag.end)}", []
        if tag.arguments is None:
            text, rules = self._text_up_to(tag.end, f"any_{i}", "TEXT")
            return number + text, rules
        parts, rules = [], []
        for j, argument in enumerate(tag.arguments):
            name = f"argument_{i}_{j}"
            value, more = self._value(argument, tag.forbidden, f"{i}_{j}")
            rules += [*more, f"{name}: {self._symbols(argument.begin)} {value}"]
            parts.append(name + "?" * argument.is_optional)
        return number + " ".join([*parts, self._symbols(tag.end)]), rules

    def _value(self, argument: Argument, forbidden: tuple[str, ...], name: str) -> tuple[str, list[str]]:
        """An argument after its begin. What is forbidden is not kept out of JSON, which the library cannot do."""
        end = self._symbols(argument.end)
        if argument.schema:
            return f"%json {_explicit(argument.schema)} {end}", []
        if argument.choices:
            return f"({' | '.join(map(_quote, argument.choices))}) {end}", []
        allowed = [f"/{_lark_regex(pattern)}/" for pattern in argument.patterns or (r"(.|\n)*",)]
        others = [rf"~/(.|\n)*{_lark_regex(re.escape(text))}(.|\n)*/" for text in forbidden]
        text, rules = self._text_up_to(argument.end, f"text_{name}", f"TEXT_{name}")
        return text, [f"TEXT_{name}: {' & '.join(allowed + others)}", *rules]

    def _text_up_to(self, end: str, name: str, lexeme: str) -> tuple[str, list[str]]:
        """Text and the end text, which ends it where it first appears; a special token does so by itself."""
        pieces = self._index.pieces(end)
        if not pieces or isinstance(pieces[0], int):
            return " ".join([lexeme, *map(_symbol, pieces)]), []
        rule = f"{name}[suffix={_quote(pieces[0])}]: {lexeme}"
        return " ".join([name, *map(_symbol, pieces[1:])]), [rule]

    def _symbols(self, text: str) -> str:
        return " ".join(map(_symbol, self._index.pieces(text)))

    def load(self, data: bytes) -> Grammar:
        matcher = llg.LLMatcher(self._tokenizer, data.decode(), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise RuntimeError(matcher.get_error())
        return _Grammar(matcher, self._eos_ids)


def _explicit(schema: str) -> str:
    return msgspec.json.encode(make_explicit(msgspec.json.decode(schema))).decode()


def _part(guide: Guide) -> str:
    """A guide as a part of a larger grammar."""
    match guide.kind:
        case "json_object":
            return "%json " + JSON_OBJECT_SCHEMA
        case "json_schema":
            return "%json " + _explicit(guide.text)
        case "regex":
            return f"/{_lark_regex(guide.text)}/"
        case "choice":
            return " | ".join(map(_quote, guide.choices))
        case "grammar":
            return "%lark {\n" + any_to_lark(guide.text) + "\n}"
    raise ValueError(f"a guide of kind {guide.kind} cannot be a part of another")


def _lark_regex(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    return _REGEX_PARTS.sub(lambda match: _ESCAPED.get(match[0][-1], match[0]), pattern)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _symbol(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else _quote(piece)
