"""The server's real ``main`` around a fake engine: ``python -m tests.helpers.serve_fake [flags]``.

Engine options come as JSON in ``FAKE_ENGINE``; ``die_after_s`` kills the engine that long after its start.
"""

import asyncio
import json
import os
import sys
import threading

from atom.entrypoints import openai_server
from atom.model_engine.arg_utils import EngineArgs
from tests.helpers.fake_engine import FakeEngine, ids_of


def create_engine(args: EngineArgs) -> FakeEngine:
    options = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
    die_after_s = options.pop("die_after_s", None)
    engine = FakeEngine(script=lambda prompt, index: ids_of("z" * 200), **options)
    stream = engine.stream

    def stream_and_arm(*args, **kwargs):
        if die_after_s is not None:
            loop = asyncio.get_running_loop()
            threading.Timer(die_after_s, lambda: loop.call_soon_threadsafe(engine.die)).start()
        return stream(*args, **kwargs)

    engine.stream = stream_and_arm  # type: ignore[method-assign]
    close = engine.close

    def close_loudly() -> None:
        close()
        print("engine closed", flush=True)

    engine.close = close_loudly  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    EngineArgs.create_config = lambda self: None  # type: ignore[method-assign,return-value]
    EngineArgs.create_engine = create_engine  # type: ignore[method-assign,assignment]
    sys.exit(openai_server._run())
