"""The engine's side of guides: which ids each guided sequence may take next.

A matcher follows the committed ids of its sequence, whenever a mask is asked for: so preemption, late
commits and several tokens a step need nothing of their own.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

import msgspec
import numpy as np

from atom.core import ScheduledBatch, Sequence, TokenMasks
from atom.model_engine.messages import CompiledGuide
from atom.model_engine.structured.backend import (
    Grammar,
    GrammarBackend,
    Matcher,
    Vocabulary,
    load_backend,
)
from atom.utils.logging import init_logger

logger = init_logger(__name__)

MAX_BLANK_BYTES = 64  # of white space in a row; then JSON has to go on: random and small models never would
LOADED_BYTES = 64 << 20  # of grammars that are kept although no sequence uses them


@dataclass(slots=True)
class _Guided:
    """One guided sequence. ``marker`` is the text after which its grammar starts; "" once it has."""

    seq: Sequence
    guide: CompiledGuide
    num_seen: int  # ids of the sequence that the matcher (or the search for the marker) has taken
    marker: bytes
    matcher: Matcher | None = None
    tail: bytes = b""  # the last bytes before the marker
    num_blank: int = 0  # bytes of white space at the end of the answer


class GuideManager:
    """Matchers of the live guided sequences. Called from the engine's thread alone."""

    def __init__(self) -> None:
        self.live: dict[int, _Guided] = {}  # by sequence id; empty: nothing to do in a step
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, GrammarBackend | Exception] = {}
        self._loading: dict[str, threading.Thread] = {}
        self._grammars: OrderedDict[bytes, tuple[Grammar, int]] = OrderedDict()
        self._num_bytes = 0
        self._bits = np.zeros((0, 0), np.int32)
        self._blank_bits = np.zeros(0, np.int32)  # of tokens that are nothing but white space

    # -- libraries

    def prepare(self, backend: str, vocabulary: bytes = b"") -> bool:
        """Load a library beside the running steps; ask again until it is True.

        Raises ImportError, and whatever else the library raises.
        """
        if vocabulary and self._vocabulary is None:
            self._set_vocabulary(msgspec.msgpack.decode(vocabulary, type=Vocabulary))
        loaded = self._backends.get(backend)
        if isinstance(loaded, Exception):
            del self._backends[backend]
            raise loaded
        if loaded is None and backend not in self._loading:
            thread = threading.Thread(target=self._load, args=(backend,), name=f"load-{backend}", daemon=True)
            self._loading[backend] = thread
            thread.start()
        return loaded is not None

    def _set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        flags = np.zeros(-(-len(vocabulary) // 32) * 32, np.uint8)
        flags[[i for i, token in enumerate(vocabulary.tokens) if token.isspace()]] = 1
        self._blank_bits = np.packbits(flags, bitorder="little").view(np.int32)

    def _load(self, backend: str) -> None:
        try:
            self._backends[backend] = load_backend(backend, self._vocabulary)
            logger.info("structured output is ready (%s)", backend)
        except Exception as error:
            self._backends[backend] = error
        del self._loading[backend]

    def _grammar(self, guide: CompiledGuide) -> Grammar:
        if guide.key in self._grammars:
            self._grammars.move_to_end(guide.key)
            return self._grammars[guide.key][0]
        backend = self._backends.get(guide.backend)
        if not isinstance(backend, GrammarBackend):
            raise RuntimeError(f"{guide.backend} is not loaded")
        grammar = backend.load(guide.data)
        self._grammars[guide.key] = grammar, len(guide.data)
        self._num_bytes += len(guide.data)
        while self._num_bytes > LOADED_BYTES and len(self._grammars) > 1:
            self._num_bytes -= self._grammars.popitem(last=False)[1][1]
        return grammar

    # -- sequences

    def add(self, seq: Sequence) -> None:
        """Follow ``seq``, which has a guide, until it ends."""
        if not seq.is_finished:
            marker = seq.guide.start_after.encode()
            self.live[seq.id] = _Guided(seq, seq.guide, seq.num_prompt_tokens, marker)

    def drop_finished(self) -> None:
        for seq_id in [seq_id for seq_id, guided in self.live.items() if guided.seq.is_finished]:
            del self.live[seq_id]

    def needs_masks(self, batch: ScheduledBatch) -> bool:
        """Whether a sequence that samples in ``batch`` is guided."""
        return any(
            samples and seq.guide is not None for seq, samples in zip(batch.seqs, batch.samples, strict=True)
        )

    def masks(self, batch: ScheduledBatch) -> tuple[TokenMasks | None, dict[int, str]]:
        """Masks of the guided rows, and why some cannot go on (by batch index).

        Ask it when every step before ``batch`` is committed. The masks are good until the next call.
        """
        masks = TokenMasks([], self._bits)
        errors: dict[int, str] = {}
        row = -1
        for index, (seq, epoch, samples) in enumerate(
            zip(batch.seqs, batch.epochs, batch.samples, strict=True)
        ):
            row += samples
            if not samples or seq.guide is None or seq.epoch != epoch:
                continue
            try:
                guided = self.live[seq.id]
                self._catch_up(guided)
                if not guided.marker:
                    self._fill(masks, row, guided)
            except Exception as error:  # of native code: it ends this request, not the engine
                logger.warning("request %d: its guide failed: %s", seq.id, error)
                errors[index] = f"the guide failed: {error}"
        return (masks if masks.rows else None), errors

    def _fill(self, masks: TokenMasks, row: int, guided: _Guided) -> None:
        at = len(masks.rows)
        if at >= len(self._bits):
            num_words = -(-len(self._vocabulary) // 32)
            bits = np.zeros((max(4, 2 * at), num_words), np.int32)
            if at:
                bits[:at] = self._bits
            masks.bits = self._bits = bits
        guided.matcher.fill_mask(self._bits, at)
        if guided.num_blank >= MAX_BLANK_BYTES:
            others = self._bits[at] & ~self._blank_bits
            if others.any():
                self._bits[at] = others
        masks.rows.append(row)
        seq = guided.seq
        if seq.num_output_tokens < seq.params.min_tokens and guided.matcher.is_finished:
            words = self._bits[at].view(np.uint32)
            num_ends = sum(
                int(words[i // 32]) >> i % 32 & 1 for i in seq.stop_ids if i < len(self._vocabulary)
            )
            if sum(map(int.bit_count, words[words != 0].tolist())) == num_ends:
                masks.ended.add(row)

    def _catch_up(self, guided: _Guided) -> None:
        """Show the matcher the ids that were committed since. Raises RuntimeError for one that does not fit."""
        if guided.matcher is None:
            guided.matcher = self._grammar(guided.guide).matcher()
        token_ids = guided.seq.token_ids
        while guided.num_seen < len(token_ids):
            token = token_ids[guided.num_seen]
            guided.num_seen += 1
            if guided.marker:
                self._look_for_marker(guided, token)
            elif not guided.matcher.accept(token):
                raise RuntimeError(f"token {token} does not fit the grammar")
            elif guided.guide.is_json:
                text = self._vocabulary.tokens[token]
                guided.num_blank = guided.num_blank + len(text) if text.isspace() else 0

    def _look_for_marker(self, guided: _Guided, token: int) -> None:
        tokens = self._vocabulary.tokens
        guided.tail += tokens[token] if token < len(tokens) else b""
        at = guided.tail.find(guided.marker)
        if at < 0:
            guided.tail = guided.tail[-len(guided.marker) :]
            return
        # What else its last token holds is white space as a rule; anything else has to fit.
        rest = guided.tail[at + len(guided.marker) :].strip()
        guided.marker = guided.tail = b""
        for byte in rest:
            token = tokens.index(bytes((byte,))) if bytes((byte,)) in tokens else -1
            if token < 0 or not guided.matcher.accept(token):
                raise RuntimeError(f"the text {rest!r} after the start marker does not fit the grammar")
