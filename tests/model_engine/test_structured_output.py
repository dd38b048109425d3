"""Structured output through LLMEngine: a random model, both grammar libraries, both engine loops.

The model knows nothing, so whatever is right about an answer the grammar has done.
"""

import asyncio
import json
import re
import time

import numpy as np
import pytest

from atom import LLMEngine, SamplingParams
from atom.core import Sequence
from atom.errors import RequestError
from atom.guide import Guide, Tag
from atom.model_engine.messages import CompiledGuide
from atom.model_engine.structured.backend import GrammarError, load_backend
from atom.model_engine.structured.guide_compiler import make_vocabulary
from atom.model_engine.structured.guide_manager import GuideManager
from atom.model_loader.model_files import ModelFiles
from tests.helpers.tiny_model import EOS_ID, TURN_ID, make_tiny_model
from tests.model_ops.test_sampler import make_batch, make_seq

BACKENDS = ("xgrammar", "llguidance")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "mood": {"enum": ["good", "bad", None]},
    },
    "required": ["name", "age"],
}
POINT = '{"type": "object", "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["x"]}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("guided"))


@pytest.fixture(scope="module", params=["plain", "overlapped"])
def engine(request, folder):
    with LLMEngine(
        str(folder), in_process=True, show_progress=False, loop=request.param, max_num_seqs=16
    ) as e:
        yield e


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def params(guide: Guide | None, seed: int = 0, **fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 300, "temperature": 1.0, "seed": seed, "guide": guide} | fields)


def answers(engine: LLMEngine, guide: Guide, num: int = 4, **fields) -> list[str]:
    outputs = engine.generate(["go"] * num, [params(guide, seed, **fields) for seed in range(num)])
    for output in outputs:
        assert output["finish_reason"] == "stop" and output["error"] is None, output
        assert output["token_ids"][-1] == EOS_ID
    return [output["text"] for output in outputs]


def test_json_objects_parse(engine, backend):
    # A random model would go on inside the object for ever: only what ends within the limit can be parsed.
    guide = Guide(kind="json_object", backend=backend)
    outputs = engine.generate(["go"] * 8, [params(guide, s, max_tokens=400) for s in range(8)])
    for output in outputs:
        assert output["text"].lstrip().startswith("{")
        if output["finish_reason"] == "stop":
            assert isinstance(json.loads(output["text"]), dict)
        else:
            assert output["num_tokens_output"] == 400


def test_schemas_validate(engine, backend):
    for text in answers(engine, Guide(kind="json_schema", text=json.dumps(PERSON), backend=backend)):
        value = json.loads(text)
        assert set(value) <= {"name", "age", "mood"}, "the schema names no other property"
        assert isinstance(value["name"], str) and len(value["name"]) <= 6
        assert isinstance(value["age"], int) and 0 <= value["age"] <= 99
        assert value.get("mood") in ("good", "bad", None)


def test_what_xgrammar_would_ignore_is_enforced_by_the_other_library(engine):
    schema = '{"allOf": [{"type": "integer", "minimum": 7}, {"maximum": 8}]}'
    assert set(answers(engine, Guide(kind="json_schema", text=schema))) <= {"7", "8"}


@pytest.mark.parametrize("pattern", [r"[a-c]{3,6}x\d?", r"(foo|ba[rz])+?!", r"é{2}.", r"^\w{2}$"])
def test_regular_expressions_match(engine, backend, pattern):
    texts = answers(engine, Guide(kind="regex", text=pattern, backend=backend), ignore_eos=False)
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_choices_are_of_the_list_even_where_one_begins_another(engine, backend):
    choices = ("yes", "yes, please", 'a "quoted" \\ one', "línea\nnueva", "no")
    texts = answers(engine, Guide(kind="choice", choices=choices, backend=backend), num=12)
    assert set(texts) <= set(choices) and len(set(texts)) > 2


