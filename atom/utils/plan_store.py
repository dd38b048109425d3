"""Plans on disk, under the rules of the compile cache: ours alone, whole, and made from the sources of today.

    <cache root>/.plans/<hash of the artifacts>-<key>.json      {"format", "sha256", "plan"}

No torch.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from atom.utils.cache_folder import check_private, write_aside

FORMAT = 1
PLANS = ".plans"
_FOLDER = re.compile(r"[0-9a-f]{10}/rank_\d+/\w+")


def write_plan(root: Path, key: str, plan: dict[str, Any]) -> None:
    """Keep ``plan`` below the cache's ``root``; plans whose artifacts are gone are swept."""
    folder = check_private(root / PLANS)
    for left in folder.glob("*.json"):
        if not (root / left.name.partition("-")[0]).is_dir():
            left.unlink(missing_ok=True)
    text = json.dumps(plan)
    whole = {"format": FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest(), "plan": text}
    write_aside(folder / f"{plan['folder'][:10]}-{key}.json", json.dumps(whole))


def read_plans(root: Path, key: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The plans for ``key`` whose source files are what they were, with their paths; damaged ones are removed."""
    if not (root / PLANS).is_dir():
        return
    for path in sorted(check_private(root / PLANS).glob(f"*-{key}.json")):
        try:
            status = path.lstat()
            own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            whole = json.loads(path.read_text()) if own and not status.st_mode & 0o022 else {}
            text = whole["plan"]
            if whole["format"] != FORMAT or whole["sha256"] != hashlib.sha256(text.encode()).hexdigest():
                raise ValueError("it was altered")
            plan = json.loads(text)
            if not _FOLDER.fullmatch(plan["folder"]) or not path.name.startswith(plan["folder"][:10]):
                raise ValueError("it belongs to other artifacts")
            files = plan["files"].items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            with suppress(OSError):
                path.unlink()
            continue
        with suppress(OSError):  # a file that is gone has changed
            if all(hashlib.sha256(Path(name).read_bytes()).hexdigest() == digest for name, digest in files):
                yield path, plan
