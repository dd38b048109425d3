"""The compile worker: its limits, its death, the cache in front of it. The library behind it is a fake."""

import importlib.util
import json
import threading
import time

import pytest

from atom.errors import AtomError, QueueFullError, RequestError
from atom.guide import Guide
from atom.model_engine.structured import guide_compiler
from atom.model_engine.structured.backend import Vocabulary, VocabularyIndex, choose_backend
from atom.model_engine.structured.guide_compiler import GuideCompiler

WORKER = "tests.helpers.bad_guide_workers"
VOCABULARY = Vocabulary([b"a", b"b", b"<x>"], [2], [2])


def guide(text: str, **fields) -> Guide:
    return Guide(kind="regex", text=text, backend="xgrammar", **fields)


@pytest.fixture
def prepared():
    return []


@pytest.fixture
def compiler(prepared):
    compiler = new_compiler(prepared)
    yield compiler
    compiler.close()


def new_compiler(prepared, **fields) -> GuideCompiler:
    fields = {"worker_module": WORKER, "time_limit_s": 1.0, **fields}
    return GuideCompiler(lambda: VOCABULARY, lambda *args: prepared.append(args), **fields)


def run(compiler: GuideCompiler, text: str, **fields) -> list:
    return json.loads(compiler.submit(guide(text, **fields)).result(30).data)


def test_a_guide_compiles_once_and_the_engine_is_prepared_once(compiler, prepared):
    first = compiler.submit(guide("abc")).result(30)
    assert json.loads(first.data)[1:] == [3, "abc"]
    again = compiler.submit(guide("abc", start_after="</t>", field="response_format")).result(0)
    assert (again.key, again.data, again.start_after) == (first.key, first.data, "</t>")
    assert run(compiler, "abd")[0] == compiler.worker_pid
    assert [name for name, _ in prepared] == ["xgrammar"]


def test_equal_guides_share_a_job_in_flight(compiler, monkeypatch):
    jobs = []
    original = GuideCompiler._compile
    monkeypatch.setattr(GuideCompiler, "_compile", lambda self, job: jobs.append(job) or original(self, job))
    futures = [compiler.submit(guide("same")) for _ in range(10)]
    assert len({future.result(30) for future in futures}) == 1
    assert len(jobs) == 1


def test_crash_of_the_worker_fails_that_guide_and_the_next_one_gets_a_new_worker(compiler):
    before = run(compiler, "ok")[0]
    crash, after = compiler.submit(guide("crash", field="response_format")), compiler.submit(guide("fine"))
    with pytest.raises(
        RequestError, match="response_format does not compile as regex: .* crashed on it"
    ) as info:
        crash.result(30)
    assert info.value.param == "response_format" and info.value.status == 400
    assert json.loads(after.result(30).data)[0] != before


def test_time_limit_ends_the_worker_and_names_the_limit(compiler):
    run(compiler, "warm")
    began = time.monotonic()
    with pytest.raises(RequestError, match="longer than the limit of 1 s"):
        compiler.submit(guide("sleep")).result(30)
    assert 0.9 < time.monotonic() - began < 3
    began = time.monotonic()
    with pytest.raises(RequestError, match="longer than"):  # remembered: it costs no second worker
        compiler.submit(guide("sleep")).result(0)
    assert time.monotonic() - began < 0.1
    assert run(compiler, "after")[2] == "after"


def test_refusals_are_remembered_for_a_while(compiler, monkeypatch):
    for _ in range(2):
        with pytest.raises(RequestError, match="^guide does not compile as regex: no such thing$"):
            compiler.submit(guide("refuse")).result(30)
    for result in compiler._results.values():
        result.expires = 0.0
    assert not compiler.submit(guide("refuse")).done()


def test_the_cache_has_a_bound():
    compiler = new_compiler([], cache_bytes=2000)
    try:
        for i in range(20):
            run(compiler, f"number {i}")
            assert compiler.cached_bytes <= 2000
        assert compiler.submit(guide("number 19")).done()
        assert not compiler.submit(guide("number 0")).done()
    finally:
        compiler.close()


def test_the_queue_has_a_bound(compiler, monkeypatch):
    monkeypatch.setattr(guide_compiler, "MAX_QUEUED_GUIDES", 3)
    futures = [compiler.submit(guide(f"q{i}")) for i in range(3)]
    with pytest.raises(QueueFullError, match="the limit is 3"):
        compiler.submit(guide("q3"))
    assert all(future.result(30) for future in futures)


def test_close_fails_who_waits_and_ends_the_worker(compiler):
    run(compiler, "warm")
    waiting = compiler.submit(guide("sleep"))
    worker = compiler._worker
    threading.Timer(0.1, compiler.close).start()
    with pytest.raises(AtomError):
        waiting.result(10)
    compiler.close()
    assert not worker.is_alive
    with pytest.raises(AtomError, match="closed"):
        compiler.submit(guide("more"))


def test_trouble_in_preparing_the_engine_is_reported_and_not_remembered():
    def fail(backend, vocabulary):
        raise AtomError("the engine says no")

    compiler = GuideCompiler(lambda: VOCABULARY, fail, worker_module=WORKER)
    try:
        for _ in range(2):
            with pytest.raises(AtomError, match="the engine says no"):
                compiler.submit(guide("abc")).result(30)
    finally:
        compiler.close()


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    from atom.model_engine.structured import backend

    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(
        RequestError, match=r"needs the package xgrammar, .*atom-inference-engine\[structured\]"
    ):
        choose_backend(guide("abc"))
    monkeypatch.setattr(backend, "find_spec", lambda name: name == "llguidance" or None)
    assert choose_backend(Guide(kind="regex", text="abc")) == "llguidance"


def test_auto_takes_the_library_that_enforces_the_whole_schema():
    assert importlib.util.find_spec("xgrammar") and importlib.util.find_spec("llguidance")
    plain = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    assert choose_backend(Guide(kind="json_schema", text=plain)) == "xgrammar"
    for schema, keyword in (
        ('{"properties": {"a": {"not": {"type": "null"}}}}', "#/properties/a/not"),
        ('{"type": "array", "uniqueItems": true}', "#/uniqueItems"),
        ('{"allOf": [{"type": "integer"}, {"minimum": 3}]}', "#/allOf"),
        ('{"type": "string", "pattern": "a", "maxLength": 3}', "#/pattern"),
    ):
        assert choose_backend(Guide(kind="json_schema", text=schema)) == "llguidance"
        with pytest.raises(RequestError, match=f"xgrammar ignores {keyword}"):
            choose_backend(Guide(kind="json_schema", text=schema, backend="xgrammar"))


def test_texts_are_cut_at_special_tokens():
    index = VocabularyIndex(Vocabulary([b"a", b"<x>", b"<x>y"], [1, 2], [1]))
    assert index.pieces("<x>a<x>yb") == [1, "a", 2, "b"]
    assert index.pieces("ab") == ["ab"] and index.pieces("") == []
