"""What an answer has to look like: JSON, a schema, a regular expression, a choice, a grammar, or tool calls.

A :class:`Guide` is checked when it is built, in time linear in its size, so that nothing oversized or deeply
nested ever reaches a grammar compiler. Whether it compiles is found out later, in a process of its own
(``model_engine.structured``).
"""

import re
from typing import Any, Literal

import msgspec

from atom.errors import RequestError

MAX_GUIDE_BYTES = 64 * 1024  # of all texts of a guide together
MAX_GUIDE_DEPTH = 64  # nested brackets of a schema, a regular expression or a grammar
MAX_REGEX_CHARS = 8192
MAX_CHOICES = 1024
MAX_TAGS = 128
MAX_MARKER_CHARS = 256  # of ``start_after``

MAX_ARGUMENTS = 512  # of all tags together

GuideKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural", "calls"]
GuideBackend = Literal["auto", "xgrammar", "llguidance"]

# Possessive, so that an unclosed string costs one pass over the text and not one from each of its quotes.
_STRING = r'"(?:[^"\\]|\\.)*+(?:"|\Z|\\\Z)'
_JSON_BRACKETS = re.compile(_STRING + r"|[\[\]{}]", re.DOTALL)
_GRAMMAR_BRACKETS = re.compile(_STRING + r"|\[(?:[^\]\\]|\\.)*+(?:\]|\Z|\\\Z)|[()]", re.DOTALL)
_REGEX_CLASS = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*+\]", re.DOTALL)
_REGEX_COUNT = re.compile(r"\{(?:\d+(?:,\d*)?|,\d+)\}")
_REGEX_GROUP = re.compile(r"\(\?(?:P?<\w+>|P=\w+\)|<?[=!:]|:)")

