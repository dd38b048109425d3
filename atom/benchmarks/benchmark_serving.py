"""Measure a running server that speaks OpenAI's API: latencies and throughput of streamed requests.

    python -m atom.benchmarks.benchmark_serving --model MODEL --dataset-name random [flags]

docs/benchmarking_guide.md explains every figure.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from atom.benchmarks.serving_client import Client, RequestForm
from atom.benchmarks.serving_data import (
    RandomShape,
    Render,
    SampleRequest,
    random_requests,
    sharegpt_requests,
)
from atom.benchmarks.serving_load import (
    Load,
    Run,
    accepted_between,
    control_profile,
    read_speculation,
    run_load,
    warm_up,
)
from atom.benchmarks.serving_metrics import (
    METRICS,
    detailed_fields,
    format_summary,
    parse_goodput,
    pytorch_records,
    result_fields,
    summarize,
)
from atom.benchmarks.serving_report import write_report
from atom.entrypoints.openai.chat_template import ChatTemplate
from atom.entrypoints.openai.sockets import raise_file_limit
from atom.errors import AtomError, ConfigError
from atom.model_loader.model_files import ModelFiles
from atom.model_loader.tokenizer import Tokenizer
from atom.utils import envs
from atom.utils.cli_parser import FlexibleArgumentParser

COMPLETION_BACKENDS = ("vllm", "openai", "sglang", "lmdeploy", "scalellm")
REFUSED_BACKENDS = ("tgi", "deepspeed-mii", "tensorrt-llm")  # their own protocols; all speak OpenAI's as well
BACKENDS = (*COMPLETION_BACKENDS, "openai-chat", *REFUSED_BACKENDS)
DATASETS = ("random", "sharegpt", "burstgpt", "sonnet", "hf")
# Flags of data sets that are not built in; scripts that set one mean a data set that they would not get.
REFUSED_FLAGS = {
    **{f"--sonnet-{name}-len": int for name in ("input", "output", "prefix")},
    **{f"--hf-{name}": str for name in ("subset", "split")},
    "--hf-output-len": int,
}


def make_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(
        prog="python -m atom.benchmarks.benchmark_serving", description=__doc__.splitlines()[0]
    )
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend", choices=BACKENDS, default="vllm", help="All but openai-chat use completions."
    )
    group.add_argument("--base-url", help="http://host:port; instead of --host and --port.")
    group.add_argument("--host", default="127.0.0.1", help="Host of the server.")
    group.add_argument("--port", type=int, default=8000, help="Port of the server.")
    group.add_argument(
        "--endpoint", help="Path. Default: /v1/completions, or /v1/chat/completions for openai-chat."
    )
    group.add_argument(
        "--model", required=True, help="Name to ask for, and tokenizer unless --tokenizer is given."
    )
    group.add_argument("--served-model-name", help="Name to ask for, where it differs from --model.")
    group.add_argument("--tokenizer", help="Folder, .gguf file or hub id of the tokenizer.")
    group.add_argument("--tokenizer-mode", choices=("auto",), default="auto", help="Only auto.")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="Accepted; no code of a model is ever run here."
    )

    group = parser.add_argument_group("data")
    group.add_argument("--dataset-name", choices=DATASETS, default="sharegpt", help="random or sharegpt.")
    group.add_argument("--dataset-path", type=Path, help="The ShareGPT file.")
    group.add_argument("--num-prompts", type=int, default=1000, help="Requests to send.")
    group.add_argument("--random-input-len", type=int, default=1024, help="Prompt tokens at most.")
    group.add_argument("--random-output-len", type=int, default=128, help="Answer tokens at most.")
    group.add_argument(
        "--random-range-ratio", type=float, default=1.0, help="Shortest length as a share of the longest."
    )
    group.add_argument("--random-prefix-len", type=int, default=0, help="Tokens that all prompts start with.")
    group.add_argument(
        "--use-chat-template", action="store_true", help="Put random prompts into the chat template."
    )
    group.add_argument("--sharegpt-output-len", type=int, help="Answer tokens instead of the data's own.")
    for flag, kind in REFUSED_FLAGS.items():
        group.add_argument(flag, type=kind, help="Not available.")

    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=float, default=float("inf"), help="Requests a second; inf: all at once."
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="1: Poisson; less: burstier; more: steadier."
    )
    group.add_argument("--max-concurrency", type=int, help="Requests under way at most.")
    group.add_argument("--num-warmups", type=int, default=1, help="Requests sent before, unmeasured.")
    group.add_argument("--seed", type=int, default=0, help="Of data and arrival times.")
    group.add_argument("--ignore-eos", action="store_true", help="Have every answer be as long as asked for.")
    group.add_argument("--best-of", type=int, default=1, help="Sent with completions when above 1.")
    group.add_argument("--use-beam-search", action="store_true", help="Sent with every request.")
    group.add_argument("--logprobs", type=int, help="Ask for so many log probabilities a token.")
    group.add_argument(
        "--lora-modules", nargs="+", default=[], help="Model names to draw from for each request."
    )
    group.add_argument("--profile", action="store_true", help="Profile the server meanwhile.")

    group = parser.add_argument_group("output")
    group.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl", help="Of ttft, tpot, itl, e2el.")
    group.add_argument("--metric-percentiles", default="99", help="Numbers separated by commas.")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="KEY:MS", help="Objectives, as ttft:200 tpot:50."
    )
    group.add_argument("--save-result", action="store_true", help="Write a JSON file.")
    group.add_argument("--save-detailed", action="store_true", help="With every request's figures in it.")
    group.add_argument("--result-dir", type=Path, help="Folder of the JSON file.")
    group.add_argument("--result-filename", help="Name of the JSON file.")
    group.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="Put into the JSON file."
    )
    group.add_argument("--report", type=Path, metavar="FILE", help="Write an HTML page with plots.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        _benchmark(args)
    except ConfigError as error:
        print(f"benchmark_serving: error: {error}", file=sys.stderr)
        return 2
    except (AtomError, OSError) as error:
        print(f"benchmark_serving: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _benchmark(args: argparse.Namespace) -> None:
    _check(args)
    metrics = _metrics(args.percentile_metrics)
    percentiles = _percentiles(args.metric_percentiles)
    goodput = parse_goodput(args.goodput)
    metadata = _metadata(args.metadata)
    tokenizer = ModelFiles.resolve(args.tokenizer or args.model).load_tokenizer()
    requests = _requests(args, tokenizer)
    run, speculation = _run_in_loop(_measure(args, requests))
    for outcome in run.outcomes:
        if outcome.is_success and not outcome.num_output_tokens:  # a server that does not report usage
            outcome.num_output_tokens = len(tokenizer.encode(outcome.text, add_special_tokens=False))
    summary = summarize(run, goodput)
    print(format_summary(summary, metrics, percentiles, *speculation))

    now = datetime.now()
    result: dict[str, Any] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": args.model,
        "tokenizer_id": args.tokenizer or args.model,
        "best_of": args.best_of,
        "num_prompts": args.num_prompts,
        "metadata": metadata,
        "request_rate": args.request_rate if args.request_rate < float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **result_fields(summary, metrics, percentiles),
        "accept_length": speculation[0],
        "acceptance_rate": speculation[1],
    }
    if args.report is not None:
        args.report.write_text(write_report(result, summary, run, metrics, percentiles))
        print(f"Report: {args.report}")
    if args.save_result or args.save_detailed:
        detailed = detailed_fields(run.outcomes) if args.save_detailed else {}
        _save(args, {**result, **detailed})


async def _measure(
    args: argparse.Namespace, requests: Sequence[SampleRequest]
) -> tuple[Run, tuple[float | None, float | None]]:
    """Warm up, run, and read the server's speculation counters around it."""
    client = Client(args.base_url or _url_of(args.host, args.port), envs.OPENAI_API_KEY)
    is_chat = args.backend == "openai-chat"
    form = RequestForm(
        is_chat,
        args.endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions"),
        args.served_model_name or args.model,
        args.ignore_eos,
        args.best_of,
        args.use_beam_search,
        args.logprobs,
    )
    load = Load(args.request_rate, args.burstiness, args.max_concurrency)
    raise_file_limit()
    await client.open()
    await warm_up(client, form, requests[0], args.num_warmups)
    before = await read_speculation(client)
    if args.profile:
        await control_profile(client, "start")
    try:
        with tqdm(total=len(requests), unit="req", disable=args.disable_tqdm) as bar:
            run = await run_load(
                client,
                form,
                requests,
                load,
                np.random.default_rng(args.seed + 1),
                models=args.lora_modules,
                on_done=bar.update,
            )
    finally:
        if args.profile:
            await control_profile(client, "stop")
    return run, accepted_between(before, await read_speculation(client))


