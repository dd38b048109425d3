"""ModelRunner: the worker that runs a real model on one device."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from atom.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, CompilationLevel, Config, set_current_atom_config
from atom.config_parts import CompilationConfig, CUDAGraphMode, KVCacheTensor
from atom.core import BatchOutput, CacheGroupSpec, ScheduledBatch, TokenMasks
from atom.errors import ConfigError
from atom.kernels.cpu.native.library import native_library
from atom.kernels.registry import select_kernel, selected_kernels
from atom.model_engine.runner.determinism import check_deterministic
from atom.model_engine.runner.device_timer import make_device_timer
from atom.model_engine.runner.forward_mode import capture_sizes, token_graph_sizes
from atom.model_engine.runner.forward_pass import ForwardPass, ForwardResult
from atom.model_engine.runner.fused_steps import buffer_bytes, why_modules
from atom.model_engine.runner.graph_recorder import GraphRecorder, RecordedBucket
from atom.model_engine.runner.kv_budget import (
    CacheLimits,
    MemoryFacts,
    format_bytes,
    plan_cache,
    with_block_count,
)
from atom.model_engine.runner.limits import scheduler_limits
from atom.model_engine.runner.prompt_scores import PromptScores, score_prompts
from atom.model_engine.runner.readback import Readback
from atom.model_engine.runner.step_profiler import StepProfiler
from atom.model_engine.runner.step_sizes import StepSizes, largest_chunk, measured_sizes
from atom.model_engine.runner.warm_up import kernels_ahead, warm_up_batches
from atom.model_engine.runner.weight_format import check_cpu_weights, check_online_quant, keeps_gguf_blocks
from atom.model_engine.runner.worker import ReportProgress, Worker
from atom.model_engine.scheduler import SchedulerConfig
from atom.model_loader.loader import announce_blocks, load_dummy, load_weights
from atom.model_loader.model_files import ModelFiles
from atom.model_ops import sampler_cpu
from atom.model_ops.attentions.backend import override_backend
from atom.model_ops.dense_decoder import DenseDecoder, FusedDecoder
from atom.model_ops.online_quant import apply_online_quant
from atom.model_ops.sampler import Sampler, SampleResult, SamplingPlan, late_bans, to_batch_output
from atom.models.registry import get_model_class, support_model_arch_dict
from atom.platforms import get_platform, meta_stands_for
from atom.utils.debug_helper import install_block_forward_hooks, needs_eager
from atom.utils.decorators import can_compile, compile_as_is
from atom.utils.forward_context import HeadWork
from atom.utils.logging import init_logger
from atom.utils.region_graph import ReqGraph, token_graphs

__all__ = ["ModelRunner", "support_model_arch_dict"]

logger = init_logger(__name__)

CPU_WARM_UP_TOKENS = 64
GRAPH_BYTES = 8 << 20  # of a graph's own; 4 to 9 MiB were measured for 28 layers


@dataclass(slots=True)
class StepHandle:
    """A launched step: what sampling and reading back need."""

    batch: ScheduledBatch
    result: ForwardResult
    plan: SamplingPlan
    logits: torch.Tensor | None = None  # [num sampling sequences, vocab], until sampled
    head: HeadWork | None = None  # what a fused decoder made in the same call, beside logits or instead
    sampled: SampleResult | None = None
    prompt_scores: PromptScores | None = None


class ModelRunner(Worker):
    """Loads a model, owns its KV cache and device tables, and computes steps.

    Args:
        config: validated; ``check_supported`` has passed.
    """

    def __init__(self, config: Config):
        self.platform = get_platform(config.device)
        self.config = replace(config, compilation_config=self._settle_compilation(config))
        self._is_mode_open = config.compilation_config.is_mode_open
        # Read now: a bad value is said before weights are read.
        self._prefill_sizes = token_graph_sizes(in_eighths=self.platform.supports("device_graphs"))
        check_cpu_weights(self.config, self.platform.name)
        check_online_quant(self.config)
        check_deterministic(self.config, self.platform.name)
        self.device = self.platform.device()
        if self.platform.name == "cpu":
            num_threads = config.num_threads or self.platform.default_num_threads
            torch.set_num_threads(num_threads)
            library = native_library()
            if library is not None and library.num_threads != num_threads:
                library.set_threads(num_threads)
        torch.set_grad_enabled(False)
        self.files = ModelFiles.resolve(config.model, hf_overrides=config.hf_overrides)
        self.hf_config = self.files.hf_config
        self.dtype = self._choose_dtype()
        self.block_size = config.kv_cache_block_size
        self.model: torch.nn.Module | None = None
        self.groups: list[CacheGroupSpec] = []
        self.req_graph = ReqGraph(device=self.device)  # decode steps by request bucket
        self.forward_vars: dict[str, torch.Tensor] = {}  # what a step's inputs lie in, at fixed addresses
        self._forward: ForwardPass | None = None
        self._recorder: GraphRecorder | None = None
        self._readback: Readback | None = None
        self._remaining: Iterator[RecordedBucket] = iter(())  # still to be recorded, while serving
        self._profiler = StepProfiler(config, self.platform)
        self._timer = make_device_timer(self.device, "gpu_forward_seconds", "gpu_sample_seconds")

    def _settle_compilation(self, config: Config) -> CompilationConfig:
        """Level and graph mode: as asked for, else the platform's; nothing of either where steps must be eager."""
        given, platform = config.compilation_config, self.platform
        reason = "--enforce-eager" if config.enforce_eager else needs_eager()
        if reason is None:
            return given.settled(platform.compilation_level, CUDAGraphMode[platform.cudagraph_mode])
        logger.info("neither compilation nor recorded graphs: %s", reason)
        return replace(
            given, level=0, cudagraph_mode=CUDAGraphMode.NONE, is_level_open=False, is_mode_open=False
        )

    def _choose_dtype(self) -> torch.dtype:
        """``--dtype``; auto takes the checkpoint's own, and the platform's default where it names none."""
        name = self.config.dtype
        if name == "auto":
            name = self.hf_config.get("dtype") or dtype_name(self.platform.default_dtype())
        return getattr(torch, name)

    # -- loading

    def load(self, report: ReportProgress) -> None:
        logger.info(
            "device %s (%s), dtype %s", self.platform.name, self.platform.reason, dtype_name(self.dtype)
        )
        # Allocated and not touched, a model in host memory costs nothing yet, as one without memory: enough to plan
        # by. What cannot fit is said here, in seconds, before a weight is read.
        is_cpu = self.device.type == "cpu"
        if not is_cpu:
            from atom.kernels.triton.compile_ahead import prepare_triton_ahead

            prepare_triton_ahead()
        with meta_stands_for(self.platform):
            self.model = self._build_model(self.device if is_cpu else torch.device("meta"))
        if keeps_gguf_blocks(self.config, self.platform.name, self.files):
            announce_blocks(self.model, self.files)
        self._weight_bytes = self.model.num_weight_bytes()
        self._plan(self.model.cache_groups(self.block_size, self.dtype))
        if not is_cpu:
            self.model = self._build_model(self.device)
        if self.config.load_dummy is None:
            load_weights(self.model, self.files, report=lambda _, fraction: report("load weights", fraction))
        else:
            load_dummy(self.model, self.config.load_dummy)
        level = self.config.compilation_level
        if level >= CompilationLevel.DYNAMO_ONCE and not can_compile(self.model):
            raise ConfigError(
                f"level {level:d} needs a model that is marked @support_torch_compile; {type(self.model).__name__} "
                "is not (levels 0 and 1 run it)"
            )
        if level == CompilationLevel.DYNAMO_AS_IS:
            self.model.model.forward = compile_as_is(self.model.model.forward)
        install_block_forward_hooks(self.model)
        self._profiler.watch(self.model, is_compiled=level > 0)
        report("load weights", 1.0)

    def _build_model(self, device: torch.device) -> torch.nn.Module:
        model_class = get_model_class(self.hf_config.architectures)
        self.config.compilation_config.static_forward_context.clear()  # of a model that was planned with
        name = self.config.attention_backend
        backend = nullcontext() if name == "auto" else override_backend(name)
        with device, _default_dtype(self.dtype), set_current_atom_config(self.config), backend:
            model = model_class(self.hf_config, lm_head_dtype=self.config.lm_head_dtype).eval()
            apply_online_quant(model, self.config.online_quant_config)
        return model

    # -- memory

    def _plan(self, specs: list[CacheGroupSpec]) -> None:
        config = self.config
        context = config.resolve_max_model_len(self.hf_config.get("max_position_embeddings"))
        default = largest_chunk(config) if self.platform.name == "cpu" else DEFAULT_MAX_NUM_BATCHED_TOKENS
        self._chunk_tokens = min(config.max_num_batched_tokens or default, 1 << 20)
        self._sizes = StepSizes(self._chunk_tokens, config.max_num_seqs, step_tokens=self._chunk_tokens)
        limits = CacheLimits(
            block_size=self.block_size,
            max_model_len=context,
            max_model_len_is_explicit=config.max_model_len is not None,
            max_num_seqs=config.max_num_seqs,
            chunk_tokens=self._chunk_tokens,
            kv_cache_memory=config.kv_cache_memory,
            gpu_memory_utilization=None if self.platform.name == "cpu" else config.gpu_memory_utilization,
        )
        self._facts = MemoryFacts(
            device=self.platform.name,
            total=self.platform.total_memory(),
            free=self.platform.free_memory(),
            weights=self._weight_bytes,
            activations=self._activation_bytes(),
            graphs=self._graph_bytes(),
            buffers=buffer_bytes(
                config, self.platform, self.model if self.hf_config.num_hidden_layers else None
            ),
        )
        plan = plan_cache(specs, self._facts, limits)
        if config.num_kvcache_blocks > 0:
            plan = with_block_count(plan, config.num_kvcache_blocks, limits)
        if plan.max_model_len < limits.max_model_len:
            logger.warning(
                "context lowered from %d to %d tokens: the KV cache budget of %s holds no longer request "
                "(--kv-cache-memory raises it)",
                limits.max_model_len,
                plan.max_model_len,
                format_bytes(plan.budget),
            )
        self.groups = plan.groups
        self.max_model_len = plan.max_model_len
        self.num_cache_tokens = plan.num_tokens
        self.cache_bytes = sum(group.num_blocks * group.bytes_per_block for group in plan.groups)
        logger.info(
            "KV cache: %s of a budget of %s, %d tokens (%s)",
            format_bytes(self.cache_bytes),
            format_bytes(plan.budget),
            plan.num_tokens,
            ", ".join(f"{group.kind} {group.num_blocks} blocks" for group in plan.groups),
        )

    def _activation_bytes(self) -> int:
        """Upper estimate of the largest step's tensors: a few hidden rows and the MLP's a token, and logits."""
        rows = min(self.config.max_num_seqs, self._chunk_tokens)
        return self._chunk_tokens * self._bytes_per_token() + rows * self.hf_config.vocab_size * 4

    def _bytes_per_token(self) -> int:
        config = self.hf_config
        return (8 * config.hidden_size + 3 * config.intermediate_size) * self.dtype.itemsize

    def _graph_bytes(self) -> int:
        """Upper estimate of the graphs' pool, as large as the largest bucket, and of what each graph takes itself."""
        compilation = self.config.compilation_config
        if self.platform.name == "cpu" or not compilation.captures_graphs:
            return 0
        decode = capture_sizes(compilation.capture_sizes(), self.config.max_num_seqs, self._chunk_tokens)
        prefill = [] if compilation.cudagraph_mode.mixed_mode() is CUDAGraphMode.NONE else self._prefill_sizes
        sizes = [*decode, *(min(size, self._chunk_tokens) for size in prefill)]
        return max(sizes, default=0) * self._bytes_per_token() + len(sizes) * GRAPH_BYTES

    def cache_groups(self) -> list[CacheGroupSpec]:
        return self.groups

    def allocate(self, groups: list[CacheGroupSpec]) -> None:
        layers = self.model.attention_layers()
        kv_caches: dict[str, KVCacheTensor] = {}
        for group in groups:
            for name in group.layer_names:
                shape = layers[name].cache_shape(group.num_blocks, self.block_size)
                kv_caches[name] = KVCacheTensor(
                    len(kv_caches), self._new_cache(shape), self._new_cache(shape)
                )
        self._forward = ForwardPass(
            self.model,
            groups,
            kv_caches,
            self.req_graph,
            block_size=self.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_blocks=-(-self.max_model_len // self.block_size) + 1,
            chunk_tokens=self._chunk_tokens,
            device=self.device,
            annotate=self._profiler.step,
            time_model=partial(self._timer.start, "gpu_forward_seconds"),
            no_compile_layers=self.config.compilation_config.static_forward_context,
        )
        self.forward_vars = self._forward.buffers()
        size = sum(buffer.nbytes for buffer in self.forward_vars.values())
        logger.debug("step buffers on the device: %s (%s)", format_bytes(size), ", ".join(self.forward_vars))
        self.model.fused = self._fused_decoder()
        self.set_vocab_size(self.hf_config.vocab_size)
        if self.platform.name == "cpu" and self.config.max_num_batched_tokens is None:
            self._size_steps()

    def _size_steps(self) -> None:
        cpu, num_threads = self.platform.describe(), torch.get_num_threads()
        facts = {
            "weights": [dtype_name(self.dtype), self._weight_bytes],
            "machine": [cpu["device"], cpu["cores"], cpu["instruction sets"], num_threads],
            "kernels": self._backends(),
        }
        self._sizes = measured_sizes(
            self.config,
            self.hf_config,
            self.groups,
            facts,
            self._run_step,
            chunk_tokens=self._chunk_tokens,
            max_model_len=self.max_model_len,
            num_threads=num_threads,
        )

    def _fused_decoder(self) -> FusedDecoder | None:
        """What runs steps in place of the modules; None where they run them, said in the log."""
        decoder = self.model.dense_decoder() if self.hf_config.num_hidden_layers else None
        reason, fused = why_modules(self.config), None
        if reason is None and self.platform.name == "cpu":
            fused, reason = self._fuse_on_cpu(decoder)
        elif reason is None and self.platform.supports("triton"):
            from atom.model_ops.fused_cuda import fused_cuda_decoder

            tables = self._forward.tables
            advance = tables.computed, tables.last_token
            most = self.config.max_num_seqs
            fused, reason = fused_cuda_decoder(decoder, self.platform, max_tokens=most, advance=advance)
            tables.prepare_decode = None if fused is None else fused.prepare
        if reason is not None and self.config.deterministic:
            raise ConfigError(f"--deterministic needs steps that are one native call: {reason}")
        if reason is not None:
            logger.info("steps run module by module: %s", reason)
        elif fused is not None and self.platform.name == "cpu":
            kind = ", whose bits do not depend on the batch" if self.config.deterministic else ""
            logger.info("a step is one native call%s", kind)
        return fused

    def _fuse_on_cpu(self, decoder: DenseDecoder | None) -> tuple[FusedDecoder | None, str | None]:
        from atom.model_ops.fused_cpu import fuse_on_cpu

        if self.config.compilation_level > 0:
            return None, f"they are compiled (level {self.config.compilation_level:d})"
        return fuse_on_cpu(decoder, is_uniform=self.config.deterministic)

    def _run_step(self, batch: ScheduledBatch) -> None:
        """A step from launch to result, for steps that nobody asked for."""
        handle = self.launch(batch)
        self.sample(handle)
        self.wait(handle)

    def _new_cache(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Zeros, because a NaN in a slot that was never written would survive a masked product.

        On the CPU they come from calloc, so that memory is only taken when a block is first used.
        """
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        num_bytes = math.prod(shape) * self.dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(self.dtype).view(shape)

    def set_vocab_size(self, size: int) -> None:
        self._vocab_size = min(size, self.hf_config.vocab_size)
        ops = sampler_cpu if self.device.type == "cpu" else select_kernel("sampling", device=self.device)
        self._sampler = Sampler(self.config.max_num_seqs, self._vocab_size, self.device, ops)
        if self._readback is None:
            self._readback = Readback(self.config.max_num_seqs, self.device)

    def scheduler_config(self) -> SchedulerConfig:
        is_cpu = self.platform.name == "cpu"
        bound = self.config.max_consecutive_prefill_steps
        return scheduler_limits(
            self.config,
            self._sizes,
            max_model_len=self.max_model_len,
            max_consecutive_prefill_steps=(1 if is_cpu else 0) if bound is None else bound,
        )

    def uses_overlapped_loop(self) -> bool:
        loop = self.config.loop
        return loop == "overlapped" or (loop == "auto" and self.platform.name != "cpu")

    # -- steps

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        if torch.is_grad_enabled():  # a thread's own affair: in process, another one has loaded the model
            torch.set_grad_enabled(False)
        handle = self.run_model(batch)
        hidden = handle.result.hidden
        handle.prompt_scores = score_prompts(batch, hidden, self.model.compute_logits, self._sampler)
        return handle

    def run_model(self, batch: ScheduledBatch) -> StepHandle:
        """The forward pass, eagerly or by a recorded graph as ``ForwardMode.decide`` says, and the logits of what
        samples, outside of any graph; a fused decode step has its logits or ids already. How it is sampled is planned
        before only where the decoder asks: of prompts the device has enough to do meanwhile.
        """
        fused, head, plan = self.model.fused, None, None
        if fused is not None and (fused.takes_prefill or not batch.num_prefill_seqs):
            plan = self._sampler.plan(batch)
            head = self._head_work(batch, plan)
            fused.begin(head)
        result = self._forward.run(batch, head)
        if plan is None:
            plan = self._sampler.plan(batch)
        handle = StepHandle(batch, result, plan)
        if head is not None:
            fused.finish(head, result.hidden)
        if head is not None and head.is_done:
            handle.logits = head.logits
            handle.head = head if head.best_ids is not None else None
        elif plan.indices is None or plan.indices:
            handle.logits = self.model.compute_logits(self._last_rows(batch, plan, result))
        return handle

    def _head_work(self, batch: ScheduledBatch, plan: SamplingPlan) -> HeadWork:
        """What a fused decoder may do at once: the best ids of the rows that sample, or their logits."""
        is_uniform = batch.num_tokens == batch.num_seqs  # one token each
        rows = np.arange(batch.num_seqs) if is_uniform else np.cumsum(batch.num_scheduled) - 1
        if plan.indices is not None:
            rows = rows[plan.indices]
        prefills = batch.seqs[: batch.num_prefill_seqs]
        scores_prompts = any(seq.params.prompt_logprobs is not None for seq in prefills)
        return HeadWork(rows, self._sampler.num_valid_ids, plan.is_argmax, scores_prompts)

    def _last_rows(self, batch: ScheduledBatch, plan: SamplingPlan, result: ForwardResult) -> torch.Tensor:
        """Hidden states of the last token of each sequence that samples."""
        if plan.indices is None and batch.num_tokens == batch.num_seqs:
            return result.hidden
        last = result.cu_seqlens_q[1:].long() - 1
        return result.hidden[last if plan.index is None else last[plan.index]]

    def needs_late_mask(self, handle: StepHandle) -> bool:
        return handle.plan.needs_late_mask

    def sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        rows, context_lens = handle.result.rows, handle.result.context_lens
        tables = self._forward.tables
        if handle.logits is None and handle.head is None:
            tables.advance(rows, context_lens, rows[:0], rows[:0])
            return
        plan = handle.plan
        head, advance, out = handle.head, None, None
        stop_timer = self._timer.start("gpu_sample_seconds")
        if head is not None:
            sampled = SampleResult(head.best_ids, head.is_finite)
        else:
            bans = late_bans(handle.batch) if plan.needs_late_mask else None
            if plan.index is None and self._sampler.ops.ADVANCES:
                advance = (rows, context_lens, tables.computed, tables.last_token)
                out = None if plan.reads_ids else self._readback.room(len(handle.logits))
            sampled = self._sampler.sample(handle.logits, plan, bans, masks, advance, out)
        stop_timer()
        if advance is None and (head is None or not head.is_advanced):
            sampled_rows = rows if plan.index is None else rows[plan.index]
            tables.advance(rows, context_lens, sampled_rows, sampled.token_ids)
        handle.sampled = self._readback.start(sampled, None if head is None else head.letter)
        handle.logits = None  # the largest tensor of a step; the handle may wait for another one

    def wait(self, handle: StepHandle) -> BatchOutput:
        if handle.sampled is None:
            output = BatchOutput([0] * handle.batch.num_seqs)
        else:
            output = to_batch_output(handle.batch, handle.plan, handle.sampled)
        if handle.prompt_scores is not None:
            output.prompt_logprobs = handle.prompt_scores.read()
        return output

    def warm_up(self, report: ReportProgress) -> None:
        """Run the largest prefill step and a decode step, so that neither is slow or fails for a user.

        A short prefill on the CPU: what a large one needs is taken from the system as it is touched, and a
        start is too short for a second of proof.
        """
        largest = CPU_WARM_UP_TOKENS if self.platform.name == "cpu" else self._chunk_tokens
        length = min(largest, self._chunk_tokens, self.max_model_len - 1)
        level, sizes = self.config.compilation_level, self._decode_sizes() | {1}
        sample = partial(self._sampler.rehearse, self.hf_config.vocab_size, self.dtype)
        with kernels_ahead(self._forward, sizes, self._chunk_tokens, level, sample) as wait_for_kernels:
            for number, batch in enumerate(warm_up_batches(length, self.block_size, len(self.groups)), 1):
                # Tracing, which the first step does, takes longer than the kernels.
                if number > 1 or level < CompilationLevel.DYNAMO_ONCE:
                    wait_for_kernels()
                self._run_step(batch)
                report("warm up", number / 2)
        self.platform.synchronize()

    def _decode_sizes(self) -> set[int]:
        """Sequences of the decode steps that are recorded."""
        compilation = self.config.compilation_config
        if not compilation.captures_graphs:
            return set()
        return set(capture_sizes(compilation.capture_sizes(), self.config.max_num_seqs, self._chunk_tokens))

    # -- recorded graphs

    def record_graphs(self, report: ReportProgress) -> None:
        warmup = self.config.compilation_config.graph_warmup
        self._recorder = self._new_recorder()
        if self._recorder is None:
            return
        if warmup == "startup":
            self.capture_cudagraph(report)
        elif warmup == "lazy":
            self._recorder.record_on_demand()
        else:
            self._remaining = self._recorder.run_while_serving()

    def capture_cudagraph(self, report: ReportProgress) -> tuple[float, list[int]]:
        """Record every bucket, the largest first. Returns the seconds it took and the decode sizes, ascending."""
        recorder = self._recorder
        for done, bucket in enumerate(recorder.run(), 1):
            name = f"record graphs ({bucket.kind} {bucket.size}, {format_bytes(bucket.memory)})"
            report(name, done / recorder.num_buckets)
        return sum(bucket.seconds for bucket in recorder.recorded), sorted(recorder.decode_sizes)

    @torch.no_grad()  # the thread may not have launched a step yet
    def record_next_graph(self) -> bool:
        return next(self._remaining, None) is not None

    def _tr_hybrid_active(self) -> bool:
        """Whether decode steps replay token graphs, which break where attention cannot be recorded."""
        return self.config.compilation_config.cudagraph_mode.uses_tr_hybrid()

    def _new_recorder(self) -> GraphRecorder | None:
        """What records the configured buckets; None where nothing is to be recorded."""
        compilation = self.config.compilation_config
        if not compilation.captures_graphs:
            return None
        forward, mode = self._forward, compilation.cudagraph_mode
        if not (forward.supports_token_graph or self.device.type == "cpu" or self._tr_hybrid_active()):
            names = ", ".join(sorted({layer.backend.name for layer in forward.layers.values()}))
            reason = f"needs attention that a device graph can hold; {names} cannot be"
            if not self._is_mode_open:
                raise ConfigError(f"cudagraph_mode {mode.name} {reason} (TR_HYBRID breaks the graph there)")
            logger.info("cudagraph_mode TR_HYBRID: %s %s", mode.name, reason)
            mode = CUDAGraphMode.TR_HYBRID
        prefill = []
        if forward.supports_token_graph and mode.mixed_mode() is not CUDAGraphMode.NONE:
            prefill = sorted({min(size, self._chunk_tokens) for size in self._prefill_sizes})
        if not token_graphs(self.model):
            if mode.uses_tr_hybrid():
                name = type(self.model).__name__
                reason = f"a model with a part that is marked @token_graph; {name} has none"
                if not self._is_mode_open:
                    raise ConfigError(f"cudagraph_mode {mode.name} needs {reason}")
                logger.info("cudagraph_mode NONE: %s needs %s", mode.name, reason)
                return None
            prefill = []  # nothing would be recorded of them
        return GraphRecorder(
            forward, self.platform, self._profiler, mode, sorted(self._decode_sizes()), prefill
        )

    # -- facts and tools

    def info(self) -> dict[str, Any]:
        return {
            "device": self.platform.name,
            "device_reason": self.platform.reason,
            "dtype": dtype_name(self.dtype),
            "backends": self._backends(),
            "compilation_level": int(self.config.compilation_level),
            "cudagraph_mode": (self.config.compilation_config.cudagraph_mode or CUDAGraphMode.NONE).name,
            "num_threads": torch.get_num_threads(),
            "loop": "overlapped" if self.uses_overlapped_loop() else "plain",
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self._sizes.max_num_batched_tokens,
            "max_prefill_tokens": self._sizes.chunk_tokens,
            "max_busy_prefill_tokens": self._sizes.busy_chunk_tokens or self._sizes.chunk_tokens,
            "max_num_seqs": self._sizes.max_num_seqs,
            "vocab_size": self._vocab_size,
            "weight_bytes": self._weight_bytes,
            "kv_cache_bytes": self.cache_bytes,
            "kv_cache_tokens": self.num_cache_tokens,
        }

    def _backends(self) -> dict[str, str]:
        """What computes attention and every registered operation, by name."""
        layers = self.model.attention_layers().values()
        names = {"attention": ", ".join(sorted({layer.backend.name for layer in layers}))}
        return names | {op: ", ".join(kernels) for op, kernels in selected_kernels().items()}

    def metrics(self) -> dict[str, float]:
        return self._timer.values()

    def start_profile(self, directory: str | None) -> None:
        self._profiler.start(directory)

    def stop_profile(self) -> list[str]:
        return self._profiler.stop()

    def close(self) -> None:
        if self._forward is not None:
            self._forward.clear_graphs()
        self.config.compilation_config.static_forward_context.clear()
        self._remaining, self.forward_vars = iter(()), {}
        self.model = self._forward = self._sampler = self._recorder = self._readback = None


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
