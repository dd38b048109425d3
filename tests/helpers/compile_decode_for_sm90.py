"""Compiles the kernels of a fused decode step for sm_90 as the measured shapes launch them; prints what it found."""

import json
import re
import sys

import torch

from atom.benchmarks.decode_launches import SHAPES, launches_of, record_step
from tests.helpers.sm90_code import compiled, count_wide_loads, resources


def facts(binary):
    ptx = binary.asm["ptx"]
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    behind_products = ptx.rpartition("wgmma.wait_group.sync.aligned 0")[2]
    return {
        **resources(binary),
        "wide_before_wait": count_wide_loads(before) if wait else 0,
        "bulk_before_wait": before.count("cp.async.bulk.tensor") if wait else 0,
        "meets_behind_products": "bar.sync" in behind_products.partition("st.shared")[0],
        "waits": ptx.count("griddepcontrol.wait"),
        "starts_next_first": "griddepcontrol.launch_dependents" in before,
        "stores_before_wait": len(re.findall(r"st\.global|atom\.global", before)) if wait else 0,
        "barriers": ptx.count("bar.sync"),
    }


def record(recorder):
    for number, case in enumerate(sys.argv[1:]):
        name, num_tokens = case.split(":")
        shape = next(shape for shape in SHAPES if shape.name == name)
        record_step(recorder, shape, int(num_tokens))
        if number < 2:
            record_step(recorder, shape, int(num_tokens), has_gluon=False, cache_dtype=torch.float8_e4m3fn)


def main():
    found = {}
    for launch in launches_of(record):
        name = launch.kernel.fn.__name__
        found[f"{name} {launch.label} {launch.launch_options}"] = {"kernel": name, **facts(compiled(launch))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
