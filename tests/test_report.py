"""The report: its numbers against real casts, and that it leaves everything as it was."""

import json
import math
import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from amp_lab import BF16, FP8_E5M2, FP16, precision_report, tasks
from amp_lab.experiments import necessity


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(16, 6, generator=g), torch.randint(0, 3, (16,), generator=g)


def loss_of(model, b):
    return F.cross_entropy(model(b[0]), b[1])


def task_report(task, model, **options):
    return precision_report(
        model, lambda m, b: task.loss(m(b[0]), b[1]), *task.batches(2, seed=7), **options
    )


# Nothing is changed


def snapshot(model):
    return (
        deepcopy(model.state_dict()),
        [
            (id(p), id(p.grad), None if p.grad is None else p.grad.clone())
            for p in model.parameters()
        ],
        [(id(b), b.clone()) for b in model.buffers()],
        [m.training for m in model.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        [len(p._backward_hooks or {}) for p in model.parameters()],
        [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()],
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].copy(),  # noqa: NPY002 (the global state is the subject)
    )


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def noisy_loss(model, b):
    random.random()
    np.random.rand()  # noqa: NPY002
    model[2].eval()
    return loss_of(model, b)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_everything_is_as_it_was(with_gradients):
    model = net()
    if with_gradients:
        loss_of(model, batch()).backward()
    optimizer = torch.optim.Adam(model.parameters())
    before, optimizer_before = snapshot(model), deepcopy(optimizer.state_dict())
    precision_report(model, noisy_loss, batch(), batch(1), optimizer=optimizer)
    assert same(snapshot(model), before)
    assert same(optimizer.state_dict(), optimizer_before)


@pytest.mark.parametrize("where", ["forward", "second batch", "backward"])
def test_everything_is_as_it_was_after_an_error(where):
    model = net()
    loss_of(model, batch()).backward()
    before, calls = snapshot(model), []

    def failing(model, b):
        calls.append(b)
        if where == "second batch" and len(calls) == 2:
            raise KeyError("mine")
        loss = noisy_loss(model, b)
        if where == "forward":
            raise KeyError("mine")
        if where == "backward":
            loss.register_hook(lambda _: [][0])
        return loss

    with pytest.raises((KeyError, IndexError)):
        precision_report(model, failing, batch(), batch(1))
    assert same(snapshot(model), before)


def test_buffers_that_the_model_replaces_or_adds_are_put_back():
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 1)
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x):
            self.seen = self.seen + x.sum(0)
            self.register_buffer("new", torch.ones(1))
            return self.linear(x)

    model = Replacing()
    kept = model.seen
    precision_report(model, lambda m, b: m(b[0]).sum(), batch())
    assert model.seen is kept
    assert not kept.any()
    assert not hasattr(model, "new")


def test_gradients_are_given_up_and_other_hooks_stay():
    model, alive, called = net(), [], []
    model[0].register_forward_hook(lambda *_: called.append(1))

    def loss(m, b):
        alive.append([p.grad is not None for p in m.parameters()])
        return loss_of(m, b)

    precision_report(model, loss, batch(), batch(1))
    assert not any(map(any, alive))
    loss_of(model, batch())
    assert len(called) == 3


def test_no_two_gradients_are_alive_at_a_time():
    """In the pass itself: when a gradient arrives, those before it have been given up."""
    model, alive = net(), []
    for parameter in model.parameters():
        parameter.register_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    precision_report(model, loss_of, batch(), learning_rate=0.1)
    assert len(alive) == 6
    assert max(alive) == 0


def test_no_grad_autocast_and_modes_around_it_change_nothing():
    plain = precision_report(net().eval(), loss_of, batch()).to_dict()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert precision_report(net().eval(), loss_of, batch()).to_dict() == plain


# The numbers


