"""Recorded graphs against the plain modules, as Python that runs again and as segments on a tape."""

import gc
import weakref

import pytest
import torch
from torch import nn

from atom.utils import recording, region_graph
from atom.utils.forward_context import Context, ForwardContext, get_forward_context, set_forward_context
from atom.utils.python_recording import HostPool
from atom.utils.recorded_values import deliver, unowned
from atom.utils.recording import GraphRecording
from atom.utils.region_graph import (
    ReqGraph,
    TokenGraph,
    break_recording,
    eager_region,
    graph_pool,
    request_bucket,
    token_graph,
    token_graph_of,
    token_graphs,
)
from tests.helpers.tape_graph import TapeBackend

WIDTH = 4


@pytest.fixture(autouse=True)
def fresh_pool():
    region_graph._reset_graph_pool()
    yield
    region_graph._reset_graph_pool()
    assert recording.active is None


@pytest.fixture(params=["python", "tape"])
def tape(request, monkeypatch):
    """The tape's backend, or None where Python runs again."""
    return use_tape(monkeypatch) if request.param == "tape" else None


def use_tape(monkeypatch):
    backend = TapeBackend()
    monkeypatch.setattr(
        region_graph,
        "new_recording",
        lambda name, device, owner, breaks: GraphRecording(name, backend, breaks),
    )
    return backend


def live(name="scale"):
    return get_forward_context().attn_metadata[name]


@eager_region
def scale_into(x, out):
    if get_forward_context().tr_graph == "record":
        assert torch.isfinite(x).all(), "a region sees what its segment computed"
    out.copy_(x * live())


@eager_region
def shifted(x):
    return x + live("shift")


@eager_region
def swapped(x, y):
    return y * live(), x


@token_graph()
class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.num_forwards = 0

    def forward(self, x, y):
        self.num_forwards += 1
        hidden = self.up(x).relu()
        attended = torch.empty_like(hidden)
        scale_into(hidden, attended)
        hidden = shifted(attended + x)
        left, right = swapped(hidden, y)
        return self.down(left) - right


@token_graph(per_phase=True)
class PhasedUnit(nn.Module):
    def forward(self, x):
        return shifted(x * 2 if get_forward_context().context.is_prefill else x * 3)


def context(tr_graph=None, is_prefill=False, scale=1.0, shift=0.0):
    return ForwardContext(
        attn_metadata={"scale": scale, "shift": shift},
        context=Context(is_prefill=is_prefill),
        tr_graph=tr_graph,
    )


@torch.inference_mode()
def call(unit, *args, **fields):
    with set_forward_context(context(**fields)):
        return unit(*args)


def inputs(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(num_rows, WIDTH, generator=generator) for _ in range(2))


def test_replays_read_new_inputs_and_new_metadata(tape):
    unit, static = Unit(), inputs(6)
    plain = call(unit, *static, scale=2.0, shift=1.0)
    recorded = call(unit, *static, tr_graph="record", scale=2.0, shift=1.0)
    torch.testing.assert_close(recorded, plain)
    addresses = set()
    for step in range(4):
        fresh, facts = inputs(6, seed=step + 1), {"scale": step - 1.5, "shift": step * 0.25}
        expected = call(unit, *fresh, **facts)
        output = call(unit, *fresh, tr_graph="replay", **facts)
        torch.testing.assert_close(output, expected)
        addresses.add(output.data_ptr())
    assert len(addresses) == 1
    made = token_graph_of(unit).recording(6, "decode")
    assert made.regions == ["scale_into", "shifted", "swapped"]
    assert made.num_segments == 4


def test_a_replay_on_a_tape_runs_no_python_but_the_regions(monkeypatch):
    tape = use_tape(monkeypatch)
    unit, static = Unit(), inputs(3)
    call(unit, *static, tr_graph="record")
    before = unit.num_forwards
    for graph in tape.graphs:
        assert graph.num_replays == 1  # for the regions' sake
    call(unit, *static, tr_graph="replay")
    assert unit.num_forwards == before
    assert [graph.num_replays for graph in tape.graphs] == [2] * 4
    assert tape.num_sessions == 1


