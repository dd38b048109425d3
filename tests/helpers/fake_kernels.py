"""Kernels whose compilation does what a test asks for, and a parent that has some compiled."""

import json
import os
import sys
import time
from pathlib import Path


class FakeKernel:
    """``data``: the ``file`` to write the process id to, then ``seconds`` to take, then whether it ``fails``."""

    def preload(self, data: str) -> None:
        wanted = json.loads(data)
        aside = Path(wanted["file"] + ".new")
        aside.write_text(str(os.getpid()))
        aside.rename(wanted["file"])
        time.sleep(wanted["seconds"])
        if wanted["fails"]:
            raise ValueError("no such instruction")


kernel = FakeKernel()


def job(file: Path | str, seconds: float = 0.0, fails: bool = False):
    from atom.kernels.triton.compile_worker import KernelJob

    data = {"file": str(file), "seconds": seconds, "fails": fails}
    return KernelJob("tests.helpers.fake_kernels", "kernel", json.dumps(data))


def main() -> None:
    from atom.kernels.triton import compile_ahead
    from atom.kernels.triton.compile_worker import KernelTarget

    compile_ahead._target = lambda: KernelTarget("cuda", 90, 32)
    compilation = compile_ahead.KernelCompilation([job(sys.argv[1], 60.0)], num_processes=1)
    print(compilation.pid, flush=True)
    compilation.wait()


if __name__ == "__main__":
    main()
