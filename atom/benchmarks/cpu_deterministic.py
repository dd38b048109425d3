"""What ``--deterministic`` costs on this CPU: tokens a second with and without it, side by side in one run.

    python -m atom.benchmarks.cpu_deterministic [--model demo] [--rounds N] [--num-threads N] [--json]

Two engines of the same weights take turns, so that what else the machine does meets both alike; each figure is the
best of all rounds. More than 25 % is called too much.

prefill
    prompt tokens a second of a fresh prompt of 1,024 tokens.
decode
    new tokens a second behind a prompt: (n - 1) tokens over t(n new tokens) - t(1 new token), the prompt in the cache.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from atom.errors import ConfigError

if TYPE_CHECKING:
    from atom import LLMEngine

MAX_COST = 0.25
PREFILL_TOKENS = 1024
NEW_TOKENS = 33


@dataclass(frozen=True)
class Load:
    """Requests that run together, each behind ``context`` tokens; prefill alone where ``new_tokens`` is 1."""

    name: str
    num_seqs: int
    context: int
    new_tokens: int = NEW_TOKENS


LOADS = (
    Load("prefill of 1,024 tokens", 1, PREFILL_TOKENS, 1),
    Load("decode, batch 1 behind 64 tokens", 1, 64),
    Load("decode, batch 1 behind 1,024", 1, 1024),
    Load("decode, batch 1 behind 4,096", 1, 4096),
    Load("decode, batch 16 behind 64", 16, 64),
    Load("decode, batch 16 behind 512", 16, 512),
)


@dataclass
class Cost:
    """Tokens a second of one load."""

    load: str
    plain: float
    deterministic: float

    @property
    def share(self) -> float:
        """Of the speed that is given up."""
        return 1 - self.deterministic / self.plain


class Prompts:
    """Prompts of any length, no two alike."""

    def __init__(self, vocab_size: int):
        self._size = min(vocab_size, 30_000) - 10
        self._next = 1

    def take(self, length: int) -> list[int]:
        self._next += 1
        return [(self._next * 7919 + i * i * 31 + 17 * i) % self._size + 5 for i in range(length)]


def seconds_of(engine: "LLMEngine", prompts: list[list[int]], new_tokens: int) -> float:
    from atom import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def speed(engine: "LLMEngine", load: Load, prompts: list[list[int]]) -> float:
    """Tokens a second. Prompts must be new to the engine for prefill, and known to it for decode."""
    first = seconds_of(engine, prompts, 1)
    if load.new_tokens == 1:
        return load.num_seqs * load.context / first
    # The prompts are cached, but for their last block: what remains of them is in both measurements.
    rest = seconds_of(engine, prompts, load.new_tokens) - first
    return load.num_seqs * (load.new_tokens - 1) / max(1e-9, rest)


def measure(engines: Sequence["LLMEngine"], rounds: int, loads: Sequence[Load] = LOADS) -> list[Cost]:
    """The plain engine comes first in ``engines``, the deterministic one second."""
    prompts = Prompts(30_000)
    costs = []
    for load in loads:
        best = [0.0, 0.0]
        asked: list[list[int]] = []
        for number in range(rounds):
            if load.new_tokens == 1 or not asked:
                asked = [prompts.take(load.context) for _ in range(load.num_seqs)]
                for engine in engines if load.new_tokens > 1 else ():
                    seconds_of(engine, asked, 1)
            for turn in range(2):
                index = (number + turn) % 2  # neither always comes first
                best[index] = max(best[index], speed(engines[index], load, asked))
        costs.append(Cost(load.name, *best))
        print(format_table(costs[-1:]).splitlines()[-1], file=sys.stderr)
    return costs


def format_table(costs: Sequence[Cost]) -> str:
    lines = ["| load | tok/s | deterministic | cost | |", "|---|---|---|---|---|"]
    for cost in costs:
        judged = "too much" if cost.share > MAX_COST else "good"
        lines.append(
            f"| {cost.load} | {cost.plain:.1f} | {cost.deterministic:.1f} | {cost.share:.0%} | {judged} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="model folder, GGUF file or name")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine at each load")
    parser.add_argument("--num-threads", type=int, help="compute threads; default: one a core")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    from atom import LLMEngine

    longest = max(load.context + load.new_tokens for load in LOADS)
    fields = {
        "device": "cpu",
        "max_model_len": longest + 16,
        "max_num_seqs": 16,
        "num_threads": args.num_threads,
    }
    try:
        with (
            LLMEngine(args.model, **fields) as plain,
            LLMEngine(args.model, deterministic=True, **fields) as deterministic,
        ):
            costs = measure((plain, deterministic), args.rounds)
    except ConfigError as error:
        print(f"cpu_deterministic: {error}", file=sys.stderr)
        return 1
    print(format_table(costs))
    if args.json:
        print(json.dumps([asdict(cost) | {"cost": cost.share} for cost in costs]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