def test_inputs_at_the_recorded_address_are_not_copied(tape):
    unit, static = Unit(), inputs(5)
    call(unit, *static, tr_graph="record")
    for tensor, fresh in zip(static, inputs(5, seed=3), strict=True):
        tensor.copy_(fresh)
    versions = [tensor._version for tensor in static]
    torch.testing.assert_close(call(unit, *static, tr_graph="replay"), call(unit, *static))
    assert [tensor._version for tensor in static] == versions


def test_buckets_are_chosen_by_rows_and_missing_ones_are_named(tape):
    unit = Unit()
    for num_rows in (8, 4):
        call(unit, *inputs(num_rows), tr_graph="record")
    for num_rows in (4, 8):
        assert call(unit, *inputs(num_rows, 7), tr_graph="replay").shape == (num_rows, WIDTH)
    with pytest.raises(
        RuntimeError, match=r"Unit has no recording of 5 rows for decode; it has \['4', '8'\]"
    ):
        call(unit, *inputs(5), tr_graph="replay")


def test_without_tr_graph_a_unit_is_plain():
    unit, static = Unit(), inputs(2)
    call(unit, *static)
    assert unit.num_forwards == 1
    assert "token_graph_" not in unit.__dict__


def test_a_size_counts_for_the_phase_that_asked_for_it(tape):
    unit = Unit()
    for num_rows in (8, 2, 4):
        call(unit, *inputs(num_rows), tr_graph="record")
    graphs = token_graph_of(unit)
    assert graphs.captured_sizes("decode") == (2, 4, 8)
    assert graphs.captured_sizes("prefill") == ()
    made = graphs.recording(4, "decode")
    static = inputs(4, seed=5)
    expected = call(unit, *static, is_prefill=True, scale=3.0)
    torch.testing.assert_close(call(unit, *static, tr_graph="record", is_prefill=True, scale=3.0), expected)
    assert graphs.captured_sizes("prefill") == (4,)
    assert graphs.recording(4, "prefill") is made
    assert len(graphs.memory) == 3
    with pytest.raises(ValueError, match="'prefill' or 'decode', got 'mixed'"):
        graphs.captured_sizes("mixed")


def test_a_unit_per_phase_is_recorded_once_for_each(tape):
    unit, static = PhasedUnit(), torch.ones(4, WIDTH)
    call(unit, static, tr_graph="record")
    graphs = token_graph_of(unit)
    assert (graphs.captured_sizes("decode"), graphs.captured_sizes("prefill")) == ((4,), ())
    with pytest.raises(RuntimeError, match="no recording of 4 rows for prefill"):
        call(unit, static, tr_graph="replay", is_prefill=True)
    call(unit, static, tr_graph="record", is_prefill=True)
    assert graphs.captured_sizes("prefill") == (4,)
    assert graphs.recording(4, "prefill") is not graphs.recording(4, "decode")
    assert call(unit, static, tr_graph="replay", shift=1.0)[0, 0] == 4
    assert call(unit, static, tr_graph="replay", shift=1.0, is_prefill=True)[0, 0] == 3


def test_every_unit_of_a_model_has_graphs_of_its_own(tape):
    model = nn.Sequential(PhasedUnit(), nn.Identity(), PhasedUnit())
    call(model, torch.ones(4, WIDTH), tr_graph="record")
    call(model[0], torch.ones(2, WIDTH), tr_graph="record")
    assert [graphs.captured_sizes("decode") for graphs in token_graphs(model)] == [(2, 4), (4,)]
    assert token_graphs(nn.Identity()) == []


def test_stages_hand_their_output_on(tape):
    model = nn.Sequential(PhasedUnit(), PhasedUnit())
    call(model, torch.ones(4, WIDTH), tr_graph="record")
    x = torch.full((4, WIDTH), 2.0)
    torch.testing.assert_close(call(model, x, tr_graph="replay", shift=1.0), call(model, x, shift=1.0))


def test_a_unit_inside_a_unit_is_plain(tape):
    @token_graph()
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Unit()

        def forward(self, x, y):
            return self.inner(x, y) * 2

    outer, static = Outer(), inputs(3)
    call(outer, *static, tr_graph="record")
    fresh = inputs(3, 2)
    torch.testing.assert_close(call(outer, *fresh, tr_graph="replay"), call(outer, *fresh))
    assert "token_graph_" not in outer.inner.__dict__
    assert len(token_graphs(outer)) == 1


