"""What ``--deterministic`` goes with: a token's bits then depend on its own sequence alone.

Every product, norm and rotation of the native kernels gives a row the same bits whatever rows are beside it, and
attention takes the keys of every query in spans at absolute positions. What PyTorch or a device computes promises
nothing of the kind, so a run that would need them does not start.
"""

from __future__ import annotations

from atom.config import Config
from atom.errors import ConfigError
from atom.kernels.cpu.native.library import native_library
from atom.utils import envs


def check_deterministic(config: Config, platform_name: str) -> None:
    """Refuse ``--deterministic`` where it cannot be kept, before weights are read. Raises ConfigError.

    What depends on the model is refused when its steps are put together.
    """
    if not config.deterministic:
        return
    obstacles = [
        (platform_name != "cpu", f"--device cpu, got {platform_name}"),
        (config.compilation_level > 0, f"--level 0, got {config.compilation_level:d}"),
        (config.compilation_config.captures_graphs, "--cudagraph-mode NONE: recorded steps run the modules"),
        (config.mark_trace, "no --mark-trace, which runs the modules"),
        (not envs.ATOM_FUSED_DECODE, "ATOM_FUSED_DECODE=1, got 0"),
    ]
    for is_there, what in obstacles:
        if is_there:
            raise ConfigError(f"--deterministic needs {what}")
    if native_library() is None:
        raise ConfigError("--deterministic needs the native kernels, which this machine cannot build or run")
