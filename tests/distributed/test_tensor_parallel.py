import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from atom.distributed.communicator import Communicator
from atom.distributed.parallel_state import get_tp_group, init_distributed, shard_size
from atom.errors import ConfigError

REPO = Path(__file__).parents[2]


def run_ranks(folder: Path, check: str, world_size: int = 2) -> None:
    """Start the ranks; fail with their output when one fails."""
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("tp_rank.py"))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(folder), check],
            cwd=REPO,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(outputs)


@pytest.mark.distributed
def test_layers_of_two_ranks_equal_the_whole(tmp_path):
    run_ranks(tmp_path, "layers")


@pytest.mark.distributed
def test_models_of_two_ranks_equal_transformers(tmp_path):
    shape = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    configs = {
        "llama": transformers.LlamaConfig(**shape, num_key_value_heads=2, attention_bias=True),
        "gemma3": transformers.Gemma3TextConfig(
            **shape,
            num_key_value_heads=1,
            head_dim=32,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"],
        ),
    }
    torch.manual_seed(0)
    for name, config in configs.items():
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        model.save_pretrained(tmp_path / name)
        ids = torch.randint(3, 99, (26,))
        with torch.inference_mode():
            logits = model(ids[None]).logits[0]
        save_file({"ids": ids, "logits": logits}, tmp_path / f"{name}.expected")
    run_ranks(tmp_path, "model")


def test_a_process_alone_has_identity_collectives():
    group = get_tp_group()
    x = torch.randn(2, 3)
    assert (group.rank, group.world_size) == (0, 1)
    assert group.all_reduce(x) is x and group.all_gather(x) is x
    init_distributed(0, 1, "unused://")
    assert get_tp_group() is group


def test_impossible_groups_are_named():
    with pytest.raises(ConfigError, match="rank: 2 is not below world_size 2"):
        init_distributed(2, 2, "unused://")
    with pytest.raises(ConfigError, match="tensor_parallel_size: 3 does not divide num_attention_heads 4"):
        shard_size(4, 3, "num_attention_heads")
    with pytest.raises(ValueError, match="needs a process group"):
        Communicator(0, 2)
