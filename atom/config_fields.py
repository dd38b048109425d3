"""How configuration dataclasses are declared, checked at construction, and turned into plain JSON and back.

A field carries its meaning and limits where it is declared (``opt``); ``check_fields`` enforces types and
limits with one kind of message: field, what is allowed, value. No torch.
"""

import dataclasses
import enum
import functools
import math
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from atom.errors import ConfigError
from atom.utils.suggest import suggest

T = TypeVar("T")

_UNITS = {"b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def opt(
    default: Any,
    doc: str,
    *,
    lo: float | None = None,
    hi: float | None = None,
    above: float | None = None,
    coerce: Callable[[Any], Any] | None = None,
) -> Any:
    """A field with its meaning, its limits (None passes them) and, where the type is not JSON's, a reader.

    ``default`` may be a zero-argument callable, which is then called for each instance.
    """
    metadata = {"doc": doc, "lo": lo, "hi": hi, "above": above, "coerce": coerce}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def check_fields(obj: Any, prefix: str = "") -> None:
    """Convert and check every init field of a frozen dataclass in place. Raises ConfigError for the first bad one."""
    hints = type_hints(type(obj))
    for field in filter(lambda field: field.init, dataclasses.fields(obj)):
        name = prefix + field.name
        value = getattr(obj, field.name)
        coerce = field.metadata.get("coerce")
        if coerce is not None:
            value = coerce(name, value)
        else:
            value = _convert(name, value, hints[field.name])
        _check_limits(name, value, field.metadata)
        object.__setattr__(obj, field.name, value)


def _convert(name: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError:
        raise ConfigError(f"{name} must be {describe_type(hint)}, got {value!r}") from None


def _check_limits(name: str, value: Any, limits: typing.Mapping[str, Any]) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    lo, hi, above = limits.get("lo"), limits.get("hi"), limits.get("above")
    ok = math.isfinite(value)
    ok = ok and (lo is None or value >= lo) and (hi is None or value <= hi)
    if not (ok and (above is None or value > above)):
        raise ConfigError(f"{name} must be {describe_limits(limits) or 'finite'}, got {value!r}")


def describe_limits(limits: typing.Mapping[str, Any]) -> str:
    """The limits of a field in words; empty when it has none."""
    lo, hi, above = limits.get("lo"), limits.get("hi"), limits.get("above")
    words = []
    if above is not None:
        words.append(f"greater than {above:g}" if isinstance(above, float) else f"greater than {above}")
    if lo is not None:
        words.append(f"at least {lo}")
    if hi is not None:
        words.append(f"at most {hi}")
    return " and ".join(words)


def describe_type(hint: Any) -> str:
    """A type in words: ``one of 'a', 'b'``, ``an integer or None``."""
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    if typing.get_origin(hint) is Literal:
        choices = [repr(choice) for choice in typing.get_args(hint)]
        return "one of " + ", ".join(choices)
    if hint is type(None):
        return "None"
    if dataclasses.is_dataclass(hint):
        return f"a {hint.__name__} or a JSON object"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, tuple):
        return f"a list of {describe_type(args[0]).removeprefix('an ').removeprefix('a ')}s"
    if origin is dict:
        return "a JSON object"
    if args:
        return " or ".join(describe_type(arg) for arg in args)
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def nested(cls: type[T], *, optional: bool = False) -> Callable[[str, Any], T | None]:
    """Reader of a field that holds another configuration: an instance, a dict, or None where optional."""

    def read(name: str, value: Any) -> T | None:
        if value is None and optional:
            return None
        if isinstance(value, cls):
            return value
        if isinstance(value, dict):
            return from_dict(cls, value, where=name)
        raise ConfigError(f"{name} must be {describe_type(cls)}, got {value!r}")

    return read


def from_dict(cls: type[T], data: dict[str, Any], *, where: str = "") -> T:
    """Build ``cls`` from plain JSON values. Raises ConfigError for an unknown key, naming the near match."""
    known = {field.name: field for field in dataclasses.fields(cls) if field.init}
    label = where or cls.__name__
    for key in data:
        if key not in known:
            raise ConfigError(f"{label}: unknown field {key!r}{suggest(str(key), known)}")
    for name, field in known.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise ConfigError(f"{label}: {name} is required")
    return cls(**data)


def to_dict(obj: Any) -> dict[str, Any]:
    """Plain JSON values of a configuration; ``from_dict`` restores it."""
    return {field.name: _plain(getattr(obj, field.name)) for field in dataclasses.fields(obj) if field.init}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def parse_bytes(name: str, value: Any) -> int | None:
    """Bytes of ``2147483648``, ``"2GiB"``, ``"1.5 GB"`` or ``"512M"`` (k, M, G, T are powers of 1000)."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    text = str(value).strip().lower()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(digits) :].strip()
    factor = _UNITS.get(unit if unit == "b" else unit.removesuffix("b") or "b")
    try:
        size = float(digits) * factor if factor else math.nan
    except ValueError:
        size = math.nan
    if not math.isfinite(size):
        raise ConfigError(f"{name} must be bytes or a size such as '2GiB' or '512MiB', got {value!r}")
    return int(size)
