"""The work folder of the peers: one virtual environment each, what was built, and what every step printed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from atom.utils.cache_folder import private_cache_folder

STEP_TIMEOUT_S = 3600.0
_REASON_LENGTH = 200  # characters of a failed step's output that a reason shows


class PeerUnavailable(Exception):
    """A peer cannot be installed or run here; the message is the reason that is reported."""


class Workspace:
    """A folder that a benchmark may fill with environments and builds; kept between runs.

    Args:
        folder: default: ``peers`` in ATOM's cache folder.
    """

    def __init__(self, folder: Path | None = None):
        if folder is None:
            folder = private_cache_folder("peers")
        self.folder = folder.resolve()
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath(*parts)

    def python(self, environment: str) -> str:
        """The interpreter of a peer's virtual environment."""
        return str(self.path(f"venv-{environment}", "bin", "python"))

    def program(self, environment: str, name: str) -> str:
        return str(self.path(f"venv-{environment}", "bin", name))

    def make_environment(self, name: str, log: str) -> None:
        if not self.path(f"venv-{name}", "bin", "python").exists():
            self.run(log, [sys.executable, "-m", "venv", str(self.path(f"venv-{name}"))])

    def pip(self, environment: str, log: str, *args: str) -> None:
        """``pip`` of a virtual environment, with its programs first in the path (build tools are found there)."""
        command = [self.python(environment), "-m", "pip", "--disable-pip-version-check", *args]
        self.run(log, command, path_first=self.path(f"venv-{environment}", "bin"))

    def run(
        self,
        log: str,
        command: Iterable[str],
        *,
        environment: Mapping[str, str] | None = None,
        path_first: Path | None = None,
    ) -> None:
        """Run a step, its output appended to ``logs/LOG.log``. Raises PeerUnavailable with the last line."""
        env = dict(os.environ) | {"HF_HUB_OFFLINE": "1"} | dict(environment or {})
        if path_first is not None:
            env["PATH"] = f"{path_first}{os.pathsep}{env.get('PATH', '')}"
        command = list(command)
        file = self.path("logs", f"{log}.log")
        with file.open("ab") as output:
            output.write(f"\n$ {' '.join(command)}\n".encode())
            output.flush()
            start = output.tell()
            try:
                result = subprocess.run(
                    command,
                    cwd=self.folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=STEP_TIMEOUT_S,
                )
            except FileNotFoundError as error:
                raise PeerUnavailable(f"{command[0]} is not installed") from error
            except subprocess.TimeoutExpired as error:
                raise PeerUnavailable(f"{_name(command)} took more than {STEP_TIMEOUT_S:.0f} s") from error
        if result.returncode:
            with file.open("rb") as written:
                written.seek(start)
                text = written.read().decode(errors="replace")
            raise PeerUnavailable(f"{_name(command)} failed: {last_line(text)} ({file})")

    def is_done(self, stamp: str, facts: Mapping[str, object]) -> bool:
        """Whether ``facts`` were stamped: what they describe is there as it was made."""
        try:
            return json.loads(self._stamp(stamp).read_text()) == dict(facts)
        except (OSError, ValueError):
            return False

    def mark_done(self, stamp: str, facts: Mapping[str, object]) -> None:
        self._stamp(stamp).write_text(json.dumps(dict(facts), indent=2) + "\n")

    def _stamp(self, name: str) -> Path:
        return self.path(f"installed-{name}.json")


def last_line(text: str) -> str:
    """The last line that says something, an error where there is one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1][:_REASON_LENGTH]


def _name(command: list[str]) -> str:
    parts = [Path(command[0]).name, *command[1:4]]
    return " ".join(part for part in parts if not part.startswith("-"))
