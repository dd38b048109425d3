"""The four modes of the comparison of dumps: verdicts, exit status, what is said."""

import math

import pytest
import torch

from atom.utils.debug_helper import install_block_forward_hooks
from atom.utils.debug_helper.compare import DIFFERENT, EQUAL, UNUSABLE, main
from atom.utils.debug_helper.difference import difference
from atom.utils.debug_helper.files import DumpName, load, save
from tests.helpers.tiny_model import make_tiny_model
from tests.models.harness import PagedRunner, load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=4)


def dump_run(folder, directory, monkeypatch, prompts, **env):
    """Dumps of a prefill of ``prompts`` together and of two decode steps."""
    monkeypatch.setenv("ATOM_FWD_DUMP_DIR", str(directory))
    for name, value in {"ONE_SHOT": "0", **env}.items():
        monkeypatch.setenv(f"ATOM_FWD_DUMP_{name}", value)
    model = load_model(folder, torch.float32)
    hooks = install_block_forward_hooks(model)
    runner = PagedRunner(model)
    runner.step({str(slot): prompt for slot, prompt in enumerate(prompts)})
    for token in (1, 2):
        runner.step(decode={str(slot): [token] for slot in range(len(prompts))})
    hooks.remove()


def change(path, function) -> None:
    content = load(path)
    content["hidden_states"] = function(content["hidden_states"].clone())
    save(path, content)


def compare(capsys, *words) -> tuple[int, str]:
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.fixture
def runs(folder, tmp_path, monkeypatch):
    for name in ("ref", "target"):
        dump_run(folder, tmp_path / name, monkeypatch, [[5, 6, 7, 8]])
    return tmp_path


# -- slot-invariance


def test_equal_prompts_agree_within_rounding_and_a_changed_slot_is_found(
    folder, tmp_path, monkeypatch, capsys
):
    dump_run(folder, tmp_path, monkeypatch, [[5, 6, 7]] * 3)
    words = ("slot-invariance", "--dir", tmp_path, "--n-slots", 3, "--tolerance", "1e-5")
    status, text = compare(capsys, *words)
    assert status == EQUAL, text
    assert "24 comparisons, 0 of them different" in text and "the slots agree" in text

    def spoil(states):
        states[2] += 1.0  # the third sequence of a decode step
        return states

    change(tmp_path / DumpName(2, "LlamaDecoderLayer", 0, 1).file_name, spoil)
    status, text = compare(capsys, *words)
    assert status == DIFFERENT
    assert "the first: layer 2 LlamaDecoderLayer rank 0 call 1 hidden_states slot 2" in text
    assert "24 comparisons, 1 of them different" in text


def test_slots_must_be_equal_bit_for_bit_unless_told_otherwise(tmp_path, capsys):
    states = torch.ones(4, 8)
    states[3, 0] += 1e-6
    save(tmp_path / "layer00_Block_rank0.pt", states)
    words = ("slot-invariance", "--dir", tmp_path, "--n-slots", 2)
    assert compare(capsys, *words)[0] == DIFFERENT
    assert compare(capsys, *words, "--tolerance", "1e-5")[0] == EQUAL


def test_steps_of_other_sequences_are_left_out(folder, tmp_path, monkeypatch, capsys):
    dump_run(
        folder, tmp_path, monkeypatch, [[5, 6, 7], [5, 6, 7, 8, 9]], LAYERS="1"
    )  # 8 tokens, of two lengths
    status, text = compare(capsys, "slot-invariance", "--dir", tmp_path, "--n-slots", 4)
    assert status == UNUSABLE and "no dump in" in text and "holds 4 sequences of one length (3 others" in text
    status, text = compare(capsys, "slot-invariance", "--dir", tmp_path, "--n-slots", 2)
    assert "1 tensors of other steps are left out" in text and "2 comparisons" in text


# -- ref-vs-target


def test_two_runs_of_the_same_agree(runs, capsys):
    status, text = compare(capsys, "ref-vs-target", "--dir", runs)
    assert status == EQUAL and "12 comparisons, 0 of them different" in text and "the runs agree" in text


