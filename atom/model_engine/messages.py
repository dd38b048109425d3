"""Messages between the front end and an engine process. msgspec structs; never pickle.

Ids travel as bytes of fixed-width integers: a list of 256 Python objects costs a hundred times as much
to encode as one array.
"""

import msgspec

from atom.sampling_params import SamplingParams


class NewRequest(msgspec.Struct, array_like=True):
    """A request as the engine needs it: ids only, text stays in the front end."""

    id: int
    token_ids: bytes  # int32, little endian
    params: SamplingParams
    stop_ids: list[int]
    max_output_tokens: int
    arrival_time: float
    bad_word_ids: list[list[int]] = []
    hash_seed: int = 0
    cache_salted: bool = False
    priority: int = 0
    guide: int = -1  # index into AddRequests.guides


class CompiledGuide(msgspec.Struct, array_like=True, frozen=True):
    """A grammar that has compiled. Equal keys mean equal data."""

    key: bytes
    backend: str
    data: bytes
    is_json: bool = False  # white space between its parts means nothing
    start_after: str = ""  # the grammar starts once this text has been generated


class ShippedChain(msgspec.Struct, array_like=True):
    """Prefix-hash chain that the front end computed; rides beside the request, never inside it."""

    block_size: int
    seed: int
    num_tokens: int
    fingerprint: int
    hashes: bytes  # uint64, little endian, one a full block


class AddRequests(msgspec.Struct, array_like=True, tag="add"):
    requests: list[NewRequest]
    chains: list[ShippedChain | None]
    guides: list[CompiledGuide] = []  # each once, however many requests share it


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """Stop these requests. ``keep_tokens[i]`` counts the prompt and answer tokens that the client got
    (-1: all); KV of later tokens is taken out of the prefix cache. ``reasons[i]`` is ``aborted`` or ``stop_sequence``.
    """

    ids: list[int]
    keep_tokens: list[int]
    reasons: list[str]


class Utility(msgspec.Struct, array_like=True, tag="utility"):
    call_id: int
    command: str
    args: dict


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    pass


ToEngine = AddRequests | Abort | Utility | Shutdown


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine serves: its proven limits and how long each start-up phase took (seconds)."""

    info: dict
    phases: dict[str, float]


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """Start-up news for a person: the phase that begins, or a fraction of the one that runs."""

    phase: str
    fraction: float = -1.0


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The engine cannot start or go on; it exits after this message."""

    kind: str  # name of the error class in atom.errors
    message: str


class Logprobs(msgspec.Struct, array_like=True):
    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RequestEvent(msgspec.Struct, array_like=True):
    """What a plain token delta cannot say about row ``index`` of a step: its start, end or log-probabilities."""

    index: int
    leave_reason: str = ""  # not empty: this was the last output of the request
    num_cached_tokens: int = -1  # set on the first output
    first_scheduled_time: float = 0.0  # set on the first output; time.monotonic()
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs] | None = None


class StepOutput(msgspec.Struct, array_like=True, tag="step"):
    """Every delta of one engine step."""

    ids: bytes  # int64 request ids
    token_ids: bytes  # int32, concatenated
    counts: bytes = b""  # int32 tokens per id; empty: one each
    events: list[RequestEvent] = []


class UtilityResponse(msgspec.Struct, array_like=True, tag="response"):
    call_id: int
    result: object = None
    error: str = ""


class Metrics(msgspec.Struct, array_like=True, tag="metrics"):
    values: dict[str, float]


FromEngine = Ready | Progress | Failed | StepOutput | UtilityResponse | Metrics