def test_grammars_are_followed(engine, backend):
    guide = Guide(
        kind="grammar",
        text='root ::= "<" digits ("," digits)* ">"\ndigits ::= [0-9] | [1-9] [0-9]\n',
        backend=backend,
    )
    texts = answers(engine, guide)
    assert all(re.fullmatch(r"<(\d|[1-9]\d)(,(\d|[1-9]\d))*>", text) for text in texts), texts


@pytest.mark.parametrize("stop_after_first", [True, False])
def test_tool_calls_come_first_and_have_their_schema(engine, backend, stop_after_first):
    guide = Guide(
        kind="structural",
        tags=(
            Tag(begin="<f=point>", schema=POINT, end="</f>"),
            Tag(begin="<f=none>", schema='{"type":"object","additionalProperties":false}', end="</f>"),
        ),
        triggers=("<f=",),
        at_least_one=True,
        stop_after_first=stop_after_first,
        backend=backend,
    )
    outputs = engine.generate(["go"] * 6, [params(guide, seed, max_tokens=120) for seed in range(6)])
    for text in (output["text"] for output in outputs):
        name, arguments, rest = re.fullmatch(r"<f=(\w+)>(.*?)</f>(.*)", text, re.DOTALL).groups()
        value = json.loads(arguments)
        assert value == {} if name == "none" else value["x"] in range(10)
        assert stop_after_first is False or rest == ""


def test_special_tokens_open_and_close_tags(engine, backend):
    guide = Guide(
        kind="structural",
        tags=(Tag(begin="<turn>call ", schema=POINT, end="<bos>"),),
        at_least_one=True,
        stop_after_first=True,
        backend=backend,
    )
    for output in engine.generate(["go"] * 3, [params(guide, seed) for seed in range(3)]):
        ids = output["token_ids"]
        assert ids[0] == TURN_ID and ids[-2:] == [256, EOS_ID] and ids.count(TURN_ID) == 1
        assert json.loads(output["text"].removeprefix("call "))["x"] in range(10)


def test_an_xml_style_is_xgrammars_own(engine):
    tag = Tag(begin="<function=f>", schema=POINT, end="</function>", style="qwen_xml")
    fields = dict(
        kind="structural", tags=(tag,), triggers=("<function=",), at_least_one=True, stop_after_first=True
    )
    pattern = r"<function=f>\s*<parameter=x>\s*\d\s*</parameter>\s*</function>"
    assert all(re.fullmatch(pattern, text) for text in answers(engine, Guide(**fields)))
    with pytest.raises(RequestError, match="llguidance does not write the style qwen_xml"):
        engine.generate("go", params(Guide(**fields, backend="llguidance")))


def test_the_grammar_starts_after_its_marker(engine, backend):
    # The bias makes the random model "think" in two letters until it says "]".
    guide = Guide(kind="regex", text="[0-9]{4}", backend=backend, start_after="]")
    bias = {ord("a"): 40.0, ord("]"): 39.0, ord("7"): 5.0}
    for output in engine.generate(["go"] * 4, [params(guide, s, logit_bias=bias) for s in range(4)]):
        thought, answer = output["text"].split("]", 1)
        assert set(thought) <= {"a"} and re.fullmatch("[0-9]{4}", answer)


def test_guided_rows_leave_the_others_alone(engine, backend):
    prompts = ["one", "two", "three", "four"]
    plain = [params(None, seed, max_tokens=40) for seed in range(3)]
    plain.append(params(None, temperature=0.0, max_tokens=40))
    alone = [output["token_ids"] for output in engine.generate(prompts, plain)]
    guides = [
        params(Guide(kind="regex", text="[ab]{30}", backend=backend), 9),
        params(Guide(kind="choice", choices=("x" * 20,), backend=backend), temperature=0.0),
        params(
            Guide(kind="json_schema", text=json.dumps(PERSON), backend=backend),
            5,
            top_k=20,
            presence_penalty=1.0,
        ),
    ]
    mixed = engine.generate(prompts + ["g"] * 3, plain + guides)
    assert [output["token_ids"] for output in mixed[:4]] == alone
    assert re.fullmatch("[ab]{30}", mixed[4]["text"]) and mixed[5]["text"] == "x" * 20
    assert json.loads(mixed[6]["text"])


