"""`initialize`: shapes, errors, printing; checkpoints; `reset`."""

import operator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_lab import apex as amp
from amp_lab.autocast import autocast, is_autocast_enabled
from amp_lab.tasks import digit_images, digits, train

LEVELS = ["O0", "O1", "O2", "O3"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()


def pair(level="O2"):
    """Adam, except under O3: its epsilon of 1e-8 is 0 in float16, and 0/0 soon follows."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    if level == "O3":
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def steps(model, optimizer, count, start=0):
    losses = []
    for step in range(start, start + count):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 4, generator=generator)
        targets = torch.randint(3, (16,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("enabled", [True, False])
def test_single_objects_and_lists_come_back_in_the_shape_given(level, enabled):
    options = {"opt_level": level, "enabled": enabled, "verbosity": 0}
    model, optimizer = pair()
    returned = amp.initialize(model, optimizer, **options)
    assert returned[0] is model
    assert returned[1] is optimizer
    (m1, o1), (m2, o2) = pair(), pair()
    [a, b], [c, d] = amp.initialize([m1, m2], [o1, o2], **options)
    assert (a, b, c, d) == (m1, m2, o1, o2)
    model, optimizer = pair()
    assert amp.initialize(model, [optimizer], **options) == (model, [optimizer])
    model, optimizer = pair()
    assert amp.initialize([model], optimizer, **options) == ([model], optimizer)
    model, _ = pair()
    assert amp.initialize(model, **options) is model
    models = [pair()[0]]
    assert amp.initialize(models, **options) is models


def snapshot(model, optimizer):
    return (
        [(p, p.dtype, p.detach().clone()) for p in [*model.parameters(), *model.buffers()]],
        dict(vars(model)),
        dict(vars(optimizer)),
    )


def same(a, b):
    tensors = zip(a[0], b[0], strict=True)
    return (
        all(p is q and s == t and torch.equal(x, y) for (p, s, x), (q, t, y) in tensors)
        and {k: v for k, v in a[1].items() if "hook" not in k}.keys()
        == b[1].keys() - {k for k in b[1] if "hook" in k}
        and a[2].keys() == b[2].keys()
    )


BAD = [
    ({"opt_level": "O5"}, RuntimeError, "Unknown opt_level"),
    ({"opt_level": "O1", "master_weights": True}, RuntimeError, "contradicts"),
    ({"loss_scale": "fast"}, ValueError, "loss_scale must be"),
    ({"num_losses": 0}, ValueError, "num_losses must be at least 1"),
    ({"min_loss_scale": 2.0**25}, ValueError, "leave no loss scale"),
    ({"min_loss_scale": -1.0}, ValueError, "leave no loss scale"),
    ({"max_loss_scale": 0.0}, ValueError, "leave no loss scale"),
    ({"cast_model_outputs": "half"}, ValueError, "cast_model_outputs must be"),
    ({"cast_model_outputs": torch.int8}, ValueError, "cast_model_outputs must be"),
    ({"models": "model"}, TypeError, "models must be one Module or a list"),
    ({"models": [3]}, TypeError, "models must be one Module or a list"),
    ({"optimizers": 3}, TypeError, "optimizers must be one Optimizer or a list"),
    ({"optimizers": ()}, TypeError, "optimizers must be one Optimizer or a list"),
]


@pytest.mark.parametrize(("bad", "error", "says"), BAD, ids=str)
def test_errors_come_before_anything_is_changed(bad, error, says):
    model, optimizer = pair()
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=says):
        amp.initialize(
            **{"models": model, "optimizers": optimizer, "opt_level": "O2", "verbosity": 0, **bad}
        )
    assert same(before, snapshot(model, optimizer))
    with pytest.raises(RuntimeError, match="before initialize"):
        amp.state_dict()


def test_optimizer_goes_through_once():
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match="once only"):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    model, optimizer = pair()
    with pytest.raises(RuntimeError, match="once only"):
        amp.initialize(model, [optimizer, optimizer], opt_level="O1", verbosity=0)


def test_optimizer_with_double_parameters():
    model = nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="float64"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert model.weight.dtype == torch.float64


def test_prints_the_level_and_the_properties_after_overrides(capsys):
    amp.initialize(*pair(), opt_level="O2", loss_scale="128.0")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Apex O2: half model")
    assert "    master_weights        : True" in lines
    assert "    loss_scale            : 128.0" in lines
    amp.reset()
    amp.initialize(*pair(), opt_level="O2", verbosity=0)
    assert capsys.readouterr().out == ""


def test_state_dict_has_apexs_keys():
    amp.initialize(*pair(), opt_level="O2", num_losses=2, verbosity=0)
    fresh = {"loss_scale": 65536.0, "unskipped": 0}
    assert amp.state_dict() == {"loss_scaler0": fresh, "loss_scaler1": fresh}
    destination = {"loss_scaler0": 3}
    assert amp.state_dict(destination) is destination
    assert destination["loss_scaler0"] == fresh


def test_load_state_dict():
    amp.initialize(*pair(), opt_level="O2", num_losses=2, verbosity=0)
    state = {
        "loss_scaler0": {"loss_scale": 4.0, "unskipped": 7},
        "loss_scaler1": {"loss_scale": 8.0, "unskipped": 9},
    }
    amp.load_state_dict(state)
    assert amp.state_dict() == state


def test_load_state_dict_of_another_number_of_losses_is_reported(capsys):
    amp.initialize(*pair(), opt_level="O2", num_losses=1, verbosity=0)
    amp._amp_state.verbosity = 1
    state = {f"loss_scaler{i}": {"loss_scale": 4.0, "unskipped": i} for i in range(2)}
    amp.load_state_dict(state)
    assert "2 loss scalers, num_losses is 1" in capsys.readouterr().out
    assert amp.state_dict() == {"loss_scaler0": state["loss_scaler0"]}


def test_load_state_dict_refuses_other_keys_and_changes_nothing():
    amp.initialize(*pair(), opt_level="O2", verbosity=0)
    before = amp.state_dict()
    with pytest.raises(RuntimeError, match="scale, _growth_tracker"):
        amp.load_state_dict(
            {
                "loss_scaler0": {"loss_scale": 4.0, "unskipped": 7},
                "scale": 4.0,
                "_growth_tracker": 7,
            }
        )
    assert amp.state_dict() == before


@pytest.mark.parametrize("call", [amp.state_dict, lambda: amp.load_state_dict({})])
def test_state_before_initialize(call):
    with pytest.raises(RuntimeError, match="before initialize"):
        call()


@pytest.mark.parametrize("level", LEVELS)
def test_resume_bit_for_bit(level, tmp_path):
    """Apex's workflow: initialize with the same level, then load all three state dicts."""
    torch.manual_seed(0)
    model, optimizer = pair(level)
    other, other_optimizer = pair(level)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    steps(model, optimizer, 5)
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
    }
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    expected = steps(model, optimizer, 10, start=5)
    weights = [p.detach().clone() for p in amp.master_params(optimizer)]
    expected_state = amp.state_dict()
    amp.reset()

    model, optimizer = amp.initialize(other, other_optimizer, opt_level=level, verbosity=0)
    checkpoint = torch.load(tmp_path / "checkpoint.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    assert steps(model, optimizer, 10, start=5) == expected
    for p, q in zip(amp.master_params(optimizer), weights, strict=True):
        assert torch.equal(p, q)
    assert amp.state_dict() == expected_state


@pytest.mark.parametrize("level", LEVELS)
def test_reset_without_training_undoes_everything(level):
    model, optimizer = pair()
    before = snapshot(model, optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, cast_model_outputs=torch.float64)
    optimizer.zero_grad()
    amp.reset()
    assert same(before, snapshot(model, optimizer))
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p is q for p, q in zip(params, after, strict=True))
    assert "forward" not in vars(model)
    assert not {"step", "zero_grad", "add_param_group", "load_state_dict"} & set(vars(optimizer))
    assert not is_autocast_enabled("cpu")
    assert not any(m._state_dict_hooks or m._load_state_dict_pre_hooks for m in model.modules())
    x = torch.randn(8, 4)
    assert model(x).dtype == torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_reset_keeps_what_was_trained(level):
    torch.manual_seed(0)
    model, optimizer = pair(level)
    state = "momentum_buffer" if level == "O3" else "exp_avg"
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    steps(model, optimizer, 5)
    masters = [p.detach().float().clone() for p in amp.master_params(optimizer)]
    momenta = [optimizer.state[p][state].float() for p in amp.master_params(optimizer)]
    amp.reset()
    for p, master, momentum in zip(model.parameters(), masters, momenta, strict=True):
        assert p.dtype == torch.float32
        # A bias before batch normalization has no gradient to speak of: its old bits come back.
        assert torch.equal(p, master) or torch.equal(p.half().float(), master)
        assert torch.equal(optimizer.state[p][state], momentum)
    assert all(map(operator.is_, optimizer.param_groups[0]["params"], model.parameters()))
    F.cross_entropy(model(torch.randn(8, 4)), torch.zeros(8, dtype=torch.long)).backward()
    optimizer.step()


