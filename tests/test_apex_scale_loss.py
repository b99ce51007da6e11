"""`scale_loss`: scaling, overflow, skipped steps, several losses and optimizers, errors."""

import math

import pytest
import torch
from torch import nn

from amp_lab import apex as amp


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()


def one_weight(**options):
    """A model `y = weight * x` with weight 1 and learning rate 1, initialized."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return amp.initialize(model, optimizer, **{"opt_level": "O2", "verbosity": 0, **options})


def backward(model, optimizer, x, **options):
    """Backward of `weight * x`, whose gradient is `x`; that of the model's output is 1/4."""
    loss = model(torch.tensor([[4 * x]])).sum() / 4
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def scales():
    return [saved["loss_scale"] for saved in amp.state_dict().values()]


OVERFLOWS = 1.0  # times 2^16 is more than float16 holds
FITS = 0.25


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scaled_loss_is_float32_times_the_scale(dtype):
    _, optimizer = one_weight()
    with amp.scale_loss(torch.tensor(3.0, dtype=dtype), optimizer) as scaled_loss:
        assert scaled_loss.dtype == torch.float32
        assert scaled_loss.item() == 3 * 2.0**16


def test_loss_may_have_more_than_one_element():
    model, optimizer = one_weight(loss_scale=4.0)
    losses = model(torch.tensor([[1.0], [2.0]]))
    with amp.scale_loss(losses, optimizer) as scaled_losses:
        assert scaled_losses.tolist() == [[4.0], [8.0]]
        scaled_losses.backward(torch.ones(2, 1))
    optimizer.step()
    assert model.weight.item() == -2.0


@pytest.mark.parametrize("options", [{"opt_level": "O2"}, {"opt_level": "O3"}])
def test_overflow_halves_the_scale_and_skips_the_next_step_once(options, capsys):
    model, optimizer = one_weight(**{"loss_scale": "dynamic", **options, "verbosity": 1})
    capsys.readouterr()
    backward(model, optimizer, OVERFLOWS)
    assert scales() == [2.0**15]
    assert capsys.readouterr().out == ""
    optimizer.step()
    message = capsys.readouterr().out
    assert "overflow" in message
    assert "skipped" in message
    assert "loss scaler 0" in message
    assert "32768.0" in message
    assert model.weight.item() == 1.0

    optimizer.zero_grad()
    backward(model, optimizer, FITS)
    optimizer.step()
    assert capsys.readouterr().out == ""
    assert model.weight.item() == 1 - FITS


def test_skipped_step_clears_the_master_gradients():
    model, optimizer = one_weight()
    backward(model, optimizer, OVERFLOWS)
    optimizer.step()
    assert [p.grad for p in amp.master_params(optimizer)] == [None]


def test_skipped_step_leaves_the_optimizers_state():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    backward(model, optimizer, FITS)
    optimizer.step()
    steps = [optimizer.state[p]["step"].item() for p in amp.master_params(optimizer)]
    backward(model, optimizer, 100.0)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in amp.master_params(optimizer)] == steps


def test_verbosity_zero_skips_in_silence(capsys):
    model, optimizer = one_weight(verbosity=0)
    backward(model, optimizer, OVERFLOWS)
    optimizer.step()
    assert capsys.readouterr().out == ""
    assert model.weight.item() == 1.0


def test_scale_stays_within_min_and_max():
    model, optimizer = one_weight(min_loss_scale=2.0**15, max_loss_scale=2.0**16)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model, optimizer, 100.0)
        optimizer.step()
    assert scales() == [2.0**15]
    amp._amp_state.loss_scalers[0]._unskipped = 1999
    backward(model, optimizer, FITS)
    amp._amp_state.loss_scalers[0]._unskipped = 1999
    backward(model, optimizer, FITS)
    assert scales() == [2.0**16]


def test_static_scale_does_not_look_for_overflow():
    model, optimizer = one_weight(loss_scale=2.0**16)
    backward(model, optimizer, OVERFLOWS)
    optimizer.step()
    assert model.weight.item() == -math.inf


def test_scale_one_without_master_weights_takes_the_short_way():
    model, optimizer = one_weight(opt_level="O3")
    loss = model(torch.tensor([[FITS]])).sum().half()
    with amp.scale_loss(loss, optimizer) as same_loss:
        assert same_loss.dtype == torch.float32
        assert same_loss.item() == loss.item()
        same_loss.backward()
    assert model.weight.grad.item() == FITS
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 0  # no scaler was asked
    model, optimizer = one_weight(opt_level="O2", loss_scale=1.0)
    backward(model, optimizer, FITS)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


def test_closure_is_refused_under_master_weights():
    model, optimizer = one_weight()
    backward(model, optimizer, FITS)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)
    optimizer.step()
    assert model.weight.item() == 1 - FITS


def test_closure_is_refused_on_a_skipped_step_and_the_skip_is_still_to_come():
    model, optimizer = one_weight(opt_level="O3", loss_scale="dynamic")
    backward(model, optimizer, OVERFLOWS)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(closure=lambda: None)
    optimizer.step()
    assert model.weight.item() == 1.0


def test_closure_is_passed_on_otherwise():
    model, optimizer = one_weight(opt_level="O3")
    backward(model, optimizer, FITS)
    assert optimizer.step(lambda: 42) == 42
    assert model.weight.item() == 1 - FITS


