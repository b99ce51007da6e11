"""Checks for 07_recipes: each runs the learner's function on a small real model."""

from typing import Any

import torch
from torch import nn

from amp_lab.checks import WrongAnswer, demand, exercise, run
from amp_lab.grad_scaler import GradScaler


def _model() -> tuple[nn.Linear, torch.optim.Optimizer, GradScaler]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", 2.0**10)


def _loss(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    return model(torch.full((2, 4), factor)).square().mean()


def _moved(model: nn.Linear) -> bool:
    fresh, _, _ = _model()
    return not torch.equal(model.weight, fresh.weight)


@exercise(
    "There are five calls; the loss comes in unscaled and without a backward pass.",
    "Clipping looks at .grad, which has to be unscaled by then.",
    "scaler.scale(loss).backward(), then unscale_, clip, step, update.",
    right="the weights are those of clipping in float32.",
)
def clipped_step(answer: Any) -> None:
    """A function (scaler, optimizer, loss, parameters, max_norm) that makes one clipped step."""
    model, optimizer, scaler = _model()
    run(answer, scaler, optimizer, _loss(model), list(model.parameters()), 0.01)
    demand(_moved(model), "the weights have not moved. (No answer yet?)")
    reference, plain, _ = _model()
    _loss(reference).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    plain.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        demand(torch.allclose(ours, theirs, atol=1e-7), "the weights are not float32's.")
    demand(scaler.state_dict()["_growth_tracker"] == 1, "update() is to be called, once.")


@exercise(
    "Each loss needs its own backward pass; the gradients add up by themselves.",
    "The sum of the gradients is to be that of the mean: divide each loss by their number.",
    "step and update come once, after the loop.",
    right="many small batches have made the step of one large batch.",
)
def accumulated_step(answer: Any) -> None:
    """A function (scaler, optimizer, losses) that makes one step for the mean of the losses."""
    model, optimizer, scaler = _model()
    factors = (1.0, 2.0, 3.0)
    run(answer, scaler, optimizer, [_loss(model, f) for f in factors])
    demand(_moved(model), "the weights have not moved. (No answer yet?)")
    reference, plain, _ = _model()
    torch.stack([_loss(reference, f) for f in factors]).mean().backward()
    plain.step()
    count = scaler.state_dict()["_growth_tracker"]
    demand(count == 1, f"update() was called {count} times; one step, one update.")
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        demand(torch.allclose(ours, theirs, atol=1e-6), "the step is not that of the mean loss.")


@exercise(
    "The scaler knows whether the last step of an optimizer was skipped.",
    "scaler.step_was_skipped(optimizer) tells; it can be asked after update(), too.",
    "Call scheduler.step() only if it was not.",
    right="the schedule counts optimizer steps now, not iterations.",
)
def follow(answer: Any) -> None:
    """A function (scaler, optimizer, scheduler), called after every update."""
    model, optimizer, scaler = _model()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    taken = 0
    for bad in (True, False, True, False, False):
        optimizer.zero_grad()
        scaler.scale(_loss(model)).backward()
        if bad:
            gradient = model.weight.grad
            assert gradient is not None
            gradient[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        run(answer, scaler, optimizer, scheduler)
        taken += not bad
        rate = float(scheduler.get_last_lr()[0])
        what = "a skipped step" if bad else "a step that was taken"
        demand(abs(rate - 0.1 * 0.5**taken) < 1e-9, f"after {what} the rate is {rate:g}.")


@exercise(
    "What has a state that the next step depends on? More than the model.",
    "The optimizer has momentum, and the scaler has its scale and its count.",
    "A dict with the keys 'model', 'optimizer' and 'scaler', each a state_dict().",
    right="a run that loads all three goes on bit for bit.",
)
def checkpoint(answer: Any) -> None:
    """A function (model, optimizer, scaler) -> dict of what must be saved, by these three names."""
    model, optimizer, scaler = _model()
    optimizer.param_groups[0]["lr"] = 0.05  # as a schedule leaves it
    scaler.scale(_loss(model)).backward()
    scaler.step(optimizer)
    scaler.update(48.0)
    saved = run(answer, model, optimizer, scaler)
    demand(saved not in (None, ...), "the function returns nothing yet.")
    demand(isinstance(saved, dict), "return a dict.")
    for name in ("model", "optimizer", "scaler"):
        demand(name in saved, f"the state of the {name} is lost when the run ends.")
    fresh, other, third = _model()
    try:
        fresh.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        third.load_state_dict(saved["scaler"])
    except Exception as error:
        raise WrongAnswer(f"one of the states cannot be loaded: {error}") from error
    demand(torch.equal(fresh.weight, model.weight), "the model's weights differ.")
    rate = other.param_groups[0]["lr"]
    demand(rate == 0.05, f"the learning rate is {rate:g} after loading: is that this optimizer?")
    demand(third.get_scale() == 48.0, "the scaler's scale differs after loading.")
