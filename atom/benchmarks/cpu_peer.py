"""One contender of the CPU benchmark, alone in a fresh process.

    python -m atom.benchmarks.cpu_peer transformers --model FOLDER --dtype bfloat16 ...
    python -m atom.benchmarks.cpu_peer atom --engine-args '{"lm_head_dtype": "int8"}' ...

Loads the model, generates greedily from random token ids, and prints one JSON line (``RESULT {...}``) with a
:class:`Measurement`. What each figure means is written at :func:`measure`. Nothing heavy is imported before
the contender is known: the start of the process is one of the figures. Other engines' environments run this
file too, so it needs msgspec and the standard library alone.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

import msgspec

from atom.benchmarks.child import print_result
from atom.benchmarks.cpu_peers.generators import OpenVinoGenerator, VllmGenerator

NUM_INPUT, NUM_OUTPUT = 128, 128  # tokens of the decode and the concurrent figures
NUM_CONCURRENT = 16
WORKLOADS = ("decode", "prefill", "concurrent")
PREFILL_LENGTHS = (512, 2048)
SANITY_PROMPT = "The capital of France is"
SANITY_IDS = [2, 818, 5279, 529, 7001, 563]  # the same, as token ids: six with BOS
NUM_SANITY_OUTPUT = 24
_ORDINARY_IDS = (2000, 200_000)  # words of the demo model's vocabulary: no control tokens


class Measurement(msgspec.Struct):
    """What one process measured. Rates in tokens per second; a figure that was not asked for is None."""

    start_to_first_token_s: float
    peak_rss_bytes: int
    sanity_ids: list[int]
    decode_tok_s: float | None = None
    ttft_128_ms: float | None = None
    prefill_512_tok_s: float | None = None
    prefill_2048_tok_s: float | None = None
    concurrent_tok_s: float | None = None
    http_tok_s: float | None = None
    serving_rss_bytes: int | None = None


class Generator(Protocol):
    """A loaded model. It must not reuse anything of an earlier prompt."""

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Exactly ``num_tokens`` greedy tokens for each prompt, all prompts at once."""

    def close(self) -> None:
        """End what was started."""


class TransformersGenerator:
    """``model.generate`` of transformers, eager; prompts of equal length form one batch."""

    def __init__(self, args: argparse.Namespace):
        import torch

        torch.set_num_threads(args.num_threads)
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype)
        ).eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return output[:, ids.shape[1] :].tolist()

    def close(self) -> None:
        """Nothing was started."""


