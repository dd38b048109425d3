"""Which class serves which architecture. Importing this module imports no model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from atom.errors import ConfigError

if TYPE_CHECKING:
    from atom.models.base import CausalLM

# ``architectures[0]`` of a configuration -> "module:class".
support_model_arch_dict: dict[str, str] = {
    "LlamaForCausalLM": "atom.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "atom.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "atom.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "atom.models.qwen3:Qwen3ForCausalLM",
    "Gemma3ForCausalLM": "atom.models.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "atom.models.gemma3:Gemma3ForConditionalGeneration",
}


def get_model_class(architectures: list[str] | None) -> type[CausalLM]:
    """The class for the first supported name of a configuration's ``architectures``.

    Raises ConfigError that lists what is supported.
    """
    for name in architectures or []:
        if name in support_model_arch_dict:
            module, _, attribute = support_model_arch_dict[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
    supported = ", ".join(support_model_arch_dict)
    raise ConfigError(f"architectures: {architectures!r} is not supported; supported: {supported}")