def test_an_error_beyond_rounding_is_shown_with_its_size(runs, capsys):
    path = runs / "target" / DumpName(1, "LlamaDecoderLayer", 0, 0).file_name
    change(path, lambda states: states * 1.001)
    status, text = compare(capsys, "ref-vs-target", "--dir", runs)
    assert status == DIFFERENT and "the first: layer 1 LlamaDecoderLayer rank 0 call 0" in text
    row = next(line for line in text.splitlines() if line.endswith("DIFFERENT"))
    assert "1.000e-03" in row and "1.000000" in row
    assert compare(capsys, "ref-vs-target", "--dir", runs, "--tolerance", "0.01")[0] == EQUAL


def test_missing_files_other_shapes_and_nan_are_differences(runs, capsys):
    target = runs / "target"
    (target / DumpName(0, "LlamaDecoderLayer", 0, 0).file_name).unlink()
    (runs / "ref" / DumpName(3, "LlamaDecoderLayer", 0, 0).file_name).unlink()
    change(target / DumpName(1, "LlamaDecoderLayer", 0, 0).file_name, lambda states: states[:2])
    change(target / DumpName(2, "LlamaDecoderLayer", 0, 0).file_name, lambda states: states * math.nan)
    status, text = compare(capsys, "ref-vs-target", "--dir", runs)
    assert status == DIFFERENT and "4 of them different" in text
    for words in ("no target", "no reference", "shape [2, 64], its reference's [4, 64]", "not finite"):
        assert words in text


def test_the_reference_may_be_another_implementation(runs, capsys):
    """Bare tensors with a batch dimension, under the class name and the call number that it likes."""
    (runs / "other").mkdir()
    for layer in range(4):
        path = runs / "target" / DumpName(layer, "LlamaDecoderLayer", 0, 0).file_name
        save(runs / "other" / f"layer{layer:02d}_Block_rank0.pt", load(path)["hidden_states"][None])
        for call in (1, 2):
            (runs / "target" / DumpName(layer, "LlamaDecoderLayer", 0, call).file_name).unlink()
    status, text = compare(capsys, "ref-vs-target", "--dir", runs, "--ref", "other")
    assert status == EQUAL and "4 comparisons" in text, text


def test_weights_of_two_runs_are_compared_by_name(tmp_path, capsys):
    for name in ("ref", "target"):
        (tmp_path / name).mkdir()
        weights = {
            "layers.0.a": torch.ones(3, 3),
            "layers.0.scale": torch.tensor(2.0 if name == "ref" else 3.0),
        }
        save(tmp_path / name / DumpName(0, "", 0).file_name, weights)
    status, text = compare(capsys, "ref-vs-target", "--dir", tmp_path)
    assert status == DIFFERENT and "the first: layer 0 rank 0 layers.0.scale" in text
    assert "2 comparisons, 1 of them different" in text


# -- layer-bisect


def test_the_first_layer_that_leaves_the_direction_is_named(runs, capsys):
    assert compare(capsys, "layer-bisect", "--dir", runs)[0] == EQUAL

    def turn(states):
        states[-1] = -states[-1]
        return states

    for layer, call in ((3, 0), (2, 0), (0, 1)):  # the order of execution counts, not that of the names
        change(runs / "target" / DumpName(layer, "LlamaDecoderLayer", 0, call).file_name, turn)
    status, text = compare(capsys, "layer-bisect", "--dir", runs, "--threshold", "0.99")
    assert status == DIFFERENT
    assert "the first: layer 2 LlamaDecoderLayer rank 0 call 0 hidden_states" in text
    assert (
        "the last that agrees: layer 1 LlamaDecoderLayer rank 0 call 0 hidden_states, worst row 1.000000"
        in text
    )
    change(runs / "target" / DumpName(0, "LlamaDecoderLayer", 0, 0).file_name, turn)
    assert "nothing before it was dumped" in compare(capsys, "layer-bisect", "--dir", runs)[1]


# -- schema


def test_schemas_are_compared_by_name_shape_and_dtype(tmp_path, capsys):
    save(tmp_path / "a.pt", {"x": torch.ones(2, 3), "y": torch.ones(1), "layer": 3})
    save(
        tmp_path / "b.pt",
        {"x": torch.zeros(2, 3), "y": torch.ones(1, dtype=torch.bfloat16), "z": [torch.ones(1)]},
    )
    save(tmp_path / "c.pt", torch.ones(2, 3))
    assert compare(capsys, "schema", "--a", tmp_path / "a.pt", "--b", tmp_path / "a.pt")[0] == EQUAL
    status, text = compare(capsys, "schema", "--a", tmp_path / "a.pt", "--b", tmp_path / "b.pt")
    assert status == DIFFERENT and "3 tensors, 2 of them different" in text
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert "[1] float32" in rows["y"] and "[1] bfloat16" in rows["y"] and "DIFFERENT" in rows["z.0"]
    assert "DIFFERENT" not in rows["x"]
    status, text = compare(capsys, "schema", "--a", tmp_path / "c.pt", "--b", tmp_path / "a.pt")
    assert status == DIFFERENT and "(the tensor)" in text


