"""JSON values of tool arguments: strict text in both directions, and conversion by the declared schema.

Nothing a model wrote is ever evaluated; every failure is a ``ValueError``.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_REFERENCES = 16  # $ref, anyOf ... followed within one schema
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGRAL = re.compile(r"-?\d{1,300}\.0+", re.ASCII)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def load_json(text: str) -> Any:
    """The value of a JSON text; control characters inside strings are let through.

    Raises:
        ValueError: not JSON, not finite or nested too deep.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value


def dump_json(value: Any) -> str:
    """JSON text that every encoder can send: lone surrogates become U+FFFD."""
    return _LONE_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False, allow_nan=False))


def declared_parameters(tools: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Tool name -> JSON schema of its arguments; OpenAI's shape, its bare inside, or Anthropic's."""
    declared = {}
    for tool in tools:
        if isinstance(tool, Mapping):
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters") or function.get("input_schema")
                declared[function["name"]] = schema if isinstance(schema, dict) else {}
    return declared


class Schema:
    """A JSON schema, read for one purpose: which type a value that arrived as text should have."""

    __slots__ = ("_branches", "_root")

    def __init__(self, schema: Any, root: Any = None):
        self._root = schema if root is None else root
        self._branches: list[dict[str, Any]] = []  # the schema and all it refers to or is composed of
        self._collect(schema)

    def _collect(self, schema: Any) -> None:
        queue = [schema]
        while queue and len(self._branches) < MAX_REFERENCES:
            branch = queue.pop(0)
            if not isinstance(branch, dict):
                continue
            self._branches.append(branch)
            for key in ("anyOf", "oneOf", "allOf"):
                composed = branch.get(key)
                queue.extend(composed if isinstance(composed, list) else ())
            if isinstance(branch.get("$ref"), str):
                queue.append(self._resolve(branch["$ref"]))

    def _resolve(self, reference: str) -> Any:
        target = self._root
        for step in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        return target

    @property
    def types(self) -> set[str]:
        """Names of the types that are declared; empty if none is."""
        found: set[str] = set()
        for branch in self._branches:
            kind = branch.get("type")
            listed = kind if isinstance(kind, list) else [kind]
            found.update(one for one in listed if isinstance(one, str))
            values = branch.get("enum", [branch["const"]] if "const" in branch else [])
            if kind is None and isinstance(values, list):
                found.update(_type_name(value) for value in values)
            if kind is None and isinstance(branch.get("properties"), dict):
                found.add("object")
        return found

    def has_property(self, name: str) -> bool:
        return any(name in _dict(branch.get("properties")) for branch in self._branches)

    def property_names(self) -> set[str]:
        return {name for branch in self._branches for name in _dict(branch.get("properties"))}

    def property(self, name: str) -> "Schema":
        for branch in self._branches:
            if name in _dict(branch.get("properties")):
                return Schema(branch["properties"][name], self._root)
        extra = next((b["additionalProperties"] for b in self._branches if "additionalProperties" in b), None)
        return Schema(extra, self._root)

    def items(self) -> "Schema":
        return Schema(next((b["items"] for b in self._branches if "items" in b), None), self._root)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "string")


def convert(text: str, schema: Schema, is_string: bool | None = None) -> Any:
    """The value that ``text`` stands for: the declared type wins, else JSON, else it is the string.

    ``is_string``: what the wire said of the value, where it says anything; it counts when nothing is declared.
    A text that is not of any declared type stays the string that it is.
    """
    types = schema.types
    if not types:
        if is_string:
            return text
        try:
            return load_json(text)
        except ValueError:
            return text
    if types == {"string"} or (is_string and "string" in types):
        return text
    word = text.strip()
    if "null" in types and word.lower() in ("null", "none"):
        return None
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        value = load_json(word)
        name = _type_name(value)
    except ValueError:
        return text
    if name == "number" and "number" not in types and "integer" in types and _INTEGRAL.fullmatch(word):
        return int(word.partition(".")[0])
    if name in types or (name == "integer" and "number" in types):
        return value
    return text
