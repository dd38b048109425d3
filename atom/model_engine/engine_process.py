"""The engine process: ``python -m atom.model_engine.engine_process``, started by CoreManager alone.

The main thread runs everything: it polls its sockets, steps the core and sends what came out. One side
thread stamps the heartbeat.
"""

import gc
import os
import sys
import time

import msgspec

from atom.config import Config
from atom.errors import AtomError
from atom.model_engine.messages import Failed, Progress, Shutdown, ToEngine
from atom.platforms import has_accelerator_node
from atom.runtime.liveness import HeartbeatThread, LivenessPage, ProcessState
from atom.runtime.process import read_child_config, set_process_title
from atom.runtime.startup_phases import StartupPhases
from atom.runtime.transport import EngineSockets
from atom.utils import envs
from atom.utils.bytecode_cache import keep_bytecode
from atom.utils.gc_utils import configure_gc, release_library_code, settle_heap, unfreeze_heap
from atom.utils.logging import init_logger, set_process_name
from atom.utils.torch_imports import lean_torch

logger = init_logger(__name__)

BLOCKED_WAIT_MS = 1  # all that is left waits for a transfer: look again soon, but do not spin
IDLE_WAIT_MS = 100  # how long an idle engine sleeps in poll; a message wakes it at once


class EngineProcessConfig(msgspec.Struct):
    """What CoreManager hands to the process."""

    config: dict
    folder: str
    index: int


def main() -> int:
    phases = StartupPhases(since_creation=True)
    # What a start creates stays: passes over it find nothing and take a fifth of a second. settle_heap ends this.
    gc.disable()
    keep_bytecode()
    settings, parent_pid = read_child_config(EngineProcessConfig)
    set_process_title("EngineCore")
    set_process_name("EngineCore")
    configure_gc()
    page = LivenessPage(os.path.join(settings.folder, f"liveness{settings.index}"))
    heartbeat = HeartbeatThread(page, parent_pid)
    heartbeat.start()
    sockets = EngineSockets(settings.folder, settings.index, msgspec.msgpack.Decoder(ToEngine))
    try:
        return _serve(Config.from_dict(settings.config), sockets, page, phases)
    except AtomError as error:
        logger.error("%s", error)
        sockets.send(Failed(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine failed")
        sockets.send(Failed("EngineDeadError", f"{type(error).__name__}: {error}"))
        return 1
    finally:
        page.set_state(ProcessState.STOPPING)
        sockets.close()
        heartbeat.stop()


def _serve(config: Config, sockets: EngineSockets, page: LivenessPage, phases: StartupPhases) -> int:
    # Imported here: an unreadable configuration is reported before torch is paid for.
    phases.begin("import torch")
    with lean_torch(is_on=_serves_on_cpu(config)):
        from atom.model_engine.engine_core import EngineCore, load_worker_class

        load_worker_class(config.runner_qualname)
        if envs.ATOM_GC_FREEZE:
            gc.freeze()  # modules live on: the collection at the end need not walk them
        # A device's start calls most of what a CPU's leaves alone: it would only be read again.
        if "torch" in sys.modules and not _may_use_accelerator(config):
            release_library_code(os.path.dirname(sys.modules["torch"].__file__))
        core = EngineCore(config, sockets.send, phases=phases, page=page)
    core.start(lambda phase, fraction: sockets.send(Progress(phase, fraction)), settle=settle_heap)
    page.set_state(ProcessState.READY)
    try:
        run_loop(core, sockets)
    finally:
        core.close()
        unfreeze_heap()  # some libraries complain of what outlives the interpreter
    return 0


def _serves_on_cpu(config: Config) -> bool:
    """Whether it is certain, without torch, that a model of a checkpoint runs uncompiled on the CPU.

    Random weights come from a torch.Generator, which needs all of torch.
    """
    return not _may_use_accelerator(config) and not config.compilation_level and config.load_dummy is None


def _may_use_accelerator(config: Config) -> bool:
    return config.device != "cpu" and (config.device != "auto" or has_accelerator_node())


def run_loop(core, sockets: EngineSockets) -> None:
    """Step until told to stop: drain every queued message, agree with the peers, compute."""
    stopping = False
    wait_ms = IDLE_WAIT_MS
    while True:
        # Everything queued is taken before a step is scheduled: prompts sent together meet in one step.
        messages = sockets.receive(wait_ms)
        for message in messages:
            stopping = stopping or isinstance(message, Shutdown)
            core.handle(message)
        agreement = core.coordinator.agree(core.has_work, stopping)
        if agreement.must_stop:
            return
        has_waited, wait_ms = wait_ms == IDLE_WAIT_MS and not messages, IDLE_WAIT_MS
        if core.has_work:
            did_work = agreement.may_schedule and core.step()
            wait_ms = 0 if did_work else BLOCKED_WAIT_MS
        elif has_waited:
            core.rest()
        core.push_metrics_if_due(time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
