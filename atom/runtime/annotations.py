"""Names in a trace: what each step computed, and which module ran.

    prefill[bs=2 tok=96 ctx=64]             sequences, tokens, longest context of a step without decodes
    decode[bs=5/8 tok=5 p=0 d=5 spec=0]     real and padded batch, tokens, of these sequences prefilling and
                                            decoding, draft tokens; the step replays a recorded graph
    eager_decode[...]                       the same, run call by call
    dummy_prefill[...], dummy_decode[...]   nobody asked for it: warm-up, or a rank that keeps others company

``ATOM_ENABLE_DETAILED_ANNOTATION`` appends sums over the sequences, from which attention's work follows:
``sqsq`` of q^2, ``sqsk`` of q * k and ``sk`` of k, where q are a sequence's query tokens and k its keys.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from atom.core import ScheduledBatch
from atom.utils import envs

if TYPE_CHECKING:
    import torch

_NOTHING: AbstractContextManager[Any] = nullcontext()


def step_label(
    batch: ScheduledBatch,
    *,
    padded_bs: int | None = None,
    is_graph: bool = False,
    is_dummy: bool = False,
    is_detailed: bool = False,
) -> str:
    """The name of a step.

    Args:
        padded_bs: sequences that the device computes; None: as many as there are.
        is_graph: whether the step replays a recorded graph.
        is_detailed: whether the attention sums are appended.
    """
    bs, num_prefill = batch.num_seqs, batch.num_prefill_seqs
    context_lens = [start + count for start, count in zip(batch.starts, batch.num_scheduled, strict=True)]
    if num_prefill == bs:
        name, facts = "prefill", f"bs={bs} tok={batch.num_tokens} ctx={max(context_lens, default=0)}"
    else:
        name = "decode" if is_graph or is_dummy else "eager_decode"
        num_decode = bs - num_prefill
        num_drafts = sum(batch.num_scheduled[num_prefill:]) - num_decode
        facts = f"bs={bs}/{padded_bs or bs} tok={batch.num_tokens} p={num_prefill} d={num_decode} spec={num_drafts}"
    if is_detailed:
        sqsq = sum(q * q for q in batch.num_scheduled)
        sqsk = sum(q * k for q, k in zip(batch.num_scheduled, context_lens, strict=True))
        facts += f" sqsq={sqsq} sqsk={sqsk} sk={sum(context_lens)}"
    return f"{'dummy_' if is_dummy else ''}{name}[{facts}]"


class StepAnnotations:
    """Ranges around steps while a trace is recorded; otherwise one attribute is read a step."""

    def __init__(self) -> None:
        self._is_recording = False
        self._is_detailed = False

    def start(self) -> None:
        """Name steps from now on."""
        self._is_recording = True
        self._is_detailed = envs.ATOM_ENABLE_DETAILED_ANNOTATION

    def stop(self) -> None:
        self._is_recording = False

    def step(
        self,
        batch: ScheduledBatch,
        *,
        padded_bs: int | None = None,
        is_graph: bool = False,
        is_dummy: bool = False,
    ) -> AbstractContextManager[Any]:
        """What a step runs in; see ``step_label``."""
        if not self._is_recording:
            return _NOTHING
        from torch.profiler import record_function

        return record_function(
            step_label(
                batch,
                padded_bs=padded_bs,
                is_graph=is_graph,
                is_dummy=is_dummy,
                is_detailed=self._is_detailed,
            )
        )


class ModuleRanges:
    """A range around every call of a model's layers and of their parts (``--mark-trace``).

    The hooks are there between ``start`` and ``stop`` only. They fire neither in replays of recorded graphs, whose
    capture they do name, nor in compiled code.
    """

    def __init__(self, model: "torch.nn.Module"):
        self._modules = {name: module for name, module in model.named_modules() if _is_marked(name, module)}
        self._handles: list[Any] = []
        self._open: list[Any] = []

    def start(self) -> None:
        from torch.profiler import record_function

        for name, module in self._modules.items():

            def begin(module: Any, args: Any, name: str = name) -> None:
                entered = record_function(name)
                entered.__enter__()
                self._open.append(entered)

            self._handles.append(module.register_forward_pre_hook(begin))
            # NOTE: always_call closes the range of a call that raised, too.
            self._handles.append(module.register_forward_hook(self._end, always_call=True))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _end(self, module: Any, args: Any, output: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def _is_marked(name: str, module: "torch.nn.Module") -> bool:
    """The model's parts down to the children of its layers; lists of layers are no calls."""
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    depth_in_layer = len(parts) - 1 - numbers[0] if numbers else 0
    is_container = type(module).__name__ in ("ModuleList", "ModuleDict")
    return bool(name) and not is_container and depth_in_layer <= 1 and len(numbers) <= 1
