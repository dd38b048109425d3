"""Time the host's share of a decode step: everything but the model.

    python -m atom.benchmarks.host_overhead [--json]

A worker that answers at once stands in for the model. A step is measured from scheduling to the moment its
tokens are Python integers again in the front end: schedule, pack the input, commit, encode the message,
send it through a Unix-domain socket, receive and decode it. Medians over many steps, one thread. The row "device" has
the calls that a runner makes for a GPU in it, as far as they are not the driver's (``instant_device``). Then the front
end alone, see ``front_end``, and what a whole request costs beside its computation, see ``request_overhead``.
"""

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq
from tqdm import tqdm

from atom.benchmarks import front_end
from atom.config import Config
from atom.core import BatchOutput, ScheduledBatch
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.messages import AddRequests, FromEngine, NewRequest, StepOutput
from atom.model_engine.runner.scripted_worker import ScriptedWorker
from atom.model_engine.runner.worker import Worker
from atom.model_engine.scheduling.prefix_hash import hash_prompt, mix_seed
from atom.sampling_params import SamplingParams

BATCH_SIZES = (1, 32, 256)
BUDGET_US = {1: 60, 32: 80, 256: 150}  # docs/performance.md; twice that is an alarm
# Loop, prefix cache, and whether the runner's work for a device is in it.
ROWS = [(loop, cached, False) for loop in ("plain", "overlapped") for cached in (False, True)]
ROWS.append(("overlapped", False, True))
_NAME = 38  # columns
PROMPT_TOKENS = 64
BLOCK_SIZE = 16


class ConstantWorker(ScriptedWorker):
    """Every sequence goes on with id 7."""

    def wait(self, handle: ScheduledBatch) -> BatchOutput:
        return BatchOutput([7] * len(handle.seqs))


@dataclass(frozen=True)
class Result:
    loop: str
    prefix_cache: bool
    batch_size: int
    us_per_step: float
    has_device: bool = False


class Loopback:
    """A Unix-domain socket pair: what the engine emits is received and decoded at once, and dropped."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="atom-bench-")
        address = f"ipc://{self._folder.name}/output"
        self._pull = self._context.socket(zmq.PULL)
        self._pull.bind(address)
        self._push = self._context.socket(zmq.PUSH)
        self._push.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.num_tokens = 0

    def emit(self, message: FromEngine) -> None:
        self._push.send(self._encoder.encode(message))
        received = self._decoder.decode(self._pull.recv())
        if isinstance(received, StepOutput):
            np.frombuffer(received.ids, np.int64).tolist()
            self.num_tokens += len(np.frombuffer(received.token_ids, np.int32).tolist())

    def close(self) -> None:
        self._push.close(linger=0)
        self._pull.close(linger=0)
        self._context.term()
        self._folder.cleanup()


def measure(
    loop: str, prefix_cache: bool, batch_size: int, num_steps: int, has_device: bool = False
) -> Result:
    """Median microseconds of a steady decode step of ``batch_size`` requests.

    ``has_device``: with what the runner does for a device (``instant_device``), the launches themselves left out.
    """
    config = Config.build(
        "scripted",
        loop=loop,
        enable_prefix_caching=prefix_cache,
        max_num_seqs=max(BATCH_SIZES),
        max_num_batched_tokens=PROMPT_TOKENS * max(BATCH_SIZES),
        max_model_len=8192,
        kv_cache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=max(BATCH_SIZES) * (2 * num_steps + PROMPT_TOKENS) // BLOCK_SIZE + 1024,
        prefix_hash_seed=1,
    )
    loopback = Loopback()
    core = EngineCore(config, loopback.emit, worker=_worker(config, has_device))
    core.start(lambda phase, fraction: None)
    core.handle(_requests(batch_size, prefix_cache, 2 * num_steps + 100))
    for _ in range(num_steps // 4 + 10):
        core.step()
    gc.collect()
    gc.freeze()
    before = loopback.num_tokens
    times = []
    for _ in range(num_steps):
        began = time.perf_counter_ns()
        core.step()
        times.append(time.perf_counter_ns() - began)
    gc.unfreeze()
    if loopback.num_tokens - before != num_steps * batch_size:
        raise RuntimeError(
            f"{loopback.num_tokens - before} tokens arrived, {num_steps * batch_size} were due"
        )
    core.close()
    loopback.close()
    return Result(loop, prefix_cache, batch_size, statistics.median(times) / 1e3, has_device)


def _worker(config: Config, has_device: bool) -> Worker:
    if not has_device:
        return ConstantWorker(config)
    from atom.benchmarks.instant_device import InstantRunner  # imports torch

    return InstantRunner(config)


def _requests(batch_size: int, prefix_cache: bool, max_tokens: int) -> AddRequests:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)
    seed = mix_seed(1)
    message = AddRequests([], [])
    for i in range(batch_size):
        ids = [1000 + (i * 131 + j) % 50_000 for j in range(PROMPT_TOKENS)]
        data = np.asarray(ids, np.int32).tobytes()
        message.requests.append(
            NewRequest(i + 1, data, params, [1], max_tokens, time.monotonic(), hash_seed=seed)
        )
        message.chains.append(hash_prompt(ids, BLOCK_SIZE, seed) if prefix_cache else None)
    return message


def run(num_steps: int, show_progress: bool) -> list[Result]:
    cases = [(*row, size) for row in ROWS for size in BATCH_SIZES]
    return [
        measure(loop, cached, size, num_steps, has_device)
        for loop, cached, has_device, size in tqdm(cases, desc="host overhead", disable=not show_progress)
    ]


def format_table(results: list[Result]) -> str:
    """Microseconds a step, one row a loop and cache setting."""
    lines = [f"{'us per decode step':<{_NAME}}" + "".join(f"{f'{n} requests':>14}" for n in BATCH_SIZES)]
    for loop, cached, has_device in ROWS:
        row = {
            r.batch_size: r.us_per_step
            for r in results
            if (r.loop, r.prefix_cache, r.has_device) == (loop, cached, has_device)
        }
        name = f"{loop}, prefix cache {'on' if cached else 'off'}{', device' if has_device else ''}"
        lines.append(f"{name:<{_NAME}}" + "".join(f"{row[n]:>14.1f}" for n in BATCH_SIZES))
    lines.append(f"{'budget':<{_NAME}}" + "".join(f"{BUDGET_US[n]:>14}" for n in BATCH_SIZES))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--steps", type=int, default=1000, help="steps measured per case")
    args = parser.parse_args(argv)
    logging.getLogger("atom").setLevel(logging.WARNING)
    results = run(args.steps, show_progress=sys.stderr.isatty())
    print(format_table(results))
    streamed = front_end.run()
    print("\n" + front_end.format_table(streamed))
    from atom.benchmarks import request_overhead  # imports torch

    requests = request_overhead.run()
    print("\n" + request_overhead.format_table(requests))
    if args.json:
        chosen = {
            str(r.batch_size): r.us_per_step
            for r in results
            if r.loop == "overlapped" and r.prefix_cache and not r.has_device
        }
        told = {
            "us_per_step": chosen,
            "all": [msgspec.to_builtins(r) for r in results],
            "streamed": [msgspec.to_builtins(r) for r in streamed],
            "requests": [msgspec.to_builtins(r) for r in requests],
        }
        print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
