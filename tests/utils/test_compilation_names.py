"""Names that pages, scripts and models outside of this repository use for compilation and graphs, where they look."""

import importlib
import inspect
from dataclasses import fields, is_dataclass

import pytest
import torch

from atom.config import CompilationConfig, Config, CUDAGraphMode

MODULES = {
    "atom.config": "CompilationLevel CompilationConfig CUDAGraphMode Config",
    "atom.distributed.nccl_watchdog": "drain_nccl_works",
    "atom.model_engine.model_runner": "ModelRunner",
    "atom.model_engine.runner.forward_mode": "ForwardMode decode_bucket_splits",
    "atom.utils": "mark_spliting_op",
    "atom.utils.backends": (
        "CompilerManager VllmBackend SplitItem split_graph PiecewiseCompileInterpreter make_compiler"
    ),
    "atom.utils.compiler_inferface": (
        "CompilerInterface InductorAdaptor InductorStandaloneAdaptor AlwaysHitShapeEnv EagerAdaptor"
    ),
    "atom.utils.cuda_piecewise_backend": "PiecewiseBackend ConcreteSizeEntry",
    "atom.utils.custom_register": "direct_register_custom_op aiter_lib mark_spliting_op",
    "atom.utils.debug_helper": "install_block_forward_hooks maybe_dump_weights_and_exit",
    "atom.utils.decorators": (
        "support_torch_compile TorchCompileWrapperWithCustomDispatcher start_monitoring_torch_compile"
    ),
    "atom.utils.forward_context": (
        "ForwardContext Context AttentionMetaData DPMetadata SpecDecodeMetadata set_forward_context "
        "get_forward_context reset_forward_context"
    ),
    "atom.utils.region_graph": "TokenGraph ReqGraph eager_region token_graph graph_pool request_bucket",
}
MEMBERS = {
    "atom.config:Config": "__post_init__ _set_cudagraph_sizes capture_sizes compilation_config enforce_eager",
    "atom.config:CompilationConfig": "set_splitting_ops_for_v1 init_with_cudagraph_sizes",
    "atom.config:CUDAGraphMode": (
        "decode_mode mixed_mode separate_routine has_full_cudagraphs uses_tr_hybrid max_cudagraph_mode"
    ),
    "atom.model_engine.model_runner:ModelRunner": "capture_cudagraph run_model _tr_hybrid_active",
    "atom.model_engine.runner.forward_mode:ForwardMode": (
        "decide token_graph ubatch_split_bs _pad_to_token_graph running_bs running_tokens"
    ),
    "atom.utils.backends:CompilerManager": "compile initialize_cache compute_hash",
    "atom.utils.decorators:TorchCompileWrapperWithCustomDispatcher": "do_not_compile dispatch_to_code bytecode_hook",
    "atom.utils.forward_context:Context": "positions is_prefill batch_size running_bs running_tokens is_draft",
    "atom.utils.forward_context:ForwardContext": (
        "no_compile_layers attn_metadata kv_cache_data context dp_metadata spec_decode_metadata tr_graph"
    ),
    "atom.utils.region_graph:ReqGraph": "record replay",
    "atom.utils.region_graph:TokenGraph": "record replay captured_sizes",
}
FIELDS = {  # of CompilationConfig, with their defaults
    "level": 0,
    "use_cudagraph": True,
    "cudagraph_capture_sizes": None,
    "cuda_graph_sizes": (512,),
    "cudagraph_mode": None,
    "splitting_ops": None,
    "cudagraph_copy_inputs": False,
    "use_inductor": True,
    "compile_sizes": None,
    "inductor_compile_config": {},
    "debug_dump_path": "",
    "cache_dir": "",
}
SPLITTING_OPS = ("aiter.unified_attention_with_output", "aiter.mla_attention")
PARAMETERS = {  # of CompilerInterface
    "initialize_cache": "self cache_dir disable_cache prefix",
    "compile": "self graph example_inputs compiler_config runtime_shape key",
    "load": "self handle graph example_inputs graph_index runtime_shape",
}


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_in_its_module(module):
    found = importlib.import_module(module)
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("place", MEMBERS)
def test_every_class_has_its_members(place):
    module, _, name = place.partition(":")
    owner = getattr(importlib.import_module(module), name)
    known = {field.name for field in fields(owner)} if is_dataclass(owner) else set()
    missing = [
        member for member in MEMBERS[place].split() if not hasattr(owner, member) and member not in known
    ]
    assert missing == []


def test_every_option_has_its_default():
    plain = CompilationConfig()
    assert {name: getattr(plain, name) for name in FIELDS} == FIELDS
    production = CompilationConfig(level=3)
    assert production.splitting_ops == SPLITTING_OPS
    assert production.cudagraph_mode is CUDAGraphMode.TR_HYBRID
    recorded = Config(model="m", compilation_config=production).capture_sizes
    assert recorded == (*range(1, 9), *range(16, 513, 16))


def test_compilers_are_called_as_the_interface_says():
    from atom.utils.compiler_inferface import CompilerInterface

    found = {
        name: list(inspect.signature(getattr(CompilerInterface, name)).parameters) for name in PARAMETERS
    }
    assert found == {name: text.split() for name, text in PARAMETERS.items()}


def test_ops_are_in_the_library_that_graphs_name():
    import atom.model_ops.attention  # noqa: F401, registers its ops
    from atom.utils.custom_register import aiter_lib, direct_register_custom_op

    assert (aiter_lib.ns, aiter_lib.kind) == ("aiter", "FRAGMENT")
    assert torch.ops.aiter.unified_attention_with_output.spliting_op
    names = list(inspect.signature(direct_register_custom_op).parameters)
    assert names[:4] == ["op_name", "op_func", "mutates_args", "fake_impl"]
