"""The ``atom`` command: ``serve``, ``generate``, ``bench``, ``doctor`` and ``cache``.

Arguments are read before anything heavy is imported, so that a mistake is told at once; ``doctor`` and
``cache`` need the standard library alone. Exit codes: 0 done, 1 the engine failed or the machine lacks
something, 2 a wrong flag or value.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atom import __version__
from atom.errors import AtomError, ConfigError, RequestError
from atom.utils.cli_parser import FlexibleArgumentParser
from atom.utils.suggest import suggest

if TYPE_CHECKING:
    from atom.sampling_params import SamplingParams

USAGE = """\
usage: atom COMMAND ...

  serve MODEL [flags]               serve a model over HTTP (OpenAI's API)
  generate MODEL [-p PROMPT] ...    print what a model answers; the prompt comes from standard input if none is given
  bench KIND [flags]                measure: serve (a running server), host, text, cpu, quality or determinism
  doctor [--json]                   what this machine has, what it lacks and which variables are set
  cache list|clear [flags]          what ATOM keeps on disk: compiled graphs, tokenizers, the demo model

  --version                         print the version
  COMMAND --help                    every flag of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"serve": serve, "generate": generate, "bench": bench, "doctor": doctor, "cache": cache}
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] in ("--version", "-V", "version"):
        print(f"atom {__version__}")
        return 0
    if words[0] not in commands:
        print(f"atom: error: unknown command {words[0]!r}{suggest(words[0], commands)}", file=sys.stderr)
        return 2
    try:
        return commands[words[0]](words[1:])
    except ConfigError as error:
        print(f"atom {words[0]}: error: {error}", file=sys.stderr)
        return 2
    except AtomError as error:
        print(f"atom {words[0]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def serve(argv: list[str]) -> int:
    """Start the server, which reads the flags itself."""
    from atom.entrypoints import openai_server

    return openai_server.main(_model_first(argv)) or 0


def generate(argv: list[str]) -> int:
    """Print the model's answer to each prompt."""
    from atom.config import check_supported
    from atom.model_engine.arg_utils import EngineArgs

    parser = FlexibleArgumentParser(
        prog="atom generate", usage="atom generate MODEL [flags]", description="Print what a model answers."
    )
    EngineArgs.add_cli_args(parser)
    group = parser.add_argument_group("generation")
    group.add_argument("-p", "--prompt", action="append", help="A prompt; may be given several times.")
    group.add_argument("--max-tokens", type=int, default=64, help="Longest answer in tokens.")
    group.add_argument("--temperature", type=float, default=0.0, help="0 picks the likeliest token.")
    group.add_argument("--top-k", type=int, default=-1, help="Sample among this many; -1: all.")
    group.add_argument("--top-p", type=float, default=1.0, help="Sample among this share of likelihood.")
    group.add_argument("--min-p", type=float, default=0.0, help="Least likelihood, relative to the best.")
    group.add_argument("--seed", type=int, help="Makes sampling repeatable.")
    group.add_argument(
        "--stop", action="append", help="Text that ends an answer; may be given several times."
    )
    group.add_argument("--ignore-eos", action="store_true", help="Go on past the end-of-text token.")
    namespace = parser.parse_args(_model_first(argv))
    args = EngineArgs.from_cli_args(namespace)
    check_supported(args.create_config())  # before a prompt is waited for
    params = _sampling_params(namespace)
    prompts = namespace.prompt or [sys.stdin.read().rstrip("\n")]
    if not all(prompts):
        raise ConfigError("--prompt must not be empty, got ''")
    with args.create_engine() as engine:
        for answer in engine.generate(prompts, params):
            print(answer["text"], flush=True)
    return 0


BENCHMARKS = {
    "serve": "benchmark_serving",
    "host": "host_overhead",
    "text": "text_pipeline",
    "cpu": "cpu_suite",
    "quality": "cpu_quality",
    "determinism": "cpu_deterministic",
}


def bench(argv: list[str]) -> int:
    """Run one of the benchmarks, which reads its flags itself."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: atom bench KIND [flags]\n")
        for kind, module in BENCHMARKS.items():
            print(f"  {kind:<11} python -m atom.benchmarks.{module}")
        return 0 if argv else 2
    if argv[0] not in BENCHMARKS:
        raise ConfigError(
            f"KIND must be one of {', '.join(BENCHMARKS)}, got {argv[0]!r}{suggest(argv[0], BENCHMARKS)}"
        )
    module = importlib.import_module(f"atom.benchmarks.{BENCHMARKS[argv[0]]}")
    return module.main(argv[1:]) or 0


def doctor(argv: list[str]) -> int:
    """Print the diagnosis; exit code 1 when something that ATOM cannot do without is missing."""
    parser = FlexibleArgumentParser(
        prog="atom doctor", description="What this machine has and lacks for ATOM."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    namespace = parser.parse_args(argv)
    from atom.utils.doctor import diagnose, render

    found = diagnose()
    print(json.dumps(found.to_dict(), indent=2) if namespace.json else render(found))
    return 0 if found.is_usable else 1


def cache(argv: list[str]) -> int:
    """List or remove what is kept below ``~/.cache/atom``. Nothing there ever has to be removed."""
    parser = FlexibleArgumentParser(
        prog="atom cache", description="What ATOM keeps on disk. It is checked before use and made again."
    )
    parser.add_argument("action", choices=("list", "clear"), help="Print it, or remove it after asking.")
    parser.add_argument("--kind", help="Only this kind, such as torch_compile_cache or tokenizers.")
    parser.add_argument("--older-than", help="Only what was not used for so long: 30d, 12h, 45m.")
    parser.add_argument("--yes", "-y", action="store_true", help="clear: do not ask.")
    parser.add_argument("--json", action="store_true", help="list: print JSON.")
    namespace = parser.parse_args(argv)
    from atom.utils import cache_list

    entries = cache_list.list_entries()
    kinds = sorted({entry.kind for entry in entries})
    if namespace.kind is not None:
        if entries and namespace.kind not in kinds:
            raise ConfigError(
                f"--kind must be one of {', '.join(kinds)}, got {namespace.kind!r}"
                f"{suggest(namespace.kind, kinds)}"
            )
        entries = [entry for entry in entries if entry.kind == namespace.kind]
    if namespace.older_than is not None:
        entries = cache_list.unused_for(entries, cache_list.parse_age(namespace.older_than))
    total = cache_list.format_size(sum(entry.num_bytes for entry in entries))
    if namespace.json and namespace.action == "list":
        print(json.dumps([entry.to_dict() for entry in entries], indent=2))
        return 0
    if not entries:
        print("nothing is kept" if namespace.action == "list" else "nothing to remove")
        return 0
    print(f"{cache_list.render(entries)}\n{len(entries)} entries, {total}")
    if namespace.action == "clear":
        if not namespace.yes and not _confirmed("remove them?"):
            print("nothing was removed")
            return 1
        cache_list.remove(entries)
        print(f"removed, {total} freed")
    return 0


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("clear asks before it removes, and standard input is no terminal: give --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _model_first(argv: list[str]) -> list[str]:
    """``MODEL [flags]`` as ``--model MODEL [flags]``."""
    if argv and not argv[0].startswith("-"):
        return ["--model", *argv]
    return argv


def _sampling_params(namespace: argparse.Namespace) -> "SamplingParams":
    from atom.sampling_params import SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
    try:
        return SamplingParams(
            stop_strings=namespace.stop, **{name: getattr(namespace, name) for name in names}
        )
    except RequestError as error:
        raise ConfigError(error.message) from None


if __name__ == "__main__":
    sys.exit(main())
