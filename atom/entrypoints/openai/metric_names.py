"""Every name of ``/metrics`` and its meaning, without the prefix. The guide lists the same names (tested)."""

PREFIX = "atom:"

# Keys of LLMEngine.stats(). What the engine does not report is left out.
ENGINE_GAUGES = {
    "requests_running": "Requests that have a row in the engine",
    "requests_waiting": "Requests that wait for admission",
    "requests_partial_prefill": "Running requests whose prompt is not computed to its end",
    "requests_parked_kv_load": "Requests that wait for KV from elsewhere",
    "requests_oldest_waiting_seconds": "Age of the oldest request that waits for admission (0: none waits)",
    "requests_oldest_running_seconds": "Age of the oldest request that runs (0: none runs)",
    "kv_cache_blocks_used": "KV cache blocks held by requests",
    "kv_cache_blocks_free": "KV cache blocks that can be given out, reusable ones included",
    "kv_cache_blocks_evictable": "Free KV cache blocks that a prefix lookup can still find",
    "kv_cache_blocks_total": "KV cache blocks of all cache groups",
    "kv_cache_blocks_indexed": "KV cache blocks that a prefix lookup can find",
    "kv_cache_usage_ratio": "Used share of the KV cache",
    "prefix_cache_hit_ratio": "Share of prompt tokens found in the prefix cache since the start",
}
ENGINE_COUNTERS = {
    "preemptions": "Requests put back to the queue because the KV cache was full",
    "prefix_cache_requests": "Answers whose prompt was looked up in the prefix cache",
    "prefix_cache_cached_tokens": "Prompt tokens found in the prefix cache",
    "prefix_cache_full_tokens": "Prompt tokens looked up in the prefix cache",
    "engine_steps": "Steps of the engine",
    "cache_integrity_faults": "Faults found, and repaired, in the books over cache blocks",
}
ENGINE_HISTOGRAMS = {
    "decode_batch_size": "Requests in a decode step",
    "decode_context_tokens": "Tokens that the requests of a decode step attend to together",
    "prefill_request_tokens": "Tokens of one request in a prefill step",
    "prefill_batch_tokens": "Tokens of a prefill step",
    "prefill_context_tokens": "Tokens that the requests of a prefill step attend to together",
    "gpu_forward_seconds": "Forward pass on the device (ATOM_ENABLE_METRICS_DEVICE_TIMER)",
    "gpu_sample_seconds": "Sampling on the device (ATOM_ENABLE_METRICS_DEVICE_TIMER)",
    "api_detokenize_chunk_seconds": "From token ids to the text of one delta",
}
# The same counts under the names of other dashboards: label value -> key of LLMEngine.stats().
ENGINE_STATES = {
    "scheduler_requests": {
        "running": "requests_running",
        "waiting": "requests_waiting",
        "waiting_kv": "requests_parked_kv_load",
    },
    "scheduler_kv_cache_blocks": {
        "used": "kv_cache_blocks_used",
        "evictable": "kv_cache_blocks_evictable",
        "vacant": "",  # free less evictable
        "total": "kv_cache_blocks_total",
    },
}
SERVER_METRICS = {
    "requests_finished": "Answers that ended, by finish reason (abort: the client left or the server stopped)",
    "requests_rejected": "Requests refused because the queue was full (HTTP 429)",
    "prompt_tokens": "Prompt tokens of finished requests",
    "generation_tokens": "Tokens of finished answers",
    "time_to_first_token_seconds": "Arrival of a request to its first token; streamed: to the write of it",
    "inter_token_latency_seconds": "Time between tokens of one answer, each token counted",
    "request_queue_time_seconds": "Arrival of a request at the engine to its first forward pass",
    "ttft_api_preprocess_seconds": "Slice of a streamed answer's first token: reading, template, tokenization",
    "ttft_api_enqueue_seconds": "Slice: from there to the hand-over to the engine",
    "ttft_forward_to_output_seconds": "Slice: first forward pass to its token in the server process",
    "ttft_output_to_callback_seconds": "Slice: from there to the request's own code on the event loop",
    "ttft_callback_to_sse_seconds": "Slice: from there to the write of the event",
    "api_body_read_seconds": "Receiving the body of a request",
    "api_chat_template_seconds": "Rendering the chat template",
    "api_tokenize_seconds": "Text to token ids",
    "api_preprocess_wait_seconds": "Waiting for a thread that renders and tokenizes",
    "stream_longest_silence_seconds": "Time since the most starved open stream was last served",
    "http_requests_in_flight": "Generation requests that are being answered",
    "request_log_dropped": "Lines of --request-log that were lost",
    "startup_phase_seconds": "Duration of each start-up phase",
    "engine_heartbeat_age_seconds": "Time since the engine last gave a sign of life",
    "engine_up": "Whether the engine is able to serve (0/1)",
    "metrics_snapshot_available": "Whether the engine has reported yet (0/1)",
    "metrics_last_refresh_timestamp_seconds": "Unix time of the newest snapshot",
    "metrics_refresh_errors": "Snapshots, or parts of an answer to a scrape, that could not be read",
}
PROCESS_METRICS = {
    "gc_collections": "Garbage collections of the server process",
    "gc_collected": "Objects that they reclaimed",
    "gc_uncollectable": "Objects that they could not reclaim",
    "gc_threshold": "Threshold of a generation",
    "process_cpu_seconds": "CPU time of each process of the server",
    "process_threads": "Threads of each process of the server",
}