def test_shares_are_those_of_really_casting():
    task = tasks.counting()
    model = tasks.train(task, steps=10, device=torch.device("cpu")).model
    [b] = task.batches(1)
    report = precision_report(model, lambda m, b: task.loss(m(b[0]), b[1]), b)
    outputs = {}
    for name, module in model.named_children():

        def keep(_module, _inputs, output, name=name):
            output.retain_grad()
            outputs[name] = output

        module.register_forward_hook(keep)
    model.zero_grad()
    task.loss(model(b[0]), b[1]).backward()
    gradients = {name: out.grad for name, out in outputs.items()}
    for rows, wanted in (
        (report.activation_gradients, gradients),
        (report.weight_gradients, {n: p.grad for n, p in model.named_parameters()}),
    ):
        assert {row.name for row in rows} == set(wanted)
        for row in rows:
            g = wanted[row.name]
            g = g[g != 0].abs()
            half = g.half()
            zero = half == 0
            assert row.largest == g.max()
            assert row.nonzero == g.numel()
            assert row.flushed == pytest.approx(zero.double().mean().item())
            small = (half > 0) & (half < FP16.smallest_normal)
            assert row.overflowing == 0
            assert row.subnormal == pytest.approx(small.double().mean().item())
            lost = (g[zero].double().sum() / g.double().sum()).item()
            assert row.lost == pytest.approx(lost, rel=0.25, abs=1e-4)


def test_the_share_that_overflows_is_that_of_really_casting():
    model = nn.Linear(1, 64, bias=False)
    spread = torch.logspace(10, 22, 64, base=2)
    report = precision_report(model, lambda m, b: (m(b)[0] * spread).sum(), torch.ones(1, 1))
    [row] = report.activation_gradients
    assert row.overflowing == spread.half().isinf().double().mean().item() > 0.4
    assert report.verdict == "needed"  # a scale below 1 mends it
    assert report.scale_window[1] < 1


@pytest.mark.parametrize("fmt", [FP16, FP8_E5M2, BF16])
def test_the_window_is_where_really_scaling_is_good(fmt):
    """The lower end to within what rounding sums to binades can shift it: one power of two."""
    model = nn.Linear(1, 64, bias=False)
    spread = torch.logspace(-30, -3, 64, base=2)

    report = precision_report(
        model, lambda m, b: (m(b)[0] * spread).sum(), torch.ones(1, 1), dtype=fmt
    )
    low, high = report.judgement.window
    assert fmt.round(spread.double() * 2.0**high).isfinite().all()
    # 2^127 is the largest scale there is.
    assert high == 127 or not fmt.round(spread.double() * 2.0 ** (high + 1)).isfinite().all()

    def lost(k):
        gone = fmt.round(spread.double() * 2.0**k) == 0
        return (spread[gone].sum() / spread.sum()).item()

    assert lost(low + 1) <= 0.01
    assert lost(low - 2) > 0.01
    assert report.scale_window == (2.0**low, 2.0**high)


def test_verdicts_and_reasons():
    good = precision_report(net(), loss_of, batch())
    assert good.verdict == "not needed"
    small = precision_report(net(), lambda m, b: loss_of(m, b) * 1e-7, batch())
    assert small.verdict == "needed"
    assert small.scale_window[0] > 1
    assert small.beside[0] == BF16
    assert small.beside[1].verdict == "not needed"
    large = precision_report(net(), lambda m, b: loss_of(m, b) * 1e7, batch())
    assert large.verdict == "needed"
    assert large.scale_window[1] < 1
    assert "below 1" in str(large)