# -- what cannot be compared


def test_unusable_input_is_named_with_status_2(tmp_path, capsys):
    status, text = compare(capsys, "slot-invariance", "--dir", tmp_path / "none", "--n-slots", 2)
    assert status == UNUSABLE and "none is not a folder" in text
    status, text = compare(capsys, "ref-vs-target", "--dir", tmp_path)
    assert status == UNUSABLE and "ref is not a folder" in text
    for name in ("ref", "target"):
        (tmp_path / name).mkdir()
    assert "ref holds no dump" in compare(capsys, "ref-vs-target", "--dir", tmp_path)[1]
    save(tmp_path / "ref" / DumpName(0, "Block", 0).file_name, torch.ones(1))
    save(tmp_path / "target" / DumpName(1, "Block", 0).file_name, torch.ones(1))
    status, text = compare(capsys, "layer-bisect", "--dir", tmp_path)
    assert status == UNUSABLE and "has its like (layer, class, rank, call)" in text
    save(tmp_path / "text.pt", {"a": "text"})
    assert (
        "text.pt holds no tensor" in compare(capsys, "schema", "--a", tmp_path / "text.pt", "--b", "x.pt")[1]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slot-invariance", "--dir", ".", "--n-slots", "1"], "must be an integer of at least 2, got '1'"),
        (["slot-invariance", "--dir", "."], "--n-slots"),
        (["layer-bisect", "--dir", ".", "--threshold", "99"], "must be a cosine between -1 and 1, got '99'"),
        (["ref-vs-target", "--dir", ".", "--tolerance", "nan"], "must be a finite number of at least 0"),
        (["halves"], "halves"),
    ],
)
def test_bad_arguments_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


# -- the measure


def test_measures_of_known_tensors():
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    found = difference(a, b)
    assert not found.is_equal and found.max_abs == 2.0
    assert found.relative == pytest.approx(2 / math.sqrt(29)) and found.cosine == pytest.approx(
        25 / (5 * math.sqrt(29))
    )
    assert found.worst_row_cosine == 0.0
    assert difference(torch.zeros(2, 2), torch.zeros(2, 2)).worst_row_cosine == 1.0
    assert difference(torch.ones(2), torch.zeros(2)).relative == math.inf
    assert difference(torch.zeros(0, 4), torch.zeros(0, 4)).is_equal
    with pytest.raises(ValueError, match="shapes differ"):
        difference(torch.ones(2), torch.ones(3))


def test_equal_infinities_and_nan_are_equal():
    a = torch.tensor([[1.0, math.inf], [math.nan, 2.0]])
    assert difference(a, a.clone()).is_equal and difference(a, a.clone()).relative == 0.0
    other = a.clone()
    other[1, 0] = 0.0
    assert difference(a, other).max_abs == math.inf and not difference(a, other).is_equal


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-4),
        (torch.bfloat16, 3e-2),
        (torch.int64, 0.0),
        (torch.float8_e4m3fn, 0.2),
        (torch.bool, 0.0),
    ],
)
def test_the_tolerance_follows_the_coarser_dtype(dtype, tolerance):
    tensor = torch.ones(2, 2).to(dtype)
    assert difference(tensor, tensor).tolerance == tolerance and difference(tensor, tensor).is_equal
    assert difference(torch.ones(2, 2), tensor).tolerance == max(tolerance, 1e-4)


def test_large_tensors_are_compared_in_parts(monkeypatch):
    a = torch.randn(37, 5, generator=torch.Generator().manual_seed(0))
    b = a + 0.01
    whole = difference(a, b)
    monkeypatch.setattr("atom.utils.debug_helper.difference._CHUNK", 20)
    parts = difference(a, b)
    assert parts.max_abs == whole.max_abs and parts.relative == pytest.approx(whole.relative, rel=1e-12)
    assert parts.worst_row_cosine == whole.worst_row_cosine
