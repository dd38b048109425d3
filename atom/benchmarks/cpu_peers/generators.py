"""Engines of other environments behind the interface of ``cpu_peer.Generator``. Each imports its package late."""

import argparse
import json
import os
from typing import Any


class OpenVinoGenerator:
    """openvino-genai's ``LLMPipeline``: continuous batching, or its SDPA backend.

    ``engine_args``: JSON object; ``{"backend": "SDPA"}`` chooses the latter.
    """

    def __init__(self, args: argparse.Namespace):
        import numpy
        import openvino
        import openvino_genai as genai

        self._numpy, self._tensor, self._genai = numpy, openvino.Tensor, genai
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.num_threads}
        if json.loads(args.engine_args).get("backend") == "SDPA":
            settings["ATTENTION_BACKEND"] = "SDPA"
        else:
            scheduler = genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            scheduler.max_num_batched_tokens = 2048
            scheduler.cache_size = 2
            settings["scheduler_config"] = scheduler
        self._pipeline = genai.LLMPipeline(args.model, "CPU", **settings)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = config.apply_chat_template = False
        ids = self._numpy.array(prompts, dtype=self._numpy.int64)
        mask = self._numpy.ones_like(ids)
        inputs = self._genai.TokenizedInputs(self._tensor(ids), self._tensor(mask))
        return [list(tokens) for tokens in self._pipeline.generate(inputs, config).tokens]

    def close(self) -> None:
        """Nothing was started."""


class VllmGenerator:
    """vLLM's ``LLM`` on the CPU, its engine in this process, compiled as it is by default."""

    def __init__(self, args: argparse.Namespace):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.num_threads - 1}")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._engine = LLM(
            args.model,
            dtype=args.dtype,
            max_model_len=4096,
            max_num_seqs=16,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = self._params(
            temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        answers = self._engine.generate(requests, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def close(self) -> None:
        """Its engine ends with the process."""
