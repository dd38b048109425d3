"""How deltas become an API's answer, whole or streamed. One subclass an API."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import msgspec

from atom.core import TokenLogprobs
from atom.entrypoints.openai.generation import Generation
from atom.entrypoints.openai.protocol import Usage
from atom.model_engine.outputs import RequestOutput


@dataclass(slots=True)
class Answer:
    """One of the n answers as far as it has come."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, output: RequestOutput) -> None:
        if output.text:
            self.texts.append(output.text)
        if output.logprobs:
            self.logprobs.extend(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finished:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


class AnswerWriter(ABC):
    """Writes the answers of one request.

    A streamed request calls ``events`` for each batch of deltas and ``last_events`` once after them; a plain
    one calls ``collect`` for each batch and ``response`` at the end.
    """

    def __init__(self, num_answers: int):
        self.answers = [Answer(index) for index in range(num_answers)]

    def collect(self, batch: list[RequestOutput]) -> None:
        for output in batch:
            self.answers[output.index].add(output)

    @abstractmethod
    def events(self, batch: list[RequestOutput], generation: Generation) -> bytes:
        """Encoded events that tell the batch; empty when it holds nothing that a client could see."""

    @abstractmethod
    def last_events(self, usage: Usage) -> bytes:
        """What follows the last delta, the end mark included."""

    @abstractmethod
    def response(self, usage: Usage) -> msgspec.Struct:
        """The whole answer."""
