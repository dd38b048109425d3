"""LLMEngine over a real engine core in this process: text in, text out, without a model.

The scripted worker answers with the prompt itself and ends, so every expected text is known.
"""

import asyncio
import gc
import threading
import weakref

import pytest

from atom import LLM, LLMEngine, SamplingParams
from atom.core import BatchOutput
from atom.errors import AtomError, ConfigError, ContextLengthError, EngineDeadError, RequestError
from atom.model_engine.runner.scripted_worker import ScriptedWorker
from tests.helpers.tiny_model import make_tiny_model

SCRIPTED = "atom.model_engine.runner.scripted_worker.ScriptedWorker"
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(params=["plain", "overlapped"])
def engine(request, folder):
    with new_engine(folder, loop=request.param) as engine:
        yield engine


def new_engine(folder, **fields) -> LLMEngine:
    fields = {"runner_qualname": SCRIPTED, "max_model_len": 512, "max_num_seqs": 8, **fields}
    return LLMEngine(str(folder), in_process=True, show_progress=False, **fields)


def test_answers_come_in_prompt_order_with_counts_and_times(engine):
    answers = engine.generate(["hello", "a longer prompt", "x"], GREEDY)
    assert [answer["text"] for answer in answers] == ["hello", "a longer prompt", "x"]
    for answer in answers:
        assert answer["finish_reason"] == "stop" and answer["stop_reason"] is None
        assert answer["num_tokens_output"] == answer["num_tokens_input"] + 1  # the whole prompt, then EOS
        assert 0 <= answer["ttft"] <= answer["latency"]


def test_token_ids_are_prompts_too(engine):
    ids = engine.tokenizer.encode("ids")
    assert engine.generate(ids, GREEDY)[0]["text"] == "ids"
    assert [a["text"] for a in engine.generate([ids, ids], GREEDY)] == ["ids", "ids"]


def test_max_tokens_ends_with_length(engine):
    answer = engine.generate("abcdefgh", SamplingParams(temperature=0.0, max_tokens=4))[0]
    assert answer["finish_reason"] == "length" and answer["num_tokens_output"] == 4


def test_n_answers_follow_each_other(engine):
    answers = engine.generate(["one", "two"], SamplingParams(temperature=0.0, max_tokens=50, n=3))
    assert [(a["text"], a["index"]) for a in answers] == [(t, i) for t in ("one", "two") for i in range(3)]


@pytest.mark.parametrize(
    "stop, text, matched",
    [(["lo wo"], "hel", "lo wo"), (["world", "hello"], "", "hello"), (["zzz"], "hello world", None)],
)
def test_stop_strings_cut_the_text_and_end_the_request(engine, stop, text, matched):
    answer = engine.generate(
        "hello world", SamplingParams(temperature=0.0, max_tokens=99, stop_strings=stop)
    )[0]
    assert answer["text"] == text
    assert answer["finish_reason"] == "stop"
    assert answer["stop_reason"] == matched


def test_callbacks_see_deltas_that_join_to_the_whole(engine):
    texts, done = [], threading.Event()

    def callback(output):
        texts.append(output.text)
        if output.finished:
            done.set()

    engine.add_request("stream me", GREEDY, callback)
    assert done.wait(20)
    assert "".join(texts) == "stream me" and len(texts) > 3


def test_step_returns_what_was_added_without_a_callback(engine):
    ids = engine.add_request(["first", "second"], GREEDY)
    seen = {}
    while not engine.is_finished():
        for output in engine.step():
            seen[output.request_id] = output.text
    assert seen == dict(zip(ids, ["first", "second"], strict=True))


def test_an_async_stream_yields_every_answer_and_ends(engine):
    async def run():
        prompt = await engine.preprocess("async text")
        texts = ["", ""]
        async for output in engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=99, n=2)):
            texts[output.index] += output.text
        return texts

    assert asyncio.run(run()) == ["async text"] * 2


def test_leaving_a_stream_aborts_its_request(engine):
    async def run():
        prompt = await engine.preprocess("x" * 300)
        stream = engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    assert engine.is_finished()
    assert engine.generate("after", GREEDY)[0]["text"] == "after"
    assert engine.call_utility("check_integrity") == []
    assert engine.get_cache_statistics()["kv_blocks_used"] == 0


def test_generate_returns_what_there_is_when_another_thread_aborts_its_request(folder):
    with new_engine(folder, max_model_len=4096) as engine:
        endless = SamplingParams(temperature=0.0, max_tokens=3500, ignore_eos=True)
        engine.add_request("beside it", endless, lambda output: engine.abort("mine"))
        [answer] = engine.generate("x" * 100, endless, ["mine"])
        assert answer["finish_reason"] == "abort"
        assert len(answer["token_ids"]) == answer["num_tokens_output"] < 3500


