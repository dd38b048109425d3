"""Grammars by llguidance. Its "compiled" form is its own grammar text, proven by compiling it once."""

import json

import llguidance as llg
import msgspec
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

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
from atom.model_engine.structured.schema import make_explicit


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
        if tag.schema:
            body = "%json " + _explicit(tag.schema)
        else:
            body = f"any_{i}"
        begin, end = self._index.pieces(tag.begin), self._index.pieces(tag.end)
        rules = []
        if not tag.schema:
            # A lexeme up to the end text; without one, or before a special token, any text at all.
            if end and isinstance(end[0], str):
                rules.append(f"any_{i}[suffix={_quote(end.pop(0))}]: TEXT")
            else:
                rules.append(f"any_{i}: TEXT")
        rest = " ".join([body, *map(_symbol, end)])
        rules.append(f"tag_{i}: {' '.join(map(_symbol, begin))} {rest}")
        if isinstance(begin[0], int):
            rules.append(f"later_{i}: TEXT {' '.join(map(_symbol, begin))} {rest}")
            return rules
        trigger = next((t for t in guide.triggers if tag.begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"the tag {tag.begin!r} begins with none of the triggers")
        after = map(_symbol, self._index.pieces(tag.begin[len(trigger) :]))
        rules.append(f"trigger_{i}[lazy]: TEXT {_quote(trigger)}")
        rules.append(f"later_{i}: {' '.join([f'trigger_{i}', *after, rest])}")
        return rules

    def load(self, data: bytes) -> Grammar:
        matcher = llg.LLMatcher(self._tokenizer, data.decode(), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise RuntimeError(matcher.get_error())
        return _Grammar(matcher, self._eos_ids)


def _explicit(schema: str) -> str:
    return msgspec.json.encode(make_explicit(msgspec.json.decode(schema))).decode()


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _symbol(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else _quote(piece)
