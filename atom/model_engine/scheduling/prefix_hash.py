"""The hash chain by which a prompt finds the KV blocks of an earlier one (spec: scheduling section 6).

Digest of block i = xxh64(digest of block i - 1 as 8 little-endian bytes, then the block's ids as contiguous
little-endian int64). The chain's seed stands where a parent of the first block would; seed 0 means none.
Used by the engine and by the front end, which hashes prompts off the scheduler's thread.
"""

import struct
import sys
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Ids
from functools import cache

import numpy as np
import xxhash

from atom.model_engine.messages import ShippedChain

MANY_BLOCKS = 4  # so many are packed at once
_digest = xxhash.xxh64_intdigest


def _packed(typecode: str, values: Ids[int]) -> bytes:
    packed = array(typecode, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@cache
def _packer(block_size: int) -> Callable[..., bytes]:
    """Packs a parent digest and the ids of one block."""
    return struct.Struct(f"<Q{block_size}q").pack


def mix_seed(server_seed: int, cache_salt: str | None = None) -> int:
    """The seed of a request's chain: never 0, and different for every salt."""
    salt = b"" if cache_salt is None else b"\x01" + cache_salt.encode("utf-8", "surrogatepass")
    key = (server_seed % 2**64).to_bytes(8, "little")
    return _digest(key + salt) or 1


def fingerprint(token_ids: Ids[int] | bytes) -> int:
    """xxh64 of the ids as little-endian int32; takes those bytes as well."""
    return _digest(token_ids if isinstance(token_ids, bytes) else _packed("i", token_ids))


class HashChain:
    """Digests of the full blocks of one growing list of ids; a block is hashed when first asked for.

    The ids must only ever grow: what is hashed is not looked at again.
    """

    __slots__ = ("block_size", "seed", "hashes", "_pack")

    def __init__(self, block_size: int, seed: int = 0, hashes: "array[int] | None" = None):
        self.block_size = block_size
        self.seed = seed
        self.hashes = array("Q") if hashes is None else hashes
        self._pack = _packer(block_size)

    def __len__(self) -> int:
        return len(self.hashes)

    def extend(self, token_ids: Ids[int], num_blocks: int | None = None) -> "array[int]":
        """Hash up to ``num_blocks`` blocks (default: every full one) of ``token_ids``; all hashes so far."""
        hashes, size = self.hashes, self.block_size
        done = len(hashes)
        if num_blocks is None:
            num_blocks = len(token_ids) // size
        if num_blocks <= done:
            return hashes
        parent, pack = hashes[-1] if done else self.seed, self._pack
        if not done and not parent:  # no seed: the first block has no parent at all
            parent = _digest(_packed("q", token_ids[:size]))
            hashes.append(parent)
            done = 1
        if num_blocks - done < MANY_BLOCKS:
            for start in range(done * size, num_blocks * size, size):
                parent = _digest(pack(parent, *token_ids[start : start + size]))
                hashes.append(parent)
            return hashes
        packed = np.asarray(token_ids[done * size : num_blocks * size], "<i8").tobytes()
        for start in range(0, len(packed), 8 * size):
            parent = _digest(parent.to_bytes(8, "little") + packed[start : start + 8 * size])
            hashes.append(parent)
        return hashes

    def link(self, index: int, token_ids: Ids[int]) -> int:
        """The digest of block ``index``, hashed anew from the digest before it."""
        size = self.block_size
        ids = token_ids[index * size : (index + 1) * size]
        parent = self.hashes[index - 1] if index else self.seed
        return _digest(self._pack(parent, *ids) if parent or index else _packed("q", ids))


def ship(chain: HashChain, token_ids: Ids[int] | bytes) -> ShippedChain:
    """The chain of a whole prompt as it travels beside the request. ``token_ids``: the ids, or their int32 bytes."""
    num_tokens = len(token_ids) // 4 if isinstance(token_ids, bytes) else len(token_ids)
    hashes = chain.hashes[: num_tokens // chain.block_size]
    if sys.byteorder == "big":
        hashes.byteswap()
    return ShippedChain(
        block_size=chain.block_size,
        seed=chain.seed,
        num_tokens=num_tokens,
        fingerprint=fingerprint(token_ids),
        hashes=hashes.tobytes(),
    )


def hash_prompt(
    token_ids: Ids[int], block_size: int, seed: int, token_bytes: bytes | None = None
) -> ShippedChain:
    """Hash a prompt and pack the result: what the front end does for each request. An array of ids takes half the time
    of a list."""
    chain = HashChain(block_size, seed)
    chain.extend(token_ids)
    return ship(chain, token_ids if token_bytes is None else token_bytes)


def adopt(
    shipped: ShippedChain | None,
    token_ids: Ids[int],
    block_size: int,
    seed: int,
    token_bytes: bytes | None = None,
) -> HashChain | None:
    """The shipped chain if it surely belongs to this prompt, else None (hash it yourself).

    Block size, seed, length and fingerprint must match and the first, middle and last block must rehash
    equal. ``token_bytes`` (the ids as int32 bytes) spares packing them for the fingerprint.
    """
    if shipped is None or shipped.block_size != block_size or shipped.seed != seed:
        return None
    num_blocks = len(token_ids) // block_size
    if shipped.num_tokens != len(token_ids) or len(shipped.hashes) != 8 * num_blocks:
        return None
    if shipped.fingerprint != fingerprint(token_ids if token_bytes is None else token_bytes):
        return None
    hashes = array("Q")
    hashes.frombytes(shipped.hashes)
    if sys.byteorder == "big":
        hashes.byteswap()
    chain = HashChain(block_size, seed, hashes)
    for index in {0, num_blocks // 2, num_blocks - 1} if num_blocks else ():
        if chain.link(index, token_ids) != hashes[index]:
            return None
    return chain
