"""A parent for test_runtime: starts ``child`` and waits to be killed."""

import msgspec

from atom.runtime.process import ChildProcess, read_child_config
from tests.runtime.child import Settings


def main() -> None:
    settings, _ = read_child_config(Settings)
    child = ChildProcess("tests.runtime.child", msgspec.to_builtins(settings), "child", lambda _: None)
    child.wait(settings.seconds)


if __name__ == "__main__":
    main()
