"""The autocast lesson's numbers against torch."""

import math

import pytest
import torch

from amp_lab.experiments import autocast as lesson
from amp_lab.plots.autocast import dtype_flow, error_by_scale
from amp_lab.plots.style import new_figure


def test_the_flow_of_a_step():
    flow = lesson.trace_step()
    ops = [call.op for call in flow.calls]
    assert ops.count("linear") == 5
    assert ops.count("matmul") == 2
    assert ops[-1] == "cross_entropy"
    by_op = {call.op: call for call in flow.calls}
    assert by_op["linear"].output == torch.float16
    assert by_op["softmax"].output == by_op["layer_norm"].output == torch.float32
    assert set(flow.weights.values()) == {torch.float32}
    outputs = {call.module: call.output for call in flow.calls if call.module}
    assert flow.gradients == outputs  # a gradient has the dtype of what it is the gradient of


@pytest.mark.parametrize("k", [-10, -4, 0, 4])
@pytest.mark.parametrize("operation", lesson.OPERATIONS)
def test_torchs_half_kernels_err_as_computed(operation, k):
    x = torch.linspace(0.5, 0.999, 1000, dtype=torch.float64) * 2.0**k
    exact = lesson.OPERATIONS[operation](x)
    half = lesson.OPERATIONS[operation](x.half()).double()
    error = ((half - exact).abs().max() / exact.abs().max()).item()
    expected = lesson.half_error(operation, k)
    if math.isinf(expected):
        assert not half.isfinite().all() or not half.any()
    else:
        assert error == pytest.approx(expected, rel=0.1, abs=2e-4)


def test_the_weight_cache():
    assert lesson.casts_of(3, cache_enabled=True) == 1
    assert lesson.casts_of(3, cache_enabled=False) == 3


def test_sentences():
    flow = lesson.trace_step()
    assert "linear, policy: lower precision" in dtype_flow(new_figure(), flow, 0)
    assert "lost" in error_by_scale(new_figure(), "pow", {0: math.inf, 1: 0.5}, 0)
    assert "more than 1%" in error_by_scale(new_figure(), "pow", {0: math.inf, 1: 0.5}, 1)