def test_no_scale_where_gradients_are_too_far_apart():
    model = nn.ModuleDict({"far": nn.Linear(6, 1), "near": nn.Linear(6, 1)})

    def loss(m, b):
        return m["far"](b[0]).sum() * 1e-10 + m["near"](b[0]).sum() * 1e3

    report = precision_report(model, loss, batch())
    assert report.verdict == "not enough"
    assert report.scale_window is None
    low, high = report.judgement.blame
    assert low == "far"
    assert high.startswith("near")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("make", "steps", "verdict"),
    [
        (tasks.counting, 100, "needed"),
        (tasks.digits, 150, "not needed"),
        (tasks.fine_tuning, 50, "not needed"),
    ],
)
def test_verdict_agrees_with_training(make, steps, verdict, seed):
    """At the start, in between and at the end; fresh counting starts with an empty last layer."""
    task = make()
    for n in (1, steps // 3, steps):
        model = tasks.train(task, steps=n, seed=seed, device=torch.device("cpu")).model
        assert task_report(task, model).verdict == verdict, n


def test_swallowed_updates_of_the_fine_tuning_task():
    task = tasks.fine_tuning()
    model = task.fresh_model(device=torch.device("cpu"))
    report = task_report(task, model, optimizer=task.optimizer(model.parameters()))
    assert report.swallowed > 0.9
    assert task_report(task, model, learning_rate=1e-2).swallowed < 0.01
    assert task_report(task, model).swallowed is None
    assert necessity.MODES["half weights + GradScaler"].half_weights


# What the format does not hold


class Masked(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.project, self.how = nn.Linear(6, 6), how
        self.register_buffer("bias", torch.full((6, 6), -1e9).triu(1))

    def forward(self, x):
        scores = self.project(x) @ x.T
        mask = torch.ones(scores.shape, dtype=torch.bool).triu(1)
        if self.how == "fill":
            scores = scores.masked_fill(mask, -1e9)
        elif self.how == "whole number":
            scores = scores.masked_fill(mask, -(10**9))
        elif self.how == "smallest":
            scores = scores.masked_fill(mask, torch.finfo(torch.float32).min)
        elif self.how == "infinity":
            scores = scores.masked_fill(mask, -math.inf)
        elif self.how == "buffer":
            scores = scores + self.bias
        elif self.how == "two":
            lowest = torch.finfo(torch.float16).min
            one = torch.zeros(scores.shape).masked_fill(mask, lowest)
            scores = scores + (one + one)
        return scores.softmax(-1)


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("fill", -1e9),
        ("whole number", -1e9),
        ("smallest", torch.finfo(torch.float32).min),
        ("buffer", -1e9),
        ("two", -131008.0),
        ("infinity", None),
        ("none", None),
    ],
)
def test_masks(how, value):
    report = precision_report(Masked(how), lambda m, b: m(b[0][:6]).pow(2).sum(), batch())
    found = {c.value for c in report.constants}
    assert found == (set() if value is None else {value})
    assert all(c.becomes == -math.inf for c in report.constants)
    if how == "fill":
        [c] = report.constants
        assert c.place == "masked_fill in Masked"
        assert c.under_autocast
        assert "-1e+09" in str(report)


def test_epsilons():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.LayerNorm(6, eps=1e-12), nn.Linear(6, 1)

        def forward(self, x):
            x = self.out(self.norm(x))
            return x / (x.abs() + 1e-8) + F.normalize(x, eps=1e-5).clamp(min=1e-30)

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
    report = precision_report(model, lambda m, b: m(b[0]).sum(), batch(), optimizer=optimizer)
    found = {(c.value, c.place, c.under_autocast) for c in report.constants}
    assert found == {
        (1e-12, "layer_norm in norm", False),
        (1e-8, "add in Model", True),
        (1e-30, "clamp in Model", False),
        (1e-8, "eps of Adam", False),
    }
    assert all(c.becomes == 0 for c in report.constants)


def test_sizes_and_probabilities_are_no_constants():
    def loss(m, b):
        x = torch.zeros(70_000).view(70_000).expand(2, 70_000)
        return F.dropout(m(b[0]), 0.1).sum() + x.sum()

    assert precision_report(nn.Linear(6, 1), loss, batch()).constants == []


# What overflows


def test_an_activation_beyond_the_range():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    nn.init.constant_(model[0].bias, 1e5)
    report = precision_report(model, lambda m, b: m(b[0]).mean(), batch())
    assert report.verdict == "not enough"
    assert set(report.overflows) == {
        "input of linear in 0",  # the bias
        "result of linear in 0",
        "result of relu in 1",
    }
    assert report.headroom["0"] < 0
    assert report.beside[1].verdict == "not needed"