class AtomGenerator:
    """``LLMEngine.generate`` with the engine in its own process, as the server runs it."""

    def __init__(self, args: argparse.Namespace):
        from atom import LLMEngine, SamplingParams

        self._params = SamplingParams
        self._engine = LLMEngine(
            args.model,
            device="cpu",
            dtype=args.dtype,
            num_threads=args.num_threads,
            enable_prefix_caching=False,
            **json.loads(args.engine_args),
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = self._params(temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True)
        return [answer["token_ids"] for answer in self._engine.generate(prompts, params, use_tqdm=False)]

    def close(self) -> None:
        self._engine.close()


ENGINES: dict[str, Callable[[argparse.Namespace], Generator]] = {
    "transformers": TransformersGenerator,
    "atom": AtomGenerator,
    "openvino": OpenVinoGenerator,
    "vllm": VllmGenerator,
}


class PromptMaker:
    """Random prompts, another one at each call, so that no cache can share them; BOS (id 2) first."""

    def __init__(self) -> None:
        self._num_made = 0

    def make(self, num_tokens: int) -> list[int]:
        self._num_made += 1
        source = random.Random(1_000_003 * num_tokens + self._num_made)
        return [2] + [source.randrange(*_ORDINARY_IDS) for _ in range(num_tokens - 1)]


def measure(generator: Generator, launched_at: float, workloads: Collection[str] = WORKLOADS) -> Measurement:
    """Run every figure of ``workloads`` once, each after a warm-up of its shape.

    start_to_first_token_s
        from ``launched_at`` (``time.monotonic()`` just before the process was started) until the first token
        of a prompt of six: imports, loading and prefill.
    decode_tok_s
        127 / (t(128 new tokens) - t(1 new token)), one request, prompts of 128: prefill cancels out.
    prefill_512_tok_s, prefill_2048_tok_s
        n / t(1 new token) of a prompt of n tokens.
    concurrent_tok_s
        16 requests of 128 in, 128 out, submitted at once: output tokens / whole wall time. Median of two.
    peak_rss_bytes
        highest resident size until then, summed over this process and its children. Pages that two
        processes share count twice.

    Without any of ``WORKLOADS`` it measures the start and the memory alone.
    """
    make = PromptMaker().make
    timed_generate(generator, [SANITY_IDS], 1)
    start = time.monotonic() - launched_at
    sanity = generator.generate([SANITY_IDS], NUM_SANITY_OUTPUT)[0]
    result = Measurement(start, 0, sanity)
    if "decode" in workloads:
        timed_generate(generator, [make(NUM_INPUT)], 4)
        one = timed_generate(generator, [make(NUM_INPUT)], 1)
        full = timed_generate(generator, [make(NUM_INPUT)], NUM_OUTPUT)
        result.ttft_128_ms = one * 1e3
        result.decode_tok_s = (NUM_OUTPUT - 1) / (full - one)
    for length in PREFILL_LENGTHS if "prefill" in workloads else ():
        timed_generate(generator, [make(length)], 1)
        setattr(result, f"prefill_{length}_tok_s", length / timed_generate(generator, [make(length)], 1))
    if "concurrent" in workloads:
        timed_generate(generator, [make(NUM_INPUT) for _ in range(NUM_CONCURRENT)], 4)
        times = [
            timed_generate(generator, [make(NUM_INPUT) for _ in range(NUM_CONCURRENT)], NUM_OUTPUT)
            for _ in range(2)
        ]
        result.concurrent_tok_s = NUM_CONCURRENT * NUM_OUTPUT / (sum(times) / 2)
    result.peak_rss_bytes = peak_rss_of_tree()
    return result


def timed_generate(generator: Generator, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds that ``generate`` takes. Raises RuntimeError when it does not deliver what was asked for."""
    began = time.perf_counter()
    answers = generator.generate(prompts, num_tokens)
    elapsed = time.perf_counter() - began
    lengths = [len(answer) for answer in answers]
    if lengths != [num_tokens] * len(prompts):
        raise RuntimeError(f"asked for {len(prompts)} answers of {num_tokens} tokens, got lengths {lengths}")
    return elapsed


def peak_rss_of_tree(root: int | None = None) -> int:
    """Bytes: the high-water mark of the resident size (``VmHWM``) of process ``root``, by default this one,
    plus those of its children and theirs. The marks need not fall together, so this is an upper bound of
    the peak of the sum."""
    status = {entry.name: _read_status(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    tree = {str(root or os.getpid())}
    grown = True
    while grown:
        added = {pid for pid, fields in status.items() if fields.get("PPid") in tree} - tree
        tree |= added
        grown = bool(added)
    return sum(int(status[pid].get("VmHWM", "0 kB").split()[0]) * 1024 for pid in tree if pid in status)


def _read_status(entry: Path) -> dict[str, str]:
    """``/proc/PID/status`` as fields; empty when the process has just ended."""
    try:
        lines = (entry / "status").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine-args", default="{}", help="JSON: further settings of the engine")
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--launched-at", type=float, default=time.monotonic(), help="time.monotonic()")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=WORKLOADS)
    args = parser.parse_args(argv)
    generator = ENGINES[args.engine](args)
    measurement = measure(generator, args.launched_at, args.workloads)
    generator.close()
    print_result(measurement)
    return 0


if __name__ == "__main__":
    sys.exit(main())
