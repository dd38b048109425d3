"""The table of environment variables, how values are read, and the page that is generated from it."""

import ast
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atom.errors import ConfigError
from atom.utils import env_var, envs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name in envs.VARIABLES or name.startswith("ATOM_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(env_var, "_said", set())


def test_the_table_holds_every_variable_once():
    assert len(envs.VARIABLES) == len(envs.TABLE)
    assert len(envs.TABLE) >= 190
    assert all(row.meaning.endswith((".", "never.", "none.")) and row.group for row in envs.TABLE)


@pytest.mark.parametrize("row", envs.TABLE, ids=lambda row: row.name)
def test_every_default_is_a_value_that_the_row_allows(row):
    default = envs.get(row.name)
    if default is None or row.is_removed:
        return
    text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    if text or row.keeps_empty:
        assert row.parse(text) == default


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "Yes", "on", " On "])
def test_true_spellings(monkeypatch, text):
    monkeypatch.setenv("ATOM_LOG_MORE", text)
    assert envs.ATOM_LOG_MORE is True


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
def test_false_spellings(monkeypatch, text):
    monkeypatch.setenv("ATOM_GC_FREEZE", text)
    assert envs.ATOM_GC_FREEZE is False


def test_values_are_read_at_each_access(monkeypatch):
    assert envs.ATOM_DP_SIZE == 1
    monkeypatch.setenv("ATOM_DP_SIZE", "4")
    assert envs.ATOM_DP_SIZE == 4


def test_empty_means_unset(monkeypatch):
    monkeypatch.setenv("ATOM_DP_SIZE", " ")
    assert envs.ATOM_DP_SIZE == 1
    assert not envs.is_set("ATOM_DP_SIZE")


def test_empty_is_a_value_where_the_row_says_so(monkeypatch):
    assert envs.ATOM_TOKEN_GRAPH_SIZES == "256,512,1024,2048,3072"
    monkeypatch.setenv("ATOM_TOKEN_GRAPH_SIZES", "")
    assert envs.ATOM_TOKEN_GRAPH_SIZES == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ATOM_GC_FREEZE", "maybe"),
        ("ATOM_DP_SIZE", "two"),
        ("ATOM_DP_SIZE", "0"),
        ("ATOM_SHUTDOWN_TIMEOUT_S", "0"),
        ("ATOM_SHUTDOWN_TIMEOUT_S", "inf"),
        ("ATOM_DSV41_SIDE_STREAMS", "3"),
        ("ATOM_H2D_BACKEND", "pakced"),
        ("ATOM_KV_OFFLOAD_EXTRA_CONFIG", "[1]"),
        ("ATOM_FWD_DUMP_LAYERS", "1,x"),
        ("ATOM_PREFILL_DELAYER_TARGET_FILL", "much"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_is_allowed(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        envs.get(name)
    assert name in str(caught.value) and repr(text) in str(caught.value)
    assert envs.VARIABLES[name].allowed in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ATOM_PREFILL_DELAYER_TARGET_FILL", "0", 0.05),
        ("ATOM_PREFILL_DELAYER_TARGET_FILL", "-3", 0.05),
        ("ATOM_PREFILL_DELAYER_TARGET_FILL", "1.5", 1.0),
        ("ATOM_PREFILL_DELAYER_TTFT_MAX_TICKS", "0", 1),
        ("ATOM_PREFILL_DELAYER_STALL_TICKS", "-7", 1),
        ("ATOM_LOADER_PREFETCH_THREADS", "0", 1),
        ("OFFLOAD_MIN_LOAD_TOKENS", "-1", 0),
        ("ATOM_METRICS_UPDATE_INTERVAL_S", "nan", 1.0),
        ("ATOM_METRICS_UPDATE_INTERVAL_S", "-1", 1.0),
        ("ATOM_GC_THRESHOLD", "700,10", ()),
        ("ATOM_GC_THRESHOLD", "a,b,c", ()),
        ("ATOM_DETOKENIZER_DELTA_REUSE", "sometimes", "off"),
        ("ATOM_DETOKENIZER_AUDIT_EVERY", "0", 1000),
    ],
)
def test_values_that_are_clamped_or_replaced_are_logged_once(monkeypatch, caplog, name, text, value):
    monkeypatch.setenv(name, text)
    with caplog.at_level(logging.WARNING):
        assert envs.get(name) == value
        assert envs.get(name) == value
    assert [name in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ATOM_GC_THRESHOLD", "700, 10, 10", (700, 10, 10)),
        ("ATOM_FWD_DUMP_BLOCK_CLASS", "Block,MoE", ("Block", "MoE")),
        ("ATOM_DETOKENIZER_DELTA_REUSE", "ON", "on"),
        ("ATOM_KV_OFFLOAD_EXTRA_CONFIG", '{"a": 1}', {"a": 1}),
        ("ATOM_MONO_TRACE", "~/trace", os.path.expanduser("~/trace")),
        ("ATOM_STATE_CHECKPOINT_INTERVAL_TOKENS", "-1", -1),
        ("ATOM_PREFILL_DELAYER_MAX_QUEUE_MS", "250", 250.0),
    ],
)
def test_values_have_the_type_of_their_row(monkeypatch, name, text, value):
    monkeypatch.setenv(name, text)
    assert envs.get(name) == value