def test_what_autocast_computes_in_float32_may_be_large():
    def energy(m, b):
        return (m(b[0]) * 300).pow(2).sum() * 1e-3

    report = precision_report(nn.Linear(6, 16), energy, batch())
    assert report.overflows == {}
    assert report.verdict != "not enough"


def test_what_a_product_takes_may_not():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 1)
            nn.init.constant_(self.norm.weight, 1e6)
            nn.init.constant_(self.out.weight, 1e-6)

        def forward(self, x):
            return self.out(self.norm(x))

    report = precision_report(Model(), lambda m, b: m(b[0]).mean(), batch())
    assert list(report.overflows) == ["input of linear in out"]


def test_values_in_the_last_half_ulp_do_not_overflow():
    model = nn.Linear(1, 1, bias=False)
    for value, overflows in ((65519.0, False), (65520.0, True)):
        nn.init.constant_(model.weight, value)
        report = precision_report(model, lambda m, b: m(b).sum(), torch.ones(1, 1))
        assert bool(report.overflows) is overflows


def test_overflow_inside_of_a_module_names_the_operation():
    """Sums of squares by hand: mul is on no list of autocast, and runs in its inputs' dtype."""

    class Standardise(nn.Module):
        def forward(self, x):
            mean = x.mean(-1, keepdim=True)
            return (x - mean) / ((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5).sqrt()

    model = nn.Sequential(nn.Linear(6, 6), Standardise(), nn.Linear(6, 1))
    nn.init.constant_(model[0].bias, 300.0)
    report = precision_report(model, lambda m, b: m(b[0]).mean(), batch())
    assert report.headroom["1"] > 10
    assert set(report.overflows) == {"result of mul in 1", "result of mean in 1"}
    assert report.verdict == "not enough"


def test_weights_that_the_format_rounds_to_zero():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    with torch.no_grad():
        model[0].weight[:3] *= 1e-9
        model[1].bias.zero_()
    report = precision_report(model, lambda m, b: m(b[0]).mean(), batch())
    assert report.weights_flushed == {"0.weight": 0.5}
    assert "50% of 0.weight is zero in FP16" in str(report)


def test_what_is_made_of_other_operations_is_seen_through():
    class Products(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.linear, self.how = nn.Linear(6, 6), how

        def forward(self, x):
            y = self.linear(x) * 300
            return self.how(y) * 1e-6

    for how in (lambda y: y @ y.T, lambda y: torch.einsum("ik,jk->ij", y, y)):
        report = precision_report(Products(how), lambda m, b: m(b[0] * 10).mean(), batch())
        assert report.verdict == "not enough"
        assert any(place.startswith("result of") for place in report.overflows)


def test_attention_is_seen_through():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        attention.in_proj_weight *= 300
    x = torch.randn(2, 5, 8) * 300
    report = precision_report(attention, lambda m, b: m(b, b, b)[0].mean(), x)
    assert "result of linear in MultiheadAttention" in report.overflows


def test_batch_norm_keeps_half_precision():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            out = self.norm(self.conv(x)) * 300
            return (out * out).mean((1, 2, 3)) * 1e-6

    report = precision_report(Residual(), lambda m, b: m(b).mean(), torch.randn(2, 3, 8, 8))
    assert list(report.overflows) == ["result of mul in Residual", "result of mean in Residual"]


def test_gradients_that_stay_in_float32_are_not_judged():
    """A model that returns its loss: the gradient of the loss is 1, whatever it is scaled by."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.log_variance = nn.Linear(6, 6), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            error = F.mse_loss(self.linear(x) * 1e-5, torch.full_like(x, 1e-5))
            return error * (-self.log_variance).exp() + self.log_variance

    report = precision_report(WithLoss(), lambda m, b: m(b[0]), batch())
    halves = {r.name for r in (*report.activation_gradients, *report.weight_gradients) if r.half}
    assert halves == {"linear", "linear.weight", "linear.bias"}
    assert report.verdict == "needed"
    assert report.judgement.window[1] > 20


def test_a_power_of_two_on_the_edge_is_flushed():
    def gradient(value):
        model = nn.Linear(2, 1, bias=False)
        return precision_report(model, lambda m, b: m(b).sum() * value, torch.ones(1, 2))

    edge = gradient(2.0**-25)
    assert edge.verdict == "needed"
    assert edge.judgement.window[0] == 1
    [row] = edge.activation_gradients
    assert (row.flushed, row.lost) == (1.0, 1.0)
    assert gradient(2.0**-25 * 1.001).judgement.window[0] == 0
    assert gradient(2.0**-140).verdict == "needed"  # a subnormal number of float32


def test_a_mask_given_to_attention_is_meant():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(6, 6)

        def forward(self, x):
            y = self.project(x)[None]
            mask = torch.full((len(x), len(x)), -1e9).triu(1)
            return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)

    report = precision_report(Attention(), lambda m, b: m(b[0]).pow(2).mean(), batch())
    assert report.overflows == {}
    assert [c.value for c in report.constants] == [-1e9]


def test_whole_numbers_written_into_a_tensor():
    def loss(m, b):
        scores = m(b[0]) + 0
        scores[b[0] > 0] = -(10**9)
        return scores.softmax(-1)[:, 0].mean()

    report = precision_report(nn.Linear(6, 6), loss, batch())
    assert [(c.value, c.under_autocast) for c in report.constants] == [(-1e9, True)]


def test_factors_and_divisors_are_no_constants():
    def loss(m, b):
        return (m(b[0]) / 1e6 * 1e6).mean() * 1e-9 + 1.0 / (500000.0 ** m(b[0])).mean()

    assert precision_report(nn.Linear(6, 6), loss, batch()).constants == []


@pytest.mark.parametrize("kind", ["expanded", "inference", "resized", "max_norm", "clipped"])
def test_whatever_the_model_writes_is_undone(kind):
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 6, max_norm=1.0 if kind == "max_norm" else None)
            self.out = nn.Linear(6, 3)
            with torch.inference_mode(kind == "inference"):
                buffer = torch.zeros(1)
            self.register_buffer("seen", buffer.expand(3) if kind == "expanded" else buffer)

        def forward(self, x):
            if kind == "resized":
                self.seen.resize_(5).fill_(1.0)
            if kind == "clipped":
                with torch.no_grad():
                    self.out.weight.clamp_(-0.01, 0.01)
            self.out.bias.requires_grad_(False)
            return self.out(self.embed(x))

    model = Writing()
    model.out.weight.grad = torch.ones(3, 6)
    before = snapshot(model)
    tokens = torch.arange(9)
    precision_report(model, lambda m, b: m(b).mean(), tokens)
    assert same(snapshot(model), before)
    assert model.out.bias.requires_grad


def test_an_optimizer_in_the_backward_pass_does_not_train():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = snapshot(model)
    report = precision_report(model, loss_of, batch(), optimizer=optimizer)
    assert same(snapshot(model), before)
    assert "weight" in report.updates
    loss_of(model, batch()).backward()
    assert not torch.equal(model.weight, before[0]["weight"])


def test_first_non_finite():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
    nn.init.constant_(model[1].bias, math.inf)
    report = precision_report(model, lambda m, b: m(b[0]).mean(), batch())
    assert report.first_non_finite == "the output of 1"
    assert report.verdict == "not enough"
    assert "1" in str(report)
    json.loads(json.dumps(report.to_dict(), allow_nan=False))
    report = precision_report(net(), lambda m, b: loss_of(m, b) / 0, batch())
    assert report.first_non_finite == "the loss"
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    report = precision_report(model, lambda m, b: (m(b[0]) * 0).sqrt().sum(), batch())
    assert report.first_non_finite == "the gradient at 1"


# Models of every kind


def test_tied_unused_frozen_and_twice_called():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight
            self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(6, 6)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.b(self.a(self.frozen(self.a(x))))

    model = Model()
    report = precision_report(
        model, lambda m, b: m(b[0]).sum(), batch(), optimizer=torch.optim.Adam(model.parameters())
    )
    assert {r.name for r in report.weight_gradients} == {"a.weight", "a.bias", "b.bias"}
    assert set(report.updates) == {"a.weight", "a.bias", "b.bias"}
    assert model.frozen.weight.grad is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, x):
            return self.b(checkpoint(self.a, x.requires_grad_(), use_reentrant=reentrant))

    torch.manual_seed(0)
    model = Model()
    report = precision_report(model, lambda m, b: m(b[0].clone()).sum(), batch())
    assert {r.name for r in report.weight_gradients} == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert {r.name for r in report.activation_gradients} >= {"a", "b"}


def test_sparse_integer_inputs_dict_batches_several_outputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(50, 6, sparse=True), nn.Linear(6, 3)

        def forward(self, tokens, scale):
            h = self.embed(tokens)
            return {"logits": self.out(h.mean(1)) * scale, "hidden": (h, h.sum())}

    def loss(m, b):
        out = m(b["tokens"], scale=b["scale"])
        return F.cross_entropy(out["logits"], b["labels"]) + out["hidden"][1] * 1e-3

    b = {"tokens": torch.randint(0, 50, (4, 7)), "labels": torch.tensor([0, 1, 2, 0]), "scale": 1.0}
    model = Model()
    for options in (
        {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)},
        {"learning_rate": 1e-3},
    ):
        report = precision_report(model, loss, b, **options)
        assert "embed.weight" in report.updates
        assert {"embed", "out", "Model"} <= set(report.activations)


def test_recurrent_and_attention_modules():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(6, 8, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            return self.out(self.encoder(self.gru(x)[0]).mean(1))

    report = precision_report(Model(), lambda m, b: m(b[0].view(4, 4, 6)).pow(2).mean(), batch())
    assert report.verdict == "not needed"
    assert "encoder.linear1" in {r.name for r in report.activation_gradients}


def test_a_compiled_model():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    compiled = torch.compile(model, backend="eager")
    report = precision_report(compiled, loss_of, batch())
    assert "_orig_mod.0" in report.activations
    assert report.verdict == "not needed"


def test_complex_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.spectrum = nn.Parameter(torch.randn(6, dtype=torch.complex64))
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            return self.out((x * self.spectrum).abs())

    report = precision_report(Model(), loss_of, batch(), learning_rate=1e-3)
    assert {r.name for r in report.weight_gradients} == {"spectrum", "out.weight", "out.bias"}
    assert set(report.updates) == {"out.weight", "out.bias"}


def test_masks_of_infinity_between_modules_are_meant():
    class Scores(nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.eye(len(x), x.shape[1]).bool(), -math.inf)

    model = nn.Sequential(nn.Linear(6, 6), Scores(), nn.Softmax(-1))
    report = precision_report(model, lambda m, b: m(b[0]).pow(2).sum(), batch())
    assert report.first_non_finite is None
    assert report.verdict == "not needed"
    assert report.headroom["1"] == -math.inf


def test_an_optimizer_of_a_part_of_the_model():
    model = net()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
    report = precision_report(model, loss_of, batch(), optimizer=optimizer)
    assert set(report.updates) == {"4.weight", "4.bias"}


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_swallowed_is_what_really_stepping_shows(name, steps):
    """Two groups, fresh or in mid-training, against the optimizer's own next step."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    groups = [{"params": list(model[i].parameters()), "lr": lr} for i, lr in ((0, 1e-5), (2, 1e-4))]
    optimizer = OPTIMIZERS[name](groups)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch()).backward()
        optimizer.step()
    optimizer.zero_grad()
    state = deepcopy(optimizer.state_dict())
    report = precision_report(model, loss_of, batch(1), batch(), optimizer=optimizer)
    assert same(optimizer.state_dict(), state)
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, batch()).backward()
    optimizer.step()
    for (parameter, p), old in zip(model.named_parameters(), before, strict=True):
        update = p.detach().double() - old.double()
        half = old.half().double()
        stays = (half + update).half().double() == half
        wanted = int((stays & (update != 0)).sum()), int((update != 0).sum())
        assert report.updates[parameter] == wanted


