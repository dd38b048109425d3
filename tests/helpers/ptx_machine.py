"""Runs a compiled kernel's PTX in numpy, a program's threads side by side: what Triton's interpreter cannot run.

It knows the instructions that the Gluon kernels of decode steps compile to, and refuses others. Threads go in lock
step, branches must be uniform, barriers are free. Asynchronous copies arrive at the wait that asks for their group,
no earlier, and shared memory begins as NaN, so that a wrong count of outstanding groups shows.
"""

import re

import numpy as np

BASE = 1 << 20  # of the first buffer: lower addresses are nobody's
_SIZES = {
    "b8": 1,
    "u8": 1,
    "b16": 2,
    "u16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
}
_SIZES |= {"f64": 8, "bf16": 2, "f16": 2, "bf16x2": 4, "s16": 2, "f16x2": 4}


def _signed(value, bits):
    value = value & np.uint64((1 << bits) - 1)
    return (value << np.uint64(64 - bits)).astype(np.int64) >> np.int64(64 - bits)


def _float(value):
    return value.astype(np.uint32).view(np.float32)


def _raw(value):
    return np.ascontiguousarray(value, np.float32).view(np.uint32).astype(np.uint64)


def _half_to_float(value):
    return ((value & np.uint64(0xFFFF)).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _float_to_half(value):
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32).astype(np.uint64)
    return (
        (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    ) & np.uint64(0xFFFF)


class Machine:
    """One kernel and the buffers it works on."""

    def __init__(self, ptx: str, shared_bytes: int):
        self.threads = int(re.search(r"\.reqntid (\d+)", ptx).group(1))
        self.params = re.findall(
            r"\.param \.(\w+)[^\n]*?(\w+_param_\d+)", ptx[ptx.index(".entry") : ptx.index(".reqntid")]
        )
        self.shared_bytes = shared_bytes + 16
        self.memory = np.zeros(BASE, np.uint8)
        self.code, self.labels = [], {}
        body = ptx[ptx.index("{", ptx.index(".reqntid")) + 1 :]
        for line in re.sub(r"//[^\n]*", "", body).split("\n"):
            line = line.strip().rstrip(";")
            if line == "}" and self.code and self.code[-1][1] == "ret":
                break
            if match := re.match(r"(\$?[\w$]+):$", line):
                self.labels[match.group(1)] = len(self.code)
            elif line and line[0] not in ".{}":
                guard, line = re.match(r"(?:@(!?%p\d+)\s+)?(.*)", line).groups()
                opcode, _, rest = line.partition(" ")
                self.code.append((guard, opcode.strip(), re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)))

    def buffer(self, array: np.ndarray) -> int:
        """Copy ``array`` to the device; returns its address."""
        address = -(-len(self.memory) // 256) * 256
        raw = np.ascontiguousarray(array).view(np.uint8).ravel()
        self.memory = np.concatenate((self.memory, np.zeros(address - len(self.memory), np.uint8), raw))
        return address

    def read(self, address: int, dtype: type, count: int) -> np.ndarray:
        return self.memory[address : address + count * np.dtype(dtype).itemsize].view(dtype).copy()

    def launch(self, grid: tuple[int, int], arguments: list[int | float]) -> None:
        """Run the programs one after the other."""
        values = {}
        for (kind, name), value in zip(self.params, [*arguments, 0, 0], strict=True):
            values[name] = int(np.float32(value).view(np.uint32)) if kind == "f32" else int(value)
        for y in range(grid[1]):
            for x in range(grid[0]):
                _Program(self, values, x, y).run()


class _Program:
    def __init__(self, machine: Machine, values: dict[str, int], x: int, y: int):
        self.machine, self.values = machine, values
        n = machine.threads
        self.registers = {
            "%tid.x": np.arange(n, dtype=np.uint64),
            "%ctaid.x": np.full(n, x, np.uint64),
            "%ctaid.y": np.full(n, y, np.uint64),
            "%ctaid.z": np.zeros(n, np.uint64),
        }
        self.shared = np.full(machine.shared_bytes, 0xFF, np.uint8)
        self.open_group, self.groups = [], []

    def get(self, name):
        n = self.machine.threads
        if name in self.registers:
            return self.registers[name]
        if name == "global_smem":
            return np.zeros(n, np.uint64)
        if name.startswith("0f"):
            return np.full(n, int(name[2:], 16), np.uint64)
        if name.startswith("0x") and name.endswith("U"):
            name = name[:-1]
        return np.full(n, int(name, 0) & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def put(self, name, value, bits=64, where=None):
        value = value.astype(np.uint64)
        if bits < 64:
            value = value & np.uint64((1 << bits) - 1)
        if where is not None and name in self.registers:
            value = np.where(where, value, self.registers[name])
        self.registers[name] = value

    def address(self, text):
        base, _, offset = text.strip("[] ").partition("+")
        return (self.get(base.strip()) + np.uint64(int(offset or 0) & 0xFFFFFFFFFFFFFFFF)).astype(np.int64)

    def run(self):
        position, code, count = 0, self.machine.code, 0
        while position < len(code):
            guard, opcode, operands = code[position]
            position += 1
            count += 1
            assert count < 200_000, "the program does not end"
            where = None
            if guard is not None:
                where = self.get(guard.lstrip("!")).astype(bool) ^ guard.startswith("!")
            parts = opcode.split(".")
            if parts[0] == "bra":
                taken = np.ones(1, bool) if where is None else where
                assert taken.all() or not taken.any(), "threads part"
                if taken.all():
                    position = self.machine.labels[operands[0]]
                continue
            if parts[0] == "ret":
                return
            name = f"do_{parts[0]}"
            assert hasattr(self, name), f"unknown instruction {opcode} {operands}"
            getattr(self, name)(parts, operands, where)

    # Memory

    def do_ld(self, parts, operands, where):
        if parts[1] == "param":
            self.put(
                operands[0], np.full(self.machine.threads, self.values[operands[1].strip("[]")], np.uint64)
            )
            return
        self._move(parts, operands[0], operands[1], where, is_load=True)

    def do_st(self, parts, operands, where):
        self._move(parts, operands[1], operands[0], where, is_load=False)

    def _move(self, parts, names, place, where, is_load):
        is_shared = parts[1].startswith("shared")
        memory, lowest = (self.shared, 0) if is_shared else (self.machine.memory, BASE)
        size = _SIZES[parts[-1]]
        live = np.ones(self.machine.threads, bool) if where is None else where
        address = self.address(place)[live]
        names = [name.strip() for name in names.strip("{} ").split(",")]
        assert len(address) == 0 or lowest <= address.min(), "an address of nobody"
        assert len(address) == 0 or address.max() + size * len(names) <= len(memory), "an address of nobody"
        assert (address % (size * len(names)) == 0).all(), "a crooked address"
        for number, name in enumerate(names):
            places = address[:, None] + number * size + np.arange(size)
            if is_load:
                value = self.registers.get(name, np.zeros(self.machine.threads, np.uint64)).copy()
                if len(address):
                    raw = np.zeros((len(address), 8), np.uint8)
                    raw[:, :size] = memory[places]
                    value[live] = raw.view(np.uint64)[:, 0]
                self.registers[name] = value
            else:
                raw = self.get(name)[live].copy().view(np.uint8).reshape(-1, 8)
                memory[places] = raw[:, :size]

    def do_cp(self, parts, operands, where):
        if parts[2] == "commit_group":
            self.groups.append(self.open_group)
            self.open_group = []
        elif parts[2] == "wait_group":
            while len(self.groups) > int(operands[0]):
                for target, source in self.groups.pop(0):
                    self.shared[target] = self.machine.memory[source]
        else:
            live = np.ones(self.machine.threads, bool) if where is None else where
            target, source = (self.address(place)[live][:, None] + np.arange(16) for place in operands[:2])
            assert len(source) == 0 or (source.min() >= BASE and source.max() < len(self.machine.memory))
            self.open_group.append((target, source))

    def do_atom(self, parts, operands, where):
        assert parts[-2:] == ["add", "u32"]
        live = np.flatnonzero(np.ones(self.machine.threads, bool) if where is None else where)
        address, value = self.address(operands[1]), self.get(operands[2])
        old = np.zeros(self.machine.threads, np.uint64)
        for thread in live:
            word = self.machine.memory[address[thread] : address[thread] + 4].view(np.uint32)
            old[thread] = word[0]
            word[0] += np.uint32(value[thread])
        self.put(operands[0], old)

    def do_bar(self, parts, operands, where):
        pass

    do_griddepcontrol = do_bar

    # Integers

    def do_mov(self, parts, operands, where):
        if operands[0].startswith("{"):  # a word into its halves
            value = self.get(operands[1])
            for number, name in enumerate(operands[0].strip("{} ").split(",")):
                self.put(name.strip(), value >> np.uint64(16 * number), 16)
        elif operands[1].startswith("{"):
            names = [name.strip() for name in operands[1].strip("{} ").split(",")]
            bits = _SIZES[parts[-1]] * 8 // len(names)
            value = np.zeros(self.machine.threads, np.uint64)
            for number, name in enumerate(names):
                value = value | (self.get(name) & np.uint64((1 << bits) - 1)) << np.uint64(bits * number)
            self.put(operands[0], value)
        else:
            bits = 1 if parts[-1] == "pred" else _SIZES[parts[-1]] * 8
            self.put(operands[0], self.get(operands[1]), bits, where)

    def _two(self, parts, operands, function, where=None):
        bits = 1 if parts[-1] == "pred" else _SIZES[parts[-1]] * 8
        self.put(operands[0], function(self.get(operands[1]), self.get(operands[2])), bits, where)

    def do_and(self, parts, operands, where):
        self._two(parts, operands, np.bitwise_and)

    def do_or(self, parts, operands, where):
        self._two(parts, operands, np.bitwise_or)

    def do_xor(self, parts, operands, where):
        self._two(parts, operands, np.bitwise_xor)

    def do_not(self, parts, operands, where):
        bits = 1 if parts[-1] == "pred" else _SIZES[parts[-1]] * 8
        self.put(operands[0], ~self.get(operands[1]), bits)

    def do_shl(self, parts, operands, where):
        self._two(parts, operands, np.left_shift)

    def do_shr(self, parts, operands, where):
        value, by = self.get(operands[1]), self.get(operands[2])
        if parts[-1].startswith("s"):
            bits = _SIZES[parts[-1]] * 8
            self.put(operands[0], (_signed(value, bits) >> by.astype(np.int64)).view(np.uint64), bits)
        else:
            self._two(parts, operands, np.right_shift)

    def do_bfe(self, parts, operands, where):
        value, start, length = (self.get(name) for name in operands[1:])
        found = (value >> start) & ((np.uint64(1) << length) - np.uint64(1))
        if parts[-1] == "s32":
            found = _signed(found, int(length[0])).view(np.uint64)
        self.put(operands[0], found, 32)

    def do_cvt(self, parts, operands, where):
        source, target = parts[-1], parts[-2]
        value = self.get(operands[1])
        if source == "bf16":
            self.put(operands[0], _raw(_half_to_float(value)))
        elif target == "bf16":
            self.put(operands[0], _float_to_half(_float(value)))
        elif target == "bf16x2":  # the first operand is the upper half
            upper, lower = (_float_to_half(_float(self.get(name))) for name in operands[1:])
            self.put(operands[0], upper << np.uint64(16) | lower)
        elif source == "f32":
            assert parts == ["cvt", "rzi", "s32", "f32"], parts
            self.put(operands[0], _float(value).astype(np.int64).view(np.uint64), 32)
        elif source.startswith("s"):
            found = _signed(value, _SIZES[source] * 8)
            self.put(operands[0], _raw(found) if target == "f32" else found.view(np.uint64))
        else:
            value = value & np.uint64(
                (1 << _SIZES[source] * 8) - 1 if source != "u64" else 0xFFFFFFFFFFFFFFFF
            )
            self.put(operands[0], _raw(value) if target == "f32" else value, _SIZES[target] * 8)

    def do_setp(self, parts, operands, where):
        kind = parts[-1]
        left, right = (self.get(name) for name in operands[1:3])
        if kind == "f32":
            left, right = _float(left), _float(right)
        elif kind.startswith("s"):
            left, right = (_signed(value, _SIZES[kind] * 8) for value in (left, right))
        elif kind != "b64" and kind != "u64":
            left, right = (value & np.uint64(0xFFFFFFFF) for value in (left, right))
        compare = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
        compare |= {"eq": np.equal, "ne": np.not_equal}
        self.put(operands[0], compare[parts[1]](left, right))

    def do_selp(self, parts, operands, where):
        yes, no, which = (self.get(name) for name in operands[1:])
        self.put(operands[0], np.where(which.astype(bool), yes, no), _SIZES[parts[-1]] * 8)

    def _arithmetic(self, parts, operands, on_integers, on_floats):
        kind = parts[-1]
        values = [self.get(name) for name in operands[1:]]
        if kind == "f32":
            self.put(operands[0], _raw(on_floats(*map(_float, values))))
        elif kind == "bf16":
            self.put(operands[0], _float_to_half(on_floats(*map(_half_to_float, values))))
        elif kind == "bf16x2":
            lower = _float_to_half(on_floats(*map(_half_to_float, values)))
            upper = _float_to_half(on_floats(*(_half_to_float(value >> np.uint64(16)) for value in values)))
            self.put(operands[0], upper << np.uint64(16) | lower)
        else:
            bits = _SIZES[kind] * 8
            if kind[0] == "s":
                values = [_signed(value, bits) for value in values]
            self.put(operands[0], on_integers(*values).view(np.uint64), bits)

    def do_add(self, parts, operands, where):
        self._arithmetic(parts, operands, np.add, np.add)

    def do_sub(self, parts, operands, where):
        self._arithmetic(parts, operands, np.subtract, np.subtract)

    def do_neg(self, parts, operands, where):
        self._arithmetic(parts, operands, np.negative, np.negative)

    def do_min(self, parts, operands, where):
        self._arithmetic(parts, operands, np.minimum, np.fmin)

    def do_max(self, parts, operands, where):
        self._arithmetic(parts, operands, np.maximum, np.fmax)

    def _wide(self, parts, operands):
        bits = _SIZES[parts[-1]] * 8
        values = [self.get(name) for name in operands[1:3]]
        if parts[-1].startswith("s"):
            return (_signed(values[0], bits) * _signed(values[1], bits)).view(np.uint64)
        mask = np.uint64((1 << bits) - 1 if bits < 64 else 0xFFFFFFFFFFFFFFFF)
        return (values[0] & mask) * (values[1] & mask)

    def do_mul(self, parts, operands, where):
        if parts[1] in ("lo", "wide"):
            self.put(
                operands[0], self._wide(parts, operands), 64 if parts[1] == "wide" else _SIZES[parts[-1]] * 8
            )
        else:
            self._arithmetic(parts, operands, np.multiply, np.multiply)

    def do_mad(self, parts, operands, where):
        bits = 64 if parts[1] == "wide" else _SIZES[parts[-1]] * 8
        self.put(operands[0], self._wide(parts, operands) + self.get(operands[3]), bits)

    def do_fma(self, parts, operands, where):
        self._arithmetic(
            parts, operands, None, lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32)
        )

    # Floating point

    def do_div(self, parts, operands, where):
        self._arithmetic(parts, operands, None, np.divide)

    def do_rsqrt(self, parts, operands, where):
        self._arithmetic(parts, operands, None, lambda value: 1 / np.sqrt(value))

    def do_ex2(self, parts, operands, where):
        self._arithmetic(parts, operands, None, np.exp2)

    def do_shfl(self, parts, operands, where):
        assert parts[2] == "bfly", parts
        lane = np.arange(self.machine.threads)
        self.put(operands[0], self.get(operands[1])[lane ^ int(operands[2], 0)])

    def do_mma(self, parts, operands, where):
        assert ".".join(parts[3:]) == "m16n8k16.row.col.f32.bf16.bf16.f32", parts
        results, left, right, sums = (
            [n.strip() for n in names.strip("{} ").split(",")] for names in operands
        )
        warps = self.machine.threads // 32
        group, quarter = np.divmod(np.arange(32), 4)

        def halves(name):  # [warps, 32, 2]
            value = self.get(name)
            pair = [_half_to_float(value), _half_to_float(value >> np.uint64(16))]
            return np.stack(pair, -1).reshape(warps, 32, 2)

        a, b = np.zeros((warps, 16, 16), np.float32), np.zeros((warps, 16, 8), np.float32)
        c = np.zeros((warps, 16, 8), np.float32)
        for number, name in enumerate(left):
            for i in range(2):
                a[:, group + 8 * (number % 2), 2 * quarter + i + 8 * (number // 2)] = halves(name)[:, :, i]
        for number, name in enumerate(right):
            for i in range(2):
                b[:, 2 * quarter + i + 8 * number, group] = halves(name)[:, :, i]
        for number, name in enumerate(sums):
            c[:, group + 8 * (number // 2), 2 * quarter + number % 2] = _float(self.get(name)).reshape(
                warps, 32
            )
        c += a @ b
        for number, name in enumerate(results):
            self.put(name, _raw(c[:, group + 8 * (number // 2), 2 * quarter + number % 2].reshape(-1)))
