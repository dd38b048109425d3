"""Record a torch profiler trace of offline generation.

    python -m atom.examples.profile_offline --model demo --input-length 128 --output-length 32 --bs 4

Traces (gzip Chrome format) go to ``--torch-profiler-dir``, by default ``./profiler_traces``.
"""

import random
import sys

from atom.model_engine.arg_utils import EngineArgs
from atom.sampling_params import SamplingParams
from atom.utils.cli_parser import FlexibleArgumentParser

DEFAULT_DIRECTORY = "./profiler_traces"
TEXT = "The history of computing began long before the modern machine, with tools that counted. "


def main(argv: list[str] | None = None) -> int:
    parser = FlexibleArgumentParser(prog="atom.examples.profile_offline", description=__doc__.splitlines()[0])
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--input-length", type=int, default=128, help="Tokens of each prompt.")
    parser.add_argument("--output-length", type=int, default=32, help="Tokens of each answer.")
    parser.add_argument("--bs", type=int, default=1, help="Prompts that run together.")
    parser.add_argument("--random-input", action="store_true", help="Random ids instead of English text.")
    args = parser.parse_args(argv)
    engine_args = EngineArgs.from_cli_args(args)
    engine_args.torch_profiler_dir = engine_args.torch_profiler_dir or DEFAULT_DIRECTORY
    params = SamplingParams(temperature=0.0, max_tokens=args.output_length, ignore_eos=True)
    with engine_args.create_engine() as engine:
        prompts = [_prompt(engine, args.input_length, args.random_input, seed) for seed in range(args.bs)]
        engine.generate(prompts, params)  # warm: the trace shows steady steps, not first calls
        engine.call_utility("clear_kv_cache")
        engine.start_profile()
        answers = engine.generate(prompts, params)
        for path in engine.stop_profile():
            print(f"trace: {path}")
        num_tokens = sum(answer["num_tokens_output"] for answer in answers)
        print(
            f"{num_tokens} tokens, TTFT {answers[0]['ttft'] * 1e3:.1f} ms, TPOT {answers[0]['tpot'] * 1e3:.2f} ms"
        )
    return 0


def _prompt(engine, length: int, is_random: bool, seed: int) -> list[int]:
    """``length`` token ids, different for each seed so that no prompt hits another's cache."""
    if is_random:
        rng = random.Random(seed)
        return [rng.randrange(engine.vocab_size) for _ in range(length)]
    ids = engine.tokenizer.encode(f"Chapter {seed + 1}. " + TEXT * (length // 8 + 1))
    return ids[:length]


if __name__ == "__main__":
    sys.exit(main())
