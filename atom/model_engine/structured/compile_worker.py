"""The process that compiles guides: ``python -m atom.model_engine.structured.compile_worker``.

Grammar libraries are native code that reads what strangers send. Here they may take too long, too much
memory, or crash: GuideCompiler notices, says so to the one request, and starts another worker.
"""

import os
import resource
import signal
import socket
import sys
from contextlib import suppress

import msgspec

from atom.model_engine.structured.backend import GrammarBackend, GrammarError, Vocabulary, load_backend
from atom.model_engine.structured.frames import (
    Compiled,
    Job,
    Loaded,
    Refused,
    Reply,
    read_frame,
    send_frame,
)
from atom.runtime.process import read_child_config, set_process_title

MAX_EXTRA_BYTES = 4 << 30  # of address space, on top of what a loaded library takes
_NICENESS = 5  # serving comes first
_GRACE_S = 1.0  # after the time limit, for the parent to end this process; an orphan ends itself


class WorkerConfig(msgspec.Struct):
    socket_path: str


def main() -> int:
    settings, _ = read_child_config(WorkerConfig)
    set_process_title("GuideCompiler")
    os.nice(_NICENESS)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(settings.socket_path)
    with suppress(EOFError, ConnectionError):  # the parent is done, or gone
        serve(connection)
    return 0


def serve(connection: socket.socket) -> None:
    """Take the vocabulary, then one job after the other. Raises EOFError when there will be no more."""
    vocabulary = msgspec.msgpack.decode(read_frame(connection), type=Vocabulary)
    decoder = msgspec.msgpack.Decoder(Job)
    backends: dict[str, GrammarBackend] = {}
    while True:
        job = decoder.decode(read_frame(connection))
        try:
            if job.backend not in backends:
                backends[job.backend] = load_backend(job.backend, vocabulary)
                _limit_memory()
        except ImportError as error:
            _send(connection, Refused(f"{job.backend} cannot be imported: {error}"))
            continue
        _send(connection, Loaded())
        # The default action of SIGALRM ends the process, whatever native code is running.
        signal.setitimer(signal.ITIMER_REAL, job.time_limit_s + _GRACE_S)
        reply = _compile(backends[job.backend], job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, reply)


def _compile(backend: GrammarBackend, job: Job) -> Reply:
    try:
        return Compiled(backend.compile(job.guide))
    except GrammarError as error:
        return Refused(str(error))
    except (MemoryError, RecursionError) as error:
        return Refused(f"it takes too much memory to compile ({type(error).__name__})")


def _send(connection: socket.socket, reply: Reply) -> None:
    send_frame(connection, msgspec.msgpack.encode(reply))


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + MAX_EXTRA_BYTES
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


if __name__ == "__main__":
    sys.exit(main())
