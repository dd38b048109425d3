"""What an engine must agree on with its peers before a step. Alone, there is nothing to agree on."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Agreement:
    """The outcome of one round."""

    may_schedule: bool = True
    must_stop: bool = False


class StepCoordinator(ABC):
    """Called once at the top of every engine step, on every engine of a data-parallel group."""

    @abstractmethod
    def agree(self, has_work: bool, stopping: bool) -> Agreement:
        """Exchange flags with the peers (a collective where there are any); never raises for a lost peer
        but answers ``must_stop``."""


class NullCoordinator(StepCoordinator):
    """The coordinator of an engine without peers."""

    _GO = Agreement()
    _STOP = Agreement(must_stop=True)

    def agree(self, has_work: bool, stopping: bool) -> Agreement:
        return self._STOP if stopping else self._GO
