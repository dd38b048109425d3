"""What a person at a terminal sees while they wait: start-up phases and the answers being generated."""

import sys
from collections.abc import Callable

from tqdm import tqdm

from atom.model_engine.outputs import RequestOutput


def _is_wanted(choice: bool | None) -> bool:
    return sys.stderr.isatty() if choice is None else choice


class StartupProgress:
    """One bar a start-up phase, with what the phase is at behind it. ``enabled=None`` shows it on a terminal only."""

    def __init__(self, enabled: bool | None = None):
        self._enabled = _is_wanted(enabled)
        self._phase = ""
        self._bar: tqdm | None = None

    def update(self, phase: str, fraction: float) -> None:
        """``phase``, as in ``record graphs (decode 8)``, has reached ``fraction`` in [0, 1]."""
        if not self._enabled:
            return
        name, _, detail = phase.removesuffix(")").partition(" (")
        if name != self._phase:
            self._finish()
            self._phase = name
            bar_format = "{desc:<16}{percentage:3.0f}%|{bar:30}| {elapsed}{postfix}"
            self._bar = tqdm(total=1.0, desc=name, bar_format=bar_format, file=sys.stderr)
        assert self._bar is not None
        self._bar.set_postfix_str(detail, refresh=False)
        self._bar.update(max(0.0, fraction - self._bar.n))

    def _finish(self) -> None:
        if self._bar is not None:
            self._bar.update(1.0 - self._bar.n)
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "StartupProgress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._finish()


class GenerationBar:
    """Counts finished answers and shows the token rate. ``on_delta`` is called from the output thread."""

    def __init__(self, num_answers: int, enabled: bool | None = None):
        self._num_tokens = 0
        self._bar: tqdm | None = None
        if _is_wanted(enabled):
            self._bar = tqdm(total=num_answers, desc="generate", unit="answer", file=sys.stderr)

    @property
    def on_delta(self) -> Callable[[RequestOutput], None] | None:
        """What is to see each delta; None where nobody looks."""
        return None if self._bar is None else self._update

    def _update(self, output: RequestOutput) -> None:
        self._num_tokens += len(output.output_tokens)
        elapsed = self._bar.format_dict["elapsed"] or 1e-9
        self._bar.set_postfix_str(f"{self._num_tokens / elapsed:.1f} tok/s", refresh=False)
        self._bar.update(1 if output.finished else 0)

    def __enter__(self) -> "GenerationBar":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()
