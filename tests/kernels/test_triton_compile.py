"""Every Triton kernel compiles for sm_90 without a device, keeps its registers and reads its pages in wide loads."""

import pytest

from tests.helpers.own_process import json_of

BY_ELEMENT = ("plan", "patch_tables", "prepare_tokens", "mask", "narrow", "pick_kept")  # they look things up


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_sm_90(dtype, tmp_path):
    found = json_of("compile_for_sm90.py", tmp_path, dtype)
    for name, facts in found.items():
        assert facts["spilled"] == 0 or dtype == "fp32", f"{name} spills {facts['spilled']} bytes"
        assert facts["shared"] <= 227 * 1024, f"{name} wants {facts['shared']} bytes of shared memory"
        assert facts["specialised"] == [], f"{name} would be compiled again while serving"
        assert facts["wide"] > 0 or name in BY_ELEMENT, f"{name} has no 16-byte load"


def test_sampling_compiles_for_every_kind_of_argument(tmp_path):
    """Vocabularies of one id and up, strides beyond 32 bits, either width of integers, with tables and without."""
    found = json_of("compile_sampling_for_sm90.py", tmp_path)
    assert found["kernels"] == ["_mask", "_measure_spans", "_narrow", "_pick", "_pick_kept"]
    assert found["launches"] == 16 and found["failures"] == []


def test_attention_of_a_decode_step_is_two_launches(tmp_path):
    """Norms, rotation and cache write, then attention: splits of the keys are added up by the launch that made them."""
    splits = set()
    for layer, steps in json_of("count_attention_launches.py", tmp_path).items():
        for batch, launches in steps.items():
            assert [name for name, _ in launches] == ["_rotate_and_write", "_decode"], (layer, batch)
            splits.add(launches[1][1][2])
    assert splits == {1, 4, 8, 16}