def _run_in_loop(work: Any) -> Any:
    """Run a coroutine on the fast event loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


# -- flags


def _check(args: argparse.Namespace) -> None:
    """Refuse by name what cannot be done. Raises ConfigError."""
    if args.backend in REFUSED_BACKENDS:
        raise ConfigError(
            f"--backend {args.backend} is not available; that server speaks OpenAI's API too: use --backend openai"
        )
    if args.dataset_name not in ("random", "sharegpt"):
        raise ConfigError(f"--dataset-name {args.dataset_name} is not available; use random or sharegpt")
    for flag in REFUSED_FLAGS:
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            raise ConfigError(f"{flag} is not available; use --dataset-name random or sharegpt")
    if envs.VLLM_USE_MODELSCOPE:
        raise ConfigError("VLLM_USE_MODELSCOPE is not available; give --tokenizer a local folder")
    if args.dataset_name == "sharegpt" and args.dataset_path is None:
        raise ConfigError(
            "--dataset-name sharegpt needs --dataset-path; for made-up prompts: --dataset-name random"
        )
    if args.use_chat_template and args.dataset_name != "random":
        raise ConfigError(
            "--use-chat-template is for --dataset-name random; for conversations use --backend openai-chat"
        )
    if (
        args.endpoint is not None
        and args.backend == "openai-chat"
        and not args.endpoint.endswith("chat/completions")
    ):
        raise ConfigError(f"--endpoint must end in chat/completions for openai-chat, got {args.endpoint!r}")
    for flag, low in (("num_prompts", 1), ("num_warmups", 0), ("best_of", 1), ("max_concurrency", 1)):
        value = getattr(args, flag)
        if value is not None and value < low:
            raise ConfigError(f"--{flag.replace('_', '-')} must be at least {low}, got {value}")
    for flag in ("request_rate", "burstiness"):
        value = getattr(args, flag)
        if not value > 0:
            raise ConfigError(f"--{flag.replace('_', '-')} must be greater than 0, got {value}")


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in METRICS]
    if wrong:
        raise ConfigError(f"--percentile-metrics must be of {', '.join(METRICS)}, got {wrong[0]!r}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"--metric-percentiles must be numbers from 0 to 100, got {text!r}")
    return values


def _metadata(words: Sequence[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise ConfigError(f"--metadata must be KEY=VALUE, got {word!r}")
    return dict(word.split("=", 1) for word in words)


def _url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# -- data and result


def _requests(args: argparse.Namespace, tokenizer: Tokenizer) -> list[SampleRequest]:
    is_chat = args.backend == "openai-chat"
    if args.dataset_name == "sharegpt":
        return sharegpt_requests(
            tokenizer,
            args.dataset_path,
            args.num_prompts,
            args.seed,
            output_len=args.sharegpt_output_len,
            adds_special_tokens=not is_chat,
        )
    shape = RandomShape(
        args.random_input_len, args.random_output_len, args.random_range_ratio, args.random_prefix_len
    )
    return random_requests(
        tokenizer,
        args.num_prompts,
        shape,
        args.seed,
        adds_special_tokens=not is_chat,
        render=_renderer(tokenizer) if args.use_chat_template else None,
        is_rendered_here=not is_chat,
    )


def _renderer(tokenizer: Tokenizer) -> Render:
    if tokenizer.chat_template is None:
        raise ConfigError("--use-chat-template needs a model with a chat template; this one has none")
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    template = ChatTemplate(
        tokenizer.chat_template, tokens={name: text for name, text in tokens.items() if text}
    )
    return lambda text: template.render([{"role": "user", "content": text}])


def _save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    path = Path(args.result_filename or _result_name(args, result["date"]))
    if args.result_dir is not None:
        args.result_dir.mkdir(parents=True, exist_ok=True)
        path = args.result_dir / path
    path.write_text(json.dumps(result) + "\n")
    print(f"Result: {path}")
    if envs.SAVE_TO_PYTORCH_BENCHMARK_FORMAT:
        settings = {name: _plain(value) for name, value in vars(args).items()}
        other = path.with_suffix(".pytorch.json")
        other.write_text(json.dumps(pytorch_records(result, settings)) + "\n")
        print(f"Result in PyTorch's benchmark format: {other}")


def _result_name(args: argparse.Namespace, date: str) -> str:
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency is not None else ""
    model = Path(args.model).name
    return f"{args.backend}-{args.request_rate:g}qps{limit}-{model}-{date}.json"


def _plain(value: Any) -> Any:
    """A flag's value as JSON has it."""
    if isinstance(value, Path) or value == float("inf"):
        return str(value)
    return value


if __name__ == "__main__":
    sys.exit(main())
