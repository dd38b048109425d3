"""A child for test_runtime: writes a file, then waits."""

import os
import time
from pathlib import Path

import msgspec

from atom.runtime.process import read_child_config


class Settings(msgspec.Struct):
    file: str
    seconds: float


def main() -> None:
    settings, _ = read_child_config(Settings)
    Path(settings.file + ".pid").write_text(str(os.getpid()))
    Path(settings.file).write_text("hello")
    time.sleep(settings.seconds)


if __name__ == "__main__":
    main()