# Errors


def test_errors_say_what_to_do():
    model = net()
    loader = DataLoader(TensorDataset(*batch()), batch_size=4)
    for message, kind, call in (
        ("at least one batch", ValueError, lambda: precision_report(model, loss_of)),
        ("islice", TypeError, lambda: precision_report(model, loss_of, loader)),
        ("islice", TypeError, lambda: precision_report(model, loss_of, iter([batch()]))),
        ("tolerance", ValueError, lambda: precision_report(model, loss_of, batch(), tolerance=1)),
        (
            "either",
            ValueError,
            lambda: precision_report(
                model,
                loss_of,
                batch(),
                optimizer=torch.optim.SGD(model.parameters(), lr=1),
                learning_rate=1,
            ),
        ),
        ("float32", ValueError, lambda: precision_report(net().half(), loss_of, batch())),
        ("scalar", ValueError, lambda: precision_report(model, lambda m, b: m(b[0]), batch())),
        ("scalar", ValueError, lambda: precision_report(model, lambda m, b: 1.0, batch())),
        (
            "requires a gradient",
            ValueError,
            lambda: precision_report(model, lambda m, b: torch.tensor(1.0), batch()),
        ),
        ("once", ValueError, lambda: precision_report(nn.LazyLinear(3), loss_of, batch())),
        ("nn.Module", TypeError, lambda: precision_report(loss_of, loss_of, batch())),
        (
            "beyond",
            ValueError,
            lambda: precision_report(model, loss_of, batch(), dtype=torch.float64),
        ),
        (
            "complex",
            ValueError,
            lambda: precision_report(model, lambda m, b: m(b[0]).sum() * 1j, batch()),
        ),
        ("no parameter", ValueError, lambda: precision_report(nn.ReLU(), loss_of, batch())),
        (
            "no format",
            ValueError,
            lambda: precision_report(model, loss_of, batch(), dtype=torch.int8),
        ),
        (
            "closure",
            ValueError,
            lambda: precision_report(
                model, loss_of, batch(), optimizer=torch.optim.LBFGS(model.parameters())
            ),
        ),
        (
            "made of this model",
            ValueError,
            lambda: precision_report(
                model, loss_of, batch(), optimizer=torch.optim.SGD(net().parameters(), lr=1)
            ),
        ),
    ):
        with pytest.raises(kind, match=message):
            call()
    assert all(p.grad is None for p in model.parameters())


