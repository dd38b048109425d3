"""Who may ask what: the only place that reads the key of a request.

Every route is closed unless it is listed here as open; what acts on the server as a whole or shows its
inside needs a key of its own. Without any key the server trusts whoever reaches it.
"""

from enum import Enum

from starlette.types import ASGIApp, Receive, Scope, Send

from atom.entrypoints.openai.anthropic import AnthropicReply, is_anthropic_path
from atom.entrypoints.openai.errors import ErrorBody, ErrorObject
from atom.entrypoints.openai.http import Reply, header
from atom.entrypoints.openai.keys import KeyRing

OPEN_PATHS = frozenset({"/health"})  # probes carry no key, and it tells nothing of requests
ADMIN_PATHS = frozenset({"/start_profile", "/stop_profile"})
ADMIN_PREFIX = "/debug/"


class Access(Enum):
    OPEN = "open"
    CLIENT = "client"
    ADMIN = "admin"


def access_of(path: str) -> Access:
    """What a path asks for, whether or not there is such a route."""
    if path in OPEN_PATHS:
        return Access.OPEN
    if path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX):
        return Access.ADMIN
    return Access.CLIENT


class AuthMiddleware:
    """Lets a request through if its key fits the path. A key comes as ``Authorization: Bearer`` or ``X-Api-Key``.

    Args:
        clients: may use every route but those of administrators.
        admins: may use every route. Without one, administrators' routes are closed if ``clients`` has keys.
    """

    def __init__(self, app: ASGIApp, clients: KeyRing, admins: KeyRing):
        self._app = app
        self._clients = clients
        self._admins = admins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, message, code = refusal
        headers = {"www-authenticate": "Bearer"} if status == 401 else {}
        body = ErrorBody(ErrorObject(message, "invalid_request_error", None, code))
        # The body is not read: whoever has no key costs nothing.
        reply = (AnthropicReply if is_anthropic_path(scope["path"]) else Reply)(scope, send)
        await reply.json(reply.error_body(status, body), status, headers | {"connection": "close"})

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        """Status, message and code; None for a request that may pass."""
        access = access_of(scope["path"])
        if access is Access.OPEN or not (self._clients or self._admins):
            return None
        if access is Access.CLIENT and not self._clients:
            return None  # only administrators' routes are protected
        key = given_key(scope)
        if key is None:
            return 401, "This server needs an API key: Authorization: Bearer KEY", "missing_api_key"
        is_admin, is_client = self._admins.holds(key), self._clients.holds(key)
        if is_admin or (is_client and access is Access.CLIENT):
            return None
        if is_client:
            return 403, f"{scope['path']} needs the key of an administrator (--admin-api-key)", "admin_only"
        return 401, "Incorrect API key provided", "invalid_api_key"


def given_key(scope: Scope) -> str | None:
    """The key that a request carries."""
    value = header(scope, b"authorization")
    if value is not None:
        scheme, _, key = value.partition(" ")
        return key.strip() if scheme.lower() == "bearer" and key.strip() else None
    return header(scope, b"x-api-key")
