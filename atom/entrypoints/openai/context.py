"""What every endpoint shares."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atom.entrypoints.openai.chat_template import ChatTemplate, load_chat_template
from atom.entrypoints.openai.inflight import InflightRequests
from atom.entrypoints.openai.metrics import EngineSnapshot, ServerMetrics
from atom.entrypoints.openai.reasoning import ReasoningDialect, detect_reasoning, get_reasoning_dialect
from atom.entrypoints.openai.request_log import RequestLog
from atom.entrypoints.openai.settings import ServerSettings
from atom.entrypoints.openai.tool_parsers.base import ToolParser
from atom.entrypoints.openai.tool_parsers.registry import detect_parser, get_tool_parser
from atom.errors import ConfigError
from atom.runtime.tracing import RequestTracer

if TYPE_CHECKING:
    from atom.model_engine.llm_engine import LLMEngine

logger = logging.getLogger("atom.server")

NUM_TEMPLATE_THREADS = 2  # rendering is pure Python and holds the GIL: more threads would not be faster


@dataclass
class ServerContext:
    """The engine and the state of the server around it."""

    engine: "LLMEngine"
    served_model_name: str
    chat_template: ChatTemplate | None
    tool_parser: type[ToolParser] | None = None  # how the model writes tool calls
    reasoning: ReasoningDialect | None = None  # how it marks its thinking
    stops_in_reasoning: bool = False
    strict_fields: bool = False
    inflight: InflightRequests = field(default_factory=InflightRequests)
    executor: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_TEMPLATE_THREADS, "atom-template")
    )
    created: int = field(default_factory=lambda: int(time.time()))
    settings: ServerSettings = field(default_factory=ServerSettings)
    tracer: RequestTracer | None = None
    request_log: RequestLog | None = None
    startup_phases: dict[str, float] = field(default_factory=dict)  # of the whole server; empty: the engine's
    metrics: ServerMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(self._read_engine, lambda: len(self.inflight))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each start-up phase."""
        return self.startup_phases or self.engine.info().get("startup_phases", {})

    def observe_with(
        self, settings: ServerSettings, tracer: RequestTracer | None, request_log: RequestLog | None
    ) -> None:
        """Set what protects and observes the server. Before it serves."""
        self.settings, self.tracer, self.request_log = settings, tracer, request_log
        if request_log is not None:
            self.metrics.num_log_lines_dropped = lambda: request_log.num_dropped

    def close(self) -> None:
        """Write what is still to be written of traces and requests."""
        if self.request_log is not None:
            self.request_log.close()
        if self.tracer is not None:
            self.tracer.close()

    def _read_engine(self) -> EngineSnapshot:
        health = self.engine.health()
        phases = self.phases
        stats = self.engine.stats()
        taken_at = time.time() if stats else 0.0
        return EngineSnapshot(stats, phases, health.ok, health.heartbeat_age_s, taken_at)


def make_context(
    engine: "LLMEngine",
    *,
    served_model_name: str | None = None,
    chat_template: str | None = None,
    default_chat_template_kwargs: dict[str, Any] | None = None,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    stops_in_reasoning: bool = False,
    strict_fields: bool = False,
) -> ServerContext:
    """The context of a server in front of ``engine``.

    Args:
        served_model_name: name in the API; the engine's model path by default.
        chat_template: a path or Jinja; the model's own by default.
        tool_parser: a dialect of tool calls, ``auto`` for the one that template or model type tell, or ``none``.
        reasoning_parser: the same for the marks of thinking.
        stops_in_reasoning: stop strings match in the thinking too, not in the answer alone.
        strict_fields: refuse request fields that neither the server nor OpenAI's API knows.

    Raises:
        ConfigError: a given template cannot be read or compiled, defaults are given for no template, or there is
            no such parser.
    """
    tokenizer = engine.tokenizer
    source = load_chat_template(chat_template, tokenizer.chat_template)
    template = None
    if source is not None:
        names = ("bos_token", "eos_token")
        tokens = {name: text for name in names if (text := getattr(tokenizer, name)) is not None}
        try:
            template = ChatTemplate(source, tokens=tokens, default_kwargs=default_chat_template_kwargs)
        except ConfigError as error:
            if chat_template or default_chat_template_kwargs:
                raise
            logger.warning("chat completions are refused: the model's own template is unusable: %s", error)
    elif default_chat_template_kwargs:
        raise ConfigError(
            f"--default-chat-template-kwargs {default_chat_template_kwargs} needs a chat template, and the model "
            "has none: give one with --chat-template"
        )
    name = served_model_name or str(engine.config.model)
    model_type = engine.info().get("model_type")
    return ServerContext(
        engine,
        name,
        template,
        tool_parser=_tool_parser(tool_parser, source, model_type),
        reasoning=_reasoning(reasoning_parser, source, model_type),
        stops_in_reasoning=stops_in_reasoning,
        strict_fields=strict_fields,
    )


def _tool_parser(name: str, template: str | None, model_type: str | None) -> type[ToolParser] | None:
    if name == "none":
        return None
    # Where nothing tells the dialect, the answers do: "auto" is the parser that watches for all of them.
    detected = detect_parser(template, model_type) or "auto" if name == "auto" else name
    return get_tool_parser(detected)


def _reasoning(name: str, template: str | None, model_type: str | None) -> ReasoningDialect | None:
    if name == "auto":
        return detect_reasoning(template, model_type)
    return None if name == "none" else get_reasoning_dialect(name)
