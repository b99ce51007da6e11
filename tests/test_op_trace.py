"""What a traced region says of a model whose operations we know."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from amp_lab import FP8_E4M3, autocast
from amp_lab.op_policy import Policy
from amp_lab.op_trace import Call

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def model() -> nn.Module:
    return nn.Sequential(Block(), nn.Linear(4, 3, bias=False))


def test_operations_in_order_with_policy_dtypes_and_module():
    network, x, t = model(), torch.randn(2, 4), torch.tensor([0, 2])
    with autocast("cpu", BF16, trace=True) as region:
        loss = F.cross_entropy(network(x), t)
        loss.exp()
    assert region.trace == [
        Call("linear", Policy.LOWER, (FP32, FP32, FP32), BF16, "0.inner.0"),
        Call("relu", None, (BF16,), BF16, "0.inner.1"),
        Call("add", None, (FP32, BF16), FP32, "0"),
        Call("linear", Policy.LOWER, (FP32, FP32), BF16, "1"),
        Call("cross_entropy", Policy.FLOAT32, (BF16, torch.int64), FP32, ""),
        Call("exp", None, (FP32,), FP32, ""),
    ]


def test_results_are_those_of_a_region_without_trace():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    x = torch.randn(2, 3, 8)
    with autocast("cpu", BF16):
        expected = layer(x)
    with autocast("cpu", BF16, trace=True) as region:
        assert torch.equal(layer(x), expected)
    ops = [(call.op, call.module) for call in region.trace if call.policy is Policy.LOWER]
    assert ops == [
        ("linear", "self_attn"),
        ("scaled_dot_product_attention", "self_attn"),
        ("linear", "self_attn"),
        ("linear", "linear1"),
        ("linear", "linear2"),
    ]


def test_composites_show_their_parts():
    with autocast("cpu", BF16, trace=True) as region:
        nn.GRU(4, 3)(torch.randn(2, 1, 4))
        torch.einsum("ij,jk->ik", torch.ones(2, 2), torch.ones(2, 2))
        torch.inner(torch.ones(2), torch.ones(2))
        torch.cat([torch.ones(2), torch.ones(2, dtype=BF16)])
    calls = [call for call in region.trace if call.policy is not None]
    assert [call.op for call in calls] == ["linear"] * 3 + ["einsum", "cat"]
    assert {call.module for call in calls} == {""}
    assert calls[-1] == Call("cat", Policy.WIDEST, (FP32, BF16), FP32, "")
    assert [call.policy for call in region.trace if call.op == "tensordot"] == [None]  # inner


def test_emulated_operations():
    with autocast("cpu", FP16, emulate=True, trace=True) as region:
        y = model()(torch.randn(2, 4)).softmax(1).sum()
        F.mse_loss(y.half(), y.half())
    policies = [(call.op, call.policy, call.output) for call in region.trace if call.policy]
    assert policies == [
        ("linear", Policy.LOWER, FP16),
        ("linear", Policy.LOWER, FP16),
        ("softmax", Policy.FLOAT32_RESULT, FP32),
        ("sum", Policy.FLOAT32_RESULT, FP32),
        ("mse_loss", Policy.FLOAT32, FP32),
    ]
    with autocast("cpu", FP8_E4M3, emulate=True, trace=True) as region:
        torch.mm(torch.ones(1, 1), torch.ones(1, 1))
    assert region.trace == [Call("mm", Policy.LOWER, (FP32, FP32), FP32, "")]


def test_off_by_default():
    with autocast("cpu") as region:
        model()(torch.randn(2, 4))
    assert not hooks._global_forward_hooks
    with pytest.raises(RuntimeError, match="trace=True"):
        _ = region.trace


def test_hooks_are_removed_even_after_errors():
    network = model()
    region = autocast("cpu", trace=True)
    with pytest.raises(RuntimeError), region:
        network(torch.randn(2, 5))
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    with region:
        network(torch.randn(2, 4))
    assert region.trace[-1].module == "1", "the error left the position in the model right"


def test_disabled_and_nested_regions():
    x = torch.ones(2, 2)
    with autocast("cpu", BF16, trace=True) as outer:
        x @ x
        with autocast("cpu", FP16, trace=True) as inner:
            x @ x
        with autocast("cpu", enabled=False, trace=True) as disabled:
            x @ x
        x @ x
    assert [call.output for call in outer.trace] == [BF16, BF16]
    assert [call.output for call in inner.trace] == [FP16]
    assert disabled.trace == []


def test_other_threads_are_not_recorded():
    network, ready, done = model(), threading.Event(), threading.Event()

    def work() -> None:
        ready.wait()
        network(torch.ones(2, 4))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    with autocast("cpu", trace=True) as region:
        ready.set()
        done.wait()
        network(torch.ones(2, 4))
    thread.join()
    assert len(region.trace) == 4


def test_attributes_and_sizes_are_no_operations():
    x = torch.ones(2, 3)
    with autocast("cpu", trace=True) as region:
        x.shape, x.dtype, x.T, x.size(), x.dim(), x.grad, len(x), x.is_floating_point()
        torch.ones(2)
    assert region.trace == []


def test_both_passes_of_a_checkpoint():
    import torch._dynamo

    network = model()
    with autocast("cpu", BF16, trace=True) as region:
        y = checkpoint(network, torch.ones(2, 4, requires_grad=True), use_reentrant=True)
    forward = [call.op for call in region.trace if call.policy]
    y.float().sum().backward()
    assert [call.op for call in region.trace if call.policy] == forward * 2 == ["linear"] * 4
