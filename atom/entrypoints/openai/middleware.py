"""What every request passes before its route, from the outside in."""

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from atom.entrypoints.openai.auth import AuthMiddleware
from atom.entrypoints.openai.context import ServerContext
from atom.entrypoints.openai.http import RequestIdMiddleware
from atom.entrypoints.openai.telemetry import TelemetryMiddleware


def make_middleware(context: ServerContext) -> list[Middleware]:
    """Request id, CORS (a preflight carries no key, so it comes before keys), keys, telemetry."""
    settings = context.settings
    stack = [Middleware(RequestIdMiddleware)]
    cors = settings.cors
    if cors.origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=cors.origins,
                allow_methods=cors.methods,
                allow_headers=cors.headers,
                allow_credentials=cors.is_with_credentials,
                expose_headers=("x-request-id", "retry-after"),
            )
        )
    stack.append(Middleware(AuthMiddleware, clients=settings.clients, admins=settings.admins))
    stack.append(
        Middleware(
            TelemetryMiddleware,
            model=context.served_model_name,
            tracer=context.tracer,
            request_log=context.request_log,
        )
    )
    return stack