# How it reads


@pytest.mark.parametrize("layers", [0, 1, 60])
def test_text_html_and_figure_of_any_size(layers):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.layers = nn.ModuleDict({f"<{i}>": nn.Linear(6, 6) for i in range(layers)})

        def forward(self, x):
            for layer in self.layers.values():
                x = x + layer(x)
            return (x * self.scale).tanh()

    report = precision_report(Scaled(), lambda m, b: m(b[0]).mean(), batch(), learning_rate=1e-3)
    lines = str(report).splitlines()
    assert lines[
        0
    ] == f"FP16 {'needs a' if report.verdict == 'needed' else 'needs no'} GradScaler: " + (
        f"{report.judgement.reason}."
    )
    assert any("more, with less lost" in line for line in lines) is (layers == 60)
    page = report._repr_html_()
    assert "<0>" not in page
    assert page.count("<details>") == 3
    assert page.count("&lt;0&gt;.weight") == (layers > 0)
    model = nn.ModuleDict({"a" * 99: nn.Linear(6, 1), "$x_{$": nn.Linear(6, 1)})
    named = precision_report(model, lambda m, b: sum(x(b[0]).sum() for x in m.values()), batch())
    assert named.figure()._repr_png_()
    picture = report.figure()
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert len(picture.axes[0].get_yticks()) == min(layers + 1, 40)
    assert repr(report) == f"PrecisionReport(FP16: GradScaler {report.verdict})"
