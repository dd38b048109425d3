"""Compare dumps: do the rows of a batch agree, do two runs agree, where do they part, is a file shaped as another?

    python -m atom.utils.debug_helper.compare slot-invariance --dir DIR --n-slots 4
    python -m atom.utils.debug_helper.compare ref-vs-target  --dir DIR
    python -m atom.utils.debug_helper.compare layer-bisect   --dir DIR --threshold 0.99
    python -m atom.utils.debug_helper.compare schema --a A.pt --b B.pt

Exit status: 0 they agree, 1 they differ, 2 there is nothing to compare or a file cannot be read.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atom.utils.cli_parser import FlexibleArgumentParser
from atom.utils.debug_helper.difference import Difference, difference
from atom.utils.debug_helper.files import DumpFileError, DumpName, load, named_tensors

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2
_UNORDERED = 1 << 62  # place of a file that does not say when it was written


@dataclass(frozen=True)
class Dump:
    """A dump on disk."""

    path: Path
    name: DumpName


@dataclass(frozen=True)
class Comparison:
    """One tensor of one dump against its reference; ``difference`` is None where ``problem`` says why."""

    name: DumpName
    what: str  # which tensor, which slot
    order: int  # of the dump among all of its run
    difference: Difference | None = None
    problem: str = ""

    def is_within(self, tolerance: float | None) -> bool:
        """Whether the relative error is at most ``tolerance``; None: what rounding of the dtype explains."""
        d = self.difference
        if d is None:
            return False
        return d.is_equal or d.relative <= (d.tolerance if tolerance is None else tolerance)

    def is_aligned(self, threshold: float) -> bool:
        """Whether every row points in its reference's direction."""
        return self.difference is not None and self.difference.worst_row_cosine >= threshold

    @property
    def title(self) -> str:
        name = self.name
        call = "" if name.call is None else f"call {name.call}"
        return _join(f"layer {name.layer}", name.label, f"rank {name.rank}", call, self.what)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except DumpFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNUSABLE


# -- the four modes


def slot_invariance(args: argparse.Namespace) -> int:
    """Sequences of one step that were given the same prompt: do slots 1.. equal slot 0?"""
    rows: list[Comparison] = []
    num_left_out = 0
    for dump in _dumps(args.dir):
        if dump.name.is_weights:
            continue
        content = load(dump.path)
        lengths = content.get("query_lens") if isinstance(content, dict) else None
        for key, tensor in named_tensors(_without_facts(content)):
            slots = _slots(tensor, args.n_slots, lengths)
            if slots is None:
                num_left_out += 1
                continue
            for number, slot in enumerate(slots[1:], 1):
                found = difference(slot, slots[0])
                rows.append(Comparison(dump.name, _join(key, f"slot {number}"), _order(content), found))
    if not rows:
        raise DumpFileError(
            f"no dump in {args.dir} holds {args.n_slots} sequences of one length ({num_left_out} others are there); "
            f"dump every call with ATOM_FWD_DUMP_ONE_SHOT=0 and send {args.n_slots} equal prompts together, "
            f"without the prefix cache"
        )
    tolerance = 0.0 if args.tolerance is None else args.tolerance
    if num_left_out:
        print(f"{num_left_out} tensors of other steps are left out")
    return _judge(rows, [row.is_within(tolerance) for row in rows], "slots")


def ref_vs_target(args: argparse.Namespace) -> int:
    """Every dump of the target run against the reference run's: is the error what rounding explains?"""
    rows = _in_order(_compare_runs(args))
    return _judge(rows, [row.is_within(args.tolerance) for row in rows], "runs")


def layer_bisect(args: argparse.Namespace) -> int:
    """The first dump, in the order of execution, whose direction leaves the reference's."""
    rows = _in_order(_compare_runs(args))
    verdicts = [row.is_aligned(args.threshold) for row in rows]
    status = _judge(rows, verdicts, "runs")
    if status == DIFFERENT:
        at = verdicts.index(False)
        if at == 0:
            print("nothing before it was dumped: look at its inputs, the embedding and the weights")
        else:
            before = rows[at - 1]
            print(f"the last that agrees: {before.title}, worst row {before.difference.worst_row_cosine:.6f}")
    return status


