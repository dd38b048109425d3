"""Random requests to every route, sound and unsound ones, and clients that leave in the middle of them."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CONTEXT = 1024  # tokens of the served model, whose ids below are bytes
MAX_ID = 255

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
RESPONSES = "/v1/responses"
WORDS = ("one", "two", " three", "\n", "é", "日本", "🎉", "{", '"', "<tool_call>", "a b c", "\x00", "<eos>")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, "x"]}, "b": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}

GUIDES = {"response_format", "guided_choice", "guided_regex", "structured_outputs"}

DEEP = json.loads("[" * 60 + "]" * 60)
ODD_VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 7, 1025, 2**31, 2**63 - 1, 2**63, 2**70, -(2**63), -(2**70)),
    *(0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), 2.0, True, False),
    *("", "x", "auto", "\x00", "\ud83d", "é" * 3000, "1", "[", "(((", "\\"),
    *([], [[]], [None], [""], ["x"] * 70, [-1], [2**40], [1, "x"], [0] * 1100, DEEP),
    *({}, {"a": None}, {"": ""}, {"type": "x"}, {"type": "json_schema"}, {"5": 200}, {"-1": 1}, {"type": {}}),
)
ODD_SCHEMAS: tuple[Any, ...] = (
    *({}, True, {"type": "no"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}, {"enum": []}),
    *({"minimum": 5, "maximum": 1, "type": "integer"}, {"allOf": [{"type": "string"}, {"type": "null"}]}),
    *({"type": "array", "items": {"$ref": "#"}}, {"type": "string", "maxLength": -1}, {"const": "x" * 2000}),
)
ODD_BODIES = (
    *(b"", b"null", b"[]", b"{", b'{"prompt": ', b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100_000),
    *(b'{"prompt": "x", "prompt": 5}', b'{"prompt": "x", "temperature": NaN}', b'"' + b"x" * 100_000 + b'"'),
    b'{"messages": ' + b'{"a": ' * 3000,
)
ROUTES_TO_READ = (
    "/v1/models",
    "/health",
    "/metrics",
    "/version",
    "/server_info",
    "/tokenizer_info",
    "/openapi.json",
)


@dataclass(slots=True)
class RandomRequest:
    """A request and what becomes of it.

    ``must_work``: nothing in it may be refused. ``leaves_after``: the client goes away so many bytes before the
    request's end (below 0), or after so many of the answer (0 and above); None: it waits for the end.
    """

    method: str
    path: str
    body: bytes
    must_work: bool = False
    leaves_after: int | None = None
    content_type: str = "application/json"
    is_streamed: bool = False


class RequestMaker:
    """Requests of one seed."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._routes: dict[Callable[[], RandomRequest], int] = {
            self._completion: 40,
            self._chat: 30,
            self._message: 12,
            self._response: 12,
            self._text_tools: 8,
            self._read: 4,
            self._malformed: 6,
        }

    def make(self) -> RandomRequest:
        pick = self._random
        (route,) = pick.choices([*self._routes], [*self._routes.values()])
        request = route()
        if request.body and pick.random() < 0.12:
            request.leaves_after = pick.choice((-20, -1, 0, 0, 1, 200, 600))
        return request

    # -- pieces

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _text(self, most: int = 12) -> str:
        return "".join(self._random.choices(WORDS, k=self._random.randint(1, most)))

    def _ids(self) -> list[int]:
        return self._random.choices(range(MAX_ID + 1), k=self._random.randint(1, 60))

    def _shared(self, limit_name: str) -> dict[str, Any]:
        """Fields of both OpenAI routes in their ranges."""
        pick = self._random
        limit = pick.choice((1, 2, 5, 8, 12, 60))
        optional: dict[str, Callable[[], Any]] = {
            "temperature": lambda: pick.choice((0, 0.0, 0.7, 1, 2)),
            "top_p": lambda: pick.uniform(0.05, 1),
            "top_k": lambda: pick.choice((-1, 1, 5, 1000)),
            "min_p": lambda: pick.uniform(0, 0.9),
            "seed": lambda: pick.randrange(2**31),
            "stop": lambda: pick.choice(("e", ["\n", "a b"], ["é"])),
            "stop_token_ids": lambda: [pick.randint(0, MAX_ID)],
            "bad_words": lambda: ["two"],
            "min_tokens": lambda: pick.randint(0, limit),
            "ignore_eos": lambda: True,
            "skip_special_tokens": lambda: False,
            "presence_penalty": lambda: pick.uniform(-2, 2),
            "frequency_penalty": lambda: pick.uniform(-2, 2),
            "repetition_penalty": lambda: pick.uniform(0.5, 2),
            "logit_bias": lambda: {str(pick.randint(0, MAX_ID)): pick.uniform(-100, 100)},
            "cache_salt": lambda: pick.choice("abc"),
            "priority": lambda: pick.randint(-3, 3),
            "user": lambda: "someone",
            "metadata": lambda: {"k": "v"},
            "n": lambda: pick.choice((1, 2, 3)),
            "service_tier": lambda: "auto",
            "no_such_field": lambda: 1,
        }
        body = {limit_name: limit}
        body |= {name: optional[name]() for name in pick.sample([*optional], pick.randint(0, 4))}
        if self._chance(0.15):
            body.pop("ignore_eos", None)  # a grammar says where the answer ends
            body |= pick.choice(
                (
                    {"response_format": {"type": "json_object"}},
                    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
                    {"guided_choice": ["yes", "no"]},
                    {"guided_regex": "[ab]{1,4}"},
                    {"structured_outputs": {"grammar": 'root ::= "x" | "y" root'}},
                )
            )
        if self._chance(0.4):
            body["stream"] = True
            if self._chance(0.5):
                body["stream_options"] = {"include_usage": True, "continuous_usage_stats": self._chance(0.5)}
        if self._chance(0.08):
            body["prompt_logprobs"] = pick.randint(0, 3)
        return body

    def _posted(self, path: str, body: dict[str, Any]) -> RandomRequest:
        """The request, often with one or two fields that are none of the kind."""
        must_work = True
        if self._chance(0.35):
            must_work = False
            for name in self._random.sample([*body], min(len(body), self._random.randint(1, 2))):
                body[name] = self._spoiled(body[name])
        elif self._chance(0.05):
            must_work = False
            field = self._random.choice(("guided_json", "response_format"))
            odd = self._random.choice(ODD_SCHEMAS)
            wrapped = {"type": "json_schema", "json_schema": {"schema": odd}}
            body[field] = odd if field == "guided_json" else wrapped
        text = json.dumps(body).encode()
        return RandomRequest("POST", path, text, must_work, is_streamed=body.get("stream") is True)

    def _spoiled(self, value: Any) -> Any:
        """``value`` with an odd one in its place, or somewhere inside it."""
        keys: list[Any] = []
        if isinstance(value, (dict, list)):
            keys = [*value] if isinstance(value, dict) else [*range(len(value))]
        if not keys or self._chance(0.4):
            return self._random.choice(ODD_VALUES)
        spoiled, key = value.copy(), self._random.choice(keys)
        if self._chance(0.2):
            del spoiled[key]
        else:
            spoiled[key] = self._spoiled(value[key])
        return spoiled

    # -- routes

    def _completion(self) -> RandomRequest:
        pick = self._random
        body = self._shared("max_tokens")
        kinds = (
            self._text,
            self._ids,
            lambda: [self._text(), self._text()],
            lambda: [self._ids(), self._ids()],
        )
        body["prompt"] = pick.choice(kinds)()
        if self._chance(0.3):
            body["logprobs"] = pick.randint(0, 5)
        if self._chance(0.15):
            body["echo"] = True
        if self._chance(0.1) and not body.get("stream"):
            body["best_of"] = body.get("n", 1) + pick.randint(0, 2)
        return self._posted(COMPLETIONS, body)

    def _chat(self) -> RandomRequest:
        pick = self._random
        body = self._shared(pick.choice(("max_tokens", "max_completion_tokens")))
        body["messages"] = self._conversation()
        if self._chance(0.3):
            body |= {"logprobs": True, "top_logprobs": pick.randint(0, 4)}
        if self._chance(0.25) and not GUIDES & set(body):
            body.pop("ignore_eos", None)
            named = {"type": "function", "function": {"name": "look"}}
            body |= {"tools": [TOOL], "tool_choice": pick.choice(("auto", "none", "required", named))}
            body["parallel_tool_calls"] = self._chance(0.5)
        return self._posted(CHAT, body)

    def _conversation(self) -> list[dict[str, Any]]:
        roles = ["system"] * self._chance(0.3) + ["user", "assistant"] * self._random.randint(0, 2) + ["user"]
        return [{"role": role, "content": self._content()} for role in roles]

    def _content(self) -> Any:
        if self._chance(0.2):
            return [{"type": "text", "text": self._text(4)}, {"type": "text", "text": "and"}]
        return self._text(6)

    def _message(self) -> RandomRequest:
        pick = self._random
        messages = [turn for turn in self._conversation() if turn["role"] != "system"]
        body: dict[str, Any] = {"model": "any", "max_tokens": pick.randint(1, 12), "messages": messages}
        optional: dict[str, Callable[[], Any]] = {
            "system": self._text,
            "temperature": lambda: pick.choice((0, 1)),
            "stop_sequences": lambda: ["e"],
            "top_k": lambda: 5,
            "stream": lambda: True,
            "metadata": lambda: {"user_id": "u"},
            "tools": lambda: [{"name": "look", "input_schema": SCHEMA}],
        }
        body |= {name: optional[name]() for name in pick.sample([*optional], pick.randint(0, 3))}
        if "tools" in body and self._chance(0.5):
            body["tool_choice"] = {"type": pick.choice(("auto", "any", "none"))}
        if self._chance(0.15):
            counted = {name: body[name] for name in ("model", "messages", "system", "tools") if name in body}
            return self._posted(f"{MESSAGES}/count_tokens", counted)
        return self._posted(MESSAGES, body)

    def _response(self) -> RandomRequest:
        pick = self._random
        body: dict[str, Any] = {"max_output_tokens": pick.randint(1, 12)}
        body["input"] = self._text() if self._chance(0.4) else self._conversation_items()
        named = {"type": "function", "name": "look"}
        optional: dict[str, Callable[[], Any]] = {
            "instructions": self._text,
            "temperature": lambda: pick.choice((0, 1)),
            "top_p": lambda: pick.uniform(0.05, 1),
            "stream": lambda: True,
            "metadata": lambda: {"k": "v"},
            "truncation": lambda: pick.choice(("auto", "disabled")),
            "store": lambda: False,
            "text": lambda: {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "tools": lambda: [{"type": "function", **TOOL["function"]}],
        }
        body |= {name: optional[name]() for name in pick.sample([*optional], pick.randint(0, 4))}
        if "tools" in body:
            body |= {"tool_choice": pick.choice(("auto", "none", "required", named))}
        return self._posted(RESPONSES, body)

    def _conversation_items(self) -> list[dict[str, Any]]:
        """Turns as items of a response's input; parts of content have names of their own there."""
        items = []
        for turn in self._conversation():
            kind = "output_text" if turn["role"] == "assistant" else "input_text"
            content = turn["content"]
            if not isinstance(content, str):
                content = [{"type": kind, "text": part["text"]} for part in content]
            items.append({"type": "message", "role": turn["role"], "content": content})
        return items

    def _text_tools(self) -> RandomRequest:
        if self._chance(0.4):
            return self._posted("/detokenize", {"tokens": self._ids()})
        given = {"prompt": self._text(40)} if self._chance(0.5) else {"messages": self._conversation()}
        return self._posted("/tokenize", given | {"return_token_strs": self._chance(0.5)})

    def _read(self) -> RandomRequest:
        if self._chance(0.3):
            path = self._random.choice(
                ("/v1/embeddings", "/nope", "/v1/models/nope", "/%00", "/v1/../health", COMPLETIONS)
            )
            return RandomRequest(self._random.choice(("GET", "PUT", "DELETE")), path, b"")
        return RandomRequest("GET", self._random.choice(ROUTES_TO_READ), b"", must_work=True)

    def _malformed(self) -> RandomRequest:
        path = self._random.choice((COMPLETIONS, CHAT, MESSAGES, RESPONSES, "/tokenize", "/detokenize"))
        kind = self._random.choice(("application/json", "application/json", "text/plain", ""))
        return RandomRequest("POST", path, self._random.choice(ODD_BODIES), content_type=kind)
