"""A command-line parser in which ``--kv-cache-dtype`` and ``--kv_cache_dtype`` are the same flag."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from atom.utils.suggest import suggest


class _HelpFormatter(argparse.HelpFormatter):
    """Shows a default where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unsaid = action.default in (None, False, argparse.SUPPRESS) or "default" in (action.help or "")
        return action.help if unsaid else f"{action.help} Default: %(default)s."


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Accepts every long option in kebab and snake spelling; no abbreviations.

    Only the name after ``--`` is matched this way; values and short flags are left alone, and an option that
    is registered exactly as typed wins. Errors name the near match and exit with code 2.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        return super().parse_known_args([*map(self._registered, words[:end]), *words[end:]], namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._reject(unknown[0])
        return parsed

    def _registered(self, word: str) -> str:
        """``word`` with its option name in the spelling under which it is registered."""
        if not word.startswith("--") or word == "--":
            return word
        name, equals, value = word.partition("=")
        if name in self._option_string_actions:
            return word
        key = name.replace("_", "-")
        for option in self._option_string_actions:
            if option.startswith("--") and option.replace("_", "-") == key:
                return option + equals + value
        return word

    def _reject(self, word: str) -> NoReturn:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        self.error(f"unknown flag {name!r}{suggest(name, self._option_string_actions)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            allowed = ", ".join(map(str, action.choices))
            near = suggest(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"must be one of {allowed}, got {value!r}{near}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee {self.prog} --help.\n")


def json_object(text: str) -> dict[str, Any]:
    """Value of a flag that takes a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def int_list(text: str) -> list[int]:
    """Value of a flag that takes integers, as ``1,2,4`` or ``[1, 2, 4]``."""
    try:
        return [int(part) for part in text.strip().strip("[]").split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers separated by commas, got {text!r}") from None


def float_list(text: str) -> list[float]:
    """Value of a flag that takes numbers separated by commas."""
    try:
        return [float(part) for part in text.strip().strip("[]").split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers separated by commas, got {text!r}") from None
