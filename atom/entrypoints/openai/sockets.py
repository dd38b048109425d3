"""Sockets and file limits, before anything else is imported."""

import contextlib
import ipaddress
import resource
import socket

from atom.errors import ConfigError

MAX_OPEN_FILES = 2**20


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a taken port is told before minutes of loading.

    Raises:
        ConfigError: the address is not there or is in use.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--server-port must be in [0, 65535], got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host!r} --server-port {port}: {error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on --host {host} --server-port {port}: {error.strerror}") from None
    return sock


def socket_url(sock: socket.socket, scheme: str = "http") -> str:
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    return ipaddress.ip_address(sock.getsockname()[0].split("%")[0]).is_loopback


def raise_file_limit() -> None:
    """As many open files as the system allows: every client holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
