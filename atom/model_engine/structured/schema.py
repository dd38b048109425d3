"""JSON schemas as the grammar libraries understand them: what one of them ignores, and what both need said."""

from collections.abc import Iterator
from typing import Any

# Keywords that restrict values and that xgrammar reads without acting on them.
_UNENFORCED = frozenset(
    (
        "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else",
        "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems",
    )
)  # fmt: skip
_OTHERS = frozenset(
    ("additionalProperties", "unevaluatedProperties", "minProperties")
)  # speak of unnamed ones
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf")  # xgrammar takes the first of these and nothing beside it
_RESTRICTING = frozenset(
    (
        "type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems", "pattern",
        "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
        "enum", "const", *_ALTERNATIVES,
    )
)  # fmt: skip
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = (*_ALTERNATIVES[1:], "prefixItems", "items")
_SINGLE = ("additionalProperties", "propertyNames", "contains", "items", "not", "if", "then", "else")


def subschemas(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema object within ``schema``, itself first, with its JSON pointer."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key in _BY_NAME:
        for name, part in (schema.get(key) or {}).items():
            yield from subschemas(part, f"{path}/{key}/{name}")
    for key in _LISTS:
        parts = schema.get(key)
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            yield from subschemas(part, f"{path}/{key}/{i}")
    for key in _SINGLE:
        yield from subschemas(schema.get(key), f"{path}/{key}")


def unenforced_by_xgrammar(schema: Any) -> list[str]:
    """JSON pointers of what an answer guided by xgrammar could violate."""
    found = []
    for path, part in subschemas(schema):
        found += [f"{path}/{key}" for key in part if key in _UNENFORCED]
        if len(part.get("allOf", ())) > 1:
            found.append(f"{path}/allOf")
        elif _has_alternatives_beside(part):
            found.append(f"{path}/{next(key for key in _ALTERNATIVES if key in part)}")
        pattern = part.get("pattern", "")
        if pattern and ("minLength" in part or "maxLength" in part or '"' in pattern or r"\\" in pattern):
            found.append(f"{path}/pattern")  # it takes one of the two, and would not escape the character
    return found


def _has_alternatives_beside(part: dict[str, Any]) -> bool:
    """Whether alternatives stand beside other restrictions."""
    return any(key in part for key in _ALTERNATIVES) and sum(key in _RESTRICTING for key in part) > 1


def make_explicit(schema: Any) -> Any:
    """Say, in place, what a language model had better keep to although the schema leaves it open.

    What names properties is an object. It gets no others, unless the schema says something about others or
    combines schemas. Names that are required but not described become properties of any type. What fits the
    result fits the schema.
    """
    parts = list(subschemas(schema))
    if any("allOf" in part or _has_alternatives_beside(part) for _, part in parts):
        return schema
    for _, part in parts:
        properties = part.get("properties", {})
        missing = [name for name in part.get("required", ()) if name not in properties]
        if not properties and not missing:
            continue
        part.setdefault("type", "object")
        if missing:
            others = part.get("additionalProperties", True)
            others = True if others is False else others  # contradicts itself: the answer has to have it
            part["properties"] = properties | dict.fromkeys(missing, others)
        if properties and not _OTHERS & part.keys():
            part["additionalProperties"] = False
    return schema


def lengths_as_patterns(schema: Any) -> Any:
    """Say, in place, the length of strings by a pattern: xgrammar's own bounded strings may hold raw control
    characters, which JSON forbids. No character in them is an escape."""
    for _, part in subschemas(schema):
        is_alone = not any(key in part for key in ("pattern", "format", "enum", "const"))
        if is_alone and ("minLength" in part or "maxLength" in part):
            least, most = part.pop("minLength", 0), part.pop("maxLength", "")
            part["pattern"] = rf'^[^"\\\x00-\x1f]{{{least},{most}}}$'
    return schema
