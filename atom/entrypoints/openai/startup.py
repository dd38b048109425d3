"""How long the start of the server took, phase by phase, from the creation of its process to the open port."""

import time
from typing import TYPE_CHECKING

from atom.runtime.startup_phases import process_age_s

if TYPE_CHECKING:
    from atom.model_engine.llm_engine import LLMEngine

SERVER_IMPORTS = "server start"  # before the engine process was created
UNEXPLAINED = "unexplained"  # of the engine's start: between what it measured and what the server waited
OPEN_PORT = "open port"


class StartupClock:
    """Joins the server's own phases with those of the engine process, which starts in between.

    The phases sum to the wall time; what none of them covers is a phase of its own.
    """

    def __init__(self) -> None:
        self.created_at = time.monotonic() - process_age_s()

    def phases(self, engine: "LLMEngine", engine_ready_at: float, now: float) -> dict[str, float]:
        """Seconds of each phase.

        Args:
            engine_ready_at: when the engine was handed over; times are ``time.monotonic()``.
            now: when the port opened.
        """
        engine_phases = engine.info().get("startup_phases", {})
        started_at = getattr(engine, "start_time", engine_ready_at)
        rest = engine_ready_at - started_at - sum(engine_phases.values())
        return {
            SERVER_IMPORTS: started_at - self.created_at,
            **engine_phases,
            UNEXPLAINED: max(0.0, rest),
            OPEN_PORT: now - engine_ready_at,
        }
