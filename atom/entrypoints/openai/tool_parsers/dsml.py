"""DeepSeek-V3.2 and V4: tags ``invoke name="N"`` and ``parameter name="k" string="true"``, marked ``｜DSML｜``.

The ``｜DSML｜`` of every tag may be missing, which is MiniMax-M2's form; an invoke may be self-closing, hold a
JSON object in place of parameters, or lack the name: then the declared tool that its parameters fit best is
meant.
"""

from typing import Any

from atom.entrypoints.openai.tool_parsers.base import ToolParser, attributes
from atom.entrypoints.openai.tool_parsers.reader import HEAD, Malformed, Markers, Steps
from atom.entrypoints.openai.tool_parsers.values import Schema, convert, load_json

MAX_UNWRAPPED = 4
WRAPPERS = ("arguments", "input")  # a model may put all arguments under one of these
MARK = "｜DSML｜"


def _tags(*names: str, close: bool = False) -> tuple[str, ...]:
    slash, end = ("/", ">") if close else ("", "")
    return tuple(f"<{slash}{mark}{name}{end}" for name in names for mark in (MARK, ""))


SECTIONS = ("tool_calls", "function_calls", "calls")
SECTION_OPEN = (*(f"{tag}>" for tag in _tags(*SECTIONS)), "<minimax:tool_call>")
SECTION_CLOSE = (*_tags(*SECTIONS, close=True), "</minimax:tool_call>")
INVOKE = Markers(*_tags("invoke"))
INVOKE_END = Markers(*_tags("invoke", close=True))
PARAMETER_END = Markers(*_tags("parameter", close=True))
INSIDE = Markers(*_tags("parameter"), *INVOKE_END.literals)
AFTER = Markers(*INVOKE.literals, *SECTION_CLOSE)
HEAD_END = Markers(">")


class DsmlParser(ToolParser):
    name = "dsml"
    openers = Markers(*SECTION_OPEN, *INVOKE.literals)
    wire_tokens = (MARK, "<minimax:tool_call>", "</minimax:tool_call>")

    def call(self, marker: str) -> Steps[None]:
        reader = self.reader
        if marker in SECTION_OPEN:
            yield from reader.space()
            yield from reader.expect(INVOKE)
        while True:
            yield from self._invoke()
            yield from reader.space()
            following = yield from reader.accept(AFTER)
            if following not in INVOKE.literals:
                return
            reader.record(following)

    def _head(self) -> Steps[str]:
        head = yield from self.reader.run(HEAD)
        yield from self.reader.expect(HEAD_END)
        if head and not head[0].isspace() and head[0] != "/":
            raise Malformed  # a longer word than the tag's
        return head

    def _invoke(self) -> Steps[None]:
        reader = self.reader
        head = yield from self._head()
        name = attributes(head).get("name", "").strip()
        values: dict[str, Any] = {}
        texts: dict[str, tuple[str, bool | None]] = {}
        if not head.rstrip().endswith("/"):
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                values = yield from self.json_object()
                yield from reader.space()
                yield from reader.expect(INVOKE_END)
            else:
                texts = yield from self._parameters()
        name = name or self._infer_name({*values, *texts})
        schema = self.schema(name)
        for key, (text, is_string) in texts.items():
            values[key] = convert(text, schema.property(key), is_string)
        self.emit(name, _unwrapped(values, schema))

    def _parameters(self) -> Steps[dict[str, tuple[str, bool | None]]]:
        """Key -> text, and what its ``string`` attribute says."""
        found: dict[str, tuple[str, bool | None]] = {}
        while True:
            yield from self.reader.space()
            if (yield from self.reader.expect(INSIDE)) in INVOKE_END.literals:
                return found
            stated = attributes((yield from self._head()))
            key = stated.get("name", "").strip()
            if not key:
                raise Malformed
            text = yield from self.value(PARAMETER_END, INSIDE)
            found[key] = (text, {"true": True, "false": False}.get(stated.get("string", "")))

    def _infer_name(self, keys: set[str]) -> str:
        """The declared tool with the most parameters in common, less a tenth of those that differ."""
        best, best_score = "", 0.0
        for name, schema in self.schemas.items():
            declared = schema.property_names()
            score = len(keys & declared) - 0.1 * len(keys ^ declared)
            if score > best_score:
                best, best_score = name, score
        return best


def _unwrapped(given: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """The arguments inside wrappers that the tool does not declare."""
    for _ in range(MAX_UNWRAPPED):
        key = next(iter(given), "")
        if len(given) != 1 or key not in WRAPPERS or schema.has_property(key):
            break
        inner = given[key]
        if isinstance(inner, str):
            try:
                inner = load_json(inner)
            except ValueError:
                break
        if not isinstance(inner, dict):
            break
        given = inner
    return given