def schema(args: argparse.Namespace) -> int:
    """Names, shapes and dtypes of the tensors of two files."""
    a, b = _schema_of(args.a), _schema_of(args.b)
    table = [("tensor", "a", "b", "")]
    num_different = 0
    for name in [*a, *(name for name in b if name not in a)]:
        is_same = a.get(name) == b.get(name)
        num_different += not is_same
        table.append(
            (name or "(the tensor)", a.get(name, "-"), b.get(name, "-"), "" if is_same else "DIFFERENT")
        )
    _print_table(table)
    print(f"{len(table) - 1} tensors, {num_different} of them different")
    return DIFFERENT if num_different else EQUAL


# -- pairing


def _compare_runs(args: argparse.Namespace) -> list[Comparison]:
    references = _by_key(_dumps(args.dir / args.ref))
    targets = _by_key(_dumps(args.dir / args.target))
    if all(len({name.label for name in names if name.label}) == 1 for names in (references, targets)):
        # The same blocks under two class names: another implementation is the reference.
        references, targets = (_with_one_label(dumps) for dumps in (references, targets))
    rows = []
    for key, dump in sorted(targets.items()):
        if key not in references:
            rows.append(Comparison(dump.name, "", _UNORDERED, problem="no reference"))
            continue
        rows += _compare_files(dump, references[key])
    rows += [
        Comparison(dump.name, "", _UNORDERED, problem="no target")
        for key, dump in sorted(references.items())
        if key not in targets
    ]
    if all(row.problem.startswith("no ") for row in rows):
        raise DumpFileError(
            f"no dump in {args.dir / args.target} has its like (layer, class, rank, call) in {args.dir / args.ref}"
        )
    return rows


def _with_one_label(dumps: dict[DumpName, Dump]) -> dict[DumpName, Dump]:
    return {(name if name.is_weights else replace(name, label="block")): dump for name, dump in dumps.items()}


def _compare_files(target: Dump, reference: Dump) -> Iterator[Comparison]:
    content, other = load(target.path), load(reference.path)
    order = _order(content)
    a, b = (dict(named_tensors(_without_facts(c))) for c in (content, other))
    if len(a) == len(b) == 1:  # a bare tensor may stand for the hidden states
        b = dict(zip(a, b.values(), strict=True))
    if not a or a.keys() != b.keys():
        yield Comparison(target.name, "", order, problem=f"holds {_listed(a)}, its reference {_listed(b)}")
        return
    for key, tensor in a.items():
        x, y = _without_batch(tensor), _without_batch(b[key])
        if x.shape != y.shape:
            problem = f"shape {list(x.shape)}, its reference's {list(y.shape)}"
            yield Comparison(target.name, key, order, problem=problem)
        else:
            yield Comparison(target.name, key, order, difference(x, y))


def _dumps(folder: Path) -> list[Dump]:
    if not folder.is_dir():
        raise DumpFileError(f"{folder} is not a folder")
    named = [(path, DumpName.parse(path.name)) for path in sorted(folder.iterdir())]
    dumps = [Dump(path, name) for path, name in named if name is not None]
    if not dumps:
        raise DumpFileError(
            f"{folder} holds no dump (layer<L>_<class>_rank<R>[_call<N>].pt, weight_rank<R>_layer<L>.pt)"
        )
    return dumps


def _by_key(dumps: Iterable[Dump]) -> dict[DumpName, Dump]:
    """By layer, class, rank and call, where a dump without a call is of the first."""
    return {replace(dump.name, call=dump.name.call or 0): dump for dump in dumps}


def _slots(tensor: torch.Tensor, num_slots: int, lengths: list[int] | None) -> list[torch.Tensor] | None:
    """The rows of each slot; None when the tensor does not hold that many sequences of one length."""
    tensor = _without_batch(tensor)
    if tensor.dim() == 0:
        return None
    num_rows = len(tensor)
    if lengths:
        if len(lengths) != num_slots or len(set(lengths)) != 1 or sum(lengths) > num_rows:
            return None
        tensor = tensor[: sum(lengths)]  # the rest is padding
    elif num_rows == 0 or num_rows % num_slots:
        return None
    return list(tensor.chunk(num_slots))


def _without_batch(tensor: torch.Tensor) -> torch.Tensor:
    """``[1, tokens, hidden]`` as other implementations have it: ``[tokens, hidden]``."""
    return tensor[0] if tensor.dim() == 3 and len(tensor) == 1 else tensor


def _without_facts(content: Any) -> Any:
    """Only the tensors of what ForwardDump wrote."""
    if isinstance(content, dict) and "hidden_states" in content:
        return {"hidden_states": content["hidden_states"]}
    if isinstance(content, dict) and "outputs" in content:
        return {"outputs": content["outputs"]}
    return content


