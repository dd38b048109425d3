"""One environment variable: its type, default and limits, and what a bad value does."""

import json
import logging
import math
import os
from dataclasses import dataclass
from typing import Any, Literal

from atom.errors import ConfigError

logger = logging.getLogger("atom.envs")

TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})

Kind = Literal["bool", "int", "float", "str", "path", "csv int", "csv str", "JSON object"]
OnBad = Literal["raise", "clamp", "log"]

_said: set[tuple[str, str]] = set()


def say_once(name: str, message: str) -> None:
    """Warn, once a process for each message about a variable."""
    if (name, message) not in _said:
        _said.add((name, message))
        logger.warning(message)


@dataclass(frozen=True, slots=True)
class EnvVar:
    """A row of the table in ``env_table``.

    ``on_bad``: ``raise`` a ConfigError; ``clamp`` a number into its range (text that is no number raises);
    ``log`` a warning and use ``bad_value``.
    """

    name: str
    kind: Kind
    default: Any
    meaning: str
    group: str = ""
    lo: float | None = None  # smallest value allowed
    above: float | None = None  # exclusive lower bound, for sizes and times that must not be 0
    hi: float | None = None
    choices: tuple[Any, ...] = ()
    count: int | None = None  # how many entries a list must have
    on_bad: OnBad = "raise"
    bad_value: Any = None  # what ``log`` uses
    low_value: Any = None  # what ``clamp`` uses below the range; ``lo`` when None
    effective: bool = False  # whether something in this version reads it
    owner: str = "ATOM"  # another program's variable is known here, and left to that program
    default_from: str = ""  # variable whose value is the default
    old_names: tuple[str, ...] = ()  # read when the new name is unset, with a warning
    keeps_empty: bool = False  # an empty string is a value here, not "unset"
    is_removed: bool = False

    @property
    def allowed(self) -> str:
        """The values allowed, in words."""
        if self.choices:
            return "one of " + ", ".join(str(c) or "(empty)" for c in self.choices)
        words = {
            "bool": "1/0, true/false, yes/no or on/off",
            "int": "an integer",
            "float": "a finite number",
            "csv int": "integers separated by commas",
            "csv str": "names separated by commas",
            "JSON object": "a JSON object",
        }.get(self.kind, "text")
        if self.count is not None:
            words = f"{self.count} {words}"
        limits = []
        if self.above is not None:
            limits.append(f"greater than {self.above:g}")
        if self.lo is not None:
            limits.append(f"at least {self.lo:g}")
        if self.hi is not None:
            limits.append(f"at most {self.hi:g}")
        return " ".join([words, " and ".join(limits)]).strip()

    def raw(self) -> tuple[str, str] | None:
        """``(name, text)`` as set in the environment, an old name included; None when unset."""
        for name in (self.name, *self.old_names):
            text = os.environ.get(name)
            if text is None or (not text.strip() and not self.keeps_empty):
                continue
            if name != self.name:
                say_once(name, f"{name} is the old name of {self.name}; please set that instead")
            return name, text
        return None

    def allows(self, text: str) -> bool:
        """Whether ``text`` is a value of this variable as it stands."""
        try:
            return self._in_range(self._convert(text.strip()))
        except ValueError:
            return False

    def parse(self, text: str, name: str = "") -> Any:
        """The value that ``text`` stands for. Raises ConfigError as ``on_bad`` says."""
        name = name or self.name
        try:
            value = self._convert(text.strip())
        except ValueError:
            if self.on_bad == "log":
                return self._fall_back(name, text)
            raise self._error(name, text) from None
        if self._in_range(value):
            return value
        if self.on_bad == "raise":
            raise self._error(name, text)
        return self._clamp(name, value) if self.on_bad == "clamp" else self._fall_back(name, text)

    def _convert(self, text: str) -> Any:
        match self.kind:
            case "bool":
                lowered = text.lower()
                if lowered not in TRUE | FALSE:
                    raise ValueError(text)
                return lowered in TRUE
            case "int":
                return int(text)
            case "float":
                value = float(text)
                if not math.isfinite(value):
                    raise ValueError(text)
                return value
            case "csv int":
                return tuple(int(part) for part in text.split(",") if part.strip())
            case "csv str":
                return tuple(part.strip() for part in text.split(",") if part.strip())
            case "JSON object":
                value = json.loads(text)
                if not isinstance(value, dict):
                    raise ValueError(text)
                return value
            case "path":
                return os.path.expanduser(text)
        return text.lower() if text.lower() in self.choices else text

    def _in_range(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        numbers = value if self.kind == "csv int" else (value,)
        if self.kind not in ("int", "float", "csv int"):
            return True
        if self.count is not None and len(numbers) != self.count:
            return False
        return all(
            (self.lo is None or n >= self.lo)
            and (self.above is None or n > self.above)
            and (self.hi is None or n <= self.hi)
            for n in numbers
        )

    def _clamp(self, name: str, value: float) -> float:
        if self.hi is not None and value > self.hi:
            clamped = self.hi
        else:
            clamped = self.lo if self.low_value is None else self.low_value
        say_once(name, f"{name} must be {self.allowed}, got {value}; using {clamped}")
        return int(clamped) if self.kind == "int" else float(clamped)

    def _fall_back(self, name: str, text: str) -> Any:
        say_once(name, f"{name} must be {self.allowed}, got {text!r}; using {self.bad_value}")
        return self.bad_value

    def _error(self, name: str, text: str) -> ConfigError:
        return ConfigError(f"environment variable {name} must be {self.allowed}, got {text!r}")
