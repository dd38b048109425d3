"""The native arg-max and choice of an id, for tensors."""

import torch

from atom.kernels.cpu.native.arguments import ArgmaxArguments, ChooseArguments
from atom.kernels.cpu.native.library import NativeLibrary

MAX_VOCAB = 400_000  # ATOM_MAX_VOCAB


def native_argmax(library: NativeLibrary, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.argmax`` of ``logits [n, vocab]`` float32, rows contiguous."""
    num_rows, vocab_size = logits.shape
    ids, values = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    arguments = ArgmaxArguments(
        x=logits.data_ptr(),
        ldx=logits.stride(0),
        m=num_rows,
        n=vocab_size,
        ids=ids.data_ptr(),
        values=values.data_ptr(),
    )
    library.call("atom_argmax_rows", arguments, alone=num_rows == 1)
    return ids, values


def native_choose(
    library: NativeLibrary,
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """As ``reference.choose``, rows of ``logits`` contiguous, at most MAX_VOCAB ids.

    Exponentials differ from torch's in the last bit: where a bound is met within 1e-6, a neighbour may be chosen.
    """
    num_rows, vocab_size = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int64)
    best, temperature, top_p, min_p, uniforms = (
        t.float().contiguous() for t in (best, temperature, top_p, min_p, uniforms)
    )
    top_k = top_k.to(torch.int32).contiguous()
    arguments = ChooseArguments(
        x=logits.data_ptr(),
        ldx=logits.stride(0),
        m=num_rows,
        n=vocab_size,
        best=best.data_ptr(),
        temperature=temperature.data_ptr(),
        top_p=top_p.data_ptr(),
        min_p=min_p.data_ptr(),
        uniforms=uniforms.data_ptr(),
        top_k=top_k.data_ptr(),
        ids=ids.data_ptr(),
    )
    library.call("atom_choose_rows", arguments, alone=num_rows == 1)
    return ids
