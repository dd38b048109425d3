"""Chat templates: a sandboxed Jinja environment with the helpers that model templates expect.

A template comes from the model or the operator and is compiled once. It is data of strangers all the same:
the sandbox forbids attributes that lead out of it, and a rendering is bounded in time and size.
"""

import datetime
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from atom.errors import ConfigError, RequestError

MAX_RENDER_S = 5.0
MAX_RENDER_CHARS = 32 * 2**20

# What the server fills in itself; a request's chat_template_kwargs may not replace it.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}
    | {"strftime_now", "continue_final_message"}
)


class TemplateLimitError(jinja2.TemplateError):
    """A rendering took too long or grew too large."""


class GenerationBlock(Extension):
    """``{% generation %}`` marks assistant text for training masks; serving renders just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a clock that every lookup and call of a template looks at."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        self.clock = threading.local()  # a rendering stays on one thread

    def check_clock(self) -> None:
        if time.monotonic() > getattr(self.clock, "deadline", float("inf")):
            raise TemplateLimitError(f"the chat template ran longer than {self.clock.limit_s} s")

    def call(self, /, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_clock()
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_clock()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or any(isinstance(side, (str, bytes, list, tuple)) for side in (left, right)):
            size = max((len(side) for side in (left, right) if hasattr(side, "__len__")), default=1)
            times = next((abs(side) for side in (left, right) if isinstance(side, int)), 1)
            if operator == "**" or size * times > MAX_RENDER_CHARS:
                raise TemplateLimitError(f"the chat template may not compute {operator} of this size")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which would put HTML into the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text.
        tokens: texts that the template may name, ``bos_token`` and ``eos_token``.
        default_kwargs: template variables of the server; a request's win.

    Raises:
        ConfigError: the template does not compile, or a default is no variable of it.
    """

    def __init__(
        self,
        source: str,
        *,
        tokens: dict[str, str] | None = None,
        default_kwargs: dict[str, Any] | None = None,
    ):
        environment = _BoundedEnvironment()
        environment.filters["tojson"] = _tojson
        helpers: dict[str, Callable] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        environment.globals.update(helpers)
        try:
            self._template = environment.from_string(source)
            variables = find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"The chat template does not compile: {error}") from None
        self._environment = environment
        self._tokens = tokens or {}
        self.source = source
        self.kwargs_allowed = frozenset(variables - RESERVED)
        self.takes_tools = "tools" in variables
        self._default_kwargs = default_kwargs or {}
        unknown = sorted(self._default_kwargs.keys() - self.kwargs_allowed)
        if unknown:
            raise ConfigError(
                f"--default-chat-template-kwargs: the chat template has no variable {unknown[0]!r}; "
                f"it has {sorted(self.kwargs_allowed)}"
            )

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Raises RequestError for a variable that the template lacks or that the server fills in."""
        for name in kwargs:
            if name not in self.kwargs_allowed:
                raise RequestError(
                    f"chat_template_kwargs may set {sorted(self.kwargs_allowed)} with this chat template, "
                    f"got {name!r}",
                    param="chat_template_kwargs",
                )

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: dict[str, Any] | None = None,
        max_seconds: float = MAX_RENDER_S,
        max_chars: int = MAX_RENDER_CHARS,
    ) -> str:
        """The prompt text. Blocks up to ``max_seconds``: not for the event loop.

        Raises:
            RequestError: the template refused the messages (its own words), or a limit was passed.
        """
        kwargs = kwargs or {}
        self.check_kwargs(kwargs)
        variables = {
            **self._tokens,
            **self._default_kwargs,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        clock = self._environment.clock
        clock.limit_s, clock.deadline = max_seconds, time.monotonic() + max_seconds
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > max_chars:
                    raise TemplateLimitError(f"the chat template made more than {max_chars} characters")
                self._environment.check_clock()
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise RequestError(f"chat template: {error.message or error}", param="messages") from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            # A template that meets messages of a shape it did not expect: the request's fault, not the server's.
            raise RequestError(f"chat template: {type(error).__name__}: {error}", param="messages") from None
        finally:
            clock.deadline = float("inf")
        return "".join(pieces)


def load_chat_template(option: str | None, model_template: str | None) -> str | None:
    """Template text from ``--chat-template`` (a path, or Jinja itself) or, without it, from the model.

    Raises:
        ConfigError: the option is neither a readable file nor Jinja.
    """
    if not option:
        return model_template
    if any(mark in option for mark in ("{{", "{%", "{#", "\n")):
        return option
    try:
        return Path(option).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {option!r} is neither Jinja nor a readable file: {error}"
        ) from None
