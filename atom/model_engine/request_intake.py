"""From the message that starts a request to the sequence that the scheduler runs."""

from array import array

from atom.core import Sequence
from atom.model_engine.messages import CompiledGuide, NewRequest, ShippedChain
from atom.model_engine.scheduling.prefix_hash import adopt


def make_sequence(
    request: NewRequest, chain: ShippedChain | None, block_size: int, guide: CompiledGuide | None = None
) -> Sequence:
    """The sequence of ``request``. A shipped hash chain is taken over only if it surely is this prompt's."""
    token_ids = array("i", request.token_ids)  # not a list: of 16,384 ids that takes 200 us
    seq = Sequence(
        request.id,
        token_ids,
        request.params,
        stop_ids=frozenset(request.stop_ids),
        bad_word_ids=tuple(map(tuple, request.bad_word_ids)),
        guide=guide,
        max_output_tokens=request.max_output_tokens,
        hash_seed=request.hash_seed,
        cache_salted=request.cache_salted,
        priority=request.priority,
        arrival_time=request.arrival_time,
        packed_prompt=request.token_ids,
    )
    seq.chain = adopt(chain, token_ids, block_size, request.hash_seed, request.token_ids)
    return seq
