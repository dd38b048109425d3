"""The best logits of every sampled row, one JSON line each (``ATOM_DEBUG_TOPK``)."""

import json
import math
import sys
from typing import Any, TextIO

import torch

from atom.core import ScheduledBatch
from atom.errors import ConfigError
from atom.utils import envs
from atom.utils.logging import init_logger

logger = init_logger(__name__)


def make_topk_log(rank: int = 0) -> "TopkLog | None":
    """The log that the environment asks for; None without one, and on ranks other than 0.

    Raises ConfigError when ``ATOM_DEBUG_TOPK_PATH`` cannot be written.
    """
    if rank != 0 or not envs.ATOM_DEBUG_TOPK:
        return None
    path = envs.ATOM_DEBUG_TOPK_PATH
    if path is None:
        return TopkLog(envs.ATOM_DEBUG_TOPK)
    try:
        file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed with the log)
    except OSError as error:
        raise ConfigError(
            f"environment variable ATOM_DEBUG_TOPK_PATH must name a file that can be written, got {path!r}: {error}"
        ) from None
    return TopkLog(envs.ATOM_DEBUG_TOPK, file)


class TopkLog:
    """Writes the ``k`` largest logits a row, as the model gave them; reading them waits for the device.

    Args:
        file: None: standard error.
    """

    def __init__(self, k: int, file: TextIO | None = None):
        self._k = k
        self._file = file
        self._is_broken = False

    def maybe_log_topk(
        self, logits: torch.Tensor, batch: ScheduledBatch, indices: list[int] | None = None
    ) -> None:
        """Log every row of ``logits [num_rows, vocab_size]``.

        Args:
            indices: batch index of each row; None: all, in order.
        """
        if self._is_broken or (logits.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        values, ids = logits.float().topk(min(self._k, logits.shape[-1]), dim=-1)
        values, ids = values.tolist(), ids.tolist()
        lines = []
        for row, index in enumerate(range(batch.num_seqs) if indices is None else indices):
            facts: dict[str, Any] = {
                "step": batch.step,
                "row": row,
                "request": batch.seqs[index].id,
                "position": batch.starts[index] + batch.num_scheduled[index],
                "ids": ids[row],
                "logits": [round(v, 6) if math.isfinite(v) else str(v) for v in values[row]],
            }
            lines.append(json.dumps(facts) + "\n")
        try:
            (self._file or sys.stderr).write("".join(lines))
        except OSError as error:  # a full disk must not end a serving process
            self._is_broken = True
            logger.error("the log of the best logits ends here: %s", error)
