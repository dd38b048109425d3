"""Where the scheduler meets external KV storage. ``NullConnector`` is the default: nothing is elsewhere."""

from abc import ABC, abstractmethod
from typing import Any

from atom.core import Sequence


class KVConnector(ABC):
    """Scheduler side of a KV connector (spec: kv_transfer section 1). Called on the engine's thread; never blocks."""

    @abstractmethod
    def get_num_new_matched_tokens(self, seq: Sequence, num_computed: int) -> tuple[int, bool]:
        """``(tokens, is_async)`` that an external store holds past ``num_computed``. Async: the sequence parks."""

    @abstractmethod
    def update_state_after_alloc(self, seq: Sequence, num_external_tokens: int) -> None:
        """The blocks of ``seq`` exist; record the load that fills them."""

    @abstractmethod
    def build_connector_meta(self) -> Any:
        """Drain this step's work for the workers; None when there is none."""

    @abstractmethod
    def request_finished(self, seq: Sequence) -> bool:
        """``seq`` ended. True: its blocks are still being read, keep them until ``poll_released`` names it."""

    @abstractmethod
    def poll_loaded(self) -> list[tuple[int, bool]]:
        """``(seq id, succeeded)`` of parked sequences whose load has ended since the last call."""

    @abstractmethod
    def poll_released(self) -> list[int]:
        """Ids of finished sequences whose blocks may be freed now."""

    @abstractmethod
    def is_pinned(self, seq: Sequence) -> bool:
        """Whether a transfer reads this running sequence's blocks, so that it must not be preempted."""


class NullConnector(KVConnector):
    def get_num_new_matched_tokens(self, seq: Sequence, num_computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, seq: Sequence, num_external_tokens: int) -> None:
        return None

    def build_connector_meta(self) -> None:
        return None

    def request_finished(self, seq: Sequence) -> bool:
        return False

    def poll_loaded(self) -> list[tuple[int, bool]]:
        return []

    def poll_released(self) -> list[int]:
        return []

    def is_pinned(self, seq: Sequence) -> bool:
        return False
