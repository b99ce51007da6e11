"""The rounding lesson's numbers against torch's own float16 arithmetic."""

import numpy as np
import pytest
import torch

from amp_lab.experiments import rounding
from amp_lab.formats import BF16, FP16


def test_the_seeds_example():
    assert rounding.apply_update(1.0, 0.0001).result == 1.0
    assert rounding.apply_update(1.0, 0.0001).swallowed
    assert torch.tensor([1.0], dtype=torch.float16) + 0.0001 == 1.0


def test_neighbours_are_numpys_nextafter():
    for x in (1.0, 0.999, 2.0**-14, 2.0**-24, 0.0, -1.0, 1000.0, 2.0**-15):
        numbers = rounding.neighbours(x, count=4)
        start = np.float16(x)
        expected = [start]
        for _ in range(4):
            expected.append(np.nextafter(expected[-1], np.float16(np.inf)))
            expected.insert(0, np.nextafter(expected[0], np.float16(-np.inf)))
        assert numbers == [float(e) for e in expected]


def test_updates_are_torchs_half_additions():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(500, generator=generator).half()
    updates = (weights * 2.0 ** torch.randint(-14, 0, (500,), generator=generator)).half()
    for weight, update, total in zip(weights, updates, weights + updates, strict=True):
        assert rounding.apply_update(weight.item(), update.item()).result == total.item()


@pytest.mark.parametrize("fmt", [FP16, BF16])
def test_the_band_of_swallowed_ratios(fmt):
    """Exhaustive over a binade: exactly up to the returned update the weight stays."""
    weights = rounding.binade(1.0, fmt)
    largest = rounding.largest_swallowed(weights, fmt)
    assert len(weights) == 2**fmt.mantissa_bits
    assert torch.equal(fmt.round(weights + largest), weights)
    more = [rounding.neighbours(u, fmt, count=1)[-1] for u in largest.tolist()]
    more = torch.tensor(more, dtype=torch.float64)
    assert torch.all(fmt.round(weights + more) != weights)
    ratios = largest / weights
    assert ratios.max() == 2.0 ** -(fmt.mantissa_bits + 1)
    assert ratios.min() == 2.0 ** -(fmt.mantissa_bits + 2)


def test_ties_stay_at_even_weights_and_move_odd_ones():
    assert rounding.apply_update(1.0, 2**-11).swallowed
    assert not rounding.apply_update(1 + 2**-10, 2**-11).swallowed
    assert not rounding.apply_update(1.0, 2**-11 + 2**-21).swallowed


def test_just_under_a_power_of_two_the_spacing_halves():
    assert rounding.apply_update(1.0, 2**-12).swallowed
    assert not rounding.apply_update(1.0, -(2**-11)).swallowed
    assert rounding.apply_update(1.0, -(2**-12)).swallowed  # the tie below 1
    assert not rounding.apply_update(1 - 2**-11, -(2**-12) * 1.01).swallowed


def test_many_updates_are_a_loop_over_half_tensors():
    run = rounding.many_updates(0.0, 1e-4, 3000, 1000)
    half = torch.zeros((), dtype=torch.float16)
    for _ in range(3000):
        half = half + 1e-4  # computed in float32 and rounded once
    assert run.in_half[-1] == half.item() == 0.25
    assert run.with_master[-1] == pytest.approx(0.3, rel=1e-3)
    assert run.steps == [0, 1000, 2000, 3000]
