"""What this machine has for ATOM and what it lacks: the facts behind ``atom doctor``.

Works without torch: versions come from package metadata, the hardware from ``atom.platforms``.
"""

import dataclasses
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass, field
from typing import Any

from atom import __version__
from atom.utils import envs

# (package, what is missing without it); None: needed for ATOM to run at all.
PACKAGES: tuple[tuple[str, str | None], ...] = (
    ("torch", None),
    ("numpy", None),
    ("msgspec", None),
    ("pyzmq", None),
    ("tokenizers", None),
    ("jinja2", None),
    ("xxhash", None),
    ("gguf", "GGUF model files cannot be read"),
    ("starlette", "the server cannot start"),
    ("uvicorn", "the server cannot start"),
    ("prometheus-client", "the server cannot start"),
    ("tqdm", "no progress bars"),
    ("transformers", "models without a tokenizer.json cannot be tokenized"),
    ("triton", "Triton kernels cannot run"),
)
# What kernels come from, and the module that has them.
BACKENDS = (
    ("Triton", "triton"),
    ("FlashAttention of PyTorch", "torch.nn.attention.varlen"),
    ("AITER", "aiter"),
)


@dataclass
class Diagnosis:
    versions: dict[str, str] = field(default_factory=dict)  # "missing" where a package is not installed
    device: dict[str, str] = field(default_factory=dict)  # of the platform that --device auto picks
    cpu: dict[str, str] = field(default_factory=dict)
    backends: dict[str, bool] = field(default_factory=dict)
    variables: list[envs.SetVariable] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # one line each
    is_usable: bool = True

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def diagnose() -> Diagnosis:
    """Look at packages, devices and environment. Starts nothing on a device."""
    found = Diagnosis(versions={"atom": __version__, "python": sys.version.split()[0]})
    for package, loss in PACKAGES:
        version = _version(package)
        found.versions[package] = version or "missing"
        if version is None:
            found.missing.append(f"{package}: {loss or 'ATOM cannot run'}; pip install {package}")
            found.is_usable = found.is_usable and loss is not None
    found.backends = {name: _has_module(module) for name, module in BACKENDS}
    _describe_devices(found)
    found.variables = envs.report()
    found.missing += [
        f"{v.name}={v.value}: {v.note}" for v in found.variables if not v.is_effective and v.note
    ]
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of a package that it is in
        return False


def _describe_devices(found: Diagnosis) -> None:
    from atom.platforms import get_platform

    found.cpu = get_platform("cpu").describe()
    if found.versions["torch"] == "missing":
        found.device = {"name": "none", "reason": "torch is missing"}
        return
    try:
        platform = get_platform("auto")
        facts = {} if platform.name == "cpu" else platform.describe()
        found.device = {"name": platform.name, "reason": platform.reason, **facts}
    except Exception as error:  # a broken torch or driver is what doctor is asked about
        found.device = {"name": "none", "reason": f"{type(error).__name__}: {error}"}
        found.missing.append(f"device: {type(error).__name__}: {error}")
        found.is_usable = False


def render(found: Diagnosis) -> str:
    """The diagnosis as text for a terminal."""
    sections = [
        ("versions", found.versions),
        ("device", found.device),
        ("cpu", found.cpu),
        ("backends", {name: "yes" if there else "no" for name, there in found.backends.items()}),
        ("environment", {v.name: f"{v.value}  ({v.note or 'in effect'})" for v in found.variables}),
    ]
    lines = []
    for title, facts in sections:
        lines.append(f"{title}:")
        width = max(map(len, facts), default=0)
        lines += [f"  {name:<{width}}  {value}" for name, value in facts.items()] or ["  no variable is set"]
    lines.append("missing or without effect:" if found.missing else "nothing is missing")
    lines += [f"  {line}" for line in found.missing]
    return "\n".join(lines)