def _order(content: Any) -> int:
    order = content.get("order") if isinstance(content, dict) else None
    return order if isinstance(order, int) else _UNORDERED


def _in_order(rows: list[Comparison]) -> list[Comparison]:
    """As they were executed, where the dumps say so, else by call and layer."""
    return sorted(rows, key=lambda row: (row.order, row.name.call or 0, row.name.layer, row.name.rank))


def _schema_of(path: Path) -> dict[str, str]:
    found = {
        name: f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for name, t in named_tensors(load(path))
    }
    if not found:
        raise DumpFileError(f"{path} holds no tensor")
    return found


def _listed(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(name or "a tensor" for name in tensors) or "no tensor"


def _join(*words: str) -> str:
    return " ".join(word for word in words if word)


# -- output


def _judge(rows: list[Comparison], verdicts: list[bool], what: str) -> int:
    """Print every comparison and the first that failed; the exit status."""
    table = [("layer", "module", "rank", "call", "tensor", "max abs", "relative", "cosine", "worst row", "")]
    for row, is_good in zip(rows, verdicts, strict=True):
        verdict = "" if is_good else (row.problem or "DIFFERENT")
        table.append((*_place(row), *_figures(row.difference), verdict))
    _print_table(table)
    num_bad = verdicts.count(False)
    print(f"{len(rows)} comparisons, {num_bad} of them different")
    if num_bad:
        print(f"the first: {rows[verdicts.index(False)].title}")
        return DIFFERENT
    print(f"the {what} agree")
    return EQUAL


def _place(row: Comparison) -> tuple[str, ...]:
    name = row.name
    call = "" if name.call is None else str(name.call)
    return (str(name.layer), name.label or "weights", str(name.rank), call, row.what)


def _figures(found: Difference | None) -> tuple[str, ...]:
    if found is None:
        return ("", "", "", "")
    if found.is_equal:
        return ("0", "0", "1", "1")
    if math.isinf(found.relative) and math.isinf(found.max_abs):
        return ("not finite", "", "", "")
    return (
        f"{found.max_abs:.3e}",
        f"{found.relative:.3e}",
        f"{found.cosine:.6f}",
        f"{found.worst_row_cosine:.6f}",
    )


def _print_table(table: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


# -- command line


def _parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(
        prog="python -m atom.utils.debug_helper.compare", description=(__doc__ or "").splitlines()[0]
    )
    modes = parser.add_subparsers(required=True, metavar="MODE")

    def add(name: str, run: Any) -> FlexibleArgumentParser:
        mode = modes.add_parser(name, help=run.__doc__, description=run.__doc__)
        mode.set_defaults(run=run)
        return mode

    slots = add("slot-invariance", slot_invariance)
    slots.add_argument("--dir", type=Path, required=True, help="Folder of the forward dump.")
    slots.add_argument(
        "--n-slots", type=_slot_count, required=True, help="Sequences of the same prompt in a step."
    )
    slots.add_argument(
        "--tolerance", type=_tolerance, help="Relative error allowed. Default: 0, equal bit for bit."
    )
    target = add("ref-vs-target", ref_vs_target)
    target.add_argument("--tolerance", type=_tolerance, help="Relative error allowed. Default: by the dtype.")
    bisect = add("layer-bisect", layer_bisect)
    bisect.add_argument("--threshold", type=_cosine, default=0.99, help="Least cosine of every row.")
    for mode in (target, bisect):
        mode.add_argument("--dir", type=Path, required=True, help="Folder that holds both runs' folders.")
        mode.add_argument("--ref", default="ref", help="The reference run's folder, within --dir.")
        mode.add_argument("--target", default="target", help="The other run's.")
    files = add("schema", schema)
    files.add_argument("--a", type=Path, required=True, help="A dump.")
    files.add_argument("--b", type=Path, required=True, help="Another dump.")
    return parser


def _slot_count(text: str) -> int:
    return int(_number(text, int, lambda n: n >= 2, "an integer of at least 2"))


def _tolerance(text: str) -> float:
    return _number(text, float, lambda x: x >= 0 and math.isfinite(x), "a finite number of at least 0")


def _cosine(text: str) -> float:
    return _number(text, float, lambda x: -1 <= x <= 1, "a cosine between -1 and 1")


def _number(text: str, kind: Any, is_allowed: Any, allowed: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not is_allowed(value):
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
