"""What rounding the weights costs in quality, beside what it gains in speed.

    python -m atom.benchmarks.cpu_quality [--model demo] [--variants keep,int8,int4] [--prompts N] [--json]

One engine after the other; the first is the source that the others are compared with: the model's own weights,
widened where they are GGUF blocks. For each:

perplexity
    of a fixed English text (``quality_text.txt``, 2,100 words), in windows of 512 tokens that start afresh.
    A variant whose perplexity rises by more than 3 % over the source's is printed as "not good".
agreement
    share of equal tokens, place by place, in greedy answers of 64 tokens to the beginnings of the text's paragraphs.
    It falls quickly after the first difference; two good formats of a small model agree on a half to two thirds.
decode
    127 / (t(128 new tokens) - t(1 new token)) of one request, the best of three. Only neighbours in one run compare.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.errors import ConfigError

if TYPE_CHECKING:
    from atom import LLMEngine

TEXT = Path(__file__).with_name("quality_text.txt")
WINDOW = 512
ANSWER_TOKENS = 64
PROMPT_TOKENS = 48
MAX_RISE = 0.03
SOURCE = "source"
# Fields of Config by variant.
VARIANTS: dict[str, dict[str, Any]] = {
    SOURCE: {"gguf_dtype": "dequantize"},
    "keep": {"gguf_dtype": "keep"},
    "int8": {"cpu_weights": "int8"},
    "int8_a8": {"cpu_weights": "int8_a8"},
    "int8_g32": {"cpu_weights": "int8_g32"},
    "int4": {"cpu_weights": "int4"},
    "int4 + int8 head": {"cpu_weights": "int4", "lm_head_dtype": "int8"},
    "bf16 + int8 head": {"gguf_dtype": "dequantize", "lm_head_dtype": "int8"},
}


@dataclass
class Quality:
    """Figures of one variant."""

    variant: str
    perplexity: float
    decode_tok_s: float
    answers: list[list[int]]


def perplexity(engine: "LLMEngine", windows: Sequence[list[int]]) -> float:
    """exp of the mean negative log-likelihood of every token but each window's first."""
    from atom import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    loss, count = 0.0, 0
    for window in windows:  # one at a time: the logits of a whole window are large
        answer = engine.generate([window], params, use_tqdm=False)[0]
        scores = [score.logprob for score in answer["prompt_logprobs"] if score is not None]
        loss -= math.fsum(scores)
        count += len(scores)
    return math.exp(loss / count)


def text_windows(ids: Sequence[int], bos: int | None, size: int = WINDOW) -> list[list[int]]:
    """``ids`` cut into runs of ``size`` tokens, the beginning-of-text id included; a last one of a token is left."""
    start = [] if bos is None else [bos]
    step = size - len(start)
    runs = [start + list(ids[at : at + step]) for at in range(0, len(ids), step)]
    return [run for run in runs if len(run) > 1 + len(start)]


def agreement(answers: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Share of places at which both have the same token."""
    same = total = 0
    for mine, theirs in zip(answers, reference, strict=True):
        same += sum(a == b for a, b in zip(mine, theirs, strict=False))
        total += max(len(mine), len(theirs))
    return same / max(1, total)


def verdict(value: float, source: float) -> str:
    return "good" if value <= source * (1 + MAX_RISE) else "not good"


def measure(variant: str, model: str, num_prompts: int, num_threads: int | None) -> Quality:
    """Start an engine of this variant, ask everything, and close it."""
    from atom import LLMEngine, SamplingParams

    fields = {"device": "cpu", "enable_prefix_caching": False, "max_model_len": 1024, "max_num_seqs": 16}
    with LLMEngine(model, num_threads=num_threads, **fields, **VARIANTS[variant]) as engine:
        text = TEXT.read_text()
        bos = engine.tokenizer.bos_id
        windows = text_windows(engine.tokenizer.encode(text, add_special_tokens=False), bos)
        prompts = [
            text_windows(engine.tokenizer.encode(paragraph, add_special_tokens=False), bos, PROMPT_TOKENS)[0]
            for paragraph in text.split("\n\n")[:num_prompts]
        ]
        score = perplexity(engine, windows)
        greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        answers = [answer["token_ids"] for answer in engine.generate(prompts, greedy, use_tqdm=False)]
        speed = max(_decode_speed(engine, windows[index % len(windows)][:128]) for index in range(3))
    return Quality(variant, score, speed, answers)


def _decode_speed(engine: "LLMEngine", prompt: list[int]) -> float:
    from atom import SamplingParams

    seconds = []
    for count in (1, 128):
        params = SamplingParams(temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True)
        start = time.perf_counter()
        engine.generate([prompt], params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return 127 / max(1e-9, seconds[1] - seconds[0])


def format_table(results: Sequence[Quality]) -> str:
    source = results[0]
    lines = ["| variant | perplexity | change | agreement | decode tok/s | |", "|---|---|---|---|---|---|"]
    for result in results:
        change = result.perplexity / source.perplexity - 1
        same = agreement(result.answers, source.answers)
        judged = "" if result is source else verdict(result.perplexity, source.perplexity)
        lines.append(
            f"| {result.variant} | {result.perplexity:.3f} | {change:+.2%} | {same:.0%} "
            f"| {result.decode_tok_s:.1f} | {judged} |"
        )
    return "\n".join(lines)


def _figures(result: Quality, source: Quality) -> dict[str, Any]:
    return {
        "variant": result.variant,
        "perplexity": result.perplexity,
        "rise": result.perplexity / source.perplexity - 1,
        "agreement": agreement(result.answers, source.answers),
        "decode_tok_s": result.decode_tok_s,
    }


def chosen_variants(names: str | None) -> list[str]:
    """The source, then the variants named; all without a name. Raises ConfigError for an unknown one."""
    wanted = list(VARIANTS) if names is None else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in VARIANTS:
            raise ConfigError(f"--variants must be among {', '.join(VARIANTS)}, got {name!r}")
    return [SOURCE, *(name for name in wanted if name != SOURCE)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="model folder, GGUF file or name")
    parser.add_argument("--variants", help=f"comma-separated; default: all of {', '.join(VARIANTS)}")
    parser.add_argument("--prompts", type=int, default=12, help="greedy answers to compare")
    parser.add_argument("--num-threads", type=int, help="compute threads; default: one a core")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args(argv)
    if args.prompts < 1:
        parser.error(f"--prompts must be at least 1, got {args.prompts}")
    results: list[Quality] = []
    try:
        for variant in chosen_variants(args.variants):
            if variant == "keep" and not _is_gguf(args.model):
                continue
            results.append(measure(variant, args.model, args.prompts, args.num_threads))
            print(format_table(results).splitlines()[-1], file=sys.stderr)
    except ConfigError as error:
        print(f"cpu_quality: {error}", file=sys.stderr)
        return 1
    print(format_table(results))
    if args.json:
        print(json.dumps([_figures(result, results[0]) for result in results]))
    return 0


def _is_gguf(model: str) -> bool:
    from atom.model_loader.model_files import ModelFiles

    return ModelFiles.resolve(model).kind == "gguf"


if __name__ == "__main__":
    sys.exit(main())