# Keywords of a JSON schema by what they must hold; others pass, as the standard says.
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = (
    "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


class Argument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One argument of a call that writes each between two fixed texts.

    A value without ``schema`` is text as it stands: one of ``choices``, or without them whatever matches all
    ``patterns`` (regular expressions for the whole text).
    """

    begin: str
    end: str
    schema: str = ""
    choices: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()  # llguidance only
    is_optional: bool = False


class Tag(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stretch of the answer between two fixed texts, such as one tool call.

    Special tokens of the model may stand in ``begin`` and ``end``. Between them is JSON after ``schema``, or the
    ``arguments`` in their order, or with neither any text.
    """

    begin: str  # starts with one of the guide's triggers, or with a special token
    end: str = ""
    schema: str = ""
    style: str = "json"  # how values are written: json, or an XML style of xgrammar (qwen_xml, glm_xml, ...)
    arguments: tuple[Argument, ...] | None = None
    forbidden: tuple[str, ...] = ()  # what no argument's text may contain
    number_end: str = ""  # if given, a number of up to four digits and this text follow ``begin``

    @property
    def schemas(self) -> list[str]:
        """Every JSON schema in it."""
        return [schema for schema in (self.schema, *(a.schema for a in self.arguments or ())) if schema]

    @property
    def texts(self) -> list[str]:
        """Every text in it."""
        texts = [self.begin, self.end, self.schema, self.number_end, *self.forbidden]
        for argument in self.arguments or ():
            texts += (argument.begin, argument.end, argument.schema)
            texts += argument.choices + argument.patterns
        return texts


class Guide(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on one answer; validated when built.

    Attributes:
        kind: ``json_object``; ``json_schema``, ``regex`` and ``grammar`` (EBNF, ``root ::= ...``) with ``text``;
            ``choice`` with ``choices``; ``structural`` with ``tags`` and ``triggers``; ``calls`` with ``tags``.
        triggers: free text runs until one of them appears; then a tag that begins so must follow. Not needed
            for tags that begin with a special token.
        at_least_one: the answer starts with a tag. ``stop_after_first``: it ends after one.
        opening, separator, closing: the answer of ``calls`` is the first, tags with the second between them, and
            the third; there is no free text.
        otherwise: what the answer of ``calls`` may be in place of calls; its own ``start_after`` and ``backend``
            count for nothing.
        start_after: the answer is free until this text has been generated (``</think>``).
        field: how the client spells the field, for messages.

    Raises:
        RequestError: over a limit, or malformed; the message names field, limit and value.
    """

    kind: GuideKind
    text: str = ""
    choices: tuple[str, ...] = ()
    tags: tuple[Tag, ...] = ()
    triggers: tuple[str, ...] = ()
    at_least_one: bool = False
    stop_after_first: bool = False
    opening: str = ""
    separator: str = ""
    closing: str = ""
    otherwise: "Guide | None" = None
    backend: GuideBackend = "auto"
    start_after: str | None = None
    field: str = "guide"

    def __post_init__(self) -> None:
        texts = [self.text, *self.choices, *self.triggers, self.opening, self.separator, self.closing]
        for tag in self.tags:
            texts += tag.texts
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise self.error("is not valid Unicode: it holds a lone surrogate") from error
        self._check_limit("bytes", size, MAX_GUIDE_BYTES)
        if self.start_after is not None and not 0 < len(self.start_after) <= MAX_MARKER_CHARS:
            limit = f"must start after a text of 1 to {MAX_MARKER_CHARS} characters"
            raise self.error(f"{limit}, got {len(self.start_after)}")
        if self.kind in ("json_schema", "regex", "grammar") and not self.text.strip():
            raise self.error(f"of kind {self.kind} must have a text, got {self.text!r}")
        match self.kind:
            case "json_schema":
                self._check_schema(self.text)
            case "regex":
                check_regex(self, self.text)
            case "grammar":
                self._check_depth(_GRAMMAR_BRACKETS, self.text)
            case "choice":
                self._check_choices()
            case "structural" | "calls":
                self._check_tags()

    @property
    def has_json(self) -> bool:
        """Whether JSON is among what the answer holds."""
        return (
            bool(self.schemas)
            or self.kind == "json_object"
            or bool(self.otherwise and self.otherwise.has_json)
        )

    @property
    def schemas(self) -> list[str]:
        """Every JSON schema in it, but for those of ``otherwise``."""
        own = [self.text] if self.kind == "json_schema" else []
        return own + [schema for tag in self.tags for schema in tag.schemas]

    def error(self, text: str) -> RequestError:
        """A RequestError that begins with the field's name."""
        return RequestError(f"{self.field} {text}", param=self.field)

    def _check_limit(self, what: str, value: int, limit: int) -> None:
        if value > limit:
            raise self.error(f"must have at most {limit} {what}, got {value}")

    def _check_depth(self, brackets: re.Pattern[str], text: str) -> None:
        depth = deepest = 0
        for match in brackets.finditer(text):
            bracket = match.group()
            depth += 1 if bracket in ("[", "{", "(") else -1 if bracket in ("]", "}", ")") else 0
            deepest = max(deepest, depth)
        self._check_limit("levels of nesting", deepest, MAX_GUIDE_DEPTH)

    def _check_schema(self, text: str) -> None:
        self._check_depth(_JSON_BRACKETS, text)
        try:
            schema = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise self.error(f"is not JSON: {error}") from error
        _check_subschema(self, schema, "#")

    def _check_choices(self) -> None:
        self._check_limit("choices", len(self.choices), MAX_CHOICES)
        if not self.choices or not all(self.choices):
            raise self.error(f"must offer non-empty choices, got {list(self.choices)!r}")

    def _check_tags(self) -> None:
        self._check_limit("tags", len(self.tags), MAX_TAGS)
        self._check_limit("triggers", len(self.triggers), MAX_TAGS)
        if not self.tags or not all(tag.begin for tag in self.tags) or not all(self.triggers):
            raise self.error(
                f"of kind {self.kind} must have tags with a non-empty begin, and no empty trigger"
            )
        self._check_limit("arguments", sum(len(tag.arguments or ()) for tag in self.tags), MAX_ARGUMENTS)
        for tag in self.tags:
            for schema in tag.schemas:
                self._check_schema(schema)
            for argument in tag.arguments or ():
                for pattern in argument.patterns:
                    check_regex(self, pattern)
        if self.otherwise is not None and self.otherwise.kind in ("structural", "calls"):
            raise self.error(f"of kind calls may otherwise be no {self.otherwise.kind}")


def _check_subschema(guide: Guide, schema: Any, path: str) -> None:
    """The parts of a schema that hold schemas hold schemas. Recursion is bounded by ``MAX_GUIDE_DEPTH``."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise guide.error(f"is no JSON schema: {path} must be an object or a boolean, got {_brief(schema)}")
    for key in _SCHEMAS:
        if key in schema:
            _check_subschema(guide, schema[key], f"{path}/{key}")
    for key in _SCHEMAS_BY_NAME:
        for name, part in _typed(guide, schema, key, dict, path).items():
            _check_subschema(guide, part, f"{path}/{key}/{name}")
            if key == "patternProperties":
                check_regex(guide, name)
    for key in _LISTS_OF_SCHEMAS:
        for i, part in enumerate(_typed(guide, schema, key, list, path)):
            _check_subschema(guide, part, f"{path}/{key}/{i}")
    items = schema.get("items", True)
    for i, part in enumerate(items if isinstance(items, list) else [items]):
        _check_subschema(guide, part, f"{path}/items" + (f"/{i}" if isinstance(items, list) else ""))
    if not all(isinstance(name, str) for name in _typed(guide, schema, "required", list, path)):
        raise guide.error(f"is no JSON schema: {path}/required must hold names, got {schema['required']!r}")
    _typed(guide, schema, "enum", list, path)
    pattern = _typed(guide, schema, "pattern", str, path)
    if pattern:
        check_regex(guide, pattern)


def _typed(guide: Guide, schema: dict[str, Any], key: str, type_: type, path: str) -> Any:
    """``schema[key]``, an empty value where there is none. Raises RequestError for another type."""
    value = schema.get(key, type_())
    if not isinstance(value, type_):
        kind = {dict: "an object", list: "an array", str: "a string"}[type_]
        raise guide.error(f"is no JSON schema: {path}/{key} must be {kind}, got {_brief(value)}")
    return value


def _brief(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


def check_regex(guide: Guide, pattern: str) -> None:
    """Length, nesting, and that each quantifier has one thing to repeat; the rest is the compiler's to say.

    Raises RequestError.
    """
    if len(pattern) > MAX_REGEX_CHARS:
        limit = f"must have a regular expression of at most {MAX_REGEX_CHARS} characters"
        raise guide.error(f"{limit}, got {len(pattern)}")
    depth = at = 0
    before = "nothing"  # what a quantifier here would repeat: nothing, one thing, or what is repeated already
    while at < len(pattern):
        step, char = 1, pattern[at]
        if char == "\\":
            step, before = 2, "thing"
        elif char == "[" and (match := _REGEX_CLASS.match(pattern, at)):
            step, before = len(match.group()), "thing"
        elif char == "(":
            depth += 1
            if depth > MAX_GUIDE_DEPTH:
                limit = f"must have a regular expression of at most {MAX_GUIDE_DEPTH} levels of nesting"
                raise guide.error(f"{limit}, got more at character {at}")
            match = _REGEX_GROUP.match(pattern, at)
            step, before = len(match.group()) if match else 1, "nothing"
        elif char == ")":
            depth, before = depth - 1, "thing"
        elif char == "|":
            before = "nothing"
        elif char in "*+?" or (char == "{" and _REGEX_COUNT.match(pattern, at)):
            if before == "nothing":
                raise guide.error(f"has a quantifier {char!r} with nothing to repeat at character {at}")
            is_lazy = char == "?" and before == "repeated"
            if before != "thing" and not is_lazy:
                raise guide.error(f"has two quantifiers in a row at character {at} ({char!r})")
            before = "lazy" if is_lazy else "repeated"
            step = len(_REGEX_COUNT.match(pattern, at).group()) if char == "{" else 1
        else:
            before = "thing"
        at += step
