"""Right answers pass; each kind of wrong one is told what is wrong."""

import pytest
import torch
from torch import nn

from amp_lab.checks import recipes as checks


def clipped(scaler, optimizer, loss, parameters, max_norm):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, max_norm)
    scaler.step(optimizer)
    scaler.update()


def clipped_first(scaler, optimizer, loss, parameters, max_norm):
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(parameters, max_norm)
    scaler.step(optimizer)
    scaler.update()


def accumulated(scaler, optimizer, losses):
    for loss in losses:
        scaler.scale(loss / len(losses)).backward()
    scaler.step(optimizer)
    scaler.update()


def summed(scaler, optimizer, losses):
    for loss in losses:
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def stepped_each_time(scaler, optimizer, losses):
    for loss in losses:
        optimizer.zero_grad()
        scaler.scale(loss / len(losses)).backward()
        scaler.step(optimizer)
        scaler.update()


def follow(scaler, optimizer, scheduler):
    if not scaler.step_was_skipped(optimizer):
        scheduler.step()


def save(model, optimizer, scaler):
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return {name: part.state_dict() for name, part in parts.items()}


def save_another_optimizer(model, optimizer, scaler):
    other = torch.optim.SGD(model.parameters(), lr=9.0)
    return {**save(model, optimizer, scaler), "optimizer": other.state_dict()}


@pytest.mark.parametrize(
    ("check", "right"),
    [
        (checks.clipped_step, clipped),
        (checks.accumulated_step, accumulated),
        (checks.follow, follow),
        (checks.checkpoint, save),
    ],
)
def test_right(check, right):
    result = check(right)
    assert result.passed, result


def blank(*_):
    return ...


@pytest.mark.parametrize(
    ("check", "wrong", "says"),
    [
        (checks.clipped_step, clipped_first, "not float32's"),
        (checks.clipped_step, blank, "not moved"),
        (checks.clipped_step, lambda *a: 1 / 0, "ZeroDivisionError"),
        (checks.accumulated_step, summed, "mean loss"),
        (checks.accumulated_step, stepped_each_time, "3 times"),
        (checks.accumulated_step, blank, "not moved"),
        (checks.follow, blank, "step that was taken"),
        (checks.follow, lambda a, b, scheduler: scheduler.step(), "a skipped step"),
        (checks.checkpoint, blank, "nothing yet"),
        (checks.checkpoint, lambda m, o, s: {"model": m.state_dict()}, "optimizer is lost"),
        (checks.checkpoint, lambda m, o, s: m.state_dict(), "model is lost"),
        (checks.checkpoint, 3, "function"),
        (checks.checkpoint, save_another_optimizer, "is that this optimizer"),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_wrong(check, wrong, says):
    result = check(wrong)
    assert not result.passed
    assert says in result.text
