"""A histogram that any process can fill and that travels as plain numbers."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

_SEPARATOR = "|"  # between the name, its part and a bound, in the flat form


class Histogram:
    """Bucket counts and a sum; one writer. ``weight`` counts an observation that many times."""

    __slots__ = ("bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += weight
        self._sum += value * weight

    def observe_all(self, values: Iterable[float]) -> None:
        for value in values:
            self.observe(value)

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, self._sum

    def flatten(self, name: str) -> dict[str, float]:
        """The buckets and the sum as numbers by name; see :func:`unflatten`."""
        buckets, total = self.buckets()
        values = {_SEPARATOR.join((name, "le", bound)): count for bound, count in buckets}
        values[_SEPARATOR.join((name, "sum"))] = total
        return values


def unflatten(name: str, values: Mapping[str, float]) -> tuple[list[tuple[str, float]], float] | None:
    """What :meth:`Histogram.buckets` said of ``name``, out of the flat form; None when it is not there."""
    total = values.get(_SEPARATOR.join((name, "sum")))
    if total is None:
        return None
    prefix = _SEPARATOR.join((name, "le", ""))
    buckets = [(key.removeprefix(prefix), count) for key, count in values.items() if key.startswith(prefix)]
    return sorted(buckets, key=lambda pair: float(pair[0])), total
