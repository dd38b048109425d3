"""Dumps of hidden states and weights and the log of the best logits, on models of every family."""

import io
import json
import logging

import pytest
import torch
from torch import nn

from atom.config import Config
from atom.core import ScheduledBatch, Sequence
from atom.errors import AtomError, ConfigError
from atom.kernels.registry import override_kernel
from atom.model_loader.model_files import ModelFiles
from atom.sampling_params import SamplingParams
from atom.utils.debug_helper import (
    TopkLog,
    forward_dump,
    install_block_forward_hooks,
    make_topk_log,
    maybe_dump_weights_and_exit,
    needs_eager,
)
from atom.utils.debug_helper.files import DumpFileError, DumpName, load, named_tensors, save
from tests.helpers.core_driver import CoreDriver
from tests.helpers.tiny_model import FAMILIES, make_tiny_model
from tests.models.harness import PagedRunner, load_model

PROMPT = [5, 9, 200, 17, 33]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(root / family, family) for family in FAMILIES}


@pytest.fixture
def llama(folders):
    return load_model(folders["llama"], torch.float32)


def set_env(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setenv(f"ATOM_{name}", str(value))


def run_one_prompt(model) -> None:
    runner = PagedRunner(model)
    runner.step({"a": PROMPT})
    runner.step(decode={"a": [1]})


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- forward dump


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hidden_states_of_every_layer_are_those_of_transformers(folders, family, tmp_path, monkeypatch):
    import transformers

    set_env(monkeypatch, FWD_DUMP_DIR=tmp_path)
    model = load_model(folders[family], torch.float32)
    install_block_forward_hooks(model, rank=3)
    PagedRunner(model).step({"a": PROMPT})
    reference = transformers.AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
    expected = reference(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    num_layers = len(expected) - 1
    block = type(model.model.layers[0]).__name__
    assert names(tmp_path) == [f"layer{layer:02d}_{block}_rank3.pt" for layer in range(num_layers)]
    for layer in range(num_layers - 1):  # the last one of transformers is after the final norm
        dump = load(tmp_path / f"layer{layer:02d}_{block}_rank3.pt")
        torch.testing.assert_close(dump["hidden_states"], expected[layer + 1][0], rtol=1e-4, atol=1e-4)
        assert (dump["layer"], dump["rank"], dump["call"], dump["order"]) == (layer, 3, 0, layer)
        assert dump["module"] == f"model.layers.{layer}" and dump["query_lens"] == [len(PROMPT)]


def test_one_shot_dumps_the_first_call_and_takes_its_hooks_off(llama, tmp_path, monkeypatch):
    set_env(monkeypatch, FWD_DUMP_DIR=tmp_path)
    dump = install_block_forward_hooks(llama)
    assert dump.num_active == 2
    run_one_prompt(llama)
    assert dump.num_active == 0 and not any(module._forward_hooks for module in llama.modules())
    assert names(tmp_path) == ["layer00_LlamaDecoderLayer_rank0.pt", "layer01_LlamaDecoderLayer_rank0.pt"]
    assert load(tmp_path / "layer00_LlamaDecoderLayer_rank0.pt")["hidden_states"].shape == (len(PROMPT), 64)


def test_every_call_is_dumped_up_to_the_bound(llama, tmp_path, monkeypatch, caplog):
    set_env(monkeypatch, FWD_DUMP_DIR=tmp_path, FWD_DUMP_ONE_SHOT=0, FWD_DUMP_LAYERS=1)
    monkeypatch.setattr(forward_dump, "MAX_CALLS", 2)
    dump = install_block_forward_hooks(llama)
    with caplog.at_level(logging.WARNING, "atom"):
        for _ in range(2):
            run_one_prompt(llama)
    assert names(tmp_path) == [f"layer01_LlamaDecoderLayer_rank0_call00{call}.pt" for call in (0, 1)]
    assert load(tmp_path / "layer01_LlamaDecoderLayer_rank0_call001.pt")["query_lens"] == [1]
    assert dump.num_active == 0 and "2 calls are dumped" in caplog.text


def test_parts_of_a_layer_are_told_apart(llama, tmp_path, monkeypatch):
    set_env(
        monkeypatch, FWD_DUMP_DIR=tmp_path, FWD_DUMP_LAYERS=0, FWD_DUMP_BLOCK_CLASS="LlamaAttention, RMSNorm"
    )
    install_block_forward_hooks(llama)
    run_one_prompt(llama)
    assert names(tmp_path) == [
        "layer00_LlamaAttention_rank0.pt",
        "layer00_RMSNorm.input_layernorm_rank0.pt",
        "layer00_RMSNorm.post_attention_layernorm_rank0.pt",
    ]
    by_order = sorted(tmp_path.iterdir(), key=lambda path: load(path)["order"])
    assert [load(path)["module"].rpartition(".")[2] for path in by_order] == [
        "input_layernorm", "self_attn", "post_attention_layernorm",
    ]  # fmt: skip


class Block(nn.Module):
    """A block as other models have it: a number of its own, any structure as output."""

    def __init__(self, number: int, output):
        super().__init__()
        self.layer_idx = number
        self.inner = nn.Linear(4, 4)
        self.output = output

    def forward(self, x):
        self.inner(x)
        return self.output(x)


def blocks(output=lambda x: x, numbers=(7, 8)) -> nn.Module:
    return nn.Sequential(*(Block(number, output) for number in numbers)).eval()


def test_the_attribute_gives_the_layer_also_to_what_is_inside(tmp_path, monkeypatch):
    set_env(
        monkeypatch,
        FWD_DUMP_DIR=tmp_path,
        FWD_DUMP_LAYER_ATTR="layer_idx",
        FWD_DUMP_BLOCK_CLASS="Block,Linear",
    )
    model = blocks()
    install_block_forward_hooks(model)
    model(torch.ones(1, 4))
    assert names(tmp_path) == [f"layer0{n}_{cls}_rank0.pt" for n in (7, 8) for cls in ("Block", "Linear")]


def test_outputs_of_any_structure_are_kept_and_views_are_cut(tmp_path, monkeypatch):
    set_env(monkeypatch, FWD_DUMP_DIR=tmp_path, FWD_DUMP_LAYERS="0")
    large = torch.arange(40_000.0).view(10_000, 4)
    model = blocks(lambda x: {"a": (x, "text"), "view": large[3:5]})
    install_block_forward_hooks(model)
    model[0](torch.ones(1, 4))
    path = tmp_path / "layer00_Block_rank0.pt"
    tensors = dict(named_tensors(load(path)))
    assert list(tensors) == ["outputs.a.0", "outputs.view"]
    assert tensors["outputs.view"].tolist() == large[3:5].tolist() and path.stat().st_size < 10_000


def test_nothing_is_installed_unless_asked_for(llama, monkeypatch):
    monkeypatch.delenv("ATOM_FWD_DUMP_DIR", raising=False)
    assert install_block_forward_hooks(llama) is None and needs_eager() is None
    assert not any(module._forward_hooks for module in llama.modules())


def test_graphs_and_compiled_code_are_refused_with_the_reason(llama, tmp_path, monkeypatch, caplog):
    set_env(monkeypatch, FWD_DUMP_DIR=tmp_path)
    assert "hooks fire neither in recorded graphs nor in compiled code" in needs_eager()
    with caplog.at_level(logging.WARNING, "atom"):
        assert install_block_forward_hooks(llama, is_eager=False) is None
    assert "--enforce-eager" in caplog.text
    run_one_prompt(llama)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"FWD_DUMP_BLOCK_CLASS": "Block"}, "ATOM_FWD_DUMP_BLOCK_CLASS must name module classes of LlamaForCausalLM, "
         "got 'Block'; those inside its layers: Attention, GateUpParallelLinear"),
        ({"FWD_DUMP_BLOCK_CLASS": "LlamaModel"}, "neither an attribute 'layer_id' nor a name tells their layer"),
        ({"FWD_DUMP_LAYERS": "0,2"}, r"ATOM_FWD_DUMP_LAYERS must name layers of the model \(0 to 1\), got 2"),
        ({"FWD_DUMP_LAYERS": "-1"}, "ATOM_FWD_DUMP_LAYERS must be integers separated by commas at least 0"),
        ({"FWD_DUMP_LAYERS": "first"}, "ATOM_FWD_DUMP_LAYERS must be integers"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_named(llama, tmp_path, monkeypatch, values, message):
    set_env(monkeypatch, FWD_DUMP_DIR=tmp_path, **values)
    with pytest.raises(ConfigError, match=message):
        install_block_forward_hooks(llama)


def test_a_model_without_layers_has_to_be_told_the_class(tmp_path, monkeypatch):
    set_env(monkeypatch, FWD_DUMP_DIR=tmp_path)
    with pytest.raises(ConfigError, match="Sequential has no list of layers"):
        install_block_forward_hooks(nn.Sequential(nn.Linear(2, 2)))


def test_a_folder_that_cannot_be_made_is_named(llama, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    set_env(monkeypatch, FWD_DUMP_DIR=tmp_path / "file" / "below", WEIGHT_DUMP_DIR=tmp_path / "file")
    with pytest.raises(ConfigError, match="ATOM_FWD_DUMP_DIR must name a folder"):
        install_block_forward_hooks(llama)
    with pytest.raises(ConfigError, match="ATOM_WEIGHT_DUMP_DIR must name a folder"):
        maybe_dump_weights_and_exit(llama)


def test_a_full_disk_ends_the_dump_and_not_the_model(llama, tmp_path, monkeypatch, caplog):
    set_env(monkeypatch, FWD_DUMP_DIR=tmp_path)
    dump = install_block_forward_hooks(llama)

    def full(*args):
        raise RuntimeError("PytorchStreamWriter failed: No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with caplog.at_level(logging.ERROR, "atom"):
        run_one_prompt(llama)
    assert dump.num_active == 0 and "the forward dump ends here" in caplog.text and names(tmp_path) == []


# -- weight dump


@pytest.mark.parametrize("load_dummy", [None, "xavier"])
def test_the_weights_are_those_of_the_checkpoint_even_where_they_are_packed(
    folders, tmp_path, monkeypatch, load_dummy
):
    set_env(monkeypatch, WEIGHT_DUMP_DIR=tmp_path, WEIGHT_DUMP_LAYERS="1,0")
    config = Config.build(str(folders["qwen2"]), device="cpu", dtype="float32", load_dummy=load_dummy)
    with pytest.raises(SystemExit) as ended:
        CoreDriver(config)
    assert ended.value.code == 0
    assert names(tmp_path) == ["weight_rank0_layer0.pt", "weight_rank0_layer1.pt"]
    weights = load(tmp_path / "weight_rank0_layer1.pt")
    assert all(name.startswith("model.layers.1.") for name in weights)
    packed = weights["model.layers.1.self_attn.qkv_proj.weight"]
    assert packed.shape == (128, 64) and weights["model.layers.1.self_attn.qkv_proj.bias"].shape == (128,)
    if load_dummy is None:
        tensors = ModelFiles.resolve(str(folders["qwen2"])).tensors
        assert "model.layers.1.self_attn.q_proj.weight" in tensors
        import transformers

        reference = transformers.AutoModelForCausalLM.from_pretrained(folders["qwen2"], dtype=torch.float32)
        own = reference.model.layers[1].self_attn.q_proj.weight
        assert torch.equal(packed[: len(own)], own)


def test_without_exit_the_engine_goes_on(folders, tmp_path, monkeypatch):
    set_env(monkeypatch, WEIGHT_DUMP_DIR=tmp_path, WEIGHT_DUMP_EXIT=0)
    with override_kernel("linear", "reference"):
        load_model(folders["llama"], torch.float32)
    assert names(tmp_path) == ["weight_rank0_layer0.pt"]


def test_routed_experts_are_left_out_and_unknown_layers_refused(tmp_path, monkeypatch):
    set_env(monkeypatch, WEIGHT_DUMP_DIR=tmp_path, WEIGHT_DUMP_EXIT=0, WEIGHT_DUMP_LAYERS=0)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].experts = nn.ModuleList([nn.Linear(2, 2)])
    model.layers[0].gate = nn.Linear(2, 2, bias=False)
    model.layers[0].register_buffer("scale", torch.ones(3))
    maybe_dump_weights_and_exit(model, rank=2)
    assert list(load(tmp_path / "weight_rank2_layer0.pt")) == ["layers.0.gate.weight", "layers.0.scale"]
    set_env(monkeypatch, WEIGHT_DUMP_LAYERS=4)
    with pytest.raises(
        ConfigError, match=r"ATOM_WEIGHT_DUMP_LAYERS must name layers of the model \(0 to 0\), got 4"
    ):
        maybe_dump_weights_and_exit(model)

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    set_env(monkeypatch, WEIGHT_DUMP_LAYERS=0)
    with pytest.raises(AtomError, match="weights of layer 0 cannot be dumped: no space left"):
        maybe_dump_weights_and_exit(model)


# -- top-k log


def test_the_engine_logs_the_best_logits_of_each_sampled_row(folders, tmp_path, monkeypatch):
    path = tmp_path / "topk.jsonl"
    set_env(monkeypatch, DEBUG_TOPK=3, DEBUG_TOPK_PATH=path)
    config = Config.build(
        str(folders["llama"]), device="cpu", dtype="float32", max_num_batched_tokens=16, kv_cache_memory=2**22
    )
    driver = CoreDriver(config)
    path.write_text("")  # what the warm-up logged
    driver.add({1: PROMPT, 2: list(range(1, 30))}, SamplingParams(temperature=0.0, max_tokens=3))
    driver.run()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for request, length in ((1, len(PROMPT)), (2, 29)):
        own = [line for line in lines if line["request"] == request]
        assert [line["position"] for line in own] == [length, length + 1, length + 2]
        assert [line["ids"][0] for line in own] == driver.tokens[request]  # greedy takes the best
        assert all(line["logits"] == sorted(line["logits"], reverse=True) for line in own)
        assert all(len(line["ids"]) == len(line["logits"]) == 3 for line in own)


def make_batch(num_seqs: int) -> ScheduledBatch:
    seqs = [Sequence(10 + i, [1, 2], SamplingParams(), max_output_tokens=4) for i in range(num_seqs)]
    ones = [1] * num_seqs
    return ScheduledBatch(4, seqs, ones, ones, ones, ones, [True] * num_seqs, 0, num_seqs, [], [])


def test_rows_go_to_standard_error_and_follow_the_indices(capsys):
    logits = torch.tensor([[0.0, 3.0, float("nan")]])
    TopkLog(9).maybe_log_topk(logits, make_batch(3), [2])
    line = json.loads(capsys.readouterr().err)
    assert line == {
        "step": 4, "row": 0, "request": 12, "position": 2, "ids": [2, 1, 0], "logits": ["nan", 3.0, 0.0],
    }  # fmt: skip


def test_only_rank_0_logs_and_only_when_asked(monkeypatch, tmp_path):
    monkeypatch.delenv("ATOM_DEBUG_TOPK", raising=False)
    assert make_topk_log() is None
    set_env(monkeypatch, DEBUG_TOPK=2)
    assert make_topk_log() is not None and make_topk_log(rank=1) is None
    set_env(monkeypatch, DEBUG_TOPK_PATH=tmp_path / "none" / "file")
    with pytest.raises(ConfigError, match="ATOM_DEBUG_TOPK_PATH must name a file that can be written"):
        make_topk_log()
    set_env(monkeypatch, DEBUG_TOPK=-1)
    with pytest.raises(ConfigError, match="ATOM_DEBUG_TOPK must be an integer at least 0, got '-1'"):
        make_topk_log()


def test_a_log_that_cannot_be_written_ends_and_says_so(caplog):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError("no space left")

    log = TopkLog(1, Full())
    with caplog.at_level(logging.ERROR, "atom"):
        log.maybe_log_topk(torch.zeros(1, 4), make_batch(1))
        log.maybe_log_topk(torch.zeros(1, 4), make_batch(1))
    assert caplog.text.count("ends here: no space left") == 1


# -- files


@pytest.mark.parametrize(
    "name", [DumpName(3, "Block", 1), DumpName(120, "RMSNorm.input_norm", 0, 7), DumpName(5, "", 2)]
)
def test_names_are_read_back(name):
    assert DumpName.parse(name.file_name) == name
    assert DumpName.parse(name.file_name + ".tmp") is None


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(DumpFileError, match="nothing.pt does not exist"):
        load(tmp_path / "nothing.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(DumpFileError, match="text.pt is not a file of tensors"):
        load(tmp_path / "text.pt")
    save(tmp_path / "whole.pt", {"a": torch.ones(2)})
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-40])
    with pytest.raises(DumpFileError, match="cut.pt is not a file of tensors"):
        load(tmp_path / "cut.pt")


def test_files_that_would_run_code_are_refused(tmp_path):
    class Code:
        def __reduce__(self):
            return print, ("ran",)

    torch.save(Code(), tmp_path / "code.pt")
    with pytest.raises(DumpFileError, match="code.pt is not a file of tensors"):
        load(tmp_path / "code.pt")
