"""The recipes of notebook 07: training loops with a scaler that are more than the plain one.

Each trains on the digits and returns the loss of every step. With `mixed=False` the same code runs
in float32, with scaler and autocast switched off: the control that the recipe is compared with.
`mistake=True` does what people do wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_lab.autocast import custom_bwd, custom_fwd
from amp_lab.devices import default_device
from amp_lab.experiments.loss_scaling import half_precision
from amp_lab.grad_scaler import GradScaler
from amp_lab.tasks import digits

KIND = default_device().type


@dataclass
class Setup:
    """What a recipe needs: model, optimizer, scaler, region and batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    region: Callable[[], AbstractContextManager]

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same batches to everyone."""
        return digits().batches(steps)


def setup(mixed: bool, **scaler: Any) -> Setup:
    """Make the digits network and what trains it; the scaler is disabled unless `mixed`."""
    model = digits().fresh_model()
    made = GradScaler(KIND, enabled=mixed, **scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Setup(model, optimizer, made, half_precision if mixed else nullcontext)


def clipping(steps: int, *, mixed: bool, mistake: bool = False) -> list[float]:
    """Clip the gradients' norm: after `unscale_`, or (the mistake) without it."""
    s, losses = setup(mixed), []
    for inputs, targets in s.batches(steps):
        s.optimizer.zero_grad()
        with s.region():
            loss = F.cross_entropy(s.model(inputs), targets)
        s.scaler.scale(loss).backward()
        if not mistake:
            s.scaler.unscale_(s.optimizer)
        nn.utils.clip_grad_norm_(s.model.parameters(), max_norm=1.0)
        s.scaler.step(s.optimizer)
        s.scaler.update()
        losses.append(loss.item())
    return losses


def accumulation(steps: int, *, mixed: bool, mistake: bool = False) -> list[float]:
    """Accumulate four micro-batches: one `step` and `update` for all, or `update` after each."""
    s, losses = setup(mixed), []
    for inputs, targets in s.batches(steps):
        s.optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            with s.region():
                loss = F.cross_entropy(s.model(x), y) / 4
            s.scaler.scale(loss).backward()
            total += loss.item()
            if mistake:
                s.scaler.update()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        losses.append(total)
    return losses


def gan(steps: int, *, mixed: bool, mistake: bool = False) -> list[float]:
    """Two networks, two optimizers, two losses, one scaler: updated once, or after each step.

    The loss that is returned is the discriminator's. The scale grows in every update, so that an
    update in the wrong place shows at once.
    """
    device = default_device()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
        critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    generator, critic = generator.to(device), critic.to(device)
    for_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    for_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    scaler = GradScaler(KIND, init_scale=2.0**4, growth_interval=1, enabled=mixed)
    region = half_precision if mixed else nullcontext
    noise = torch.Generator().manual_seed(0)
    judge, losses = F.binary_cross_entropy_with_logits, []
    for inputs, _ in digits().batches(steps):
        real, z = inputs.flatten(1), torch.randn(64, 16, generator=noise).to(device)
        ones, zeros = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])
        for optimizer in (for_critic, for_generator):
            optimizer.zero_grad()
        with region():
            fake = generator(z)
            critic_loss = judge(critic(real), ones) + judge(critic(fake.detach()), zeros)
            generator_loss = judge(critic(fake), ones)
        own = list(generator.parameters())
        scaler.scale(generator_loss).backward(inputs=own, retain_graph=True)
        scaler.scale(critic_loss).backward(inputs=list(critic.parameters()))
        scaler.step(for_critic)
        if mistake:
            scaler.update()
        scaler.step(for_generator)
        scaler.update()
        losses.append(critic_loss.item())
    return losses


