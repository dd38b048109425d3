"""The OpenAPI document, made from the same structs that decode requests and encode answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import atom
from atom.entrypoints.openai.errors import ErrorBody

_REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True)
class Operation:
    """A route: its path in the router's notation, methods, and the types that go in and out."""

    path: str
    methods: tuple[str, ...]
    summary: str
    request: Any = None
    response: Any = None
    event: Any = None  # what each server-sent event of a streamed answer carries
    error: Any = ErrorBody  # of every status but 200
    media_type: str = "application/json"


def make_document(operations: Sequence[Operation]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of ``operations``."""
    types = []
    for operation in operations:
        own = (operation.request, operation.response, operation.event, operation.error)
        types += [t for t in own if t is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = dict(zip(map(str, types), schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        for method in operation.methods:
            if method != "HEAD":
                paths.setdefault(path, {})[method.lower()] = _describe(operation, path, method, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ATOM", "version": atom.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _describe(operation: Operation, path: str, method: str, schema_of: dict[str, Any]) -> dict[str, Any]:
    def content(kind: Any, media_type: str) -> dict[str, Any]:
        return {media_type: {"schema": {"type": "string"} if kind is None else schema_of[str(kind)]}}

    error = {"description": "Error", "content": content(operation.error, "application/json")}
    answer = content(operation.response, operation.media_type)
    if operation.event is not None:
        carried = [schema_of[str(kind)] for kind in (operation.event, operation.error)]
        answer["text/event-stream"] = {"schema": _event_schema(carried)}
    description: dict[str, Any] = {
        "operationId": f"{method.lower()}_{path.strip('/').replace('/', '_').translate({123: '', 125: '', 46: '_'})}",
        "summary": operation.summary,
        "responses": {"200": {"description": "Success", "content": answer}, "default": error},
    }
    if operation.request is not None:
        body = content(operation.request, "application/json")
        description["requestBody"] = {"required": True, "content": body}
    if "{" in path:
        name = path[path.index("{") + 1 : path.index("}")]
        description["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return description


def _event_schema(carried: list[dict[str, Any]]) -> dict[str, Any]:
    """A server-sent event whose data is JSON of one of the schemas ``carried``, or OpenAI's mark of the end."""
    json_data = {"contentMediaType": "application/json", "contentSchema": {"anyOf": carried}}
    data = {"type": "string", "if": {"not": {"const": "[DONE]"}}, "then": json_data}
    properties = {"data": data, "event": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": ["data"]}
