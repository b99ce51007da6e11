"""The overflow lesson's numbers against torch's own float16 kernels."""

import math

import pytest
import torch

from amp_lab.experiments import overflow
from amp_lab.formats import FP16, FP32


@pytest.mark.parametrize(("value", "count"), [(16, 4096), (16, 4095), (16, 4094), (16, 3000)])
def test_totals_are_torchs_half_sums(value, count):
    half = torch.full((count,), float(value), dtype=torch.float16)
    assert overflow.total(value, count) == half.sum().item()
    assert overflow.total(value, count, FP32) == half.float().sum().item() == value * count


def test_the_sequential_accumulator_is_a_loop_over_halves():
    for value in (0.1, 1.0, 16.0, 20.0):
        sums = overflow.sequential(FP16.round(torch.tensor(value)).item(), 4000)
        accumulator = torch.zeros((), dtype=torch.float16)
        for step in range(4000):
            assert sums[step] == accumulator.item()
            accumulator = accumulator + torch.tensor(value, dtype=torch.float16)


def test_sixteens_stagnate_at_32768_after_2048_additions():
    sums = overflow.sequential(16.0, 5000)
    assert sums[-1] == 32768 == 2048 * 16
    assert overflow.stagnation(sums) == 2048
    assert overflow.stagnation(overflow.sequential(16.0, 1000)) is None


def test_pairwise_sums_grow_until_they_overflow():
    assert overflow.pairwise(16.0, 12) == [16.0 * 2**k for k in range(12)] + [math.inf]


@pytest.mark.parametrize("log2_scale", [-14, -6, 0, 2, 4, 8])
def test_exact_programs_are_torchs_float64_operations(log2_scale):
    x = overflow.inputs(2.0**log2_scale)
    expected = {
        "mean": x.mean(),
        "norm": torch.linalg.vector_norm(x),
        "variance": x.var(correction=0),
        "softmax": x.softmax(0)[-1],
        "exp": x.exp()[-1],
    }
    for name, truth in expected.items():
        outcome = overflow.run(name, 2.0**log2_scale)
        assert outcome.exact == pytest.approx(truth.item(), rel=1e-12)
        assert outcome.inside_float32 == FP16.round(truth).item()


def test_verdicts():
    assert overflow.run("mean", 1.0).verdict == "right"
    assert overflow.run("mean", 2.0**8).verdict == "inf"
    assert overflow.run("norm", 2.0**-14).verdict == "off"  # the squares flush to zero
    assert overflow.run("softmax", 2.0**3).verdict == "off"
    assert overflow.run("softmax", 2.0**4).verdict == "nan"


def test_where_naive_programs_break_in_torch_itself():
    """The same programs on torch's float16 tensors overflow at the same scales."""
    x = overflow.inputs(2.0**4).half()
    assert (x * x).sum().isinf()
    assert (x.exp() / x.exp().sum()).isnan().any()
    assert overflow.inputs(2.0**8).half().sum().isinf()
