"""The serving guide tells the truth: fields, limits, flags and routes equal the code's, its examples run."""

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest

from atom.entrypoints.openai import limits, protocol
from atom.entrypoints.openai.app import make_routes
from atom.entrypoints.openai.context import make_context
from atom.entrypoints.openai.endpoint import GenerationEndpoint
from atom.model_engine.arg_utils import add_server_args
from atom.utils.cli_parser import FlexibleArgumentParser
from tests.helpers.fake_engine import FakeEngine

GUIDE = Path(__file__).parents[2].joinpath("docs/serving_benchmarking_guide.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Cells of the rows of the first table after ``heading``."""
    lines = GUIDE[GUIDE.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip().strip("|").split("|")])
    return rows


def fields_of(struct: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(struct)}


def test_L6_listed_fields_are_the_fields_of_the_structs():
    shared = fields_of(protocol.GenerationFields)
    assert {row[0] for row in table("<!-- fields: GenerationFields -->")} == shared
    unsupported = set(protocol.UNSUPPORTED_EVERYWHERE)
    for struct, extra in (
        (protocol.CompletionRequest, protocol.UNSUPPORTED_COMPLETION),
        (protocol.ChatCompletionRequest, protocol.UNSUPPORTED_CHAT),
    ):
        listed = {row[0] for row in table(f"<!-- fields: {struct.__name__} -->")}
        assert listed == fields_of(struct) - shared - unsupported - set(extra)


def test_L6_listed_refusals_are_those_of_the_code():
    expected: dict[str, tuple[str, str]] = {}
    by_route = {"completions": protocol.UNSUPPORTED_COMPLETION, "chat": protocol.UNSUPPORTED_CHAT}
    tables = {"both": protocol.UNSUPPORTED_EVERYWHERE, **by_route}
    for routes, fields in tables.items():
        for field, allowed in fields.items():
            where = "both" if all(field in t for t in by_route.values()) else routes
            accepted = ", ".join(msgspec.json.encode(value).decode() for value in allowed)
            expected[field] = (where, accepted)
    assert {row[0]: (row[1], row[2]) for row in table("<!-- unsupported -->")} == expected


def test_listed_fields_without_effect():
    told = GUIDE[GUIDE.index("have no effect") : GUIDE.index("### Both routes")]
    assert {*protocol.IGNORED_CHAT, *protocol.IGNORED_COMPLETION} <= set(re.findall(r"`([\w.]+)`", told))


def test_listed_limits():
    constants = {name: value for name, value in vars(limits).items() if name.startswith("MAX_")}
    assert {row[0]: int(row[1]) for row in table("<!-- limits -->")} == constants


def test_listed_flags():
    parser = add_server_args(FlexibleArgumentParser())
    group = next(group for group in parser._action_groups if group.title == "server")
    assert {row[0] for row in table("<!-- flags -->")} == {
        action.option_strings[0] for action in group._group_actions
    }


def test_listed_routes_and_error_codes():
    routes = make_routes(make_context(FakeEngine()))
    assert {row[0]: row[1] for row in table("## Routes")} == {
        operation.path.replace(":path", ""): ", ".join(operation.methods) for operation, _ in routes
    }
    assert sum(isinstance(endpoint, GenerationEndpoint) for _, endpoint in routes) == 4
    sources = Path(protocol.__file__).parent.glob("*.py")
    codes = {code for path in sources for code in re.findall(r'code(?:=| = \d+, )"(\w+)"', path.read_text())}
    errors = GUIDE[GUIDE.index("## Errors") : GUIDE.index("## Limits")]
    assert codes - set(re.findall(r"`(\w+)`", errors)) == set()


EXAMPLES = re.findall(r"```bash\n(curl.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("command", EXAMPLES)
def test_example_works(http, command):
    words = shlex.split(command.replace("\\\n", " "))
    url = next(word for word in words if word.startswith("http://127.0.0.1:8000"))
    path = url.removeprefix("http://127.0.0.1:8000")
    if "-d" not in words:
        assert http.get(path).status_code == 200
        return
    headers = dict([words[words.index("-H") + 1].split(": ")])
    body = words[words.index("-d") + 1]
    answer = http.post(path, content=body, headers=headers)
    assert answer.status_code == 200
    if json.loads(body).get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        told = answer.json()
        assert told.get("choices") or told.get("content") or told["output"]


def test_there_are_examples():
    assert len(EXAMPLES) >= 4