def test_n_answers_share_a_guide_and_differ(engine, backend):
    guide = Guide(kind="regex", text="[a-z]{12}", backend=backend)
    outputs = engine.generate("go", params(guide, 4, n=4))
    texts = [output["text"] for output in outputs]
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts) and len(set(texts)) == 4
    assert texts == [output["text"] for output in engine.generate("go", params(guide, 4, n=4))]


def test_logprobs_are_the_models_own(engine, backend):
    guide = Guide(kind="choice", choices=("zebra",), backend=backend)
    output = engine.generate("go", params(guide, logprobs=2))[0]
    assert output["text"] == "zebra" and len(output["logprobs"]) == 6
    for entry, token_id in zip(output["logprobs"], output["token_ids"], strict=True):
        assert entry.token_id == token_id and -100 < entry.logprob < 0
        assert entry.rank > 2 or token_id in entry.top_ids


def test_a_finished_grammar_outweighs_min_tokens(engine, backend):
    assert (
        answers(engine, Guide(kind="choice", choices=("ab",), backend=backend), min_tokens=20) == ["ab"] * 4
    )
    texts = answers(engine, Guide(kind="regex", text="a+", backend=backend), min_tokens=20)
    assert all(len(text) >= 20 for text in texts)


def test_a_guide_that_leaves_no_token_fails_its_request_alone(engine, backend):
    guide = Guide(kind="choice", choices=("q",), backend=backend)
    bad, good = engine.generate(["a", "b"], [params(guide, bad_words=["q"]), params(guide)])
    assert bad["finish_reason"] == "error" and "no token is left" in bad["error"]
    assert good["text"] == "q"


def test_a_failing_matcher_fails_its_request_alone(engine, backend, monkeypatch):
    original = GuideManager._catch_up

    def fail(self, guided):
        if len(guided.seq.token_ids) > guided.seq.num_prompt_tokens + 3 and guided.seq.num_prompt_tokens == 8:
            raise RuntimeError("broken on purpose")
        original(self, guided)

    monkeypatch.setattr(GuideManager, "_catch_up", fail)
    guide = Guide(kind="regex", text="[ab]{10}", backend=backend)
    outputs = engine.generate(
        ["seven:)", "good", "free"], [params(guide), params(guide), params(None, max_tokens=20)]
    )
    assert outputs[0]["finish_reason"] == "error" and "broken on purpose" in outputs[0]["error"]
    assert re.fullmatch("[ab]{10}", outputs[1]["text"])
    assert outputs[2]["error"] is None
    assert engine.call_utility("check_integrity") == []


def test_preempted_sequences_go_on_within_their_grammar(folder, backend):
    guide = Guide(kind="regex", text="([a-d]{4} )+!", backend=backend)
    prompts = [f"prompt {i} " * 3 for i in range(6)]
    given = [params(guide, seed, max_tokens=60) for seed in range(6)]
    expected = None
    for fields in ({}, {"num_kvcache_blocks": 10}, {"num_kvcache_blocks": 10, "loop": "overlapped"}):
        with LLMEngine(
            str(folder),
            in_process=True,
            show_progress=False,
            max_model_len=128,
            kv_cache_block_size=16,
            **fields,
        ) as engine:
            texts = [output["text"] for output in engine.generate(prompts, given)]
            num_preemptions = engine.get_metrics_statistics()["preemptions"]
        assert (num_preemptions > 0) == bool(fields)
        expected = expected or texts
        assert texts == expected
        assert all(re.fullmatch(r"([a-d]{4} )*([a-d]{0,4}|!)", text) for text in texts)


