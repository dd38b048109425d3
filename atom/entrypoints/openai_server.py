"""The OpenAI-compatible HTTP server: ``python -m atom.entrypoints.openai_server --model MODEL``.

The port is bound first, so that a taken one is told at once, and listened on last: whoever gets a
connection gets answers. Between the two the engine process starts, and this process uses its waiting time
to import what it serves with.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from atom.entrypoints.openai.sockets import bind_socket, raise_file_limit
from atom.errors import AtomError, ConfigError
from atom.model_engine.arg_utils import EngineArgs, add_server_args
from atom.utils.cli_parser import FlexibleArgumentParser
from atom.utils.logging import init_logger

logger = init_logger("atom.server")


def make_parser() -> FlexibleArgumentParser:
    """Every flag of the server."""
    parser = FlexibleArgumentParser(
        prog="python -m atom.entrypoints.openai_server", description="Serve a model over HTTP (OpenAI's API)."
    )
    EngineArgs.add_cli_args(parser)
    add_server_args(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal or the engine's death; returns the exit code.

    Raises:
        ConfigError: a flag, the port or the chat template is wrong.
        AtomError: the engine cannot start.
    """
    args = make_parser().parse_args(None if argv is None else list(argv))
    engine_args = EngineArgs.from_cli_args(args)
    # A signal during start-up unwinds the stack, so that the engine process is stopped and waited for.
    before = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        return _serve(args, engine_args)
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(args: argparse.Namespace, engine_args: EngineArgs) -> int:
    threading.Thread(target=_import_server, name="import-server", daemon=True).start()
    raise_file_limit()
    if args.chat_template:
        from atom.entrypoints.openai.chat_template import ChatTemplate, load_chat_template

        # Read here for its errors, which are not to wait for the engine.
        ChatTemplate(load_chat_template(args.chat_template, None) or "")
    _check_parsers(args)
    with bind_socket(args.host, args.server_port) as sock:
        engine = engine_args.create_engine()
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
            return serve(
                context,
                sock,
                keep_alive_s=args.timeout_keep_alive,
                access_log=not args.disable_uvicorn_access_log,
            )
        finally:
            engine.close()


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
