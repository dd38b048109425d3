"""Tool-call dialects by name, and the one a model speaks by its chat template or its type."""

from collections.abc import Collection

from atom.entrypoints.openai.tool_parsers.auto import AutoParser
from atom.entrypoints.openai.tool_parsers.base import ToolParser
from atom.entrypoints.openai.tool_parsers.dsml import DsmlParser
from atom.entrypoints.openai.tool_parsers.glm import GlmParser
from atom.entrypoints.openai.tool_parsers.harmony import HarmonyParser
from atom.entrypoints.openai.tool_parsers.hermes import HermesParser
from atom.entrypoints.openai.tool_parsers.kimi import KimiParser
from atom.entrypoints.openai.tool_parsers.kimi_k3 import KimiK3Parser
from atom.entrypoints.openai.tool_parsers.llama3 import Llama3Parser
from atom.entrypoints.openai.tool_parsers.minimax import MinimaxParser
from atom.entrypoints.openai.tool_parsers.mistral import MistralParser
from atom.entrypoints.openai.tool_parsers.qwen import QwenParser
from atom.errors import ConfigError
from atom.utils.suggest import suggest

_CLASSES: tuple[type[ToolParser], ...] = (
    KimiK3Parser,
    MinimaxParser,
    DsmlParser,
    GlmParser,
    QwenParser,
    KimiParser,
    HermesParser,
    Llama3Parser,
    MistralParser,
    HarmonyParser,
    AutoParser,
)
TOOL_PARSERS: dict[str, type[ToolParser]] = {parser.name: parser for parser in _CLASSES}

# Tried in order on the template's text: a template shows its model how to write a call.
TEMPLATE_MARKS: tuple[tuple[str, str], ...] = (
    ("<|open|>", "kimi_k3"),
    ("]<]minimax[>[", "minimax"),
    ("｜DSML｜", "dsml"),
    ("<minimax:tool_call>", "dsml"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("[AVAILABLE_TOOLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ("<|start_header_id|>ipython", "llama3"),
    ('"parameters": dictionary of argument name', "llama3"),
)
# Beginnings of model types, the longest that fits wins.
MODEL_TYPES: dict[str, str] = {
    "kimi_k3": "kimi_k3",
    "kimi_k2": "kimi",
    "minimax_m3": "minimax",
    "minimax_m2": "dsml",
    "deepseek_v32": "dsml",
    "deepseek_v4": "dsml",
    "glm4_moe": "glm",
    "glm_moe": "glm",
    "qwen2": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "qwen",
    "llama": "llama3",
    "mllama": "llama3",
    "mistral": "mistral",
    "ministral": "mistral",
    "mixtral": "mistral",
    "gpt_oss": "harmony",
}


def get_tool_parser(name: str) -> type[ToolParser]:
    """The parser called ``name``, as ``--tool-call-parser`` spells it.

    Raises:
        ConfigError: there is none; the message lists all and names the nearest.
    """
    if name in TOOL_PARSERS:
        return TOOL_PARSERS[name]
    raise ConfigError(unknown_name("--tool-call-parser", name, TOOL_PARSERS))


def unknown_name(flag: str, name: str, known: Collection[str]) -> str:
    """What to say of a value of ``flag`` that is not known."""
    return f"{flag} must be one of {', '.join(known)}, got {name!r}{suggest(name, known)}"


def detect_parser(chat_template: str | None, model_type: str | None) -> str | None:
    """The dialect that a model speaks, or None if neither template nor type tells (``auto`` then watches
    the answers)."""
    for mark, name in TEMPLATE_MARKS:
        if chat_template and mark in chat_template:
            return name
    fitting = [kind for kind in MODEL_TYPES if model_type and model_type.startswith(kind)]
    return MODEL_TYPES[max(fitting, key=len)] if fitting else None
