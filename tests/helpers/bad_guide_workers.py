"""Compile workers that misbehave, chosen by the guide's text: it crashes, sleeps, or writes it back."""

import os
import sys
import time

import msgspec

from atom.model_engine.structured import compile_worker
from atom.model_engine.structured.backend import GrammarBackend, GrammarError, Vocabulary
from atom.runtime.process import ChildProcess  # noqa: F401  (the child imports what a real one imports)


class Backend(GrammarBackend):
    name = "fake"

    def __init__(self, vocabulary: Vocabulary):
        self._size = len(vocabulary)

    def compile(self, guide) -> bytes:
        if guide.text == "crash":
            os.kill(os.getpid(), 11)
        if guide.text == "sleep":
            time.sleep(60)
        if guide.text == "refuse":
            raise GrammarError("no such thing")
        return msgspec.json.encode([os.getpid(), self._size, guide.text])

    def load(self, data: bytes):
        raise RuntimeError("the tests load nothing")


if __name__ == "__main__":
    compile_worker.load_backend = lambda name, vocabulary: Backend(vocabulary)
    sys.exit(compile_worker.main())
