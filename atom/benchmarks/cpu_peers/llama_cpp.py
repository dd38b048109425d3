"""Measuring llama.cpp through its own programs.

Decoding and prefill come from ``llama-bench``, which neither samples nor turns ids into text, 16 sequences from
``llama-batched-bench``, the start from ``llama-completion``: the figures that its users quote. Requests through
HTTP are measured as for every server (``http_load``).
"""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from atom.benchmarks.cpu_peer import (
    NUM_CONCURRENT,
    NUM_INPUT,
    NUM_OUTPUT,
    PREFILL_LENGTHS,
    SANITY_PROMPT,
    Measurement,
    peak_rss_of_tree,
)
from atom.benchmarks.cpu_peers.workspace import PeerUnavailable, last_line

_TIMEOUT_S = 300.0
_RSS_INTERVAL_S = 0.02
_NUM_SANITY_OUTPUT = 24


class LlamaPrograms:
    """llama.cpp over one file. ``program``: name of a program to its path."""

    def __init__(self, program: Callable[[str], str], file: Path, num_threads: int):
        self._program, self._file, self._num_threads = program, str(file), str(num_threads)
        self.peak_rss_bytes = 0

    def measure(self, workloads: Collection[str]) -> Measurement:
        """As ``cpu_peer.measure`` does for engines in Python. Raises PeerUnavailable."""
        began = time.monotonic()
        self._complete(1)
        result = Measurement(time.monotonic() - began, 0, [])
        if "decode" in workloads:
            result.decode_tok_s = self._bench("-p", "0", "-n", NUM_OUTPUT, "-d", NUM_INPUT)[0, NUM_OUTPUT]
            result.ttft_128_ms = 1e3 * NUM_INPUT / self._bench("-p", NUM_INPUT, "-n", "0")[NUM_INPUT, 0]
        if "prefill" in workloads:
            rates = self._bench("-p", ",".join(map(str, PREFILL_LENGTHS)), "-n", "0")
            result.prefill_512_tok_s, result.prefill_2048_tok_s = (rates[n, 0] for n in PREFILL_LENGTHS)
        if "concurrent" in workloads:
            result.concurrent_tok_s = self._batched()
        result.peak_rss_bytes = self.peak_rss_bytes
        return result

    def sanity_text(self) -> str:
        """What follows the sanity prompt."""
        return self._complete(_NUM_SANITY_OUTPUT).strip().removeprefix(SANITY_PROMPT)

    def server_command(self, port: int) -> list[str]:
        """``llama-server`` with a slot for each concurrent request."""
        options = ["-np", NUM_CONCURRENT, "-c", 8192, "--host", "127.0.0.1", "--port", port, "--no-webui"]
        return [self._program("llama-server"), *self._common(), *map(str, options)]

    def _common(self) -> list[str]:
        return ["-m", self._file, "-t", self._num_threads]

    def _complete(self, num_tokens: int) -> str:
        options = ["-p", SANITY_PROMPT, "-n", str(num_tokens), "--temp", "0", "-no-cnv", "--no-warmup"]
        return self._run("llama-completion", *options)

    def _bench(self, *options: object) -> dict[tuple[int, int], float]:
        """Tokens a second by (prompt tokens, generated tokens)."""
        text = self._run("llama-bench", *map(str, options), "-r", "1", "-o", "json")
        return {(row["n_prompt"], row["n_gen"]): row["avg_ts"] for row in json.loads(text)}

    def _batched(self) -> float:
        """Output tokens over the whole time of 16 sequences, prefill included; mean of two."""
        sizes = ["-c", "8192", "-b", "2048", "-ub", "512", "-npp", NUM_INPUT, "-ntg", NUM_OUTPUT]
        sizes += ["-npl", NUM_CONCURRENT, "--output-format", "jsonl"]
        seconds = []
        for _ in range(2):
            text = self._run("llama-batched-bench", *map(str, sizes))
            seconds += [json.loads(line)["t"] for line in text.splitlines() if line.startswith("{")]
        return NUM_CONCURRENT * NUM_OUTPUT * len(seconds) / sum(seconds)

    def _run(self, name: str, *options: str) -> str:
        """Output of a program; notes its peak memory. Raises PeerUnavailable."""
        process = subprocess.Popen(
            [self._program(name), *self._common(), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        is_done = threading.Event()
        watcher = threading.Thread(target=self._watch_memory, args=(process.pid, is_done))
        watcher.start()
        try:
            out, err = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            raise PeerUnavailable(f"{name} took more than {_TIMEOUT_S:.0f} s") from error
        finally:
            is_done.set()
            watcher.join()
        if process.returncode:
            raise PeerUnavailable(f"{name} failed: {last_line(err or out)}")
        return out

    def _watch_memory(self, pid: int, is_done: threading.Event) -> None:
        while not is_done.wait(_RSS_INTERVAL_S):
            self.peak_rss_bytes = max(self.peak_rss_bytes, peak_rss_of_tree(pid))
