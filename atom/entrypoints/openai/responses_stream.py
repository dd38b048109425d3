"""The shape of a response: items of thinking, text and calls, one open at a time, and the events that tell them."""

import time
import uuid
from collections.abc import Iterator

import msgspec

from atom.core import TokenLogprobs
from atom.entrypoints.openai import responses_protocol as p
from atom.entrypoints.openai.answers import AnswerWriter
from atom.entrypoints.openai.chat_core import PreparedChat
from atom.entrypoints.openai.generation import Generation
from atom.entrypoints.openai.http import event_frame
from atom.entrypoints.openai.logprobs import TokenBytes, chat_logprobs
from atom.entrypoints.openai.protocol import ChatTokenLogprob, Usage
from atom.entrypoints.openai.tool_parsers.base import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from atom.model_engine.outputs import RequestOutput

MAX_OUTPUT_TOKENS = "max_output_tokens"


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class OutputItems:
    """The items of one answer, made of its parser's events; what an item is told to be is never changed."""

    def __init__(self) -> None:
        self._done: list[p.OutputItem] = []
        self._open: p.OutputItem | None = None  # as it was added, without content
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._logprobs: list[ChatTokenLogprob] = []  # of the open item's text
        self._untold: list[ChatTokenLogprob] = []  # of tokens whose text is held back

    def add_logprobs(self, logprobs: list[ChatTokenLogprob]) -> None:
        """Of the tokens that the following events come from."""
        self._untold += logprobs

    def drop_logprobs(self) -> None:
        """Of tokens that turned out to be no text: log-probabilities are told of text alone."""
        self._untold = []

    def add(self, event: ParserEvent, is_cut: bool) -> Iterator[p.ItemEvent]:
        """``is_cut``: the event is one of the last of an answer that was cut off."""
        match event:
            case Content(text):
                if not isinstance(self._open, p.OutputMessage):
                    yield from self._begin(p.OutputMessage(_new_id("msg"), "in_progress", []))
                logprobs, self._untold = self._untold, []
                self._logprobs += logprobs
                yield p.OutputTextDelta(*self._told(text), logprobs)
            case Reasoning(text):
                if not isinstance(self._open, p.ReasoningItem):
                    yield from self._begin(p.ReasoningItem(_new_id("rs"), "in_progress", []))
                yield p.ReasoningTextDelta(*self._told(text))
            case ToolCallStart(_, call_id, name):
                item = p.FunctionCallItem(_new_id("fc"), "in_progress", call_id, name, "")
                yield from self._begin(item)
            case ToolCallArguments(_, text):
                yield p.ArgumentsDelta(*self._told(text))
            case ToolCallEnd():
                yield from self._end(is_cut and not _is_json("".join(self._pieces)))
        if not isinstance(event, (Content, Reasoning)):
            self.drop_logprobs()

    def finish(self, is_cut: bool) -> Iterator[p.ItemEvent]:
        """End the item that is open. An answer has one at least."""
        if not self._done and self._open is None:
            yield from self._begin(p.OutputMessage(_new_id("msg"), "in_progress", []))
        yield from self._end(is_cut)

    def snapshot(self) -> list[p.OutputItem]:
        """All items; one that is open is told as incomplete."""
        return self._done if self._open is None else [*self._done, self._whole(self._open, "incomplete")]

    @property
    def _index(self) -> int:
        """Of the open item."""
        return len(self._done)

    def _told(self, text: str) -> tuple[str, int, str]:
        """Keep a piece of the open item; what an event tells of it."""
        assert self._open is not None
        self._pieces.append(text)
        return self._open.id, self._index, text

    def _begin(self, item: p.OutputItem) -> Iterator[p.ItemEvent]:
        yield from self._end()
        self._open = item
        yield p.ItemAdded(self._index, item)
        if isinstance(item, p.OutputMessage):
            yield p.PartAdded(item.id, self._index, p.OutputText("", []))
        elif isinstance(item, p.ReasoningItem):
            yield p.PartAdded(item.id, self._index, p.ReasoningText(""))

    def _end(self, is_cut: bool = False) -> Iterator[p.ItemEvent]:
        if self._open is None:
            return
        item = self._whole(self._open, "incomplete" if is_cut else "completed")
        index = self._index
        match item:
            case p.OutputMessage(content=[part]):
                yield p.OutputTextDone(item.id, index, part.text, part.logprobs)
                yield p.PartDone(item.id, index, part)
            case p.ReasoningItem(content=[part]):
                yield p.ReasoningTextDone(item.id, index, part.text)
                yield p.PartDone(item.id, index, part)
            case p.FunctionCallItem():
                yield p.ArgumentsDone(item.id, index, item.name, item.arguments)
        yield p.ItemDone(index, item)
        self._done.append(item)
        self._open, self._pieces, self._logprobs = None, [], []

    def _whole(self, item: p.OutputItem, status: str) -> p.OutputItem:
        """The open item with what it has got."""
        text = "".join(self._pieces)
        match item:
            case p.OutputMessage():
                return p.OutputMessage(item.id, status, [p.OutputText(text, self._logprobs)])
            case p.ReasoningItem():
                return p.ReasoningItem(item.id, status, [p.ReasoningText(text)])
            case p.FunctionCallItem():
                return p.FunctionCallItem(item.id, status, item.call_id, item.name, text)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


