"""The hash chain: its bytes, its growth, and when a shipped one is adopted."""

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from atom.model_engine.messages import ShippedChain
from atom.model_engine.scheduling.prefix_hash import (
    HashChain,
    adopt,
    fingerprint,
    hash_prompt,
    mix_seed,
    ship,
)

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=200)


def naive(ids: list[int], block_size: int, seed: int) -> list[int]:
    """The spec, word by word."""
    digests, parent = [], seed if seed else None
    for start in range(0, len(ids) - block_size + 1, block_size):
        h = xxhash.xxh64()
        if parent is not None:
            h.update(np.uint64(parent).astype("<u8").tobytes())
        h.update(np.array(ids[start : start + block_size], dtype="<i8").tobytes())
        parent = h.intdigest()
        digests.append(parent)
    return digests


@given(token_ids, st.integers(1, 40), st.sampled_from([0, 1, 2**64 - 1]))
def test_chain_is_the_one_of_the_spec(ids, block_size, seed):
    chain = HashChain(block_size, seed)
    assert list(chain.extend(ids)) == naive(ids, block_size, seed)


@given(token_ids, st.integers(1, 9), st.lists(st.integers(0, 200), max_size=6))
def test_growing_in_pieces_changes_nothing(ids, block_size, cuts):
    whole, pieces = HashChain(block_size, 5), HashChain(block_size, 5)
    whole.extend(ids)
    for cut in sorted(min(cut, len(ids)) for cut in cuts):
        pieces.extend(ids[:cut])
        pieces.extend(ids, min(3, cut // block_size))
        assert pieces.hashes == whole.hashes[: len(pieces)]
    assert pieces.extend(ids) == whole.hashes


def test_known_values():
    assert HashChain(4).extend([1, 2, 3, 4])[0] == xxhash.xxh64_intdigest(
        b"".join(i.to_bytes(8, "little") for i in (1, 2, 3, 4))
    )
    assert fingerprint([1, 2]) == fingerprint(bytes([1, 0, 0, 0, 2, 0, 0, 0]))


@given(token_ids, st.integers(1, 20), st.integers(0, 2**64 - 1))
def test_a_shipped_chain_is_adopted_by_its_own_prompt(ids, block_size, seed):
    packed = np.array(ids, dtype="<i4").tobytes()
    for shipped in (hash_prompt(ids, block_size, seed), hash_prompt(ids, block_size, seed, packed)):
        for chain in (
            adopt(shipped, ids, block_size, seed),
            adopt(shipped, ids, block_size, seed, packed),
        ):
            assert list(chain.hashes) == naive(ids, block_size, seed)
            longer = [*ids, *range(50)]
            assert list(chain.extend(longer)) == naive(longer, block_size, seed)


def changed(shipped: ShippedChain, **fields) -> ShippedChain:
    values = {name: getattr(shipped, name) for name in ShippedChain.__struct_fields__}
    return ShippedChain(**{**values, **fields})


def test_any_mismatch_refuses_a_shipped_chain():
    ids = list(range(100))
    shipped = hash_prompt(ids, 8, 3)
    assert adopt(shipped, ids, 8, 3) is not None
    assert adopt(None, ids, 8, 3) is None
    assert adopt(shipped, ids, 16, 3) is None
    assert adopt(shipped, ids, 8, 4) is None
    assert adopt(shipped, ids[:-1], 8, 3) is None
    assert adopt(shipped, [*ids[:50], 0, *ids[51:]], 8, 3) is None  # the fingerprint sees it
    assert adopt(changed(shipped, fingerprint=1), ids, 8, 3) is None
    assert adopt(changed(shipped, hashes=shipped.hashes[:-8]), ids, 8, 3) is None
    for link in (0, 6, 11):  # first, middle, last of twelve
        bad = bytearray(shipped.hashes)
        bad[8 * link] ^= 1
        assert adopt(changed(shipped, hashes=bytes(bad)), ids, 8, 3) is None, link


def test_ship_leaves_out_blocks_past_the_prompt():
    chain = HashChain(4, 9)
    chain.extend(list(range(40)))
    shipped = ship(chain, list(range(18)))
    assert shipped.num_tokens == 18 and len(shipped.hashes) == 8 * 4


def test_seeds_differ_by_salt_and_server_and_are_never_none():
    seeds = {mix_seed(server, salt) for server in (0, 1, -1) for salt in (None, "", "a", "b", "\ud800")}
    assert len(seeds) == 15 and 0 not in seeds and all(0 < seed < 2**64 for seed in seeds)
    assert mix_seed(2**64 - 1) == mix_seed(-1)


def test_scheduling_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; import atom.model_engine.scheduler, atom.model_engine.scheduling.prefix_hash; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
