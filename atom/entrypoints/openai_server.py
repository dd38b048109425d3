"""The OpenAI-compatible HTTP server: ``python -m atom.entrypoints.openai_server --model MODEL``.

The port is bound first, so that a taken one is told at once, and listened on last: whoever gets a
connection gets answers. Between the two the engine process starts, and this process uses its waiting time
to import what it serves with.
"""

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

from atom.entrypoints.openai.request_log import RequestLog
from atom.entrypoints.openai.settings import ServerSettings, add_settings_args
from atom.entrypoints.openai.sockets import bind_socket, raise_file_limit
from atom.entrypoints.openai.startup import StartupClock
from atom.errors import AtomError, ConfigError
from atom.model_engine.arg_utils import EngineArgs, add_server_args
from atom.runtime.tracing import make_tracer
from atom.utils.cli_parser import FlexibleArgumentParser
from atom.utils.gc_utils import configure_gc
from atom.utils.logging import init_logger, set_process_name

logger = init_logger("atom.server")


class ReadyTimeoutError(AtomError):
    """The start took longer than ``--ready-timeout``."""


def make_parser() -> FlexibleArgumentParser:
    """Every flag of the server."""
    parser = FlexibleArgumentParser(
        prog="python -m atom.entrypoints.openai_server", description="Serve a model over HTTP (OpenAI's API)."
    )
    EngineArgs.add_cli_args(parser)
    add_server_args(parser)
    add_settings_args(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal or the engine's death; returns the exit code.

    Raises:
        ConfigError: a flag, the port or the chat template is wrong.
        AtomError: the engine cannot start.
    """
    clock = StartupClock()
    set_process_name("Server")
    configure_gc()
    args = make_parser().parse_args(None if argv is None else list(argv))
    engine_args = EngineArgs.from_cli_args(args)
    settings = ServerSettings.from_cli_args(args)
    # A signal during start-up unwinds the stack, so that the engine process is stopped and waited for.
    before = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        return _serve(args, engine_args, settings, clock)
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(
    args: argparse.Namespace, engine_args: EngineArgs, settings: ServerSettings, clock: StartupClock
) -> int:
    threading.Thread(target=_import_server, name="import-server", daemon=True).start()
    raise_file_limit()
    if args.chat_template:
        from atom.entrypoints.openai.chat_template import ChatTemplate, load_chat_template

        # Read here for its errors, which are not to wait for the engine.
        ChatTemplate(load_chat_template(args.chat_template, None) or "")
    _check_parsers(args)
    tracer = make_tracer()
    with bind_socket(args.host, args.server_port) as sock, _ready_within(settings.ready_timeout_s) as timer:
        request_log = RequestLog(settings.request_log) if settings.request_log else None
        engine = engine_args.create_engine()
        engine_ready_at = time.monotonic()
        context = None
        try:
            from atom.entrypoints.openai.context import make_context
            from atom.entrypoints.openai.serving import serve

            context = make_context(
                engine,
                served_model_name=args.served_model_name or args.model,
                chat_template=args.chat_template,
                default_chat_template_kwargs=args.default_chat_template_kwargs,
                tool_parser=args.tool_call_parser,
                reasoning_parser=args.reasoning_parser,
                stops_in_reasoning=args.stop_in_reasoning,
                strict_fields=args.strict_fields,
            )
            context.observe_with(settings, tracer, request_log)

            def on_ready() -> None:
                timer.close()
                context.startup_phases = clock.phases(engine, engine_ready_at, time.monotonic())

            return serve(
                context,
                sock,
                keep_alive_s=args.timeout_keep_alive,
                access_log=not args.disable_uvicorn_access_log,
                on_ready=on_ready,
            )
        finally:
            engine.close()
            if context is not None:
                context.close()


@contextlib.contextmanager
def _ready_within(timeout_s: float) -> Iterator[contextlib.ExitStack]:
    """Raises ReadyTimeoutError on the main thread unless what is yielded is closed in time; 0: never.

    The error unwinds whatever the main thread is doing, so that all that was started is ended.
    """

    def on_alarm(number: int, frame: FrameType | None) -> NoReturn:
        raise ReadyTimeoutError(f"the server was not ready within --ready-timeout {timeout_s:g} s")

    with contextlib.ExitStack() as timer:
        if timeout_s:
            before = signal.signal(signal.SIGALRM, on_alarm)
            timer.callback(signal.signal, signal.SIGALRM, before)
            timer.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
        yield timer


def _check_parsers(args: argparse.Namespace) -> None:
    """Refuse an unknown parser now, not when the engine has started."""
    from atom.entrypoints.openai.reasoning import get_reasoning_dialect
    from atom.entrypoints.openai.tool_parsers.registry import get_tool_parser

    if args.tool_call_parser not in ("auto", "none"):
        get_tool_parser(args.tool_call_parser)
    if args.reasoning_parser not in ("auto", "none"):
        get_reasoning_dialect(args.reasoning_parser)


def _import_server() -> None:
    import atom.entrypoints.openai.serving  # noqa: F401


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _run() -> int:
    try:
        return main()
    except ConfigError as error:
        print(f"openai_server: error: {error}", file=sys.stderr)
        return 2
    except AtomError as error:
        print(f"openai_server: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(_run())
