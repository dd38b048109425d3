"""Take the start-up heap out of garbage collection.

A full collection walks every tracked object while the process stands still. After warm-up nearly all of
them are start-up state that is never garbage: frozen, they are not walked again.
"""

import gc

from atom.utils import envs
from atom.utils.logging import init_logger

logger = init_logger(__name__)


def freeze_heap() -> int:
    """Collect once, then freeze what is left, unless ``ATOM_GC_FREEZE`` is off. Returns the objects frozen."""
    if not envs.ATOM_GC_FREEZE:
        return 0
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count() - before
    logger.info("%d objects of the start-up heap are exempt from garbage collection", frozen)
    return frozen


def unfreeze_heap() -> None:
    """Undo ``freeze_heap``, so that an engine that is closed in a living process can be collected."""
    gc.unfreeze()