@pytest.mark.parametrize(
    "case, fields, words",
    [
        ("F4", {"kind": "regex", "text": "foo**"}, "quantifiers in a row"),
        ("F4", {"kind": "regex", "text": "(?=a)b"}, "(?i)look-?a"),
        ("F5", {"kind": "json_schema", "text": '{"properties": {"foo": "bar"}}'}, "#/properties/foo"),
        ("F5", {"kind": "json_schema", "text": '{"type": "foo"}'}, "foo"),
        ("F6", {"kind": "regex", "text": "(" * 10_000 + "a" + ")" * 10_000}, "8192"),
        ("F6", {"kind": "grammar", "text": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000}, "64 levels"),
        ("F6", {"kind": "grammar", "text": 'root ::= "a" | foo'}, "foo"),
        ("F6", {"kind": "grammar", "text": 'root := "a"'}, "(?i)line 1"),
    ],
)
def test_F4_F5_F6_bad_guides_are_refused_in_under_a_second_while_others_go_on(
    engine, backend, case, fields, words
):
    engine.generate("warm", params(Guide(kind="regex", text="a", backend=backend)))

    async def run():
        stream = engine.stream("go", params(None, max_tokens=100, ignore_eos=True))
        began = time.monotonic()
        with pytest.raises(RequestError, match=words) as info:
            await engine.compile_guide(Guide(**fields, backend=backend, field="guided_regex"))
        assert time.monotonic() - began < 1
        assert info.value.param == "guided_regex" and info.value.status == 400
        return [output async for output in stream][-1]

    last = asyncio.run(run())
    assert last.finished and last.num_output_tokens == 100 and last.error is None


def test_streams_take_a_guide_that_was_compiled_before(engine, backend):
    guide = Guide(kind="choice", choices=("streamed",), backend=backend)

    async def run():
        with pytest.raises(RequestError, match="compiled first"):
            engine.stream("go", params(guide))
        compiled = await engine.compile_guide(guide)
        return [output.text async for output in engine.stream("go", params(guide), guide=compiled)]

    assert "".join(asyncio.run(run())) == "streamed"


# -- parts


@pytest.fixture(scope="module")
def vocabulary(folder):
    return make_vocabulary(ModelFiles.resolve(str(folder)).load_tokenizer(), 260)


@pytest.fixture(scope="module")
def libraries(vocabulary):
    return {name: load_backend(name, vocabulary) for name in BACKENDS}


def allowed(matcher) -> set[int]:
    bits = np.zeros((2, 9), np.int32)
    matcher.fill_mask(bits, 1)
    assert not bits[0].any()
    flags = np.unpackbits(bits[1].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(flags).tolist())


def test_a_matcher_accepts_refuses_and_rolls_back(libraries, backend):
    library = libraries[backend]
    matcher = library.load(library.compile(Guide(kind="regex", text="ab?c"))).matcher()
    assert allowed(matcher) == {ord("a")} and not matcher.is_finished
    assert not matcher.accept(ord("b")), "refused, and nothing has changed"
    assert matcher.accept(ord("a")) and allowed(matcher) == {ord("b"), ord("c")}
    assert matcher.accept(ord("b")) and matcher.accept(ord("c"))
    assert matcher.is_finished and allowed(matcher) == {EOS_ID}
    matcher.rollback(2)
    assert allowed(matcher) == {ord("b"), ord("c")} and matcher.accept(ord("c"))
    assert matcher.accept(EOS_ID) and not matcher.accept(ord("c"))
    matcher.rollback(2)
    assert allowed(matcher) == {ord("b"), ord("c")}


def test_special_tokens_are_no_text(libraries, backend):
    library = libraries[backend]
    matcher = library.load(library.compile(Guide(kind="json_object"))).matcher()
    for byte in b'{"a':
        assert matcher.accept(byte)
    assert not allowed(matcher) & {256, EOS_ID, 258, TURN_ID}


