"""What structured output costs a step: following the grammar, its mask, and the mask on the logits.

    python -m atom.benchmarks.structured_output [--model demo]

An answer is fed to matchers of one grammar token by token, as the engine does it. Medians over its tokens,
one thread; the logits are random and on the host.
"""

import argparse
import json
import statistics
import sys
import time

import numpy as np
import torch
from tqdm import tqdm

from atom.core import TokenMasks
from atom.guide import Guide
from atom.model_engine.structured.backend import BACKENDS, load_backend
from atom.model_engine.structured.guide_compiler import make_vocabulary
from atom.model_loader.model_files import ModelFiles
from atom.model_ops.token_masks import apply_masks

ROWS = (1, 16)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "notes": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["name", "age"],
}
ANSWER = (
    '{"name": "Ada Lovelace, a mathematician", "age": 36, "tags": ["analytical engine", "first program"], '
    '"notes": [{"letter": "G", "topic": "the numbers of Bernoulli", "pages": [1, 2, 3], "printed": true}]}'
)


def measure(library, tokenizer, vocab_size: int, num_rows: int, rounds: int) -> dict[str, float]:
    """Median microseconds a step of ``num_rows`` guided rows, by part."""
    began = time.perf_counter_ns()
    data = library.compile(Guide(kind="json_schema", text=json.dumps(SCHEMA)))
    compiled = time.perf_counter_ns()
    grammar = library.load(data)
    parts = {"compile": (compiled - began) / 1e3, "load": (time.perf_counter_ns() - compiled) / 1e3}
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    bits = np.zeros((num_rows, -(-vocab_size // 32)), np.int32)
    masks = TokenMasks(list(range(num_rows)), bits)
    logits = torch.randn(num_rows, vocab_size)
    times: dict[str, list[float]] = {"mask": [], "apply": [], "accept": []}
    for _ in range(rounds):
        matchers = [grammar.matcher() for _ in range(num_rows)]
        for token in ids:
            stamps = [time.perf_counter_ns()]
            for row, matcher in enumerate(matchers):
                matcher.fill_mask(bits, row)
            stamps.append(time.perf_counter_ns())
            apply_masks(logits, masks)
            stamps.append(time.perf_counter_ns())
            if not all(matcher.accept(token) for matcher in matchers):
                raise RuntimeError(f"{library.name} refuses token {token} of the answer")
            stamps.append(time.perf_counter_ns())
            for name, start, end in zip(times, stamps, stamps[1:], strict=False):
                times[name].append((end - start) / 1e3)
            logits.fill_(1.0)
    return parts | {name: statistics.median(values) for name, values in times.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="whose vocabulary to mask")
    parser.add_argument("--rounds", type=int, default=5, help="how often the answer is repeated")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    tokenizer = ModelFiles.resolve(args.model).load_tokenizer()
    vocabulary = make_vocabulary(tokenizer, tokenizer.vocab_size)
    print(f"{len(vocabulary)} ids; microseconds (medians over the tokens of a JSON answer)")
    print(
        f"{'library':<12}{'rows':>5}{'mask':>9}{'apply':>9}{'accept':>9}{'step':>9}{'compile':>10}{'load':>9}"
    )
    for name in tqdm(BACKENDS, desc="structured output", disable=not sys.stderr.isatty()):
        library = load_backend(name, vocabulary)
        for num_rows in ROWS:
            parts = measure(library, tokenizer, len(vocabulary), num_rows, args.rounds)
            step = sum(parts[part] for part in ("mask", "apply", "accept"))
            cells = [parts["mask"], parts["apply"], parts["accept"], step]
            row = "".join(f"{cell:>9.1f}" for cell in cells)
            print(f"{name:<12}{num_rows:>5}{row}{parts['compile']:>10.0f}{parts['load']:>9.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