def test_reset_keeps_a_master_weight_that_rounds_to_the_old_half_weight():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale=1024.0, verbosity=0
    )
    with amp.scale_loss(model(torch.tensor([[-(2.0**-14)]])).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert model.weight.item() == 1.0
    amp.reset()
    assert model.weight.item() == 1 + 2.0**-14


def test_reset_casts_buffers_that_were_replaced():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(1))

        def forward(self, x):
            self.average = 0.5 * self.average + 0.5 * x.mean()
            return x - self.average

    model = amp.initialize(Averaged(), opt_level="O3", verbosity=0)
    model(torch.ones(4))
    assert model.average.dtype == torch.float16
    amp.reset()
    assert model.average.dtype == torch.float32
    assert model.average.item() == 0.5


def test_reset_twice_and_before_initialize():
    amp.reset()
    amp.initialize(*pair(), opt_level="O2", verbosity=0)
    amp.reset()
    amp.reset()


def test_levels_one_after_the_other_on_the_same_model():
    torch.manual_seed(0)
    model, optimizer = pair("O3")
    for level in [*LEVELS, *reversed(LEVELS)]:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        losses = steps(model, optimizer, 2)
        assert all(loss < 3 for loss in losses)
        amp.reset()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_initialize_for_other_models_while_one_is_trained():
    """Apex allows it; the last call's properties and scalers count, and one reset undoes all."""
    (a, opt_a), (b, opt_b) = pair(), pair()
    amp.initialize(a, opt_a, opt_level="O2", verbosity=0)
    amp.initialize(b, opt_b, opt_level="O2", loss_scale=8.0, verbosity=0)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 8.0
    steps(a, opt_a, 1)
    steps(b, opt_b, 1)
    amp.reset()
    dtypes = {p.dtype for p in [*a.parameters(), *b.parameters()]}
    assert dtypes == {torch.float32}