def test_a_callback_is_told_of_an_abort_once(engine):
    outputs, ended = [], threading.Event()

    def take(output):
        outputs.append(output)
        engine.abort(output.request_id)
        if output.finished:
            ended.set()

    engine.add_request("x" * 100, SamplingParams(max_tokens=300, ignore_eos=True, n=2), take)
    assert ended.wait(20)
    assert engine.generate("after", GREEDY)[0]["text"] == "after"
    finished = [(output.index, output.finish_reason) for output in outputs if output.finished]
    assert sorted(finished) == [(0, "abort"), (1, "abort")]
    assert engine.is_finished() and engine.get_cache_statistics()["kv_blocks_used"] == 0


@pytest.mark.parametrize(
    "prompt, params, error, words",
    [
        ("", None, None, None),
        ([], SamplingParams(), RequestError, "at least 1 token"),
        (
            [5, 99999],
            SamplingParams(),
            RequestError,
            r"prompt holds token id 99999, outside the vocabulary \[0, ",
        ),
        ([5, -1], SamplingParams(), RequestError, "prompt holds token id -1,"),
        ([5, 2**40], SamplingParams(), RequestError, f"prompt holds token id {2**40},"),
        ([5, 6.0], SamplingParams(), RequestError, "prompt holds token id 6.0,"),
        ("x" * 600, SamplingParams(max_tokens=1), ContextLengthError, "512"),
        ("x" * 500, SamplingParams(max_tokens=100), ContextLengthError, "max_tokens is 100"),
        ("x", SamplingParams(logit_bias={99999: 1.0}), RequestError, "logit_bias"),
        ("x", SamplingParams(stop_token_ids=[-1]), RequestError, "stop_token_ids"),
    ],
)
def test_a_bad_request_is_refused_alone(engine, prompt, params, error, words):
    if error is None:
        assert engine.generate("ok", GREEDY)[0]["text"] == "ok"
        return
    with pytest.raises(error, match=words):
        engine.generate([prompt], params)
    assert engine.is_finished()


def test_lists_must_match(engine):
    with pytest.raises(RequestError, match="sampling_params must hold one entry per prompt"):
        engine.generate(["a", "b"], [GREEDY])


def test_a_request_id_cannot_be_used_twice_at_once(engine):
    with pytest.raises(RequestError, match="in use"):
        engine.add_request(["a", "b"], GREEDY, request_ids=["same", "same"])
    assert engine.is_finished()


def test_an_unknown_field_names_the_near_match(folder):
    with pytest.raises(ConfigError, match="max_model_len"):
        LLMEngine(str(folder), in_process=True, max_modle_len=64)


def test_an_unknown_model_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="no/such model"):
        LLMEngine("./no/such model", in_process=True, runner_qualname=SCRIPTED)


class DyingWorker(ScriptedWorker):
    """Fails as a device would: in the middle of a step."""

    def wait(self, handle) -> BatchOutput:
        if any(seq.num_output_tokens >= 3 for seq in handle.seqs):
            raise RuntimeError("the device is gone")
        return super().wait(handle)


def test_a_closed_engine_refuses_instead_of_waiting_for_ever(folder):
    with new_engine(folder) as engine:
        assert engine.generate("before", GREEDY)[0]["text"] == "before"
    for ask in (engine.generate, engine.add_request):
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            ask("after", GREEDY)
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        engine.call_utility("check_integrity")
    assert engine.is_finished()


def test_a_request_registered_while_the_engine_dies_is_not_waited_for(folder, monkeypatch):
    with new_engine(folder) as engine:
        add = engine._io.add

        def dying(*args, **fields):
            engine._on_death(EngineDeadError("the device is gone"))
            return add(*args, **fields)

        monkeypatch.setattr(engine._io, "add", dying)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            engine.generate("late", GREEDY)
        assert engine.is_finished()


def test_a_dead_engine_ends_every_request_and_says_why(folder):
    engine = new_engine(folder, runner_qualname=f"{__name__}.DyingWorker")
    died = threading.Event()
    engine.on_death(died.set)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        engine.generate(["a long enough prompt"], GREEDY)
    assert died.wait(5)
    assert not engine.health().ok and engine.health().state == "dead"
    with pytest.raises(EngineDeadError):
        engine.generate(["again"], GREEDY)
    engine.close()


def test_close_is_idempotent_and_llm_is_the_same_class(folder):
    engine = new_engine(folder)
    engine.close()
    engine.close()
    assert LLM is LLMEngine
    assert not engine.health().ok


def test_a_failing_utility_raises_with_the_engines_words(engine):
    with pytest.raises(AtomError, match="unknown command 'nonsense'"):
        engine.call_utility("nonsense")


def test_M4_a_closed_engine_is_gone_with_its_last_reference(folder):
    gc.collect()
    gc.disable()
    try:
        engine = new_engine(folder)
        engine.generate("used once", GREEDY)
        engine.close()
        gone = weakref.ref(engine)
        del engine
        assert gone() is None
    finally:
        gc.enable()
