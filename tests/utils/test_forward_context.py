"""The forward context: one at a time, read by anybody inside, gone afterwards whatever happens."""

import pytest
import torch

from atom.utils.forward_context import (
    AttentionMetaData,
    Context,
    DPMetadata,
    ForwardContext,
    get_forward_context,
    reset_forward_context,
    set_forward_context,
)


def test_a_context_is_set_for_one_forward_and_reset_afterwards():
    empty = get_forward_context()
    assert (empty.attn_metadata, empty.no_compile_layers, empty.tr_graph) == ({}, {}, None)
    step = ForwardContext(context=Context(batch_size=3, running_bs=4, running_tokens=8))
    with set_forward_context(step) as current:
        assert get_forward_context() is current is step
    assert get_forward_context() is empty
    with pytest.raises(KeyError), set_forward_context(step):
        raise KeyError("of a layer")
    assert get_forward_context() is empty


def test_contexts_do_not_nest():
    with set_forward_context(ForwardContext()) as outer:
        with pytest.raises(RuntimeError, match="forward contexts do not nest"):
            with set_forward_context(ForwardContext()):
                pass
        assert get_forward_context() is outer
        reset_forward_context()
        assert get_forward_context() is not outer


def test_what_follows_from_the_lengths_of_a_step():
    lens, slots = torch.tensor([7, 3], dtype=torch.int32), torch.arange(5)
    sums, table = torch.tensor([0, 4, 5], dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    step = AttentionMetaData(1, 4, [4, 1], [7, 3], sums, lens, table, slots)
    assert (step.num_seqs, step.max_seqlen_q, step.max_seqlen_k) == (2, 4, 7)
    rehearsed = AttentionMetaData(0, 0, [], [], sums, lens, table, slots)
    assert (rehearsed.num_seqs, rehearsed.max_seqlen_q, rehearsed.max_seqlen_k) == (0, 0, 0)


def test_token_counts_of_data_parallel_ranks():
    ranks = DPMetadata([3, 0, 5])
    assert ranks.cu_tokens_across_dp == [3, 3, 8]
    assert ranks.max_tokens_across_dp == 5
