"""The engine process: ``python -m atom.model_engine.engine_process``, started by CoreManager alone.

The main thread runs everything: it polls its connection, steps the core and sends what came out. One side
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
from atom.platforms.cpu import has_spare_cpus
from atom.runtime.liveness import HeartbeatThread, LivenessPage, ProcessState
from atom.runtime.process import read_child_config, set_process_title
from atom.runtime.startup_phases import StartupPhases
from atom.runtime.transport import MessageStream, connect
from atom.utils import envs
from atom.utils.bytecode_cache import keep_bytecode
from atom.utils.gc_utils import configure_gc, release_library_code, settle_heap, unfreeze_heap
from atom.utils.logging import init_logger, set_process_name
from atom.utils.torch_imports import lean_torch

logger = init_logger(__name__)

BLOCKED_WAIT_S = 1e-3  # all that is left waits for a transfer: look again soon, but do not spin
IDLE_WAIT_S = 0.1  # how long an idle engine sleeps in poll; a message wakes it at once
SPIN_S = (
    5e-4  # with a device to compute on and cores to spare, so long it looks for what follows without sleeping
)
LINGER_S = 4.0  # for the last messages to leave


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
    stream = connect(settings.folder, settings.index, msgspec.msgpack.Decoder(ToEngine))
    try:
        return _serve(Config.from_dict(settings.config), stream, page, phases)
    except AtomError as error:
        logger.error("%s", error)
        stream.send(Failed(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine failed")
        stream.send(Failed("EngineDeadError", f"{type(error).__name__}: {error}"))
        return 1
    finally:
        page.set_state(ProcessState.STOPPING)
        stream.close(LINGER_S)
        heartbeat.stop()


def _serve(config: Config, stream: MessageStream, page: LivenessPage, phases: StartupPhases) -> int:
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
        core = EngineCore(config, stream.send, phases=phases, page=page)
    core.start(lambda phase, fraction: stream.send(Progress(phase, fraction)), settle=settle_heap)
    page.set_state(ProcessState.READY)
    try:
        run_loop(core, stream, SPIN_S if _may_use_accelerator(config) and has_spare_cpus() else 0.0)
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


def run_loop(core, stream: MessageStream, spin_s: float = 0.0) -> None:
    """Step until told to stop: drain every queued message, agree with the peers, compute.

    ``spin_s``: so long after it was last busy, it looks for messages without sleeping.
    """
    stopping = False
    is_busy = False
    wait_s = IDLE_WAIT_S
    while True:
        # Everything queued is taken before a step is scheduled: prompts sent together meet in one step.
        messages = stream.receive(wait_s, spin_s if is_busy and wait_s == IDLE_WAIT_S else 0.0)
        for message in messages:
            stopping = stopping or isinstance(message, Shutdown)
            core.handle(message)
        agreement = core.coordinator.agree(core.has_work, stopping)
        if agreement.must_stop:
            return
        is_busy = bool(messages) or not wait_s
        has_waited, wait_s = wait_s == IDLE_WAIT_S and not messages, IDLE_WAIT_S
        if core.has_work:
            did_work = agreement.may_schedule and core.step()
            wait_s = 0.0 if did_work else BLOCKED_WAIT_S
        elif has_waited:
            core.rest()
        core.push_metrics_if_due(time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
