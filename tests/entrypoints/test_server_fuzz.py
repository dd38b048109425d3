"""Whatever a body holds, the answer is a success or a refusal, never a fault of the server."""

import json

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from atom.entrypoints.openai.responses_protocol import ResponsesRequest

json_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(-2, 2)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
part = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)})
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool", ""])},
    optional={"content": st.none() | st.text(max_size=8) | st.lists(part, max_size=2), "name": json_value},
)
prompt = (
    st.text(max_size=20)
    | st.lists(st.text(max_size=5), max_size=3)
    | st.lists(st.integers(-1, 300), max_size=9)
)

text_part = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "reasoning_text", "input_image"])},
    optional={"text": st.text(max_size=5)},
)
item = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "other"]),
        "role": st.sampled_from(["user", "assistant", "developer", ""]),
        "content": st.text(max_size=8) | st.lists(text_part, max_size=2),
        "call_id": st.sampled_from(["a", "b"]),
        "name": st.text(max_size=3),
        "arguments": st.text(max_size=5),
        "output": st.text(max_size=5) | st.lists(text_part, max_size=2),
        "summary": json_value,
    },
)


def names(struct: type[msgspec.Struct]) -> list[str]:
    skip = ("prompt", "messages", "input", "stream", "model")
    return [field.name for field in msgspec.structs.fields(struct) if field.name not in skip]


def body(struct: type[msgspec.Struct], own: dict) -> st.SearchStrategy[dict]:
    few = st.dictionaries(st.sampled_from(names(struct)), json_value, max_size=3)
    return st.builds(
        lambda a, b: {**a, **b}, st.fixed_dictionaries(own, optional={"stream": st.booleans()}), few
    )


requests = st.one_of(
    st.tuples(st.just("/v1/completions"), body(CompletionRequest, {"prompt": prompt | json_value})),
    st.tuples(
        st.just("/v1/chat/completions"),
        body(ChatCompletionRequest, {"messages": st.lists(message, max_size=3) | json_value}),
    ),
    st.tuples(
        st.just("/v1/responses"),
        body(ResponsesRequest, {"input": st.text(max_size=9) | st.lists(item, max_size=4) | json_value}),
    ),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests)
def test_no_body_is_a_server_fault(http, request_):
    path, fields = request_
    content = json.dumps(fields).encode()
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), (fields, answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["type"] == "invalid_request_error"
    elif path == "/v1/responses":
        assert '"status":"completed"' in answer.text or '"status":"incomplete"' in answer.text
    elif fields.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text
    else:
        assert answer.json()["choices"]
