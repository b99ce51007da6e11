"""O1's casts: on from `initialize` or `init` until `reset`, off where asked, banned functions."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_lab import apex as amp
from amp_lab.autocast import autocast, is_autocast_enabled

HALF, FLOAT = torch.float16, torch.float32
X = torch.ones(2, 2)


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()


def o1(model=None, optimizer=None, **options):
    model = model or nn.Linear(2, 2)
    return amp.initialize(model, optimizer, opt_level="O1", **{"verbosity": 0, **options})


def test_casts_are_on_from_initialize_to_reset_outside_any_block():
    assert torch.mm(X, X).dtype == FLOAT
    o1()
    assert torch.mm(X, X).dtype == HALF
    assert (X @ X).dtype == HALF
    assert torch.softmax(X.half(), 0).dtype == FLOAT
    assert is_autocast_enabled("cpu")
    amp.reset()
    assert torch.mm(X, X).dtype == FLOAT
    assert torch.softmax(X.half(), 0).dtype == HALF
    assert not is_autocast_enabled("cpu")


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_other_levels_cast_around_no_function(level):
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    assert torch.mm(X, X).dtype == FLOAT
    with amp.disable_casts():
        assert torch.mm(X, X).dtype == FLOAT


def test_patch_torch_functions_false():
    o1(patch_torch_functions="False")
    assert torch.mm(X, X).dtype == FLOAT


def test_the_same_functions_are_cast_as_on_a_gpu():
    """torch's list for CPUs leaves exp, pow and layer_norm in half; the one for GPUs does not."""
    o1()
    half = X.half()
    for function in (torch.exp, torch.log, torch.sum, lambda x: x**2.0):
        assert function(half).dtype == FLOAT
    assert F.layer_norm(half, (2,)).dtype == FLOAT


def test_results_are_those_of_an_autocast_block():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    x = torch.randn(5, 4)
    with autocast("cpu", HALF, emulate=True):
        expected = model(x).log_softmax(-1)
    o1(model)
    assert torch.equal(model(x).log_softmax(-1), expected)


def test_disable_casts_and_its_nesting():
    o1()
    with amp.disable_casts():
        assert torch.mm(X, X).dtype == FLOAT
        with amp.disable_casts():
            assert torch.mm(X, X).dtype == FLOAT
        assert torch.mm(X, X).dtype == FLOAT
        assert not amp._amp_state.handle.is_active()
    assert torch.mm(X, X).dtype == HALF
    assert amp._amp_state.handle.is_active()


def test_casts_are_on_again_after_an_error():
    o1()
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        raise ZeroDivisionError
    assert torch.mm(X, X).dtype == HALF


def test_disable_casts_without_casts_does_nothing():
    with amp.disable_casts():
        assert torch.mm(X, X).dtype == FLOAT


