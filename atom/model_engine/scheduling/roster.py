"""Where every live sequence stands: waiting, running, parked for a load, or ended with blocks still read."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from atom.core import NO_ROW, Sequence, SequenceStatus


class WaitingQueue:
    """First come, first served within a priority; a smaller priority number is served earlier."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[int, Sequence]] = {}
        self._order: list[int] = []  # priorities that have a queue, ascending

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._order:
            yield from self._queues[priority].values()

    def append(self, seq: Sequence) -> None:
        self._queue(seq.priority)[seq.id] = seq

    def append_front(self, seq: Sequence) -> None:
        queue = self._queue(seq.priority)
        queue[seq.id] = seq
        queue.move_to_end(seq.id, last=False)

    def first(self) -> Sequence:
        return next(iter(self._queues[self._order[0]].values()))

    def remove(self, seq: Sequence) -> None:
        queue = self._queues[seq.priority]
        del queue[seq.id]
        if not queue:
            del self._queues[seq.priority]
            self._order.remove(seq.priority)

    def _queue(self, priority: int) -> "OrderedDict[int, Sequence]":
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = OrderedDict()
            self._order = sorted(self._queues)
        return queue


class Roster:
    """Queues and rows.

    NOTE: ``running`` is replaced, never changed in place, because scheduled batches share the list.
    ``version`` grows whenever a row changes hands.
    """

    def __init__(self, num_rows: int):
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order of admission; the tail is preempted first
        self.partial: list[Sequence] = []  # those of ``running`` whose prefill has chunks left
        self.parked: dict[int, Sequence] = {}  # blocks and row held while an external load runs
        self.deferred: dict[int, Sequence] = {}  # ended, but a connector still reads the blocks
        self.version = 0
        self.num_rows = num_rows
        self._free_rows = list(range(num_rows))

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    def take_row(self, seq: Sequence) -> None:
        seq.row = heappop(self._free_rows)
        self.version += 1

    def leave_row(self, seq: Sequence) -> None:
        """Results in flight for the row are no longer ``seq``'s: its epoch ends."""
        seq.epoch += 1
        self.version += 1
        if seq.row != NO_ROW:
            heappush(self._free_rows, seq.row)
            seq.row = NO_ROW

    def run(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        self.running = [*self.running, seq]
        self.partial.append(seq)

    def drop(self, seq: Sequence) -> None:
        """Take ``seq`` out of whatever queue it is in."""
        if self.parked.pop(seq.id, None) is not None:
            return
        if seq.status == SequenceStatus.RUNNING:
            self.running = self.running.copy()
            self.running.remove(seq)
            if seq in self.partial:
                self.partial.remove(seq)
        else:
            self.waiting.remove(seq)

    def holders(self) -> list[Sequence]:
        """Every sequence that owns block tables."""
        return [*self.running, *self.parked.values(), *self.deferred.values()]

    def check_integrity(self, repair: bool = False) -> list[str]:
        """Faults of the row books; ``repair`` rebuilds the free rows from the sequences."""
        used = [seq.row for seq in (*self.running, *self.parked.values())]
        expected = sorted(set(range(self.num_rows)) - set(used))
        faults = []
        if len(set(used)) != len(used) or not all(0 <= row < self.num_rows for row in used):
            faults.append(f"rows {sorted(used)} are held by {len(used)} sequences")
        if sorted(self._free_rows) != expected:
            faults.append(f"free rows are {sorted(self._free_rows)}, should be {expected}")
        if any(seq not in self.running for seq in self.partial):
            faults.append("a sequence that is not running has prefill chunks left")
        if faults and repair:
            self._free_rows = expected
            heapify(self._free_rows)
            self.partial = [seq for seq in self.partial if seq in self.running]
        return faults
