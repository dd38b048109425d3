"""What the host does in a decode step on a device: few tensor operations, as many for many sequences as for one."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atom.benchmarks.instant_device import InstantRunner
from atom.config import Config
from atom.model_engine.messages import AddRequests, NewRequest
from atom.model_ops.outbox import SLOTS, Outbox
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import CoreDriver

# Of any decode step: two times numpy(), to read what the step left in host memory.
OPERATIONS = ["detach", "detach"]


class Operations(TorchDispatchMode):
    """Names of everything that is dispatched inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def decoding(num_seqs, loop, max_tokens=64):
    """A core whose ``num_seqs`` sequences have decoded a few tokens."""
    config = Config.build(
        "instant",
        loop=loop,
        enable_prefix_caching=False,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        max_model_len=512,
        kv_cache_block_size=16,
        num_kvcache_blocks=1024,
    )
    driver = CoreDriver(config, InstantRunner(config))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    ids = np.arange(9, dtype=np.int32).tobytes()
    requests = [NewRequest(i, ids, params, [], max_tokens, 0.0, hash_seed=1) for i in range(num_seqs)]
    driver.core.handle(AddRequests(requests, [None] * num_seqs))
    for _ in range(4):
        driver.core.step()
    return driver


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_a_decode_step_makes_few_tensor_operations_however_many_sequences(loop):
    found, with_blocks = {}, {}
    for num_seqs in (1, 3, 32, 64):
        driver = decoding(num_seqs, loop)
        for _ in range(20):  # every slot of the rings has its views by now
            driver.core.step()
        for _ in range(16):
            with Operations() as operations:
                driver.core.step()
            last = driver.core.worker._forward._packer._last
            (found if last.is_repeat else with_blocks)[num_seqs] = operations.names
    assert found == dict.fromkeys(found, OPERATIONS) and len(found) == 4
    for names in with_blocks.values():
        assert names == ["detach", *OPERATIONS], "beside it the launch that reads new blocks"
    assert with_blocks.keys() == found.keys()


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_steps_with_new_blocks_and_ends_say_what_they_should(loop):
    driver = decoding(5, loop, max_tokens=40)
    driver.run()
    assert driver.tokens == {i: [0] + [7] * 39 for i in range(5)}
    driver.check_idle()


def test_the_next_step_is_launched_before_the_last_one_is_waited_for(monkeypatch):
    driver = decoding(2, "overlapped")
    worker, calls = driver.core.worker, []
    for name in ("launch", "sample", "wait"):
        original = getattr(worker, name)

        def noted(*args, name=name, original=original):
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(worker, name, noted)
    driver.core.step()
    driver.core.step()
    assert calls == ["launch", "sample", "wait"] * 2
    assert driver.core._pending is not None, "what was launched last has not been waited for"


def test_results_of_a_bucket_are_sliced_once():
    driver = decoding(3, "plain")
    forward = driver.core.worker._forward
    assert list(forward._results) == [(4, 3)]
    kept = forward._results[4, 3][1]
    driver.core.step()
    assert forward._results[4, 3][1] is kept and len(kept.rows) == 3 and len(kept.cu_seqlens_q) == 4


def test_a_readback_slot_holds_its_step_until_the_ring_has_gone_round():
    from atom.benchmarks.instant_device import _Event
    from atom.model_engine.runner.input_packer import RING_SIZE
    from atom.model_engine.runner.readback import Readback
    from atom.model_ops.sampler import SampleResult

    readback = Readback(4, torch.device("cpu"))
    readback._ring = [(torch.zeros(36, dtype=torch.uint8), _Event()) for _ in range(RING_SIZE)]
    ids, flags = torch.tensor([11, 12]), torch.tensor([True, False])
    first = readback.start(SampleResult(ids, flags))
    ids.add_(100)
    second = readback.start(SampleResult(torch.tensor([1, 2, 3]), torch.tensor([False, True, True])))
    third = readback.start(SampleResult(ids[:1], flags[:1]))
    assert first.token_ids.tolist() == [11, 12] and first.is_finite.tolist() == [True, False]
    assert second.token_ids.tolist() == [1, 2, 3] and second.is_finite.tolist() == [False, True, True]
    assert third.token_ids.tolist() == [111] and third.is_finite.tolist() == [True]


def test_what_was_sampled_into_a_slot_is_not_copied():
    from atom.benchmarks.instant_device import _Event
    from atom.model_engine.runner.input_packer import RING_SIZE
    from atom.model_engine.runner.readback import Readback
    from atom.model_ops.sampler import SampleResult

    assert Readback(3, torch.device("cpu")).room(2) is None
    readback = Readback(3, torch.device("cpu"))
    readback._ring = [(torch.zeros(35, dtype=torch.uint8), _Event()) for _ in range(RING_SIZE)]
    assert readback.room(0) is None and readback.room(4) is None
    found = []
    for number in range(RING_SIZE):
        room = readback.room(3)
        assert all(tensor.data_ptr() % 16 == readback._ring[number][0].data_ptr() % 16 for tensor in room)
        room[0].fill_(number)
        room[1].fill_(number > 0)
        found.append(readback.start(SampleResult(*room)))
        assert found[-1].token_ids is room[0] and found[-1].arrival is not None
    assert [result.token_ids.tolist() for result in found] == [[0] * 3, [1] * 3, [2] * 3]
    assert [result.is_finite.tolist() for result in found] == [[False] * 3, [True] * 3, [True] * 3]
    ids = readback.room(3)[0]
    other = readback.start(SampleResult(torch.tensor([5, 6, 7]), torch.ones(3, dtype=torch.bool)))
    assert other.token_ids.data_ptr() == ids.data_ptr() and ids.tolist() == [5, 6, 7], "sampled elsewhere"