def test_the_mark_stands_above_a_decorator_that_replaces_call(tape):
    def dispatching(cls):
        def __call__(self, *args):
            self.num_dispatched = getattr(self, "num_dispatched", 0) + 1
            return self.forward(*args)

        cls.__call__ = __call__
        return cls

    @token_graph()
    @dispatching
    class Compiled(nn.Module):
        def forward(self, x):
            return shifted(x) * 2

    unit, x = Compiled(), torch.ones(2, WIDTH)
    call(unit, x, tr_graph="record")
    assert unit.num_dispatched == 1
    assert call(unit, x, tr_graph="replay", shift=1.0)[0, 0] == 4


def test_a_recording_begins_with_what_prepares_its_inputs():
    unit, source = Unit(), torch.full((3, WIDTH), 0.5)
    x, y = inputs(3)

    def prepare():
        x.copy_(source)

    facts = context(tr_graph="record")
    facts.prepare = prepare
    with set_forward_context(facts):
        unit(x, y)
    for value in (0.25, 2.0):
        source.fill_(value)
        replayed = call(unit, x, y, tr_graph="replay")  # nothing is prepared for it
        torch.testing.assert_close(replayed, call(unit, torch.full_like(x, value), y))


def test_the_mark_needs_parentheses_and_a_tensor():
    with pytest.raises(TypeError, match="parentheses"):
        token_graph(Unit)
    with pytest.raises(TypeError, match="Identity is not marked"):
        token_graph_of(nn.Identity())
    with pytest.raises(TypeError, match="PhasedUnit was called without a tensor"):
        call(PhasedUnit(), 3, tr_graph="record")


def record(function, *args):
    graphs = TokenGraph("toy")
    with set_forward_context(context()):
        graphs.record(2, "decode", function, *args)

    def replay(*args, **facts):
        with set_forward_context(context(**facts)):
            return graphs.replay(2, "decode", *args)

    return graphs.recording(2, "decode"), replay


def test_regions_may_come_first_last_and_in_a_row(tape):
    made, replay = record(lambda x: shifted(shifted(shifted(x) * 2)), torch.ones(2))
    assert made.regions == ["shifted"] * 3
    assert replay(torch.full((2,), 3.0), shift=1.0).tolist() == [10.0, 10.0]


def test_a_region_that_returns_its_argument_is_in_place(tape):
    @eager_region
    def scaled_in_place(x):
        return x.mul_(live())

    made, replay = record(lambda x: scaled_in_place(x + 1) - 1, torch.ones(2))
    assert replay(torch.full((2,), 3.0), scale=2.0).tolist() == [7.0, 7.0]


def test_regions_inside_a_region_do_not_break(tape):
    @eager_region
    def outer(x):
        return shifted(shifted(x))

    made, replay = record(lambda x: outer(x) * 1, torch.ones(2))
    assert [name.split(".")[-1] for name in made.regions] == ["outer"]
    assert replay(torch.ones(2), shift=2.0).tolist() == [5.0, 5.0]


def test_a_region_may_decide_at_each_call_whether_it_breaks(tape):
    @eager_region(when=lambda x, breaks: breaks)
    def maybe(x, breaks):
        return x * live()

    made, replay = record(lambda x: maybe(maybe(x, False), True) + 0, torch.ones(2))
    assert made.num_regions == 1
    expected = 9.0 if tape is None else 3.0  # a recorded launch keeps the scale of its recording
    assert replay(torch.ones(2), scale=3.0).tolist() == [expected] * 2
    assert maybe.__name__ == "maybe"


def test_any_function_may_break_a_recording(tape):
    def scaled(x):
        return x * live()

    made, replay = record(lambda x: break_recording(scaled, x) + 1, torch.ones(2))
    assert made.num_regions == 1
    assert replay(torch.ones(2), scale=5.0).tolist() == [6.0, 6.0]


def test_outside_of_a_recording_a_region_is_its_function():
    with set_forward_context(context(shift=2.0)):
        assert shifted(torch.zeros(1)).item() == 2.0
        assert break_recording(lambda x: x + 1, 1) == 2


