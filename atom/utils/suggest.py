"""The near match that every "unknown name" error carries."""

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest known name, or an empty string when none is close."""
    by_key = {_key(candidate): candidate for candidate in known}
    close = difflib.get_close_matches(_key(name), by_key, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {by_key[close[0]]!r}?"
    # A shortened name (block_size for kv_cache_block_size) is not close as a whole.
    inside = sorted((key for key in by_key if _key(name) and _key(name) in key), key=len)
    return f"; did you mean {by_key[inside[0]]!r}?" if inside else ""


def _key(name: str) -> str:
    return name.lower().replace("-", "_").strip("_")
