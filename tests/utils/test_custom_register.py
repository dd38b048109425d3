"""Custom ops of the library aiter: CPU and CUDA kernels, shapes for the compiler, marks for the splitter."""

import pytest
import torch

from atom.utils import mark_spliting_op
from atom.utils.custom_register import aiter_lib, direct_register_custom_op, is_spliting_op


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fake_double(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def fill(out: torch.Tensor, value: float) -> None:
    out.fill_(value)


def test_an_op_runs_on_the_cpu_and_is_known_on_devices():
    direct_register_custom_op("test_double", double, [], fake_double)
    assert torch.equal(torch.ops.aiter.test_double(torch.ones(3)), torch.full((3,), 2.0))
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("aiter::test_double", key)
    assert aiter_lib.ns == "aiter" and aiter_lib.kind == "FRAGMENT"


def test_an_op_passes_torchs_own_checks():
    direct_register_custom_op("test_double", double, [], fake_double)
    direct_register_custom_op("test_fill", fill, mutates_args=["out"])
    torch.library.opcheck(torch.ops.aiter.test_double.default, (torch.ones(2, 3),))
    torch.library.opcheck(torch.ops.aiter.test_fill.default, (torch.ones(2, 3), 4.0))


def test_registering_again_changes_nothing():
    direct_register_custom_op("test_double", double, [], fake_double)
    direct_register_custom_op("test_double", lambda x: x, [], fake_double)
    assert torch.ops.aiter.test_double(torch.ones(1)).item() == 2


def test_an_op_that_returns_something_needs_a_shape_function():
    with pytest.raises(ValueError, match="aiter::test_no_fake .* fake_impl, got None"):
        direct_register_custom_op("test_no_fake", double, [])


def test_an_op_may_live_in_another_library():
    library = torch.library.Library("atom_test", "FRAGMENT")
    direct_register_custom_op("double", double, [], fake_double, target_lib=library, dispatch_key="CPU")
    assert torch.ops.atom_test.double(torch.ones(1)).item() == 2
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("atom_test::double", "CUDA")


def test_split_ops_are_marked_ops_functions_and_configured_names():
    @mark_spliting_op(is_custom=True, gen_fake=fake_double)
    def test_marked(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert test_marked is torch.ops.aiter.test_marked
    assert is_spliting_op(torch.ops.aiter.test_marked) and is_spliting_op(torch.ops.aiter.test_marked.default)
    plain = mark_spliting_op()(lambda x: x)
    assert is_spliting_op(plain)
    direct_register_custom_op("test_double", double, [], fake_double)
    overload = torch.ops.aiter.test_double.default
    assert not is_spliting_op(overload)
    assert is_spliting_op(overload, {"aiter.test_double"}) and not is_spliting_op(torch.relu, {"aiter.relu"})
