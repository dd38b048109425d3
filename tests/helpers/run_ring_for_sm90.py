"""Compiles the ring kernel for sm_90 as ``DecodeLinear`` launches it and runs it in numpy; prints relative errors."""

import json

import numpy as np
import torch

from atom.benchmarks.decode_launches import META, launches_of
from atom.kernels.reference.decode import fused_linear
from atom.kernels.triton.decode_choices import Choice, fits_ring
from atom.kernels.triton.decode_linear import DecodeLinear, LinearArguments, Scaled
from tests.helpers.compile_decode_for_sm90 import facts
from tests.helpers.ptx_machine import Machine
from tests.helpers.sm90_code import compiled

EPS = 1e-6
CASES = [  # tokens, columns, rows of the result, blocks, what stands around
    (5, 512, 32, (16, 256, 1, 2, 4, 4), {"bias"}),  # all asked for before the wait, steps unrolled
    (32, 1024, 64, (32, 1024, 1, 1, 8, 8), {"scaled"}),
    (8, 1024, 32, (32, 512, 1, 2, 4, 4), {"norm", "silu"}),
    (19, 2048, 32, (16, 256, 2, 3, 4, 8), {"residual", "next"}),  # a ring, two splits, warps along the rows
    (40, 1024, 64, (32, 256, 1, 2, 4, 8), {"norm", "gelu_tanh", "bias"}),
    (3, 1024, 16, (8, 512, 1, 2, 8, 8), {"residual", "next"}),
    (20, 2048, 32, (16, 256, 1, 8, 4, 4), {"scaled", "silu"}),  # all asked for before the wait, a loop
    (2, 1024, 32, (16, 256, 2, 2, 4, 4), {"norm"}),
]
NUM_SHARES = 70  # more than are read at once


def bits(tensor):
    return tensor.bfloat16().view(torch.int16).numpy()


def run(num_tokens, columns, rows, blocks, around):
    activation = next((i for i, name in ((1, "silu"), (2, "gelu_tanh")) if name in around), 0)
    weight_rows = 2 * rows if activation else rows
    has_norm = bool(around & {"norm", "scaled"})

    def make(name, *size):
        return torch.empty(size, dtype=torch.bfloat16, device=META) if name in around else None

    def record(recorder):
        layer = LinearArguments(
            torch.empty((weight_rows, columns), dtype=torch.bfloat16, device=META),
            torch.empty(columns, dtype=torch.bfloat16, device=META) if has_norm else None,
            EPS,
            make("bias", weight_rows),
            activation,
        )
        assert fits_ring(layer.shape, blocks, num_tokens)
        x = torch.empty((num_tokens, columns), dtype=torch.bfloat16, device=META)
        out = torch.empty((num_tokens, rows), dtype=torch.bfloat16, device=META)
        left = DecodeLinear(META, has_gluon=True, uses_pdl=True)(
            x,
            layer,
            out,
            make("residual", num_tokens, rows),
            choice=Choice("ring", blocks),
            scaled=Scaled(x, NUM_SHARES) if "scaled" in around else None,
            next_norm=make("next", rows),
            next_x=out if "next" in around else None,
        )
        assert (left is not None) == ("next" in around)

    (launch,) = launches_of(record)
    binary = compiled(launch)
    given = launch.arguments
    padded, split, tiles = given["BM"], blocks[2], weight_rows // blocks[0]
    generator = torch.Generator().manual_seed(num_tokens + columns)

    def random(*size, scale=1.0):
        return (torch.randn(size, generator=generator) * scale).bfloat16()

    x, weight = random(num_tokens, columns), random(weight_rows, columns, scale=columns**-0.5)
    norm, next_norm = 1 + random(columns, scale=0.2), 1 + random(rows, scale=0.2)
    bias, residual = random(weight_rows), random(num_tokens, rows)
    wanted = fused_linear(
        x.float(),
        weight,
        norm=norm if has_norm else None,
        eps=EPS,
        bias=bias if "bias" in around else None,
        activation=(None, "silu", "gelu_tanh")[activation],
        residual=residual if "residual" in around else None,
    ).float()
    shares = torch.rand(NUM_SHARES, padded, generator=generator)
    shares[:, :num_tokens] *= x.float().square().sum(1) / shares[:, :num_tokens].sum(0)
    machine = Machine(binary.asm["ptx"], binary.metadata.shared)
    nothing = np.full((num_tokens, rows), -1, np.int16)  # NaN
    buffers = {
        "x": bits(x.float() * norm.float() if "scaled" in around else x),
        "norm": bits(norm),
        "weight": bits(weight),
        "bias": bits(bias),
        "residual": bits(residual),
        "out": nothing,
        "squares_in": shares.numpy(),
        "next_norm": bits(next_norm),
        "scaled_out": nothing,
        "squares_out": np.full((tiles, padded), np.nan, np.float32),
        "partial": np.full(tiles * split * (blocks[0] + 1) * padded, np.nan, np.float32),
        "arrivals": np.zeros(tiles, np.int32),
    }
    places = {name: machine.buffer(value) for name, value in buffers.items()}
    arguments = []
    for parameter in launch.kernel.params:
        value = given[parameter.name]
        if not (parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1)):
            arguments.append(places.get(parameter.name, value))
    machine.launch((tiles, split), arguments)

    def read(name):
        raw = torch.from_numpy(machine.read(places[name], np.int16, num_tokens * rows))
        return raw.view(torch.bfloat16).float().view(num_tokens, rows)

    def error(found, wanted):
        return float((found - wanted).norm() / wanted.norm())

    out = read("out")
    found = {"out": error(out, wanted), **facts(binary)}
    if "next" in around:
        found["next input"] = error(read("scaled_out"), out * next_norm.float())
        sums = torch.from_numpy(machine.read(places["squares_out"], np.float32, tiles * padded))
        found["squares"] = error(sums.view(tiles, padded).sum(0)[:num_tokens], out.square().sum(1))
    found["arrivals"] = float(machine.read(places["arrivals"], np.int32, tiles).sum())
    return found


if __name__ == "__main__":
    np.seterr(all="ignore")
    print(json.dumps({f"{case}": run(*case) for case in CASES}))
