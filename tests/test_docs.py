"""The pages speak of files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
_CODE_FILE = re.compile(r"`((?:[\w./-]+/)?[\w-]+\.py)\b")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.fixture(scope="module")
def files() -> list[str]:
    return [
        "/" + str(path.relative_to(ROOT))
        for room in ("atom", "tests")
        for path in ROOT.glob(f"{room}/**/*.py")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page, files):
    text = page.read_text()
    missing = [name for name in _CODE_FILE.findall(text) if not any(f.endswith("/" + name) for f in files)]
    missing += [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    assert missing == []
