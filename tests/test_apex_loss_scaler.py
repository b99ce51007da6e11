"""The scale's rule, against torch's GradScaler, and unscaling."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_lab.apex import LossScaler


def backward(scaler: LossScaler, overflow: bool) -> bool:
    gradient = torch.tensor([1.0, math.inf if overflow else 2.0])
    scaler.unscale(gradient, torch.float32)
    return scaler.update_scale()


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_scale_follows_the_same_rule_as_torchs_grad_scaler(overflows, window):
    ours = LossScaler("dynamic", scale_window=window, max_loss_scale=math.inf)
    theirs = torch.amp.GradScaler("cpu", growth_interval=window)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflow in overflows:
        theirs.scale(torch.ones(1))
        weight.grad = torch.tensor([math.inf if overflow else 1.0])
        theirs.step(optimizer)
        theirs.update()
        assert backward(ours, overflow) is overflow
        assert ours.loss_scale() == theirs.get_scale()
        assert ours._unskipped == theirs._get_growth_tracker()


def test_dynamic_scale_starts_at_two_to_the_sixteenth_and_doubles_after_2000_clean_passes():
    scaler = LossScaler("dynamic")
    assert scaler.loss_scale() == 2.0**16
    for _ in range(1999):
        assert not scaler.update_scale()
    assert scaler.loss_scale() == 2.0**16
    scaler.update_scale()
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**17, 0)


def test_scale_stays_within_its_bounds():
    scaler = LossScaler("dynamic", scale_window=1, min_loss_scale=2.0**14, max_loss_scale=2.0**17)
    for expected in (2.0**17, 2.0**17):
        backward(scaler, overflow=False)
        assert scaler.loss_scale() == expected
    for expected in (2.0**16, 2.0**15, 2.0**14, 2.0**14):
        backward(scaler, overflow=True)
        assert scaler.loss_scale() == expected


def test_scale_does_not_start_above_its_maximum():
    assert LossScaler("dynamic", max_loss_scale=1024.0).loss_scale() == 1024.0


def test_without_a_minimum_the_scale_falls_below_one():
    scaler = LossScaler("dynamic", init_scale=2.0)
    for _ in range(3):
        backward(scaler, overflow=True)
    assert scaler.loss_scale() == 0.25


def test_static_scale_never_moves_or_skips_but_counts():
    scaler = LossScaler(128.0, scale_window=1)
    assert not scaler.dynamic
    assert not backward(scaler, overflow=True)
    assert not backward(scaler, overflow=False)
    assert (scaler.loss_scale(), scaler._unskipped) == (128.0, 2)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_non_finite_gradient_is_an_overflow(bad, dtype):
    scaler = LossScaler("dynamic")
    scaler.unscale(torch.tensor([1.0, bad], dtype=dtype), torch.float32)
    scaler.unscale(torch.tensor([1.0]), torch.float32)
    assert scaler.update_scale()


def test_large_finite_gradients_are_no_overflow():
    """Their sum would overflow: each value is looked at by itself."""
    scaler = LossScaler("dynamic")
    scaler.unscale(torch.full((4,), torch.finfo(torch.float32).max), torch.float32)
    assert not scaler.update_scale()


def test_overflow_is_remembered_until_the_update_and_not_longer():
    scaler = LossScaler("dynamic")
    scaler.unscale(torch.tensor([math.inf]), torch.float32)
    scaler.unscale(torch.tensor([1.0]), torch.float32)
    assert scaler.update_scale()
    assert not scaler.update_scale()


def test_unscale_goes_to_the_dtype_asked_for_and_leaves_a_half_gradient_scaled():
    half = torch.tensor([65504.0, 2.0**-24], dtype=torch.float16)
    kept = half.clone()
    unscaled = LossScaler(2.0**10).unscale(half, torch.float32)
    assert unscaled.dtype == torch.float32
    assert unscaled.tolist() == [65504 / 1024, 2.0**-34]
    assert torch.equal(half, kept)


def test_unscale_in_place_where_the_dtype_is_the_same():
    gradient = torch.tensor([4.0])
    assert LossScaler(2.0).unscale(gradient, torch.float32) is gradient
    assert gradient.item() == 2.0


def test_unscale_adds_to_what_was_there():
    kept = torch.tensor([1.0])
    total = LossScaler(4.0).unscale(torch.tensor([8.0], dtype=torch.float16), torch.float32, kept)
    assert total is kept
    assert kept.item() == 3.0


def test_sparse_gradients():
    scaler = LossScaler("dynamic", init_scale=2.0)
    rows = torch.tensor([[0, 0, 2]])
    values = torch.tensor([2.0, 4.0, 8.0])
    sparse = torch.sparse_coo_tensor(rows, values, (3,), check_invariants=True)
    assert scaler.unscale(sparse, torch.float32).to_dense().tolist() == [3.0, 0.0, 4.0]
    assert not scaler.update_scale()
    # Two finite entries of one row whose sum is not: float16 holds up to 65504.
    values = torch.tensor([6e4, 6e4, 1.0]).half()
    sparse = torch.sparse_coo_tensor(rows, values, (3,), check_invariants=True)
    scaler.unscale(sparse, torch.float32)
    assert scaler.update_scale()