@pytest.mark.parametrize("good", ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": 1\n}'])
def test_json_objects_of_any_layout_are_allowed(libraries, backend, good):
    library = libraries[backend]
    grammar = library.load(library.compile(Guide(kind="json_object")))
    assert _fits(grammar, good)
    for bad in ("[]", "1", '{"a": 01}', '{"a\x01": 1}'):
        assert not _fits(grammar, bad)


def test_bounded_strings_hold_no_raw_control_characters(libraries, backend):
    library = libraries[backend]
    grammar = library.load(library.compile(Guide(kind="json_schema", text='{"type":"string","maxLength":3}')))
    assert _fits(grammar, '"abc"') and _fits(grammar, '""') and _fits(grammar, '"é"')
    assert not _fits(grammar, '"abcd"') and not _fits(grammar, '"a\x01"') and not _fits(grammar, '"a\n"')


def _fits(grammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.is_finished


def test_json_goes_on_after_some_white_space(vocabulary, libraries, backend):
    library = libraries[backend]
    manager = GuideManager()
    manager._set_vocabulary(vocabulary)
    manager._backends = {backend: library}
    data = library.compile(Guide(kind="json_object"))
    seq = make_seq(0, 0, output=list(b"{" + b" \n" * 31))
    seq.guide = CompiledGuide(b"key", backend, data, is_json=True)
    manager.add(seq)
    for addition, has_blank in ((b" ", True), (b"\t", False), (b'"', True)):
        seq.token_ids += addition
        masks, _ = manager.masks(make_batch([seq]))
        flags = np.unpackbits(masks.bits[0].view(np.uint8), bitorder="little")
        assert flags[ord(" ")] == has_blank and flags[ord("}")] == (addition != b'"' or flags[ord("a")])


def test_a_dot_is_no_newline(libraries, backend):
    library = libraries[backend]
    grammar = library.load(library.compile(Guide(kind="regex", text=r"a.\.[.]")))
    assert _fits(grammar, "ax..") and not _fits(grammar, "a\n..") and not _fits(grammar, "axb.")


def test_a_tag_without_a_trigger_is_refused(libraries, backend):
    guide = Guide(kind="structural", tags=(Tag(begin="<f>", end="</f>"),), triggers=("<g",))
    with pytest.raises(GrammarError, match="trigger"):
        libraries[backend].compile(guide)


def test_grammars_are_kept_up_to_a_bound_and_data_of_strangers_is_an_error(
    vocabulary, libraries, monkeypatch, backend
):
    from atom.model_engine.structured import guide_manager

    library = libraries[backend]
    manager = GuideManager()
    manager._set_vocabulary(vocabulary)
    manager._backends = {backend: library}
    data = library.compile(Guide(kind="regex", text="ab"))
    monkeypatch.setattr(guide_manager, "LOADED_BYTES", 3 * len(data))
    seqs = []
    for i in range(8):
        seq = Sequence(
            i, [1, 2], SamplingParams(), max_output_tokens=5, guide=CompiledGuide(b"%d" % i, backend, data)
        )
        seq.row = i
        manager.add(seq)
        seqs.append(seq)
    broken = make_seq(9, 9)
    broken.guide = CompiledGuide(b"x", backend, b"{no grammar")
    manager.add(broken)
    masks, errors = manager.masks(make_batch([*seqs, broken, make_seq(10, 10)]))
    assert masks.rows == list(range(8)) and list(errors) == [8]
    assert len(manager._grammars) == 3 and manager._num_bytes <= 3 * len(data)


def test_libraries_load_beside_the_steps_and_say_why_not(vocabulary, monkeypatch):
    import msgspec

    from atom.model_engine.structured import guide_manager

    manager = GuideManager()
    encoded = msgspec.msgpack.encode(vocabulary)
    deadline = time.monotonic() + 60
    while not manager.prepare("llguidance", encoded):
        assert time.monotonic() < deadline
        time.sleep(0.01)

    def fail(name, vocabulary):
        raise ImportError("no such library")

    monkeypatch.setattr(guide_manager, "load_backend", fail)
    with pytest.raises(ImportError, match="no such library"):
        while not manager.prepare("xgrammar"):
            time.sleep(0.01)
