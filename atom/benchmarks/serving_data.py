"""Prompts of the serving benchmark: random token ids of given lengths, or conversations from a ShareGPT file."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atom.errors import ConfigError
from atom.model_loader.tokenizer import Tokenizer

BATCH_SIZE = 4096  # prompts tokenized together
_MAX_ROUNDS = 10
# Conversations of these sizes are left out, as serving benchmarks have done since the first.
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048

Render = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """``num_prompt_tokens``: as the server counts them, what the tokenizer puts around a text included."""

    prompt: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class RandomShape:
    """Lengths are uniform in [floor(len x range_ratio), len]; the shared prefix comes on top."""

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 1.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        for name, low in (("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
            value = getattr(self, name)
            if value < low:
                raise ConfigError(f"--random-{name.replace('_', '-')} must be at least {low}, got {value}")
        if not 0 <= self.range_ratio <= 1:
            raise ConfigError(f"--random-range-ratio must be in [0, 1], got {self.range_ratio}")

    def lengths(self, rng: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        """Input and output lengths of ``count`` requests, at least 1."""
        inputs, outputs = (
            np.maximum(rng.integers(math.floor(length * self.range_ratio), length + 1, count), 1).tolist()
            for length in (self.input_len, self.output_len)
        )
        return inputs, outputs


def random_requests(
    tokenizer: Tokenizer,
    count: int,
    shape: RandomShape,
    seed: int,
    *,
    adds_special_tokens: bool = True,
    render: Render | None = None,
    is_rendered_here: bool = True,
) -> list[SampleRequest]:
    """``count`` prompts of ordinary tokens whose text tokenizes to the lengths asked for.

    Args:
        adds_special_tokens: the server puts BOS and the like around the prompt; they are part of the length.
        render: writes a user message as the chat template does; the template's tokens are part of the length.
        is_rendered_here: the prompt is the rendered text; otherwise the server renders the message.
    """
    rng = np.random.default_rng(seed)
    ordinary = np.asarray([i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids])
    if not len(ordinary):
        raise ConfigError("the tokenizer has no ordinary tokens to make prompts of")
    prefix = ordinary[rng.integers(0, len(ordinary), shape.prefix_len)].tolist()
    input_lens, output_lens = shape.lengths(rng, count)
    offsets = rng.integers(0, len(ordinary), count).tolist()
    around = len(tokenizer.encode(render("") if render else "", adds_special_tokens))

    requests: list[SampleRequest] = []
    for start in range(0, count, BATCH_SIZE):
        batch = range(start, min(start + BATCH_SIZE, count))
        targets = [len(prefix) + max(input_lens[i] - around, 1) for i in batch]
        fillers = [ordinary[(offsets[i] + i + np.arange(2 * input_lens[i])) % len(ordinary)] for i in batch]
        texts = _fit(tokenizer, prefix, fillers, targets)
        prompts = [render(text) for text in texts] if render else texts
        sizes = [len(ids) for ids in tokenizer.encode_batch(prompts, adds_special_tokens)]
        sent = prompts if is_rendered_here else texts
        rows = zip(sent, sizes, (output_lens[i] for i in batch), strict=True)
        requests += [SampleRequest(*row) for row in rows]
    return requests


def _fit(tokenizer: Tokenizer, prefix: list[int], fillers: list[np.ndarray], targets: list[int]) -> list[str]:
    """Texts of ``targets`` tokens. Decoding and encoding may join or split tokens, so cut or fill up and repeat."""
    ids = [
        prefix + filler.tolist()[: max(0, target - len(prefix))]
        for filler, target in zip(fillers, targets, strict=True)
    ]
    used = [max(0, len(i) - len(prefix)) for i in ids]
    texts = [""] * len(ids)
    pending = range(len(ids))
    for _ in range(_MAX_ROUNDS):
        for i in pending:
            texts[i] = tokenizer.decode(ids[i])
        encoded = tokenizer.encode_batch([texts[i] for i in pending], add_special_tokens=False)
        wrong = []
        for i, again in zip(pending, encoded, strict=True):
            missing = targets[i] - len(again)
            if missing:
                wrong.append(i)
                more = fillers[i][np.arange(used[i], used[i] + max(missing, 0)) % len(fillers[i])]
                used[i] += len(more)
                ids[i] = again[: targets[i]] + more.tolist()
        pending = wrong
        if not pending:
            break
    return texts


def sharegpt_requests(
    tokenizer: Tokenizer,
    path: Path,
    count: int,
    seed: int,
    *,
    output_len: int | None = None,
    adds_special_tokens: bool = True,
) -> list[SampleRequest]:
    """Prompts and answer lengths from a JSON list of ``{"conversations": [{"value": ...}, ...]}``.

    The first two turns of a conversation are a prompt and its answer. Conversations are taken in a seeded
    random order, those that are very short or long left out, and from the start again where the file has
    fewer than ``count``.

    Args:
        output_len: tokens to generate; the answer's own length when None.

    Raises:
        ConfigError: the file cannot be read, or holds no conversation that fits.
    """
    try:
        data = json.loads(path.read_bytes())
        turns = [
            [turn["value"] for turn in row.get("conversations", row.get("conversation"))] for row in data
        ]
    except OSError as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"--dataset-path {path} is not a list of conversations ({what})") from None
    pairs = [(texts[0], texts[1]) for texts in turns if len(texts) >= 2]
    order = np.random.default_rng(seed).permutation(len(pairs))
    requests: list[SampleRequest] = []
    for start in range(0, len(pairs), BATCH_SIZE):
        chosen = [pairs[i] for i in order[start : start + BATCH_SIZE]]
        prompts = tokenizer.encode_batch([prompt for prompt, _ in chosen], adds_special_tokens)
        answers = tokenizer.encode_batch([answer for _, answer in chosen], add_special_tokens=False)
        for (prompt, _), ids, answer in zip(chosen, prompts, answers, strict=True):
            num_output = output_len or len(answer)
            too_short = len(ids) < _MIN_TOKENS or num_output < _MIN_TOKENS and output_len is None
            if too_short or len(ids) > _MAX_PROMPT_TOKENS or len(ids) + num_output > _MAX_TOTAL_TOKENS:
                continue
            requests.append(SampleRequest(prompt, len(ids), num_output))
            if len(requests) == count:
                return requests
    if not requests:
        raise ConfigError(
            f"--dataset-path {path} holds no conversation of {_MIN_TOKENS} to {_MAX_PROMPT_TOKENS} prompt tokens"
        )
    return [requests[i % len(requests)] for i in range(count)]