def test_a_region_result_of_another_shape_is_named(tape):
    @eager_region
    def cut(x):
        return x[: int(live())] + 0

    _, replay = record(lambda x: cut(x), torch.ones(3))
    with pytest.raises(
        RuntimeError,
        match=r"result of eager region .*cut was recorded as a tensor \[1\] .* got a tensor \[2\]",
    ):
        replay(torch.ones(3), scale=2)


def test_what_is_baked_into_a_recording_is_checked(tape):
    def function(x, factor, extra):
        return x * factor + extra["bias"][0]

    _, replay = record(function, torch.ones(3), 2, {"bias": [torch.ones(3)]})
    assert replay(torch.ones(3), 2, {"bias": [torch.full((3,), 5.0)]}).tolist() == [7.0] * 3
    with pytest.raises(RuntimeError, match=r"argument\[1\] was recorded as 2, got 3"):
        replay(torch.ones(3), 3, {"bias": [torch.ones(3)]})
    with pytest.raises(
        RuntimeError, match=r"argument\[0\] was recorded as a tensor \[3\] .* got a tensor \[4\]"
    ):
        replay(torch.ones(4), 2, {"bias": [torch.ones(3)]})
    with pytest.raises(
        RuntimeError, match=r"argument\[2\] was recorded as dict of \['bias'\], got dict of \[\]"
    ):
        replay(torch.ones(3), 2, {})


def test_without_a_device_regions_must_come_as_recorded():
    @eager_region
    def first(x):
        return x + 1

    @eager_region
    def second(x):
        return x + 2

    plan = [first, second]
    _, replay = record(lambda x: [x := region(x) for region in plan][-1], torch.zeros(2))
    assert replay(torch.zeros(2)).tolist() == [3.0, 3.0]
    plan[:] = [second, first]
    with pytest.raises(RuntimeError, match=r"region .*second runs where .*first was recorded"):
        replay(torch.zeros(2))
    plan[:] = [first, second, first]
    with pytest.raises(RuntimeError, match=r"region .*first runs where the end was recorded"):
        replay(torch.zeros(2))
    plan[:] = [first]
    with pytest.raises(RuntimeError, match=r"region .*second was recorded but did not run"):
        replay(torch.zeros(2))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("start", "failed before its first eager region: start"),
        ("region", r"failed in eager region .*failing.*: region"),
        ("behind", r"failed after eager region .*failing.*: behind"),
    ],
)
def test_a_failure_while_recording_names_the_place_and_leaves_nothing(tape, place, message):
    fails_at = place

    def check(here):
        if here == fails_at:
            raise ValueError(here)

    @eager_region
    def failing(x):
        check("region")
        return x * live()

    def function(x):
        check("start")
        x = failing(x + 1)
        check("behind")
        return x * 2

    graphs, x = TokenGraph("toy"), torch.ones(2)
    with set_forward_context(context(scale=3.0)):
        with pytest.raises(RuntimeError, match=message) as failure:
            graphs.record(2, "decode", function, x)
        assert isinstance(failure.value.__cause__, ValueError)
        assert recording.active is None
        assert graphs.captured_sizes("decode") == () and not graphs.memory
        if tape is not None:
            assert tape.tape is None
            assert tape.num_aborted == (place != "region")
        fails_at = "nowhere"
        assert graphs.record(2, "decode", function, x).tolist() == [12.0, 12.0]
        assert graphs.replay(2, "decode", x).tolist() == [12.0, 12.0]


def test_recordings_do_not_nest(tape):
    def function(x):
        return TokenGraph("inner").record(2, "decode", shifted, x)

    with set_forward_context(context()), pytest.raises(RuntimeError, match="recordings do not nest"):
        TokenGraph("outer").record(2, "decode", function, torch.ones(2))