class ResponseWriter(AnswerWriter):
    """Writes a response, whole or as events that are numbered from 0."""

    def __init__(self, chat: PreparedChat, request: p.ResponsesRequest, model: str, tokenizer: TokenBytes):
        super().__init__(1)
        self.id = _new_id("resp")
        self._tokenizer = tokenizer
        self._num_logprobs = chat.num_logprobs
        self._reader = chat.readers()[0]
        self._counter = chat.reasoning_counter(tokenizer)
        self._items = OutputItems()
        self._is_cut = False
        self._num_events = 0
        text_format = request.text.format if request.text is not None else None
        if text_format is None or text_format.type != "json_schema":
            text_format = p.TextFormat(type=text_format.type if text_format is not None else "text")
        self._started = p.ResponseObject(
            id=self.id,
            created_at=int(time.time()),
            status="in_progress",
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=model,
            output=[],
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=p.ReasoningUsed(request.reasoning.effort if request.reasoning is not None else None),
            temperature=chat.params.temperature,
            text=p.TextConfig(format=text_format),
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_logprobs=request.top_logprobs or 0,
            top_p=chat.params.top_p,
            truncation=request.truncation or "disabled",
            user=request.user,
        )

    def collect(self, batch: list[RequestOutput]) -> None:
        for output in batch:
            for _ in self._read(output):
                pass  # the items are made on the way

    def events(self, batch: list[RequestOutput], generation: Generation) -> bytes:
        frames: list[bytes] = []
        for output in batch:
            if not self._num_events:
                frames.append(self._frame(p.ResponseCreated(self._started)))
                frames.append(self._frame(p.ResponseInProgress(self._started)))
            frames += map(self._frame, self._read(output))
        return b"".join(frames)

    def last_events(self, usage: Usage) -> bytes:
        event = p.ResponseIncomplete if self._is_cut else p.ResponseCompleted
        return self._frame(event(self.response(usage)))

    def response(self, usage: Usage) -> p.ResponseObject:
        items = self._items.snapshot()
        if self._is_cut:
            end = {"status": "incomplete", "incomplete_details": p.IncompleteDetails(MAX_OUTPUT_TOKENS)}
        else:
            end = {"status": "completed", "completed_at": int(time.time())}
        return msgspec.structs.replace(self._started, output=items, usage=self._usage(usage), **end)

    def failed(self, message: str) -> bytes:
        """The event that ends the stream of a response that failed."""
        error = p.ResponseError("server_error", message)
        items = self._items.snapshot()
        response = msgspec.structs.replace(self._started, status="failed", error=error, output=items)
        return self._frame(p.ResponseFailed(response))

    def _read(self, output: RequestOutput) -> Iterator[p.ItemEvent]:
        num_thinking = 0
        if self._counter is not None:
            num_before = self._counter.add(output.output_tokens)
            num_thinking = num_before if self._counter.num_tokens else 0
        if output.logprobs and self._num_logprobs is not None:
            self._take_logprobs(output.logprobs, num_thinking)
        self._is_cut = output.finished and output.finish_reason == "length"
        for event in self._reader.read(output):
            if isinstance(event, Reasoning) and not num_thinking:
                self._items.drop_logprobs()  # more thinking, after the answer's beginning
            yield from self._items.add(event, self._is_cut)
        if output.finished:
            yield from self._items.finish(self._is_cut)

    def _take_logprobs(self, entries: list[TokenLogprobs], num_thinking: int) -> None:
        """``num_thinking``: so many of the first entries are of thinking."""
        if num_thinking:
            self._items.drop_logprobs()
        special = self._tokenizer.special_ids
        shown = [entry for entry in entries[num_thinking:] if entry.token_id not in special]
        self._items.add_logprobs(chat_logprobs(self._tokenizer, self._num_logprobs or 0, shown).content)

    def _usage(self, usage: Usage) -> p.ResponseUsage:
        num_thinking = 0 if self._counter is None else self._counter.num_tokens
        return p.ResponseUsage(
            usage.prompt_tokens,
            p.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            p.OutputTokensDetails(min(num_thinking, usage.completion_tokens)),
            usage.total_tokens,
        )

    def _frame(self, event: p.ResponseStreamEvent) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        return event_frame(event)