def test_not_enabled_changes_nothing():
    model, optimizer = pair()
    before = snapshot(model, optimizer)
    amp.initialize(model, optimizer, enabled=False, opt_level="O2")
    assert same(before, snapshot(model, optimizer))
    assert amp.state_dict() == {}
    steps(model, optimizer, 1)


# Real training -----------------------------------------------------------------------------------


@cache
def train_digits(level, count, **options):
    task = digits()
    model = task.fresh_model(device=CPU)
    optimizer = task.optimizer(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    losses = []
    for inputs, targets in task.batches(count, device=CPU):
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    amp.reset()
    return losses, model


def test_o0_is_float32_training_bit_for_bit():
    task = digits()
    expected = train(task, steps=30, device=CPU)
    losses, model = train_digits("O0", 30)
    assert losses == expected.losses
    for p, q in zip(model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_o1_is_autocast_with_torchs_grad_scaler_bit_for_bit():
    expected = train(
        digits(),
        steps=30,
        device=CPU,
        autocast=lambda: autocast("cpu", torch.float16, emulate=True),
        scaler=torch.amp.GradScaler("cpu"),
    )
    losses, model = train_digits("O1", 30)
    assert losses == expected.losses
    for p, q in zip(model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_o3_is_training_a_half_model_bit_for_bit():
    def float32_loss(outputs, targets):
        return F.cross_entropy(outputs.float(), targets)

    task = replace(digits(), loss=float32_loss)
    expected = train(task, steps=15, device=CPU, weights_dtype=torch.float16)
    losses, model = train_digits("O3", 15)
    assert losses == expected.losses
    for p, q in zip(model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(p, q.float())


@pytest.mark.parametrize(
    ("level", "options"),
    [
        ("O1", {}),
        ("O2", {}),
        ("O2", {"cast_model_type": torch.bfloat16, "loss_scale": 1.0}),
        ("O3", {"loss_scale": 128.0}),
    ],
)
def test_every_level_learns_what_float32_learns(level, options):
    reference, _ = train_digits("O0", 120)
    losses, model = train_digits(level, 120, **options)
    assert sum(reference[-10:]) / 10 < 0.5
    assert sum(losses[-10:]) / 10 == pytest.approx(sum(reference[-10:]) / 10, abs=0.15)
    images, labels = digit_images()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    assert right > 0.85