def test_request_graphs_hold_a_whole_forward_each(tape):
    graphs, sizes = ReqGraph(), (4, 2, 1)
    buffer, unit = inputs(4), Unit()
    for bs in sizes:
        with set_forward_context(context(scale=2.0)):
            graphs.record(request_bucket(bs, 1), lambda bs=bs: unit(*(t[:bs] for t in buffer)))
    assert (request_bucket(4, 1), request_bucket(4, 3)) == ((4, 0), (4, 2))
    assert graphs.sizes() == (1, 2, 4) and graphs.sizes(max_seqlen_q=2) == ()
    assert (4, 0) in graphs and (4, 1) not in graphs and len(graphs) == 3 == len(graphs.memory)
    for tensor, fresh in zip(buffer, inputs(4, seed=9), strict=True):
        tensor.copy_(fresh)
    expected = call(unit, *(t[:2] for t in buffer), scale=2.0)
    with set_forward_context(context(scale=2.0)):
        output = graphs.replay((2, 0))
    torch.testing.assert_close(output, expected)
    assert output is graphs.outputs((2, 0))
    assert graphs.recording((2, 0)).num_segments == 1
    with pytest.raises(
        RuntimeError, match=r"no recording of \(3, 0\); it has \[\(4, 0\), \(2, 0\), \(1, 0\)\]"
    ):
        graphs.replay((3, 0))
    with pytest.raises(RuntimeError, match=r"has recorded \(2, 0\) already"):
        graphs.record((2, 0), lambda: None)
    graphs.clear()
    assert not len(graphs)


def test_recordings_share_one_pool_that_is_as_large_as_the_largest():
    unit = Unit()
    for num_rows in (16, 8, 4):
        call(unit, *inputs(num_rows), tr_graph="record")
    memory = token_graph_of(unit).memory
    assert memory[16] > 0 and memory[8] == memory[4] == 0
    assert graph_pool() is graph_pool("cpu") and isinstance(graph_pool(), HostPool)
    assert graph_pool().num_bytes == memory[16]
    large = call(unit, *inputs(16), tr_graph="replay")
    small = call(unit, *inputs(8), tr_graph="replay")
    assert large.data_ptr() == small.data_ptr()  # an output is consumed before the next replay
    pool = graph_pool()
    region_graph._reset_graph_pool()
    assert graph_pool() is not pool


def test_a_smaller_bucket_recorded_first_keeps_its_buffers():
    unit = Unit()
    call(unit, *inputs(4), tr_graph="record")
    call(unit, *inputs(8), tr_graph="record")
    for num_rows in (4, 8, 4):
        fresh = inputs(num_rows, seed=num_rows)
        torch.testing.assert_close(call(unit, *fresh, tr_graph="replay"), call(unit, *fresh))


def test_a_unit_is_freed_with_its_recordings(tape):
    unit = Unit()
    call(unit, *inputs(4), tr_graph="record")
    freed = weakref.ref(unit)
    gc.collect()
    gc.disable()
    try:
        del unit
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64]
)
@pytest.mark.parametrize("has_inference_mode", [False, True])
def test_an_unowned_tensor_is_the_same_memory(dtype, has_inference_mode):
    with torch.inference_mode(has_inference_mode):
        base = torch.arange(24).to(torch.float32).reshape(4, 6).to(dtype)
        view = base.t()[1:5]
        alias = unowned(view)
    assert (alias.data_ptr(), alias.shape, alias.stride()) == (view.data_ptr(), view.shape, view.stride())
    assert alias.dtype == dtype
    assert torch.equal(alias.to(torch.float32), view.to(torch.float32))
    alias.zero_()
    assert not base.to(torch.float32)[:, 1:5].any()
    assert alias.untyped_storage()._cdata != view.untyped_storage()._cdata


def test_overlapping_inputs_arrive_whole():
    memory = torch.arange(6.0)
    deliver(memory[:4], memory[2:], "x")
    assert memory.tolist() == [0, 1, 0, 1, 2, 3]


def test_a_region_inside_a_custom_op_of_compiled_code_reads_live_metadata():
    @eager_region
    def attention(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * live())

    library = torch.library.Library("atom_region_test", "FRAGMENT")
    library.define("attention(Tensor x, Tensor(a!) out) -> ()")
    library.impl("attention", attention, "CPU")
    library.impl("attention", lambda x, out: None, "Meta")

    def forward(x):
        out = torch.empty_like(x)
        torch.ops.atom_region_test.attention(x + 1, out)
        return out * 2

    unit = torch.compile(forward, backend="eager", fullgraph=True)
    made, replay = record(unit, torch.ones(2))
    assert [name.split(".")[-1] for name in made.regions] == ["attention"]
    assert replay(torch.ones(2), scale=5.0).tolist() == [20.0, 20.0]