def gradient_penalty(steps: int, *, mixed: bool, mistake: bool = False) -> list[float]:
    """Penalise the norm of the gradients: of the unscaled ones, or of the scaled ones."""
    s, losses = setup(mixed), []
    parameters = list(s.model.parameters())
    for inputs, targets in s.batches(steps):
        s.optimizer.zero_grad()
        with s.region():
            loss = F.cross_entropy(s.model(inputs), targets)
        # A second derivative follows, hence create_graph; the scaled gradients are no .grad yet.
        gradients = torch.autograd.grad(s.scaler.scale(loss), parameters, create_graph=True)
        if not mistake:
            inverse = 1.0 / s.scaler.get_scale()
            gradients = tuple(g * inverse for g in gradients)
        with s.region():
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            total = loss + 0.01 * norm**2
        s.scaler.scale(total).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        losses.append(loss.item())
    return losses


class Linear(torch.autograd.Function):
    """A linear layer with its own backward, for use under autocast."""

    @staticmethod
    @custom_fwd(device_type=KIND)
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @custom_bwd(device_type=KIND)
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class UndecoratedLinear(torch.autograd.Function):
    """The same without the decorators: backward runs outside of autocast."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def custom_function(steps: int, *, mixed: bool, mistake: bool = False) -> list[float]:
    """Train one layer whose backward is written by hand."""
    layer, losses = UndecoratedLinear if mistake else Linear, []
    weight = nn.Parameter(torch.zeros(10, 64, device=default_device()))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler(KIND, enabled=mixed)
    for inputs, targets in digits().batches(steps):
        optimizer.zero_grad()
        with (half_precision if mixed else nullcontext)():
            loss = F.cross_entropy(layer.apply(inputs.flatten(1), weight), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def checkpointing(steps: int, *, mixed: bool, mistake: bool = False) -> list[float]:
    """Recompute activations in the backward pass; the mistake draws new dropout masks there."""
    s, losses = setup(mixed), []
    body, head = s.model[:-1], s.model[-1]  # type: ignore[index]
    dropout = nn.Dropout(0.2)
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=not mistake)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for inputs, targets in s.batches(steps):
            s.optimizer.zero_grad()
            with s.region():
                hidden = recompute(lambda x: dropout(body(x)), inputs)
                loss = F.cross_entropy(head(hidden), targets)
            s.scaler.scale(loss).backward()
            s.scaler.step(s.optimizer)
            s.scaler.update()
            losses.append(loss.item())
    return losses


def scheduled(steps: int, *, mixed: bool, mistake: bool = False) -> list[float]:
    """Lower the learning rate in every step that was taken, or (the mistake) in every iteration.

    Returns the learning rates, not the losses. The first scale is so large that steps are skipped.
    """
    s = setup(mixed, init_scale=2.0**24)
    schedule = torch.optim.lr_scheduler.ExponentialLR(s.optimizer, gamma=0.5)
    rates = []
    for inputs, targets in s.batches(steps):
        s.optimizer.zero_grad()
        with s.region():
            loss = F.cross_entropy(s.model(inputs), targets)
        s.scaler.scale(loss).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        if mistake or not s.scaler.step_was_skipped(s.optimizer):
            schedule.step()
        rates.append(float(schedule.get_last_lr()[0]))
    return rates


def resumed(steps: int, *, stop: int | None = None, mistake: bool = False) -> list[float]:
    """Train; stop after `stop` steps, save, load into new objects and go on.

    The mistake leaves the scaler out of the checkpoint.
    """
    options = {"init_scale": 2.0**22, "growth_interval": 5}
    s, losses = setup(True, **options), []
    for step, (inputs, targets) in enumerate(s.batches(steps)):
        if step == stop:
            parts = ("model", "optimizer") if mistake else ("model", "optimizer", "scaler")
            file = BytesIO()
            torch.save({part: getattr(s, part).state_dict() for part in parts}, file)
            file.seek(0)
            s, saved = setup(True, **options), torch.load(file)
            for part in parts:
                getattr(s, part).load_state_dict(saved[part])
        s.optimizer.zero_grad()
        with s.region():
            loss = F.cross_entropy(s.model(inputs), targets)
        s.scaler.scale(loss).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        losses.append(loss.item())
    return losses
