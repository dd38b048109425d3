"""``response_format``, ``structured_outputs`` and ``guided_*`` as a ``Guide``: what an answer must look like."""

from typing import TYPE_CHECKING, Any

import msgspec

from atom.entrypoints.openai.protocol import GenerationFields, ResponseFormat, StructuredOutputs
from atom.errors import RequestError
from atom.guide import Guide

if TYPE_CHECKING:
    from atom.model_engine.llm_engine import LLMEngine
    from atom.model_engine.messages import CompiledGuide


def requested_guide(request: GenerationFields) -> Guide | None:
    """The one guide that a request asks for, None for free text.

    Raises:
        RequestError: more than one is asked for, or one is malformed or over a limit.
    """
    guides = [guide for guide in (_of_format(request.response_format), *_of_extensions(request)) if guide]
    if len(guides) > 1:
        fields = " and ".join(guide.field for guide in guides)
        raise RequestError(
            f"At most one field may say what the answer looks like, got {fields}", param=guides[1].field
        )
    return guides[0] if guides else None


def _of_format(asked: ResponseFormat | None) -> Guide | None:
    field = "response_format"
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Guide(kind="json_object", field=field)
    if asked.type == "json_schema":
        if asked.json_schema is None:
            raise RequestError(f"{field}.json_schema is missing", param=f"{field}.json_schema")
        return _json_guide(asked.json_schema.schema, f"{field}.json_schema.schema")
    raise RequestError(
        f"{field}.type must be text, json_object or json_schema, got {asked.type[:200]!r}",
        param=f"{field}.type",
    )


def _of_extensions(request: GenerationFields) -> list[Guide]:
    given = _of_values(
        "guided_", request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar
    )
    asked = request.structured_outputs
    if asked is not None:
        prefix = "structured_outputs."
        given += _of_values(prefix, asked.json, asked.regex, asked.choice, asked.grammar)
        if asked.json_object:
            given.append(Guide(kind="json_object", field=f"{prefix}json_object"))
        if asked == StructuredOutputs():
            raise RequestError(
                "structured_outputs must have one of json, json_object, regex, choice or grammar, got none",
                param="structured_outputs",
            )
    return given


def _of_values(
    prefix: str, schema: Any, regex: str | None, choices: list[str] | None, grammar: str | None
) -> list[Guide]:
    guides = []
    if schema is not None:
        guides.append(_json_guide(schema, f"{prefix}json"))
    if regex is not None:
        guides.append(Guide(kind="regex", text=regex, field=f"{prefix}regex"))
    if choices is not None:
        guides.append(Guide(kind="choice", choices=tuple(choices), field=f"{prefix}choice"))
    if grammar is not None:
        guides.append(Guide(kind="grammar", text=grammar, field=f"{prefix}grammar"))
    return guides


def _json_guide(schema: Any, field: str) -> Guide:
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Guide(kind="json_schema", text=text, field=field)


async def compile_guide(engine: "LLMEngine", guide: Guide | None) -> "CompiledGuide | None":
    """What the engine needs of a guide.

    Raises:
        RequestError: it does not compile; in the compiler's words.
    """
    return None if guide is None else await engine.compile_guide(guide)
