"""How this run holds its weights: as the model stores them, rounded at load, or in a GGUF file's own blocks."""

from __future__ import annotations

from atom.config import Config
from atom.errors import ConfigError
from atom.kernels.cpu.native.library import native_library
from atom.model_loader.model_files import ModelFiles
from atom.quantization.spec import ONLINE_FORMATS
from atom.utils import envs


def check_cpu_weights(config: Config, platform_name: str) -> None:
    """Refuse ``--cpu-weights`` where nothing would follow it. Raises ConfigError."""
    if config.cpu_weights is None:
        return
    flag = f"--cpu-weights {config.cpu_weights}"
    if platform_name != "cpu":
        raise ConfigError(f"{flag} needs --device cpu, got {platform_name}")
    if config.compilation_level > 0:
        raise ConfigError(f"{flag} needs --level 0, got {config.compilation_level:d}")


def check_online_quant(config: Config) -> None:
    """Refuse formats of ``--online-quant-config`` that this version does not have. Raises ConfigError."""
    online = config.online_quant_config
    if online is None:
        return
    for name in (online.global_quant_config, *online.layer_quant_config.values()):
        if name is not None and name not in ONLINE_FORMATS:
            raise ConfigError(
                f"--online-quant-config: format {name!r} is not available in this version of ATOM; available: "
                f"{', '.join(ONLINE_FORMATS)}"
            )


def keeps_gguf_blocks(config: Config, platform_name: str, files: ModelFiles) -> bool:
    """Whether the blocks of a GGUF file stay packed.

    ``auto`` keeps them where that is possible and no wider type was asked for.

    Raises:
        ConfigError: ``--gguf-dtype keep`` and something that it does not go with; the first is named.
    """
    if config.gguf_dtype == "dequantize":
        return False
    obstacles = [
        (files.kind != "gguf", f"a GGUF file, got {files.path}"),
        (platform_name != "cpu", f"--device cpu, got {platform_name}"),
        (config.compilation_level > 0, f"--level 0, got {config.compilation_level:d}"),
        (config.online_quant_config is not None, "no --online-quant-config"),
        (config.load_dummy is not None, f"weights of its own, got --load_dummy {config.load_dummy}"),
        (
            bool(envs.ATOM_WEIGHT_DUMP_DIR),
            f"no dump of weights, got ATOM_WEIGHT_DUMP_DIR={envs.ATOM_WEIGHT_DUMP_DIR}",
        ),
    ]
    for is_there, what in obstacles:
        if is_there and config.gguf_dtype == "keep":
            raise ConfigError(f"--gguf-dtype keep needs {what}")
    if any(is_there for is_there, _ in obstacles) or config.cpu_weights is not None:
        return False
    if config.gguf_dtype == "auto" and config.dtype not in ("auto", "bfloat16"):
        return False
    return native_library() is not None  # without a compiler the blocks are widened; the log says why
