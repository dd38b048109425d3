"""ATOM: an LLM inference engine. ``from atom import LLMEngine, SamplingParams``."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "LLMEngine", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from atom.model_engine.llm_engine import LLM, LLMEngine
    from atom.sampling_params import SamplingParams

_HOME = {
    "LLM": "atom.model_engine.llm_engine",
    "LLMEngine": "atom.model_engine.llm_engine",
    "SamplingParams": "atom.sampling_params",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that `import atom.utils.envs` costs nothing else.
    if name not in _HOME:
        raise AttributeError(f"module 'atom' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