def test_what_a_step_left_in_host_memory_is_read_there():
    from atom.benchmarks.instant_device import _Event
    from atom.model_engine.runner.readback import Readback
    from atom.model_ops.sampler import SampleResult

    readback, outbox = Readback(4, torch.device("cpu")), Outbox(4, torch.device("cpu"))
    readback._ring = [(torch.zeros(36, dtype=torch.uint8), _Event())]
    letter = outbox.take(2)
    slot = letter.number % SLOTS
    result = readback.start(SampleResult(torch.zeros(2), torch.zeros(2)), letter)
    with pytest.raises(RuntimeError, match="results of step 1 were read, those of step 0 are there"):
        result.wait()
    outbox.tensors.ids[slot] = torch.tensor([1, 21, 22, 0, 0])
    outbox.tensors.flags[slot, 0] = True
    result.wait()
    assert result.token_ids.tolist() == [21, 22] and result.is_finite.tolist() == [True, False]


def test_steps_that_nobody_counted_do_not_shift_the_outbox():
    outbox = Outbox(4, torch.device("cpu"))
    number = outbox.tensors.number
    letters = []
    for is_counted in (True, False, True, True, True):
        outbox.begin()
        assert number.item() == len(letters), "the device's count is the host's when a step begins"
        if not is_counted:
            outbox.forget()
            number.add_(5)
        number.add_(1)
        letter = outbox.take(3)
        assert (letter is not None) == is_counted
        letters += [letter] if is_counted else []
    assert [letter.number for letter in letters] == [1, 2, 3, 4]
    addresses = {letter.token_ids.data_ptr() for letter in letters}
    assert len(addresses) == SLOTS, "each of the last steps has a slot of its own"
    assert outbox.take(3).token_ids.data_ptr() in addresses


def test_what_a_step_left_outlasts_a_graph_recorded_on_demand_for_the_next():
    outbox = Outbox(4, torch.device("cpu"))
    number, ids, flags = outbox.tensors

    def run(token):
        """As the last kernel of a step."""
        number.add_(1)
        slot = number.item() % len(ids)
        ids[slot, 0], ids[slot, 1:3], flags[slot, :2] = number.item(), token, True

    outbox.begin()
    run(11)
    letter = outbox.take(2)
    outbox.begin()
    for token in (21, 22, 23):  # rehearsed, replayed once it is recorded, and the step itself
        outbox.forget()
        run(token)
    assert outbox.take(2) is None
    letter.check()
    assert letter.token_ids.tolist() == [11, 11]
    outbox.begin()
    run(31)
    later = outbox.take(2)
    later.check()
    assert later.token_ids.tolist() == [31, 31]


@pytest.mark.parametrize("backend", ["packed", "direct"])
def test_each_way_to_the_device_ships_all_that_a_step_reads(monkeypatch, backend):
    from atom.benchmarks.instant_device import _Publisher
    from atom.model_engine.runner.input_packer import InputPacker

    monkeypatch.setenv("ATOM_H2D_BACKEND", backend)
    driver = decoding(3, "plain")
    packs, repeats, is_read = [], [], backend == "packed"
    forward = driver.core.worker._forward
    capacity = len(forward._publisher.buffer)
    publisher = _Publisher(capacity)
    forward._publisher = publisher
    forward._packer = InputPacker(capacity, 64, publisher.buffers, publisher.wait_for)
    original = publisher.deliver

    def deliver(step, tables):
        packed = original(step, tables)
        if step.is_repeat:
            repeats.append(step)
            n = step.running_bs
            assert packed[: 2 * n].tolist() == step.buffer[: 2 * n].tolist()
            return packed
        used = 2 * step.running_bs if is_read and not step.num_prefill_seqs else len(step.buffer)
        for start, end in step.sections():
            end = min(end, used)
            assert packed[start:end].tolist() == step.buffer[start:end].tolist()
        packs.append(len(step.buffer))
        return packed

    monkeypatch.setattr(publisher, "deliver", deliver)
    ids = np.arange(300, dtype=np.int32).tobytes()  # a prompt longer than a round of the packed copy
    request = NewRequest(99, ids, SamplingParams(temperature=0.0, max_tokens=8), [], 8, 0.0, hash_seed=1)
    driver.core.handle(AddRequests([request], [None]))
    driver.run()
    assert max(packs) > 300 and min(packs) < 20
    assert repeats, "most decode steps say nothing new"
