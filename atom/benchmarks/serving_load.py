"""Send the benchmark's requests when they are due, and collect what became of them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from atom.benchmarks.serving_client import Client, Outcome, RequestForm
from atom.benchmarks.serving_data import SampleRequest
from atom.errors import AtomError


class BenchmarkError(AtomError):
    """The server does not do what the benchmark needs."""


@dataclass(frozen=True)
class Load:
    """When requests are sent.

    Attributes:
        request_rate: requests a second on average; infinite sends all at once.
        burstiness: shape of the gamma distribution of the gaps; 1 is a Poisson process, less is burstier.
        max_concurrency: requests under way at most; the others wait, unsent and untimed.
    """

    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None

    def due_times(self, count: int, rng: np.random.Generator) -> list[float]:
        """Seconds after the start at which each request is due; the first at once."""
        if self.request_rate == float("inf"):
            return [0.0] * count
        gaps = rng.gamma(self.burstiness, 1.0 / (self.request_rate * self.burstiness), max(count - 1, 0))
        return [0.0, *np.cumsum(gaps).tolist()][:count]


@dataclass(frozen=True)
class Run:
    """All outcomes, in the order of the requests. Seconds; ``start`` on the clock of ``time.perf_counter``."""

    outcomes: list[Outcome]
    start: float
    duration: float


async def run_load(
    client: Client,
    form: RequestForm,
    requests: Sequence[SampleRequest],
    load: Load,
    rng: np.random.Generator,
    *,
    models: Sequence[str] = (),
    on_done: Callable[[], None] = lambda: None,
) -> Run:
    """Send every request at its time and wait for all answers. ``models``: one is drawn for each request."""
    due = load.due_times(len(requests), rng)
    chosen = (
        [models[i] for i in rng.integers(0, len(models), len(requests))]
        if models
        else [form.model] * len(due)
    )
    bodies = [
        form.body(request.prompt, request.num_output_tokens, model)
        for request, model in zip(requests, chosen, strict=True)
    ]
    slots = asyncio.Semaphore(load.max_concurrency or len(requests) or 1)
    outcomes = [Outcome(request.num_prompt_tokens) for request in requests]

    async def send(body: bytes, outcome: Outcome) -> None:
        async with slots:
            await client.stream(form.path, body, outcome)
        on_done()

    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for at, body, outcome in zip(due, bodies, outcomes, strict=True):
            delay = start + at - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.create_task(send(body, outcome))
    return Run(outcomes, start, time.perf_counter() - start)


async def warm_up(client: Client, form: RequestForm, request: SampleRequest, count: int) -> None:
    """Send one request ``count`` times, one after another. Raises BenchmarkError when it fails."""
    body = form.body(request.prompt, request.num_output_tokens)
    for _ in range(count):
        outcome = Outcome(request.num_prompt_tokens)
        await client.stream(form.path, body, outcome)
        if outcome.error:
            raise BenchmarkError(f"the warm-up request failed: {outcome.error}")


async def control_profile(client: Client, action: str) -> None:
    """``start`` or ``stop`` the server's profiler."""
    try:
        status, body = await client.fetch("POST", f"/{action}_profile")
    except OSError as error:
        raise BenchmarkError(f"POST /{action}_profile failed: {error}") from None
    if status != 200:
        text = body.decode("utf-8", "replace")[:300]
        raise BenchmarkError(
            f"POST /{action}_profile failed (is the server's profiler on?): HTTP {status} {text}"
        )


class SpeculationStats(msgspec.Struct):
    """Counters of ``/debug/mtp_stats``, since the server's start."""

    enabled: bool = False
    total_draft_tokens: int = 0
    total_accepted_tokens: int = 0
    distribution: dict[str, int] = {}

    @property
    def num_steps(self) -> int:
        return sum(self.distribution.values())


async def read_speculation(client: Client) -> SpeculationStats | None:
    """The server's counters; None where it has none."""
    try:
        status, body = await client.fetch("GET", "/debug/mtp_stats")
        stats = msgspec.json.decode(body, type=SpeculationStats) if status == 200 else None
    except (OSError, msgspec.DecodeError):
        return None
    return stats if stats is not None and stats.enabled else None


def accepted_between(
    before: SpeculationStats | None, after: SpeculationStats | None
) -> tuple[float | None, float | None]:
    """Tokens a forward pass and share of drafted tokens accepted, of the time between two readings."""
    if before is None or after is None:
        return None, None
    accepted = after.total_accepted_tokens - before.total_accepted_tokens
    drafted = after.total_draft_tokens - before.total_draft_tokens
    steps = after.num_steps - before.num_steps
    return 1 + accepted / steps if steps > 0 else None, accepted / drafted if drafted > 0 else None
