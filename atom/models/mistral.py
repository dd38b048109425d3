"""Mistral: Llama whose layers all slide over a window where the configuration sets one (``layer_types``)."""

from atom.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