def test_no_casts_inside_the_optimizers_step():
    seen = []

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(torch.mm(X, X).dtype)
            return super().step(closure)

    model = nn.Linear(2, 2)
    model, optimizer = o1(model, Optimizer(model.parameters(), lr=0.1))
    with amp.scale_loss(model(X).sum() / 1000, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert seen == [FLOAT]
    assert torch.mm(X, X).dtype == HALF


def test_a_weight_is_cast_once_and_anew_after_the_step():
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    model, optimizer = o1(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_scale=4.0)
    for expected in (1.0, 0.0, -1.0):
        output = model(torch.eye(2))
        assert output[0, 0].item() == expected
        with amp.scale_loss(output.trace(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_weights_changed_by_hand_are_seen_by_the_next_forward():
    model = o1(nn.Linear(2, 2, bias=False))
    model(X)
    nn.init.constant_(model.weight, 3.0)
    assert model(X)[0, 0].item() == 6.0


def test_evaluation_under_no_grad_does_not_spoil_training():
    model = nn.Linear(2, 2)
    model, optimizer = o1(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=4.0)
    with torch.no_grad():
        F.linear(X, model.weight)
    with amp.scale_loss(F.linear(X, model.weight).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert model.weight.grad.abs().sum() > 0


def test_banned_function_on_half():
    o1()
    probability, target = torch.full((2,), 0.5), torch.ones(2)
    assert F.binary_cross_entropy(probability, target).dtype == FLOAT
    with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(probability.half(), target)
    with pytest.raises(NotImplementedError, match="allow_banned=True"):
        nn.BCELoss()(probability.half(), target.half())
    assert F.binary_cross_entropy_with_logits(probability.half(), target).dtype == FLOAT
    amp.reset()
    assert F.binary_cross_entropy(probability.half(), target.half()).dtype == HALF


def test_init_is_the_old_form():
    handle = amp.init()
    assert handle.is_active()
    assert handle.has_cache
    assert torch.mm(X, X).dtype == HALF
    with handle.disable_casts():
        assert torch.mm(X, X).dtype == FLOAT
        assert not handle.is_active()
    amp.reset()
    assert torch.mm(X, X).dtype == FLOAT


def test_init_allow_banned():
    amp.init(allow_banned=True)
    probability, target = torch.full((2,), 0.5).half(), torch.ones(2).half()
    assert F.binary_cross_entropy(probability, target).dtype == HALF


def test_init_not_enabled():
    handle = amp.init(enabled=False)
    assert isinstance(handle, amp.NoOpHandle)
    assert not handle.is_active()
    assert not handle.has_cache
    assert torch.mm(X, X).dtype == FLOAT
    loss = torch.ones(1)
    with handle.scale_loss(loss, None) as same_loss:
        assert same_loss is loss
    with handle.disable_casts():
        pass
    weight = nn.Parameter(torch.ones(1))
    optimizer = handle.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    with optimizer.scale_loss(weight.sum()) as loss:
        loss.backward()
    optimizer.step()
    assert weight.item() == 0.0


def test_handle_scale_loss_names_its_successor():
    with pytest.raises(RuntimeError, match=r"scale_loss\(loss, optimizer\)"):
        amp.init().scale_loss(torch.ones(1), None)


@pytest.mark.parametrize("enable_caching", [True, False])
def test_the_handles_cast_cache(enable_caching):
    casts = []

    @amp.half_function
    def double(weight):
        casts.append(weight)
        return 2 * weight

    handle = amp.init(enable_caching=enable_caching)
    weight = nn.Parameter(torch.ones(1))
    double(weight)
    double(weight)
    assert (casts[0] is casts[1]) is enable_caching
    assert len(handle.cache) == int(enable_caching)
    handle.remove_cache(weight)
    handle.remove_cache(weight)
    assert len(handle.cache) == 0
    double(weight)
    handle.clear_cache()
    assert len(handle.cache) == 0
    with torch.no_grad():
        double(weight)
    double(weight).backward()
    assert weight.grad.item() == 2.0


def wrapped(num_loss=1):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    return weight, amp.init().wrap_optimizer(optimizer, num_loss)


def backward(optimizer, weight, gradient):
    with optimizer.scale_loss((weight * gradient).sum()) as scaled_loss:
        scaled_loss.backward()


def test_wrapped_optimizer_adds_up_its_losses_and_steps():
    weight, optimizer = wrapped(num_loss=2)
    assert optimizer.param_groups[0]["params"] == [weight]
    backward(optimizer, weight, 0.25)
    backward(optimizer, weight, 0.5)
    assert weight.grad.item() == 0.75
    optimizer.step()
    assert weight.item() == 0.25
    optimizer.zero_grad()
    backward(optimizer, weight, 0.25)
    optimizer.step()
    assert weight.item() == 0.0


def test_wrapped_optimizer_skips_on_overflow():
    weight, optimizer = wrapped(num_loss=2)
    backward(optimizer, weight, float("inf"))
    backward(optimizer, weight, 0.5)
    optimizer.step()
    assert weight.item() == 1.0
    optimizer.zero_grad()
    backward(optimizer, weight, 0.5)
    optimizer.step()
    assert weight.item() == 0.5
    with optimizer.scale_loss(weight.sum()) as scaled_loss:
        assert scaled_loss.item() == 0.5 * 2.0**15  # the first loss overflowed once


def test_wrapped_optimizer_errors():
    weight, optimizer = wrapped(num_loss=1)
    backward(optimizer, weight, 0.5)
    with pytest.raises(RuntimeError, match="num_loss=1"):
        backward(optimizer, weight, 0.5)
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: None)


def test_wrapped_optimizer_scales_nothing_while_casts_are_off():
    weight, optimizer = wrapped()
    with amp._amp_state.handle.disable_casts():
        with optimizer.scale_loss(weight.sum()) as loss:
            assert loss.item() == 1.0
            loss.backward()
        assert optimizer.step(lambda: 42) == 42
    assert weight.item() == 0.0


def test_verbosity_two_prints_what_is_cast(capsys):
    o1(verbosity=2)
    capsys.readouterr()
    torch.softmax(torch.mm(X, X), 0)
    torch.relu(X)
    assert capsys.readouterr().out.splitlines() == [
        "mm(float32, float32) -> torch.float16",
        "softmax(float16) -> torch.float32",
    ]
    amp.reset()
    torch.mm(X, X).half()
    assert capsys.readouterr().out == ""


def test_blocks_around_initialize_and_reset_end_as_they_should():
    """`with torch.device` is a mode of torch's, like the casts, and ends by leaving the top one."""
    with torch.device("meta"):
        o1(nn.Linear(2, 2, device="cpu"), verbosity=2)
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"
    assert torch.mm(X, X).dtype == HALF
    with torch.device("meta"):
        amp.reset()
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"
    assert torch.mm(X, X).dtype == FLOAT


def test_an_autocast_block_inside_has_the_last_word():
    o1()
    with autocast("cpu", torch.bfloat16, emulate=True):
        assert torch.mm(X, X).dtype == torch.bfloat16
    assert torch.mm(X, X).dtype == HALF


def test_initialize_twice_and_disable_casts():
    o1()
    o1()
    assert torch.mm(X, X).dtype == HALF
    with amp.disable_casts():
        assert torch.mm(X, X).dtype == FLOAT
    amp.reset()
    assert torch.mm(X, X).dtype == FLOAT