def test_the_default_may_be_another_variable(monkeypatch):
    assert envs.ATOM_PROFILER_WITH_STACK is False
    monkeypatch.setenv("ATOM_PROFILER_MORE", "1")
    assert envs.ATOM_PROFILER_WITH_STACK is True
    monkeypatch.setenv("ATOM_PROFILER_WITH_STACK", "0")
    assert envs.ATOM_PROFILER_WITH_STACK is False


def test_an_old_name_still_works_and_warns_once(monkeypatch, caplog):
    monkeypatch.setenv("ATOM_MORI_V2_FUSED", "0")
    assert envs.is_set("ATOM_MEGA_STAGE2_FUSED")
    assert envs.ATOM_MEGA_STAGE2_FUSED is False
    assert [r.getMessage() for r in caplog.records].count(
        "ATOM_MORI_V2_FUSED is the old name of ATOM_MEGA_STAGE2_FUSED; please set that instead"
    ) == 1
    monkeypatch.setenv("ATOM_MEGA_STAGE2_FUSED", "1")
    assert envs.ATOM_MEGA_STAGE2_FUSED is True


def test_an_unknown_name_is_an_attribute_error_with_the_near_match():
    with pytest.raises(AttributeError, match="did you mean 'ATOM_GC_FREEZE'"):
        _ = envs.ATOM_GC_FREZE
    with pytest.raises(AttributeError, match="unknown environment variable"):
        envs.is_set("ATOM_NO_SUCH_THING_AT_ALL")


def test_the_report_names_every_set_variable_and_what_it_does(monkeypatch):
    monkeypatch.setenv("ATOM_GC_FREEZE", "0")
    monkeypatch.setenv("ATOM_GC_FREZE", "1")
    monkeypatch.setenv("ATOM_MONO_CHECK", "1")
    monkeypatch.setenv("ATOM_PA_FLYDSL_PLAN", "1")
    monkeypatch.setenv("ATOM_TBO_SOMETHING", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "30")
    found = {variable.name: variable for variable in envs.report()}
    assert found["ATOM_GC_FREEZE"].is_effective and found["ATOM_GC_FREEZE"].value == "0"
    assert not found["ATOM_GC_FREZE"].is_known
    assert "did you mean 'ATOM_GC_FREEZE'" in found["ATOM_GC_FREZE"].note
    assert found["ATOM_MONO_CHECK"].is_known and not found["ATOM_MONO_CHECK"].is_effective
    assert "removed" in found["ATOM_PA_FLYDSL_PLAN"].note
    assert found["ATOM_TBO_SOMETHING"].is_known
    assert found["OPENAI_API_KEY"].value == "***"
    assert found["MC_TRANSFER_TIMEOUT"].note == "read by Mooncake"


def test_the_report_says_what_is_wrong_with_a_value(monkeypatch, caplog):
    monkeypatch.setenv("ATOM_SHUTDOWN_TIMEOUT_S", "-1")
    monkeypatch.setenv("ATOM_LOADER_PREFETCH_THREADS", "0")
    notes = [(found.is_effective, found.note) for found in envs.report()]
    assert notes == [
        (False, "must be an integer at least 1"),
        (False, "must be a finite number greater than 0"),
    ]
    assert not caplog.records


def test_variables_without_effect_are_warned_about_once(monkeypatch, caplog):
    monkeypatch.setenv("ATOM_GC_FREEZE", "0")
    monkeypatch.setenv("ATOM_MONO_CHECK", "1")
    monkeypatch.setenv("ATOM_UNHEARD_OF", "1")
    monkeypatch.setenv("ATOM_DP_SIZE", "")
    envs.warn_ineffective()
    envs.warn_ineffective()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0] == "ATOM_MONO_CHECK=1: has no effect in this version"
    assert messages[1].startswith("ATOM_UNHEARD_OF=1: unknown variable")


def test_every_variable_that_the_code_reads_is_marked_effective():
    """A feature that reads its variable takes the mark off, or ``doctor`` would call the variable dead."""
    # The configuration can be written down before its feature exists.
    early = {name for name in envs.VARIABLES if name.startswith(("ATOM_DP_", "ATOM_KV_EVENTS_"))}
    early |= {"ATOM_STATE_CHECKPOINT_DEMAND", "ATOM_DYNAMIC_CHUNKING_SMOOTH_FACTOR"}
    read = _names_read()
    assert {n for n in read - early if not envs.VARIABLES[n].effective} == set()
    assert read <= set(envs.VARIABLES)


def test_every_effective_variable_is_read_somewhere():
    assert {row.name for row in envs.TABLE if row.effective} - _names_read() == set()


def _names_read() -> set[str]:
    """Variables that the package reads as ``envs.NAME``, ``envs.get("NAME")`` or ``envs.is_set("NAME")``."""
    names = set()
    for path in (ROOT / "atom").rglob("*.py"):
        if path.name in ("envs.py", "env_table.py", "env_var.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "envs"
            ):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and node.value in envs.VARIABLES:
                names.add(node.value)
    read = {name for name in names if name.isupper()}
    return read | {envs.VARIABLES[name].default_from for name in read if name in envs.VARIABLES} - {""}


def test_the_page_is_in_sync():
    page = (ROOT / "docs" / "environment_variables.md").read_text()
    assert page == envs.markdown(), "run: python -m atom.utils.envs > docs/environment_variables.md"
    assert all(f"`{name}`" in page or f"~~{name}~~" in page for name in envs.VARIABLES)


def test_reading_variables_imports_the_standard_library_only():
    code = "import sys; from atom.utils import envs; envs.ATOM_DP_SIZE; print([*sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "msgspec", "numpy"} & set(ast.literal_eval(run.stdout))
