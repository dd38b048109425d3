"""Time what the server does to text: tokenizing the next turn of a long conversation, and detokenizing answers.

    python -m atom.benchmarks.text_pipeline [--model MODEL] [--json]

Each figure is the median of several runs, with and without what ``ATOM_TOKENIZE_CACHE_MB`` and
``ATOM_DETOKENIZER_DELTA_REUSE`` turn on.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from tqdm import tqdm

from atom.errors import AtomError
from atom.model_engine.detokenizer import DetokenizerFactory
from atom.model_loader.model_files import ModelFiles
from atom.model_loader.tokenize_cache import enable_tokenize_cache
from atom.model_loader.tokenizer import Tokenizer
from atom.utils import envs

CONVERSATION_CHARS = 200_000
TURN_CHARS = 2_000
UPDATE_TOKENS = (1, 64)
NUM_RUNS = 5
_NUM_UNMEASURED = 4  # conversations; the cache compares its first prompts with the plain encoder
_TEXT = """the of and to in is that it was for on are as with they be at one have this from or had by hot but some
what there we can out other were all your when up use word how said an each she which do their time if will way
about many then them would write like so these her long make thing see him two has look more day could go come
did function return value = x[i] + 1; if (a == b) { print("result"); } naïve résumé Größe 東京 привет 42 3.14"""


@dataclass(frozen=True)
class Figure:
    """``plain`` and ``reused``: seconds without and with reuse."""

    name: str
    plain: float
    reused: float


def conversation(tokenizer: Tokenizer, seed: int) -> tuple[str, str]:
    """Two successive prompts: one of ``CONVERSATION_CHARS``, and the same with two more messages."""
    rng = random.Random(seed)
    vocabulary = _TEXT.split()
    marks = [tokenizer.backend.id_to_token(i) or "" for i in sorted(tokenizer.special_ids)]
    mark = next(
        (text for text in ("<|im_start|>", "<start_of_turn>", "<|user|>") if text in marks),
        marks[0] if marks else "\n",
    )

    def message() -> str:
        size, words = 0, []
        while size < TURN_CHARS:
            words.append(rng.choice(vocabulary) + ("\n" if rng.random() < 0.02 else ""))
            size += len(words[-1]) + 1
        return f"{mark}{' '.join(words)}"

    text = ""
    while len(text) < CONVERSATION_CHARS:
        text += message()
    return text, text + message() + message()


def measure_tokenizing(tokenizer: Tokenizer, num_runs: int) -> list[Figure]:
    """A conversation seen for the first time, and its next turn."""
    enable_tokenize_cache(tokenizer, envs.ATOM_TOKENIZE_CACHE_MB)
    cache = tokenizer.cache
    if cache is None:
        return []
    times: dict[tuple[int, bool], list[float]] = {}
    for seed in range(_NUM_UNMEASURED + num_runs):
        for turn, prompt in enumerate(conversation(tokenizer, seed)):
            found = {}
            for reused in (False, True):
                tokenizer.cache = cache if reused else None
                began = time.perf_counter()
                found[reused] = tokenizer.encode(prompt, add_special_tokens=False)
                if seed >= _NUM_UNMEASURED:
                    times.setdefault((turn, reused), []).append(time.perf_counter() - began)
            if found[False] != found[True]:
                raise RuntimeError(f"turn {turn} of conversation {seed} is tokenized differently")
    names = (f"tokenize {CONVERSATION_CHARS:,} characters, new", "tokenize the next turn")
    median = {key: statistics.median(values) for key, values in times.items()}
    return [Figure(name, median[turn, False], median[turn, True]) for turn, name in enumerate(names)]


def measure_detokenizing(tokenizer: Tokenizer, num_tokens: int, num_runs: int) -> list[Figure]:
    """An update of an answer of ``num_tokens``."""
    ids = tokenizer.encode(conversation(tokenizer, 0)[0], add_special_tokens=False)[:num_tokens]
    figures = []
    for size in UPDATE_TOKENS:
        seconds, texts = {}, {}
        for mode in ("off", "auto"):
            with _environment("ATOM_DETOKENIZER_DELTA_REUSE", mode):
                factory = DetokenizerFactory(tokenizer)
            updates = [ids[at : at + size] for at in range(0, len(ids), size)]

            def stream(factory: DetokenizerFactory = factory, updates: list[list[int]] = updates) -> str:
                detokenizer = factory.create()
                return "".join([detokenizer.update(update) for update in updates]) + detokenizer.update(
                    [], True
                )

            texts[mode] = stream()
            seconds[mode] = _median_time(stream, num_runs) / len(updates)
        if texts["off"] != texts["auto"]:
            raise RuntimeError("the answer is detokenized differently")
        figures.append(Figure(f"detokenize an update of {size} tokens", seconds["off"], seconds["auto"]))
    return figures


def _median_time(run: Callable[[], object], num_runs: int) -> float:
    times = []
    for _ in range(num_runs):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def format_table(figures: list[Figure]) -> str:
    lines = [f"{'':<40}{'plain':>12}{'reused':>12}{'gain':>9}"]
    for figure in figures:
        unit, scale = ("ms", 1e3) if figure.plain > 1e-3 else ("us", 1e6)
        cells = f"{figure.plain * scale:>9.2f} {unit}{figure.reused * scale:>9.2f} {unit}"
        lines.append(f"{figure.name:<40}{cells}{figure.plain / figure.reused:>8.1f}x")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="demo", help="whose tokenizer: a folder, a .gguf file, a hub id or demo"
    )
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help="runs of each figure")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args(argv)
    try:
        tokenizer = ModelFiles.resolve(args.model).load_tokenizer()
    except AtomError as error:
        print(f"text_pipeline: {error}", file=sys.stderr)
        return 1
    figures: list[Figure] = []
    parts: list[Callable[[], list[Figure]]] = [
        lambda: measure_tokenizing(tokenizer, args.runs),
        lambda: measure_detokenizing(tokenizer, 20_000, args.runs),
    ]
    for part in tqdm(parts, desc="text pipeline", disable=not sys.stderr.isatty()):
        figures += part()
    print(format_table(figures))
    if tokenizer.cache is None:
        print("The tokenization cache does not serve this tokenizer, or ATOM_TOKENIZE_CACHE_MB is 0.")
    if args.json:
        print(json.dumps([asdict(figure) for figure in figures]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
