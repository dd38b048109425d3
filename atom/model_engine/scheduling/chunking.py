"""How many tokens of a prompt one prefill step computes (spec: scheduling section 2)."""

MIN_CHUNK_ALIGNMENT = 64  # tokens


def chunk_size(
    num_new: int,
    budget: int,
    block_size: int,
    *,
    threshold: int = 0,
    is_chunked: bool = True,
    is_first_in_batch: bool = True,
) -> int:
    """Tokens to compute now of the ``num_new`` still missing; 0: wait for a step with more room.

    Args:
        budget: tokens that the step still takes.
        threshold: longest chunk of one prompt; 0 means no limit of its own.
        is_chunked: False: all or nothing.
        is_first_in_batch: the batch is empty, so a small unaligned chunk is better than none.

    A chunk that does not finish the prompt is a multiple of ``max(block_size, 64)`` tokens.
    """
    size = min(num_new, budget)
    if is_chunked and threshold > 0:
        size = min(size, threshold)
    if size == num_new:
        return size
    if not is_chunked:
        return 0
    aligned = size - size % max(block_size, MIN_CHUNK_ALIGNMENT)
    if aligned:
        return aligned
    return size if is_first_in_batch else 0
