"""Settings of the server that protect or observe it: their flags, and every check of their values.

All of it is checked before the engine starts.
"""

import argparse
import ssl
from dataclasses import dataclass, field
from typing import Any

from atom.entrypoints.openai.keys import KeyRing, check_key, read_key_file
from atom.errors import ConfigError

_METHODS = ("GET", "HEAD", "POST", "OPTIONS")


@dataclass(frozen=True)
class TlsSettings:
    """Files in PEM form. With ``ca_certs`` a client needs a certificate that one of them signed."""

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None

    def check(self) -> None:
        """Raises ConfigError when a file cannot be used."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certfile, self.keyfile, password=_no_password)
            if self.ca_certs is not None:
                context.load_verify_locations(self.ca_certs)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            files = ", ".join(filter(None, (self.certfile, self.keyfile, self.ca_certs)))
            raise ConfigError(f"--ssl-certfile, --ssl-keyfile, --ssl-ca-certs: {files}: {error}") from None

    def uvicorn_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"ssl_certfile": self.certfile, "ssl_keyfile": self.keyfile}
        if self.ca_certs is not None:
            options |= {"ssl_ca_certs": self.ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")


@dataclass(frozen=True)
class CorsSettings:
    """Which pages of other origins may read answers in a browser. None by default."""

    origins: tuple[str, ...] = ()
    headers: tuple[str, ...] = ("authorization", "content-type", "x-api-key", "x-request-id")
    is_with_credentials: bool = False

    methods = _METHODS

    def check(self) -> None:
        """Raises ConfigError for an origin that no browser sends, and for a wildcard that would trust everyone."""
        for origin in self.origins:
            if origin != "*" and (origin.endswith("/") or "://" not in origin):
                raise ConfigError(f"--allowed-origins must hold * or SCHEME://HOST[:PORT], got {origin!r}")
        if self.is_with_credentials and "*" in self.origins:
            raise ConfigError("--allow-credentials needs the origins by name, got --allowed-origins '*'")


@dataclass(frozen=True)
class ServerSettings:
    """What the flags say. The defaults are those of a server on loopback that trusts whoever reaches it."""

    clients: KeyRing = field(default_factory=lambda: KeyRing(()))
    admins: KeyRing = field(default_factory=lambda: KeyRing(()))
    cors: CorsSettings = CorsSettings()
    tls: TlsSettings | None = None
    request_log: str | None = None
    ready_timeout_s: float = 0.0  # 0: as long as it takes

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "ServerSettings":
        """Raises ConfigError for a value that cannot work."""
        clients = _keys(args.api_key, args.api_key_file, "--api-key")
        admins = _keys(args.admin_api_key, args.admin_api_key_file, "--admin-api-key")
        if set(clients) & set(admins):
            raise ConfigError("--admin-api-key must differ from every --api-key")
        cors = CorsSettings(
            tuple(args.allowed_origins or ()),
            tuple(args.allowed_headers or CorsSettings.headers),
            args.allow_credentials,
        )
        cors.check()
        if (args.ssl_keyfile or args.ssl_ca_certs) and not args.ssl_certfile:
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        tls = None
        if args.ssl_certfile:
            tls = TlsSettings(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
            tls.check()
        if not 0 <= args.ready_timeout < float("inf"):
            raise ConfigError(f"--ready-timeout must be at least 0 seconds, got {args.ready_timeout:g}")
        return cls(KeyRing(clients), KeyRing(admins), cors, tls, args.request_log, args.ready_timeout)


def _keys(given: list[str] | None, files: list[str] | None, flag: str) -> list[str]:
    keys = [check_key(key, flag) for key in given or ()]
    for path in files or ():
        keys += read_key_file(path, f"{flag}-file")
    return keys


def add_settings_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Register the flags of :class:`ServerSettings`, in the groups "protection" and "observation"."""
    add = parser.add_argument_group("protection").add_argument
    add("--api-key", action="append", metavar="KEY", help="Key that clients must send; may be repeated.")
    add("--api-key-file", action="append", metavar="FILE", help="File of such keys, one a line.")
    add("--admin-api-key", action="append", metavar="KEY", help="Key for /debug and the profiler.")
    add("--admin-api-key-file", action="append", metavar="FILE", help="File of such keys, one a line.")
    add("--allowed-origins", nargs="+", metavar="ORIGIN", help="Web pages that may call the server (CORS).")
    add("--allowed-headers", nargs="+", metavar="HEADER", help="Request headers that such pages may send.")
    add("--allow-credentials", action="store_true", help="Let such pages send cookies.")
    add("--ssl-certfile", metavar="FILE", help="Certificate chain (PEM): serve HTTPS.")
    add("--ssl-keyfile", metavar="FILE", help="Its private key; default: in the same file.")
    add("--ssl-ca-certs", metavar="FILE", help="Ask clients for a certificate signed by one of these.")
    add(
        "--ready-timeout",
        type=float,
        default=0.0,
        metavar="S",
        help="Give up a start that takes longer; 0: never.",
    )
    add = parser.add_argument_group("observation").add_argument
    add(
        "--request-log", metavar="FILE", help="Append every request and answer as JSON lines, texts included."
    )
    return parser
