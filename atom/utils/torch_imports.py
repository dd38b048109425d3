"""``import torch`` without what serving on a CPU never looks into: two thirds of the time, 25 MB less."""

from collections.abc import Iterator
from contextlib import contextmanager

from atom.utils import envs
from atom.utils.deferred_imports import deferring

# What torch imports for exporting, quantising and describing models. The registrations are of shape functions in
# Python, which compiling and fake tensors need: whatever compiles imports torch._dynamo first.
UNUSED_PARTS = (
    "torch._meta_registrations",
    "torch.ao",
    "torch.distributed._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.quantization",
)
NEEDING_ALL = ("torch._dynamo", "torch._inductor")


@contextmanager
def lean_torch(*, is_on: bool) -> Iterator[None]:
    """Import torch inside: its :data:`UNUSED_PARTS` are executed at the first look into them.

    Nothing is deferred where ``is_on`` is False (another device than the CPU, or a model that is compiled) or with
    ``ATOM_DEFER_IMPORTS=0``.
    """
    if is_on and envs.ATOM_DEFER_IMPORTS:
        with deferring(UNUSED_PARTS, needed_by=NEEDING_ALL):
            yield
    else:
        yield
