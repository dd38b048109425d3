"""One rank of the tensor-parallel tests: ``tp_rank.py RANK WORLD_SIZE FOLDER CHECK``.

Ranks meet through a file in FOLDER. A check compares the sharded layer with the whole one, computed here from
the same seed, and raises where they differ.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from atom.distributed import parallel_state
from atom.model_ops.embedding import ParallelLMHead, VocabParallelEmbedding
from atom.model_ops.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)


def load(param, *tensors):
    for shard, tensor in zip(param.expected_shards, tensors, strict=True):
        param.weight_loader(param, tensor, shard)


def check_layers(folder: Path) -> None:
    tp = parallel_state.get_tp_group()
    torch.manual_seed(0)
    x, bias = torch.randn(5, 16), torch.randn(24)
    up, gate, down = torch.randn(24, 16), torch.randn(24, 16), torch.randn(16, 24)

    column = ColumnParallelLinear(16, 24, bias=True)
    load(column.weight, up)
    load(column.bias, bias)
    column.after_load()
    torch.testing.assert_close(tp.all_gather(column(x)), x @ up.t() + bias)

    merged = MergedColumnParallelLinear(16, (24, 24))
    load(merged.weight, gate, up)
    merged.after_load()
    my_gate, my_up = merged(x).chunk(2, dim=-1)
    torch.testing.assert_close(tp.all_gather(my_gate), x @ gate.t())

    row = RowParallelLinear(24, 16, bias=True)
    load(row.weight, down)
    load(row.bias, bias[:16])
    row.after_load()
    wanted = (x @ gate.t()) * (x @ up.t()) @ down.t() + bias[:16]
    torch.testing.assert_close(row(my_gate * my_up), wanted)
    torch.testing.assert_close(row(my_gate * my_up, x.clone()), x + wanted)  # added once, not once a rank

    # Key/value heads: more than ranks, as many, and fewer (each held by the ranks that use it).
    for num_kv_heads in (4, 2, 1):
        layer = QKVParallelLinear(16, 3, 4, num_kv_heads)
        q, k, v = torch.randn(12, 16), torch.randn(3 * num_kv_heads, 16), torch.randn(3 * num_kv_heads, 16)
        load(layer.weight, q, k, v)
        layer.after_load()
        assert (layer.num_heads, layer.num_kv_heads) == (2, max(1, num_kv_heads // 2))
        parts = layer(x).split([layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
        torch.testing.assert_close(tp.all_gather(parts[0]), x @ q.t())
        first = tp.rank * layer.kv_size if num_kv_heads > 1 else 0
        for part, whole in zip(parts[1:], (k, v), strict=True):
            torch.testing.assert_close(part, (x @ whole.t())[:, first : first + layer.kv_size])

    # 51 rows over 2 ranks: the last row is padding.
    table, ids = torch.randn(51, 16), torch.tensor([0, 25, 26, 50])
    embedding = VocabParallelEmbedding(51, 16)
    load(embedding.weight, table)
    torch.testing.assert_close(embedding(ids), table[ids])
    for dtype, tolerance in (("auto", 1e-5), ("int8", 0.3)):
        head = ParallelLMHead(51, 16, tied_to=embedding, bias=True, dtype=dtype)
        load(head.bias, torch.arange(51.0))
        head.after_load()
        wanted = x @ table.t() + torch.arange(51.0)
        torch.testing.assert_close(head(x), wanted, rtol=1e-5, atol=tolerance)


def check_model(folder: Path) -> None:
    from tests.models.harness import PagedRunner, load_model

    for name in ("llama", "gemma3"):
        model = load_model(folder / name, torch.float32)
        saved = load_file(folder / f"{name}.expected")
        ids = saved["ids"].tolist()
        runner = PagedRunner(model)
        first = runner.step(prefill={"s": ids[:20]})["s"]
        rest = [runner.step(decode={"s": ids[i : i + 1]})["s"] for i in range(20, len(ids))]
        assert (torch.cat([first, *rest]) - saved["logits"]).abs().max() <= 1e-4


def main() -> None:
    rank, world_size, folder, check = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    parallel_state.init_distributed(rank, world_size, f"file://{folder}/meet", timeout_s=60)
    try:
        {"layers": check_layers, "model": check_model}[check](folder)
    finally:
        parallel_state.destroy_distributed()


if __name__ == "__main__":
    main()
