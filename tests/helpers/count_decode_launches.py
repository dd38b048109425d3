"""What fused decode steps launch, kernel by kernel, found without a device; prints names by model, batch and kind."""

import json

import torch
from triton.runtime import driver

from atom.config_parts import KVCacheTensor
from atom.kernels.triton.compile_ahead import recording
from atom.kernels.triton.compile_worker import KernelTarget, TargetDriver
from atom.model_loader.hf_config import HFConfig
from atom.model_ops import fused_cuda
from atom.models.registry import get_model_class
from atom.platforms import meta_stands_for
from atom.platforms.cuda import CudaPlatform
from atom.utils.forward_context import AttentionMetaData, ForwardContext, set_forward_context

META = torch.device("meta")
NUM_LAYERS = 3
BATCHES = (1, 2, 8, 16, 32, 64)
MANY = (65, 256)  # which are fused on sm_90 alone
MODELS = {
    "qwen3-0.6b": ("qwen3", "Qwen3ForCausalLM", 1024, 16, 8, 128, 3072),
    "llama-3.2-1b": ("llama", "LlamaForCausalLM", 2048, 32, 8, 64, 8192),
    "llama-3.1-8b": ("llama", "LlamaForCausalLM", 4096, 32, 8, 128, 14336),
}


class Counter:
    """Names of kernels in the order in which they would be launched."""

    def __init__(self):
        self.names = []

    def run(self, kernel, *args, grid, warmup, **options):
        self.names.append(kernel.fn.__name__)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META)


def make_model(family, architecture, hidden, heads, kv_heads, dim, inner):
    config = HFConfig.from_dict(
        {
            "model_type": family, "architectures": [architecture], "vocab_size": 4096, "hidden_size": hidden,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim,
            "intermediate_size": inner, "num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 4096,
        }
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with META, meta_stands_for(CudaPlatform()):
        model = get_model_class(config.architectures)(config)
    model.after_load()
    return model


def launches(model, n, is_sm90):
    fused = fused_cuda.FusedCudaDecoder(
        model.dense_decoder(), max_tokens=n, has_gluon=is_sm90, uses_pdl=is_sm90,
        advance=(empty(257, dtype=torch.int32), empty(257, dtype=torch.int64)),
    )  # fmt: skip
    long, lens = empty(n, dtype=torch.int64), empty(n, dtype=torch.int32)
    table = empty(257, 257, dtype=torch.int32)
    metadata = AttentionMetaData(
        0, 0, [1] * n, [128] * n, empty(n + 1, dtype=torch.int32), lens, table, long, table_rows=long
    )
    layers = model.attention_layers()
    caches = {
        name: KVCacheTensor(i, *(empty(*layer.cache_shape(99, 16)) for _ in range(2)))
        for i, (name, layer) in enumerate(layers.items())
    }
    context = ForwardContext(attn_metadata=dict.fromkeys(layers, metadata), kv_cache_data=caches)
    counter = Counter()
    with recording(counter), set_forward_context(context):
        assert fused.takes(context, n)
        packed, tables = empty(999, dtype=torch.int32), table[None]
        last = empty(257, dtype=torch.int64)
        _, ids, positions, *_ = fused.prepare(packed, lens, last, tables, n, 256, 16, True)
        fused.forward(ids, positions)
    return counter.names


def main():
    driver.set_active(TargetDriver(KernelTarget("cuda", 90, 32)))
    # What looks at values, which meta tensors have not, at host memory of a device, and at the device.
    CudaPlatform.architecture = lambda self: "sm_90"
    zeros = torch.zeros
    torch.zeros = lambda *size, pin_memory=False, **options: zeros(*size, **options)
    fused_cuda._rope_tables = lambda ropes: (empty(1, 64), empty(1, 64), empty(1))
    fused_cuda.compact = lambda weight, dtype: weight.to(dtype)
    found = {}
    for name, shape in MODELS.items():
        model = make_model(*shape)
        for n in BATCHES + MANY:
            for kind in ("sm_90", "portable")[: 1 if n in MANY else 2]:
                found[f"{name} {n} {kind}"] = launches(model, n, kind == "sm_90")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
