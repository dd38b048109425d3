"""Start-up, timed without gaps: each phase ends where the next begins, so they sum to the wall time."""

import os
import time


def process_age_s() -> float:
    """Seconds since this process was created (kernel's record; 0 where it keeps none)."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


class StartupPhases:
    """Names consecutive phases and how long each took.

    Args:
        since_creation: count from the creation of this process on, as the phase ``imports``; otherwise the
            clock starts with the first ``begin``.
    """

    def __init__(self, *, since_creation: bool = False):
        self.seconds: dict[str, float] = {}
        self._name = "imports" if since_creation else ""
        self._since = time.monotonic() - (process_age_s() if since_creation else 0.0)

    def begin(self, name: str) -> None:
        """End the running phase and begin ``name``."""
        self._close()
        self._name = name

    def end(self) -> dict[str, float]:
        """End the last phase; seconds by phase, in order."""
        self._close()
        self._name = ""
        return self.seconds

    def _close(self) -> None:
        now = time.monotonic()
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._since = now


def format_phases(seconds: dict[str, float]) -> str:
    """``imports 1.21 s, load 0.80 s, ... = 2.43 s``."""
    parts = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
    return f"{parts} = {sum(seconds.values()):.2f} s"
