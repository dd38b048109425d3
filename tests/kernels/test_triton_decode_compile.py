"""The kernels of a fused decode step compile for sm_90 and keep what makes them fast there, without a device."""

import itertools

from tests.helpers.own_process import json_of

EARLY = {
    "gemv",
    "gemv_rows",
    "gemv_mma",
    "gemm_rows",
    "columns",
    "grouped",
    "splits",
    "warp_splits",
    "head_gemv",
}  # load weights or keys before they wait
CASES = (
    "qwen3-0.6b:1",
    "qwen3-0.6b:8",
    "llama-3.1-8b:1",
    "llama-3.2-1b:1",
    "llama-3.2-1b:64",
    "llama-3.2-1b:256",
)
INDEPENDENT = {"_embed", "_prepare", "_prepare_and_embed"}


def test_decode_kernels_compile_for_sm_90(tmp_path):
    found = json_of("compile_decode_for_sm90.py", tmp_path, *CASES)
    assert {facts["kernel"] for facts in found.values()} >= EARLY | {"gemm_tile", "batch_gemm"}
    for name, facts in found.items():
        kernel = facts["kernel"]
        # The exact cosine of large angles keeps a table of 28 bytes on the stack.
        assert facts["spilled"] <= (
            32 if kernel.endswith("_embed") else 0
        ), f"{name} spills {facts['spilled']} bytes"
        assert facts["shared"] <= 227 * 1024, f"{name} wants {facts['shared']} bytes of shared memory"
        if kernel in INDEPENDENT:
            assert facts["starts_next_first"] == (kernel == "_prepare_and_embed"), name
            continue
        if (
            kernel == "batch_gemm"
        ):  # of which each group of warps waits that reads what the launch before wrote
            assert facts["waits"] == ("launch_pdl" in name) * (3 if "gate_up" in name else 2), name
            continue
        if "launch_pdl" in name:
            assert facts["waits"] == 1, f"{name} does not wait once"
            assert facts["starts_next_first"] != (
                "first layer" in name
            ), f"{name} lets the next one start too late or soon"
            assert facts["stores_before_wait"] == 0, f"{name} writes before it waits"
        if kernel in EARLY and "launch_pdl" in name:
            assert facts["wide_before_wait"] >= 2, f"{name} loads nothing wide before it waits"
        if kernel == "gemm_tile":
            assert facts["bulk_before_wait"] >= 2, f"{name} asks for few weights before it waits"
            assert facts["meets_behind_products"], f"{name} writes over what other warps may still read"
        if kernel == "gemv_rows":
            assert facts["barriers"] == 0, f"{name} passes something through shared memory"
        if kernel == "gemv_mma":
            assert facts["barriers"] <= 2, f"{name} has warps meet more than for their inputs and sums"


def test_the_ring_computes_what_its_twin_does(tmp_path):
    """Gluon kernels have no interpreter: the compiled code runs in numpy, copies arriving when they are waited for."""
    for case, found in json_of("run_ring_for_sm90.py", tmp_path).items():
        assert found["out"] < 1e-2, f"{case}: {found}"
        assert found.get("next input", 0.0) < 1e-2 and found.get("squares", 0.0) < 1e-5, f"{case}: {found}"
        assert found["arrivals"] == 0.0, f"{case}: the next launch counts from zero"
        assert found["spilled"] == 0, f"{case} spills {found['spilled']} bytes"
        assert found["wide_before_wait"] >= 4, f"{case} asks for little before it waits"
        assert found["waits"] == 1 and found["starts_next_first"] and found["stores_before_wait"] == 0, case


def test_a_layer_is_at_most_five_launches(tmp_path):
    """Every kernel counts, whatever calls it: so many between the attention of one layer and that of the next."""
    attention = {"columns", "grouped", "splits", "warp_splits"}
    steps = json_of("count_decode_launches.py", tmp_path)
    assert len(steps) == 3 * (6 * 2 + 2)
    for step, names in steps.items():
        places = [at for at, name in enumerate(names) if name in attention]
        assert len(places) == 3, step
        assert {after - before for before, after in itertools.pairwise(places)} == {5}, (step, names)
        # Around the layers: prepare with the embedding; final norm, head and choice.
        assert places[0] == 2 and len(names) - 1 - places[-1] <= 3 + 3, (step, names)
    assert {name for names in steps.values() for name in names} >= attention
