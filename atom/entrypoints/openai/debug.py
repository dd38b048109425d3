"""Routes below ``/debug``: for whoever runs the server, with a key of their own. Counts only, never contents."""

import asyncio
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Scope

from atom.entrypoints.openai.info import Told
from atom.errors import RequestError
from atom.utils.gc_utils import gc_census

MAX_TOP = 1000
MAX_TYPES_PER_OWNER = 100

_census_lock = asyncio.Lock()  # walking the heap twice at once would only take twice as long


async def told_gc_census(scope: Scope) -> Told:
    """GET /debug/gc_census?top=30&types_per_owner=2."""
    top = _number(scope, "top", 30, MAX_TOP)
    types_per_owner = _number(scope, "types_per_owner", 2, MAX_TYPES_PER_OWNER)
    async with _census_lock:
        census: dict[str, Any] = await asyncio.to_thread(gc_census, top, types_per_owner)
    return Told(census)


def _number(scope: Scope, name: str, default: int, most: int) -> int:
    values = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=16).get(name)
    if values is None:
        return default
    if not (values[0].isascii() and values[0].isdigit() and len(values[0]) < 9 and int(values[0]) <= most):
        raise RequestError(f"{name} must be an integer in [0, {most}], got {values[0][:100]!r}", param=name)
    return int(values[0])
