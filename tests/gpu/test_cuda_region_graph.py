"""Recorded graphs on a device: real captures, one pool, regions between them, compiled code inside."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atom.utils import recording, region_graph
from atom.utils.forward_context import Context, ForwardContext, get_forward_context, set_forward_context
from atom.utils.recording import GraphRecording
from atom.utils.region_graph import (
    ReqGraph,
    TokenGraph,
    eager_region,
    graph_pool,
    request_bucket,
    token_graph,
    token_graph_of,
)

pytestmark = pytest.mark.gpu

WIDTH = 256
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def fresh_pool():
    torch.zeros(1, device=DEVICE)  # the device is in use from here on
    region_graph._reset_graph_pool()
    yield
    region_graph._reset_graph_pool()
    assert recording.active is None
    gc.collect()


def live(name="scale"):
    return get_forward_context().attn_metadata[name]


@eager_region
def scale_into(x, out):
    if get_forward_context().tr_graph == "record":
        assert torch.isfinite(x).all().item(), "a region sees what its segment computed"
    out.copy_(x * live())  # the scale is a number of the host: a capture would bake it


@eager_region
def shifted(x):
    return x + live("shift")


@token_graph()
class Unit(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, device=DEVICE) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            hidden = layer(x).relu()
            attended = torch.empty_like(hidden)
            scale_into(hidden, attended)
            x = x + shifted(attended)
        return x


def call(unit, *args, tr_graph=None, is_prefill=False, scale=1.0, shift=0.0):
    context = ForwardContext(
        attn_metadata={"scale": scale, "shift": shift},
        context=Context(is_prefill=is_prefill),
        tr_graph=tr_graph,
    )
    with torch.inference_mode(), set_forward_context(context):
        return unit(*args)


def inputs(num_rows, seed=0):
    torch.manual_seed(seed)
    return torch.randn(num_rows, WIDTH, device=DEVICE)


def test_replays_read_new_inputs_and_new_metadata():
    unit, static = Unit(), inputs(32)
    plain = call(unit, static, scale=2.0, shift=1.0).clone()
    recorded = call(unit, static, tr_graph="record", scale=2.0, shift=1.0)
    torch.testing.assert_close(recorded, plain)
    del recorded
    addresses = set()
    for step in range(5):
        fresh, facts = inputs(32, step + 1), {"scale": step - 1.5, "shift": step * 0.25}
        expected = call(unit, fresh, **facts)
        output = call(unit, fresh, tr_graph="replay", **facts)
        torch.testing.assert_close(output, expected)
        addresses.add(output.data_ptr())
    assert len(addresses) == 1
    made = token_graph_of(unit).recording(32, "decode")
    assert isinstance(made, GraphRecording)
    assert (made.num_regions, made.num_segments) == (6, 7)


def test_segments_without_work_are_captured_quietly_and_not_launched(recwarn):
    graphs, x = TokenGraph("toy"), torch.ones(4, device=DEVICE)
    with set_forward_context(ForwardContext(attn_metadata={"shift": 1.0})):
        graphs.record(4, "decode", lambda x: shifted(shifted(x)), x)
        assert graphs.replay(4, "decode", torch.full_like(x, 3.0)).tolist() == [5.0] * 4
    assert not [warning for warning in recwarn if "empty" in str(warning.message)]


def test_inputs_at_the_recorded_address_are_read_where_they_are():
    unit, buffer = Unit(), inputs(64)
    for num_rows in (64, 16):
        call(unit, buffer[:num_rows])
        call(unit, buffer[:num_rows], tr_graph="record")
    buffer.copy_(inputs(64, 9))
    for num_rows in (16, 64):
        expected = call(unit, buffer[:num_rows], scale=3.0)
        torch.testing.assert_close(call(unit, buffer[:num_rows], tr_graph="replay", scale=3.0), expected)


def test_recordings_share_one_pool_that_is_as_large_as_the_largest():
    rows, unit = 8192, Unit(num_layers=6)  # 8 MiB a tensor

    def reserved():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    x = inputs(rows)
    call(unit, x)
    start = reserved()
    call(unit, x, tr_graph="record")
    first = reserved() - start
    for num_rows in (rows - 8, rows - 16, rows - 24, rows - 32):
        call(unit, x[:num_rows])
        call(unit, x[:num_rows], tr_graph="record")
    others = reserved() - start - first
    assert first > 0
    assert others < first / 2  # four more recordings of the same size
    assert len(token_graph_of(unit).memory) == 5
    assert graph_pool() == graph_pool("cuda")
    for num_rows in (rows - 32, rows, rows - 16):
        fresh = inputs(num_rows, num_rows)
        torch.testing.assert_close(call(unit, fresh, tr_graph="replay"), call(unit, fresh))


def test_intermediate_memory_is_used_again_within_a_recording():
    rows = 8192

    def grown(num_layers):
        region_graph._reset_graph_pool()
        unit, x = Unit(num_layers), inputs(rows)
        call(unit, x)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        call(unit, x, tr_graph="record")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    shallow, deep = grown(2), grown(12)
    assert deep < 2 * shallow  # regions do not keep their arguments alive


def test_a_prefill_replays_what_decode_recorded_once_it_asked():
    unit, x = Unit(), inputs(16)
    call(unit, x)
    call(unit, x, tr_graph="record")
    call(unit, x, tr_graph="record", is_prefill=True, scale=2.0)
    graphs = token_graph_of(unit)
    assert graphs.captured_sizes("prefill") == graphs.captured_sizes("decode") == (16,)
    assert len(graphs.memory) == 1
    fresh = inputs(16, 4)
    expected = call(unit, fresh, scale=2.0)
    torch.testing.assert_close(call(unit, fresh, tr_graph="replay", is_prefill=True, scale=2.0), expected)


def test_stages_hand_their_output_on_through_the_pool():
    early, late = Unit(2), Unit(2)

    def model(x, **fields):
        return call(late, call(early, x, **fields), **fields)

    for num_rows in (32, 8):
        x = inputs(num_rows)
        model(x)
        model(x, tr_graph="record")
    for num_rows in (8, 32, 8):
        fresh = inputs(num_rows, num_rows)
        expected = model(fresh, scale=1.5, shift=0.5)
        torch.testing.assert_close(model(fresh, tr_graph="replay", scale=1.5, shift=0.5), expected)
        torch.testing.assert_close(late_alone(late, fresh), call(late, fresh))


def late_alone(late, fresh):
    """A stage whose input lies elsewhere than at its recording."""
    return call(late, fresh, tr_graph="replay")


@pytest.mark.parametrize("failure", ["python", "device"])
def test_after_a_failed_capture_everything_works_again(failure):
    graphs, x = TokenGraph("toy"), torch.ones(4, device=DEVICE)
    (x + torch.rand_like(x)).sum().item()  # its kernels are loaded
    fails = True

    def function(x):
        x = shifted(x * 2)
        if fails and failure == "python":
            raise ValueError("broken model")
        if fails:
            (x + 1).sum().item()  # waiting for the device voids the capture
        return x + torch.rand_like(x)

    with set_forward_context(ForwardContext(attn_metadata={"shift": 1.0})):
        with pytest.raises(RuntimeError, match="after eager region .*shifted"):
            graphs.record(4, "decode", function, x)
        assert not graphs.memory and gc.isenabled()
        assert torch.rand(3, device=DEVICE).sum().item() > 0
        assert (torch.ones(1 << 20, device=DEVICE) * 2).sum().item() == 2 << 20
        fails = False
        graphs.record(4, "decode", function, x)
        outputs = [graphs.replay(4, "decode", x).tolist() for _ in range(2)]
    assert all(3 <= value <= 4 for output in outputs for value in output)
    assert outputs[0] != outputs[1]  # random numbers go on from replay to replay


def test_a_failure_in_a_region_is_named():
    @eager_region
    def failing(x):
        raise ValueError("no such kernel")

    graphs, x = TokenGraph("toy"), torch.ones(4, device=DEVICE)
    with pytest.raises(RuntimeError, match="in eager region .*failing: no such kernel"):
        graphs.record(4, "decode", lambda x: failing(x * 2), x)
    assert graphs.record(4, "decode", lambda x: x * 2, x).tolist() == [2.0] * 4


def test_request_graphs_record_regions_inline():
    graphs, unit, buffer = ReqGraph(), Unit(), inputs(16)
    for bs in (16, 8, 1):
        call(unit, buffer[:bs], scale=2.0)
        call(lambda bs=bs: graphs.record(request_bucket(bs, 1), lambda: unit(buffer[:bs])), scale=2.0)
    buffer.copy_(inputs(16, 5))
    for bs in (1, 16, 8):
        expected = call(unit, buffer[:bs], scale=2.0)
        output = call(graphs.replay, (bs, 0), scale=7.0)  # the recorded scale stays
        torch.testing.assert_close(output, expected)
        assert graphs.recording((bs, 0)).num_segments == 1
    assert graphs.sizes() == (1, 8, 16)


def test_regions_inside_custom_ops_of_compiled_code():
    @eager_region
    def attention(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * live())

    library = torch.library.Library("atom_region_gpu_test", "FRAGMENT")
    library.define("attention(Tensor x, Tensor(a!) out) -> ()")
    library.impl("attention", attention, "CUDA")
    library.impl("attention", lambda x, out: None, "Meta")
    weight = torch.randn(WIDTH, WIDTH, device=DEVICE) / WIDTH**0.5

    def forward(x):
        for _ in range(3):
            hidden = torch.nn.functional.silu(x @ weight) * 1.5
            out = torch.empty_like(hidden)
            torch.ops.atom_region_gpu_test.attention(hidden, out)
            x = x + torch.tanh(out)
        return x

    compiled, graphs = torch.compile(forward, fullgraph=True), TokenGraph("compiled")
    for num_rows in (64, 16):
        x = inputs(num_rows)
        torch._dynamo.mark_dynamic(x, 0)
        call(compiled, x)
        call(lambda x=x: graphs.record(x.shape[0], "decode", compiled, x))
        assert graphs.recording(num_rows, "decode").num_segments == 4
    for num_rows in (16, 64):
        fresh = inputs(num_rows, 3)
        expected = call(forward, fresh, scale=0.5)
        output = call(lambda x: graphs.replay(x.shape[0], "decode", x), fresh, scale=0.5)
        torch.testing.assert_close(output, expected, rtol=2e-3, atol=2e-3)


def test_side_streams_inside_a_segment_are_recorded():
    side, x = torch.cuda.Stream(), inputs(32)
    weight = torch.randn(WIDTH, WIDTH, device=DEVICE)

    def function(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            branch = x @ weight
        main = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return shifted(main + branch) * 2

    graphs = TokenGraph("toy")
    call(function, x)
    torch.cuda.synchronize()
    call(lambda: graphs.record(32, "decode", function, x))
    fresh = inputs(32, 8)
    expected = call(function, fresh, shift=2.0)
    torch.testing.assert_close(
        call(lambda: graphs.replay(32, "decode", fresh), shift=2.0), expected, rtol=1e-3, atol=1e-3
    )


def test_collectives_are_recorded_behind_eager_ones(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:

        @eager_region
        def reduced(x):
            dist.all_reduce(x)  # pending when the next segment's capture begins

        def function(x):
            x = x * 2
            dist.all_reduce(x)
            x = shifted(x)
            reduced(x)
            dist.all_reduce(x)
            return x + 1

        graphs = TokenGraph("toy")
        for num_rows in (64, 32, 16, 8):
            x = torch.ones(num_rows, 4, device=DEVICE)
            for _ in range(20):  # the watchdog is still polling these when the capture would begin
                call(function, x)
            call(lambda x=x, n=num_rows: graphs.record(n, "decode", function, x))
        for num_rows in (8, 64):
            fresh = torch.full((num_rows, 4), 3.0, device=DEVICE)
            output = call(lambda x=fresh, n=num_rows: graphs.replay(n, "decode", x), shift=2.0)
            assert output.unique().tolist() == [9.0]
        graphs.clear()
    finally:
        dist.destroy_process_group()