def test_each_loss_has_its_own_scaler():
    model, optimizer = one_weight(num_losses=2)
    backward(model, optimizer, OVERFLOWS, loss_id=0)
    backward(model, optimizer, FITS, loss_id=1)
    assert scales() == [2.0**15, 2.0**16]
    optimizer.step()
    assert model.weight.item() == 1.0  # one bad loss spoils the step
    backward(model, optimizer, FITS, loss_id=0)
    backward(model, optimizer, 2 * FITS, loss_id=1)
    optimizer.step()
    assert model.weight.item() == 1 - 3 * FITS


def test_losses_with_different_scales_add_up_unscaled():
    model, optimizer = one_weight(num_losses=2)
    amp._amp_state.loss_scalers[1]._loss_scale = 8.0
    backward(model, optimizer, FITS, loss_id=0)
    backward(model, optimizer, 2 * FITS, loss_id=1)
    assert [p.grad.item() for p in amp.master_params(optimizer)] == [3 * FITS]


def test_one_loss_for_several_optimizers_skips_all_their_steps(capsys):
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level="O2", verbosity=1)
    capsys.readouterr()

    def both(x):
        loss = models[1](models[0](torch.tensor([[4 * x]]))).sum() / 4
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    both(OVERFLOWS)
    assert [model.weight.item() for model in models] == [1.0, 1.0]
    assert capsys.readouterr().out.count("step skipped") == 2
    assert scales() == [2.0**15]
    both(FITS)
    assert [model.weight.item() for model in models] == [1 - FITS, 1 - FITS]


def test_only_the_optimizers_of_the_loss_skip():
    """The two players of a GAN: the discriminator's overflow does not stop the generator."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    models, optimizers = amp.initialize(
        models, optimizers, opt_level="O2", num_losses=2, verbosity=0
    )
    backward(models[0], optimizers[0], OVERFLOWS, loss_id=0)
    backward(models[1], optimizers[1], FITS, loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
    assert [model.weight.item() for model in models] == [1.0, 1 - FITS]


def test_accumulation_with_an_overflow_on_the_way_skips():
    model, optimizer = one_weight()
    backward(model, optimizer, OVERFLOWS, delay_unscale=True)
    assert scales() == [2.0**16]  # not looked at yet
    backward(model, optimizer, FITS)
    assert scales() == [2.0**15]
    optimizer.step()
    assert model.weight.item() == 1.0


def test_delayed_overflow_check_is_made_up_for_by_the_next():
    model, optimizer = one_weight()
    backward(model, optimizer, OVERFLOWS, delay_overflow_check=True)
    assert scales() == [2.0**16]
    backward(model, optimizer, FITS)
    assert scales() == [2.0**15]
    optimizer.step()
    assert model.weight.item() == 1.0


def test_not_enabled_is_a_no_op():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, enabled=False)
    loss = torch.ones(1, dtype=torch.float16)
    with amp.scale_loss(loss, optimizer) as same_loss:
        assert same_loss is loss


def test_before_initialize_says_so():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with (
        pytest.raises(RuntimeError, match=r"scale_loss was called before initialize.*first"),
        amp.scale_loss(torch.ones(1), optimizer),
    ):
        pass


def test_optimizer_that_initialize_has_not_seen():
    one_weight()
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with (
        pytest.raises(RuntimeError, match="has not seen"),
        amp.scale_loss(torch.ones(1), stranger),
    ):
        pass


@pytest.mark.parametrize("loss_id", [2, -1])
def test_loss_id_without_a_scaler(loss_id):
    _, optimizer = one_weight(num_losses=2)
    with (
        pytest.raises(IndexError, match=f"loss_id={loss_id}, but there are 2"),
        amp.scale_loss(torch.ones(1), optimizer, loss_id=loss_id),
    ):
        pass


def test_an_error_in_the_block_is_the_users():
    _, optimizer = one_weight()
    with (
        pytest.raises(ZeroDivisionError),
        amp.scale_loss(torch.ones(1), optimizer),
    ):
        raise ZeroDivisionError
    assert scales() == [2.0**16]


def gan_losses(level):
    """The program of Apex's DCGAN example: two backward passes for one step of the first player."""
    torch.manual_seed(0)
    bce = nn.BCEWithLogitsLoss()
    d = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    g = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    opt_d, opt_g = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (d, g))
    [d, g], [opt_d, opt_g] = amp.initialize(
        [d, g], [opt_d, opt_g], opt_level=level, num_losses=3, loss_scale=1024.0, verbosity=0
    )
    losses = []
    for _ in range(20):
        d.zero_grad()
        real, ones, zeros = 2 + torch.randn(32, 4), torch.ones(32, 1), torch.zeros(32, 1)
        loss_real = bce(d(real), ones)
        with amp.scale_loss(loss_real, opt_d, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        fake = g(torch.randn(32, 2))
        loss_fake = bce(d(fake.detach()), zeros)
        with amp.scale_loss(loss_fake, opt_d, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        opt_d.step()
        g.zero_grad()
        loss_g = bce(d(fake), ones)
        with amp.scale_loss(loss_g, opt_g, loss_id=2) as scaled_loss:
            scaled_loss.backward()
        opt_g.step()
        losses += [loss_real.item(), loss_fake.item(), loss_g.item()]
    amp.reset()
    return losses


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_two_models_two_optimizers_three_losses(level):
    assert gan_losses(level) == pytest.approx(gan_losses("O0"), abs=0.02)
