"""Generate for a few prompts and print text, times and what ran.

    python -m atom.examples.simple_inference --model demo --temperature 0 --max-tokens 64

Takes every engine flag. Prompts are rendered through the model's chat template where it has one.
"""

import sys
import time

from atom.entrypoints.openai.chat_template import ChatTemplate
from atom.model_engine.arg_utils import EngineArgs
from atom.model_engine.llm_engine import LLMEngine
from atom.sampling_params import SamplingParams
from atom.utils.cli_parser import FlexibleArgumentParser

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at 100 degrees Celsius because",
]


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()
    parser = FlexibleArgumentParser(
        prog="atom.examples.simple_inference", description=__doc__.splitlines()[0]
    )
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--temperature", type=float, default=0.6, help="0 always takes the likeliest token.")
    parser.add_argument("--max-tokens", type=int, default=300, help="Most tokens of an answer.")
    parser.add_argument("--prompt", action="append", help="Used instead of the built-in prompts; repeatable.")
    args = parser.parse_args(argv)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with EngineArgs.from_cli_args(args).create_engine() as engine:
        ready_s = time.monotonic() - started
        prompts = args.prompt or PROMPTS
        is_profiling = bool(engine.config.torch_profiler_dir)
        if is_profiling:
            engine.start_profile()
        began = time.monotonic()
        answers = engine.generate(render_prompts(engine, prompts), params)
        wall_s = time.monotonic() - began
        if is_profiling:
            for path in engine.stop_profile():
                print(f"trace: {path}")
        for prompt, answer in zip(prompts, answers, strict=True):
            print(format_answer(prompt, answer))
        print_summary(engine, answers, ready_s, wall_s)
    return 0


def render_prompts(engine: LLMEngine, prompts: list[str]) -> list[str | list[int]]:
    """Each prompt as one user message of the model's chat template; as it is where the model has none."""
    tokenizer = engine.tokenizer
    if tokenizer.chat_template is None:
        return list(prompts)
    tokens = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}
    template = ChatTemplate(tokenizer.chat_template, tokens=tokens)
    texts = [template.render([{"role": "user", "content": prompt}]) for prompt in prompts]
    return tokenizer.encode_batch(texts, add_special_tokens=False)  # the template wrote them already


def format_answer(prompt: str, answer: dict) -> str:
    """A prompt, its answer, and how fast it came."""
    rate = 1 / answer["tpot"] if answer["tpot"] else 0.0
    return (
        f"\nPrompt: {prompt!r}\nText:   {answer['text']!r}\n"
        f"        {answer['num_tokens_output']} tokens, ended by {answer['finish_reason']}, "
        f"TTFT {answer['ttft'] * 1e3:.0f} ms, {rate:.1f} tokens/s in this stream"
    )


def print_summary(engine: LLMEngine, answers: list[dict], ready_s: float, wall_s: float) -> None:
    """What ran, and the throughput of the whole batch."""
    info = engine.info()
    num_tokens = sum(answer["num_tokens_output"] for answer in answers)
    backends = ", ".join(f"{name}: {choice}" for name, choice in info["backends"].items())
    print(
        f"\n{num_tokens} tokens for {len(answers)} prompts in {wall_s:.2f} s = {num_tokens / wall_s:.1f} tokens/s; "
        f"ready after {ready_s:.2f} s\n"
        f"device {info['device']}, dtype {info['dtype']}, {backends}"
    )


if __name__ == "__main__":
    sys.exit(main())
