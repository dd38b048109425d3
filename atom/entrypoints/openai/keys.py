"""API keys: where they come from and how they are compared. Nothing else holds or compares one."""

import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable

from atom.errors import ConfigError
from atom.utils.logging import init_logger

logger = init_logger(__name__)

MAX_KEY_CHARS = 512
_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}")


def check_key(key: str, source: str) -> str:
    """``key`` if a client could send it. Raises ConfigError, which does not quote the key."""
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{source} must hold 1 to {MAX_KEY_CHARS} visible ASCII characters, got {len(key)} characters"
        )
    return key


def read_key_file(path: str, flag: str) -> list[str]:
    """Keys from a file: one a line; empty lines and lines that begin with # do not count.

    Raises:
        ConfigError: it cannot be read or holds no key.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from None
    keys = [
        check_key(line, f"line {number} of {flag} {path}")
        for number, line in enumerate(lines, 1)
        if line and not line.startswith("#")
    ]
    if not keys:
        raise ConfigError(f"{flag} {path} must hold at least 1 key, got 0")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("%s %s can be read by other users of this machine: chmod 600 it", flag, path)
    return keys


class KeyRing:
    """A set of keys of which only keyed hashes are kept. Asking takes as long for a wrong key as for a right one."""

    def __init__(self, keys: Iterable[str]):
        self._secret = secrets.token_bytes(32)
        self._digests = [self._digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holds(self, key: str) -> bool:
        given = self._digest(key)
        is_held = False
        for digest in self._digests:  # all of them: where a match stands must not show
            is_held |= hmac.compare_digest(given, digest)
        return is_held

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogateescape"), "sha256")
