"""Aids to find where two runs part: dumps of hidden states and weights, a log of the best logits, a comparison.

Everything here is asked for by the environment (``docs/debugging_guide.md``) and decided once, at the start: what
is off leaves nothing behind in the running engine.

    forward dump   ``install_block_forward_hooks``   ATOM_FWD_DUMP_*
    weight dump    ``maybe_dump_weights_and_exit``   ATOM_WEIGHT_DUMP_*
    top-k log      ``make_topk_log``                 ATOM_DEBUG_TOPK, ATOM_DEBUG_TOPK_PATH
    comparison     ``python -m atom.utils.debug_helper.compare``
"""

from atom.utils.debug_helper.forward_dump import ForwardDump, install_block_forward_hooks, needs_eager
from atom.utils.debug_helper.topk_log import TopkLog, make_topk_log
from atom.utils.debug_helper.weight_dump import maybe_dump_weights_and_exit

__all__ = [
    "ForwardDump",
    "TopkLog",
    "install_block_forward_hooks",
    "make_topk_log",
    "maybe_dump_weights_and_exit",
    "needs_eager",
]
