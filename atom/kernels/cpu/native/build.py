"""Compiles ``src/*.c`` into one shared library, once a machine: about two seconds with gcc or clang.

    ~/.cache/atom/native_kernels/<key>/kernels.so      the library
    .../<key>/manifest.json                            sizes and SHA-256, checked before it is loaded

The key covers the sources, the compiler and the flags; the flags name every instruction set, so that a folder
shared by different machines holds a library for each kind. Loading a library runs its code, hence the folder must
be this user's own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from atom.platforms.cpu import CpuFacts, num_usable_cpus
from atom.utils.cache_folder import private_cache_folder
from atom.utils.compile_cache import ArtifactFolder, StaleArtifact

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
KIND = "native_kernels"
LIBRARY = "kernels.so"
_TIMEOUT_S = 300
# coalesce-vars makes gcc spill accumulators: 51 of them in the int8 product, whose time it doubles.
_GENERAL = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-tree-coalesce-vars")
_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")
# /proc/cpuinfo's name -> the flag; used where the processor has it and the compiler knows it.
_EXTRAS_512 = {"avx512_vnni": "-mavx512vnni", "avx512_bf16": "-mavx512bf16", "avx512_vbmi": "-mavx512vbmi"}
_EXTRAS_256 = {"avx_vnni": "-mavxvnni"}
TIERS = ("avx512", "avx2", "baseline", "arm")


class BuildError(Exception):
    """There is no compiler, or it refused the sources; the message is one line."""


@dataclass(frozen=True)
class Target:
    """What to compile for: a tier of :data:`TIERS` and what the processor has beside it."""

    tier: str
    flags: tuple[str, ...]
    optional_flags: tuple[str, ...] = ()  # dropped where the compiler does not know them

    @classmethod
    def of(cls, facts: CpuFacts, tier: str | None = None) -> Target:
        """The best target for a processor, or a lower ``tier`` of it."""
        if facts.machine in ("aarch64", "arm64"):
            extras = ("+bf16" if "bf16" in facts.flags else "") + ("+i8mm" if "i8mm" in facts.flags else "")
            base = "-march=armv8.2-a+dotprod" if "asimddp" in facts.flags else "-march=armv8-a"
            return cls("arm", (base + extras if "dotprod" in base else base,))
        best = "baseline"
        if all(name in facts.flags for name in _AVX2):
            best = "avx512" if all(name in facts.flags for name in _AVX512) else "avx2"
        tier = tier or best
        flags: list[str] = []
        optional: list[str] = []
        if tier in ("avx2", "avx512"):
            flags += ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mpopcnt"]
            optional += [flag for name, flag in _EXTRAS_256.items() if name in facts.flags]
        if tier == "avx512":
            flags += [f"-m{name}" for name in _AVX512] + ["-mprefer-vector-width=512"]
            optional += [flag for name, flag in _EXTRAS_512.items() if name in facts.flags]
            # Intel runs these dots at half the rate of fp32, also where tiles make other bf16 products fast.
            if "avx512_bf16" in facts.flags and facts.vendor == "AuthenticAMD":
                flags.append("-DATOM_FAST_BF16=1")
        return cls(tier, tuple(flags), tuple(optional))


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str

    @classmethod
    def find(cls) -> Compiler:
        """``$CC``, else gcc, clang or cc. Raises BuildError."""
        named = shlex.split(os.environ.get("CC", ""))
        for command in [named] if named else [["gcc"], ["clang"], ["cc"]]:
            path = shutil.which(command[0])
            if path is None:
                continue
            result = _run([path, *command[1:], "--version"])
            if result.returncode == 0:
                return cls((path, *command[1:]), result.stdout.strip())
        raise BuildError(f"CC={shlex.join(named)} cannot be run" if named else "there is no gcc, clang or cc")

    def accepts(self, flags: tuple[str, ...]) -> bool:
        return _run([*self.command, "-Werror", *flags, "-fsyntax-only", "-xc", os.devnull]).returncode == 0

    def usable(self, flags: tuple[str, ...]) -> tuple[str, ...]:
        """Those of ``flags`` that this compiler knows."""
        return flags if self.accepts(flags) else tuple(flag for flag in flags if self.accepts((flag,)))


def build_library(target: Target) -> Path:
    """The compiled library for ``target``, from the cache if it is there and undamaged.

    Raises:
        BuildError: no compiler, or it failed.
        ConfigError: the cache folder is not this user's own.
    """
    compiler = Compiler.find()
    flags = (*compiler.usable(_GENERAL), *target.flags, *compiler.usable(target.optional_flags))
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))
    digest = hashlib.sha256("\0".join((*compiler.command, compiler.version, *flags)).encode())
    for path in files:
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    source = digest.hexdigest()
    key = f"{target.tier}_{source[:16]}"
    folder = ArtifactFolder(private_cache_folder(KIND))
    found = _find(folder, key, source)
    if found is None:
        with folder.lock():
            found = _find(folder, key, source)  # another process may have built it meanwhile
            if found is None:
                start = time.monotonic()
                log.info("native CPU kernels: compiling for %s, once", target.tier)
                sources = [path for path in files if path.suffix == ".c"]
                found = folder.publish(key, source, lambda aside: _compile(compiler, flags, sources, aside))
                log.info("native CPU kernels: compiled in %.1f s", time.monotonic() - start)
    return found / LIBRARY


def _find(folder: ArtifactFolder, key: str, source: str) -> Path | None:
    if not (folder.path / key).exists():
        return None
    try:
        return folder.find(key, source)
    except StaleArtifact as reason:
        log.warning("native CPU kernels: not using %s: %s", folder.path / key, reason)
        return None


def _compile(compiler: Compiler, flags: tuple[str, ...], sources: list[Path], aside: Path) -> None:
    """Objects side by side, then one link; only the library stays in ``aside``."""
    objects = [aside / f"{path.stem}.o" for path in sources]
    commands = [
        [*compiler.command, *flags, "-c", str(path), "-o", str(out)]
        for path, out in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(num_usable_cpus()) as pool:
        results = list(pool.map(_run, commands))
    link = [*compiler.command, "-shared", "-o", str(aside / LIBRARY), *map(str, objects), "-lm", "-pthread"]
    failed = [result for result in results if result.returncode != 0]
    if not failed:
        result = _run(link)
        failed = [result] if result.returncode != 0 else []
    if failed:
        lines = failed[0].stderr.strip().splitlines() or [f"exit status {failed[0].returncode}"]
        raise BuildError(next((line for line in lines if "error" in line), lines[-1]))
    for path in objects:
        path.unlink()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LC_ALL": "C"}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return subprocess.CompletedProcess(command, 127, "", f"error: {error}")
