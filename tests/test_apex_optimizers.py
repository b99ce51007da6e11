"""Master weights: against a loop written by hand, and everything an optimizer is used for."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_lab import apex as amp
from amp_lab.tasks import digits

SGD = {"lr": 0.05, "momentum": 0.9}


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(steps: int):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator)


def train_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.detach()


def by_hand(model, make_optimizer, steps, scale, dtype=torch.float16):
    """Mixed precision with master weights, as section 3 of "Mixed Precision Training" has it."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    model.to(dtype)
    for norm in norms:
        norm.float()
    low = list(model.parameters())
    masters = [p.detach().clone().float() for p in low]
    optimizer = make_optimizer(masters)
    losses = []
    for inputs, targets in steps:
        loss = F.cross_entropy(model(inputs.to(dtype)).float(), targets)
        model.zero_grad()
        (loss * scale).backward()
        for p, master in zip(low, masters, strict=True):
            master.grad = p.grad.float() / scale
        optimizer.step()
        for p, master in zip(low, masters, strict=True):
            p.data.copy_(master)
        losses.append(loss.detach())
    return losses, masters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_master_weights_equal_a_loop_written_by_hand(make, dtype):
    def make_optimizer(params):
        return make(params, lr=0.01, weight_decay=0.01)

    # Batch norm's float32 parameters are part of the loop: rounded nowhere, stepped directly.
    torch.manual_seed(0)
    model = small_model()
    reference = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", cast_model_type=dtype, verbosity=0
    )
    losses = [train_step(model, optimizer, *batch) for batch in batches(30)]
    expected_losses, masters = by_hand(reference, make_optimizer, batches(30), 2.0**16, dtype)
    assert losses == expected_losses
    for ours, theirs in zip(amp.master_params(optimizer), masters, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.dtype == q.dtype
        assert torch.equal(p, q)


def test_master_weights_equal_a_loop_written_by_hand_on_the_digits():
    task = digits()
    model = task.fresh_model(device=torch.device("cpu"))
    reference = copy.deepcopy(model)
    optimizer = task.optimizer(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    steps = list(task.batches(20, device=torch.device("cpu")))
    losses = [train_step(model, optimizer, *batch) for batch in steps]
    expected_losses, masters = by_hand(reference, task.optimizer, steps, 2.0**16)
    assert losses == expected_losses
    pairs = zip(amp.master_params(optimizer), masters, strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def one_weight(level: str = "O2", **options):
    """A model `y = weight * x`, whose numbers can be followed by hand."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"loss_scale": 1024.0, "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **options)


def backward(model, optimizer, x, **options):
    with amp.scale_loss(model(torch.tensor([[x]])).sum(), optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def master(optimizer):
    (weight,) = amp.master_params(optimizer)
    return weight


def test_updates_too_small_for_half_precision_add_up_in_the_master_weight():
    model, optimizer = one_weight()
    for _ in range(4):
        optimizer.zero_grad()
        backward(model, optimizer, -(2.0**-12))
        optimizer.step()
    # 1 + 2^-12 is a quarter of an ulp (2^-10): each update alone would be lost in float16.
    assert master(optimizer).item() == 1 + 2.0**-10
    assert model.weight.dtype == torch.float16
    assert model.weight.item() == 1 + 2.0**-10


def test_master_gradients_are_unscaled_and_half_gradients_stay_scaled():
    model, optimizer = one_weight()
    backward(model, optimizer, 0.5)
    assert model.weight.grad.item() == 512.0
    assert master(optimizer).grad.item() == 0.5


def test_clipping_the_master_weights_is_clipping():
    model, optimizer = one_weight()
    backward(model, optimizer, 0.5)
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.25)
    optimizer.step()
    assert norm.item() == 0.5
    assert model.weight.item() == pytest.approx(0.75)


def test_clipping_the_models_parameters_sees_scaled_gradients_and_changes_nothing():
    model, optimizer = one_weight()
    backward(model, optimizer, 0.5)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    assert norm.item() == 512.0
    assert model.weight.item() == 0.5


def test_without_master_weights_the_models_gradients_are_unscaled():
    for level in ("O0", "O3"):
        model, optimizer = one_weight(level)
        backward(model, optimizer, 0.5)
        assert master(optimizer) is model.weight
        assert model.weight.grad.item() == 0.5


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_gradients_accumulate_over_backward_passes(level):
    model, optimizer = one_weight(level)
    for x in (0.25, 0.5, 1.0):
        backward(model, optimizer, x)
    assert master(optimizer).grad.item() == 1.75


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_gradients_accumulate_with_delay_unscale(level):
    model, optimizer = one_weight(level)
    backward(model, optimizer, 0.25, delay_unscale=True)
    backward(model, optimizer, 0.5, delay_unscale=True)
    assert model.weight.grad.item() == 0.75 * 1024
    backward(model, optimizer, 1.0)
    assert master(optimizer).grad.item() == 1.75
    optimizer.step()
    assert model.weight.item() == 1 - 1.75


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_delayed_after_undelayed_adds_unscaled_to_unscaled(level):
    model, optimizer = one_weight(level)
    backward(model, optimizer, 0.25)
    backward(model, optimizer, 0.5, delay_unscale=True)
    backward(model, optimizer, 1.0)
    assert master(optimizer).grad.item() == 1.75


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_model_and_master_gradients(set_to_none):
    model, optimizer = one_weight()
    optimizer.zero_grad(set_to_none)  # before there are any
    backward(model, optimizer, 0.5)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert master(optimizer).grad is None
    if set_to_none:
        assert model.weight.grad is None
    else:
        assert model.weight.grad.item() == 0
    backward(model, optimizer, 0.25)
    assert master(optimizer).grad.item() == 0.25


def test_zero_grad_clears_float32_parameters_too():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train_step(model, optimizer, *next(batches(1)))
    optimizer.zero_grad()
    assert all(p.grad is None for p in [*model.parameters(), *amp.master_params(optimizer)])


def test_models_zero_grad_suffices():
    """The step itself clears the master gradients, which the model does not know."""
    model, optimizer = one_weight()
    for _ in range(2):
        model.zero_grad()
        backward(model, optimizer, 0.25)
        optimizer.step()
    assert model.weight.item() == 0.5


def test_master_weights_are_made_when_first_needed():
    """Weights that are loaded or broadcast after `initialize` must count."""
    model, optimizer = one_weight()
    assert master(optimizer) is model.weight
    model.weight.data.fill_(3.0)
    backward(model, optimizer, 1.0)
    assert master(optimizer) is not model.weight
    optimizer.step()
    assert model.weight.item() == 2.0


def test_parameters_without_a_gradient_are_left_alone():
    model, optimizer = one_weight()
    spare = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": spare})
    backward(model, optimizer, 0.5)
    optimizer.step()
    assert spare.grad is None
    assert spare.tolist() == [1.0, 1.0]


def test_a_weight_frozen_at_first_and_trained_later():
    model = small_model()
    first = model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    before = first.weight.clone()
    train_step(model, optimizer, *next(batches(1)))
    assert torch.equal(first.weight, before)
    first.requires_grad_(True)
    train_step(model, optimizer, *next(batches(1)))
    assert not torch.equal(first.weight, before)


@pytest.mark.parametrize("how", ["tensor", "list", "generator", "named"])
def test_add_param_group_before_and_after_the_first_step(how):
    torch.manual_seed(0)
    base, head = nn.Linear(4, 8), nn.Linear(8, 3)
    if how == "named":
        optimizer = torch.optim.SGD(base.named_parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(base.parameters(), lr=0.1)
    [base, head], optimizer = amp.initialize(
        [base, head], optimizer, opt_level="O2", loss_scale=128.0, verbosity=0
    )
    groups = {
        "tensor": [{"params": head.weight, "lr": 0.2}, {"params": head.bias, "lr": 0.2}],
        "list": [{"params": list(head.parameters()), "lr": 0.2}],
        "generator": [{"params": (p for p in head.parameters()), "lr": 0.2}],
        "named": [{"params": list(head.named_parameters("head.")), "lr": 0.2}],
    }[how]
    for group in groups:
        optimizer.add_param_group(group)
    masters = list(amp.master_params(optimizer))
    assert len(masters) == 4
    assert all(m.dtype == torch.float32 for m in masters)
    before = head.weight.clone()
    inputs, targets = next(batches(1))
    train_step(nn.Sequential(base, head), optimizer, inputs, targets)
    assert head.weight.dtype == torch.float16
    assert not torch.equal(head.weight, before)
    assert torch.equal(head.weight, masters[2].half())
    assert optimizer.param_groups[-1]["lr"] == 0.2


def test_add_param_group_refuses_what_is_there_already():
    model, optimizer = one_weight()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.weight]})
    with pytest.raises(TypeError, match="float64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1).double())]})
    assert len(optimizer.param_groups) == 1


def test_optimizer_state_from_before_is_kept_exactly():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    inputs, targets = next(batches(1))
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    optimizer.zero_grad()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer.zero_grad()
    for p, momentum in zip(amp.master_params(optimizer), momenta, strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], momentum)
    amp.reset()
    for p, momentum in zip(model.parameters(), momenta, strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], momentum)


def test_optimizer_state_from_before_becomes_half_under_o3_and_float32_again():
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = next(batches(1))
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert {optimizer.state[p]["exp_avg"].dtype for p in model.parameters()} == {torch.float16}
    amp.reset()
    assert {optimizer.state[p]["exp_avg"].dtype for p in model.parameters()} == {torch.float32}


def test_master_weights_saved_and_loaded_as_nvidias_examples_did():
    """Their checkpoints held `list(amp.master_params(optimizer))` beside the state dicts."""
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for batch in batches(3):
        train_step(model, optimizer, *batch)
    saved = {
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "master params": [p.detach().clone() for p in amp.master_params(optimizer)],
    }
    amp.reset()
    model = small_model(seed=1)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(saved["optimizer"])
    for param, value in zip(amp.master_params(optimizer), saved["master params"], strict=True):
        param.data.copy_(value.data)
        assert optimizer.state[param]["exp_avg"].dtype == torch.float32
    train_step(model, optimizer, *next(batches(1)))
    for p, m in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert torch.equal(p, m.to(p.dtype))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("scheduler_first", [True, False])
def test_learning_rate_schedulers_work_and_do_not_warn(level, scheduler_first):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if scheduler_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
    )
    if not scheduler_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches(2):
            train_step(model, optimizer, *batch)
            scheduler.step()
        amp.reset()
        before = model[0].weight.clone()
        optimizer.zero_grad()
        inputs, targets = next(batches(1))
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    assert not torch.equal(model[0].weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_master_params_yields_every_group():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=0.1)
    yielded = amp.master_params(optimizer)
    assert next(yielded) is a
    assert next(yielded) is b
