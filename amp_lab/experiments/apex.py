"""The Apex lesson in numbers: what each level casts, where it trains, and what it keeps in memory.

Everything runs on one small network for scikit-learn's digits. `reset` is called after each run, so
the levels can follow one another in one session.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_lab import apex as amp
from amp_lab.tasks import Task, digits

# What `initialize` is given for each column of the figures.
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O3": {"opt_level": "O3"},
    "bf16 + master": {
        "opt_level": "O2",
        "cast_model_type": torch.bfloat16,
        "loss_scale": 1.0,
    },
    "bf16": {"opt_level": "O3", "cast_model_type": torch.bfloat16},
}


@cache
def network() -> Task:
    """Read the digit with two linear layers and batch normalization between them."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)
        )

    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return replace(digits(), name="network", build=build, optimizer=sgd)


@contextmanager
def initialized(
    level: str, optimizer: partial | None = None, **options: Any
) -> Iterator[tuple[nn.Module, Optimizer]]:
    """Yield a fresh network and its optimizer at one of the `LEVELS`; reset afterwards."""
    task = network()
    model = task.fresh_model()
    made = (optimizer or task.optimizer)(model.parameters())
    try:
        yield amp.initialize(model, made, **{"verbosity": 0, **LEVELS[level], **options})
    finally:
        amp.reset()


def step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Do one step as Apex's documentation writes it, and return the loss."""
    optimizer.zero_grad()
    loss = network().loss(model(inputs), targets)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.detach()


@dataclass(frozen=True)
class Training:
    """The losses of a training run, and where its loss scale ended."""

    losses: list[float]
    loss_scale: float

    def final(self) -> float:
        """Mean of the last ten losses."""
        return sum(self.losses[-10:]) / 10

    def reached(self, target: float = 0.5) -> bool:
        """Whether the last ten losses are below the target on average."""
        return self.final() < target

    @property
    def verdict(self) -> str:
        """`learns`, `does not learn`, or `NaN`."""
        if not isfinite(self.final()):
            return "NaN"
        return "learns" if self.reached() else "does not learn"


def train(level: str, loss_scale: float | str | None = None, steps: int = 40) -> Training:
    """Train the network at a level, with its own loss scale or the one given."""
    options: dict[str, Any] = {} if loss_scale is None else {"loss_scale": loss_scale}
    with initialized(level, **options) as (model, optimizer):
        losses = [step(model, optimizer, *batch) for batch in network().batches(steps)]
        scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
        return Training(torch.stack(losses).tolist(), scale)


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype as figures have it: "half" says nothing that "float16" does."""
    return str(dtype).removeprefix("torch.")


def dtypes(level: str) -> dict[str, str]:
    """Return the dtypes of everything in one training step, read off the tensors themselves."""
    found: dict[str, str] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found[name] = short(output.dtype)

        return hook

    with initialized(level, loss_scale=128.0) as (model, optimizer):
        layers: Any = model
        _, first, norm, _, last = layers
        for module, name in (
            (layers[0], "inputs inside"),
            (first, "output of Linear"),
            (norm, "output of BatchNorm"),
            (last, "output of the last Linear"),
        ):
            module.register_forward_hook(note(name))
        inputs, targets = next(network().batches(1))
        outputs = model(inputs)
        loss = network().loss(outputs, targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        found |= {
            "outputs outside": short(outputs.dtype),
            "loss": short(loss.dtype),
            "weights of Linear": short(first.weight.dtype),
            "weights of BatchNorm": short(norm.weight.dtype),
            "running mean": short(norm.running_mean.dtype),
            "gradients of Linear": short(first.weight.grad.dtype),
        }
        optimizer.step()
        updated = next(amp.master_params(optimizer))
        found["updated by the optimizer"] = short(updated.dtype)
        found["momentum"] = short(optimizer.state[updated]["momentum_buffer"].dtype)
    return found


def moved(level: str, lr: float, steps: int = 50) -> float:
    """Return the share of the numbers that training changes which are not where they began.

    Plain SGD with learning rate `lr`, so that every gradient that is not zero asks for a change.
    What training changes are the master weights, or without them the weights themselves.
    """
    sgd = partial(torch.optim.SGD, lr=lr)
    with initialized(level, sgd, loss_scale=128.0) as (model, optimizer):
        optimizer.zero_grad()  # makes the master weights
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        for batch in network().batches(steps):
            step(model, optimizer, *batch)
        after = list(amp.master_params(optimizer))
        changed = sum(int((p != q).sum()) for p, q in zip(after, before, strict=True))
        return changed / sum(p.numel() for p in after)


def memory(level: str) -> dict[str, float]:
    """Return bytes per parameter between backward and step, read off the tensors themselves."""
    with initialized(level, loss_scale=128.0) as (model, optimizer):
        for batch in network().batches(2):
            loss = network().loss(model(batch[0]), batch[1])
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            kept = _tensors_kept(model, optimizer)
            optimizer.step()
        count = sum(p.numel() for p in model.parameters())
        return {name: sum(t.nbytes for t in tensors) / count for name, tensors in kept.items()}


def _tensors_kept(model: nn.Module, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    params = list(model.parameters())
    own = {id(p) for p in params}
    masters = [p for p in amp.master_params(optimizer) if id(p) not in own]
    state = [
        value
        for p in amp.master_params(optimizer)
        for value in optimizer.state[p].values()
        if isinstance(value, Tensor) and value.numel() == p.numel()
    ]
    return {
        "weights": [p.detach() for p in params],
        "gradients": [p.grad for p in params if p.grad is not None],
        "master weights": [p.detach() for p in masters],
        "master gradients": [p.grad for p in masters if p.grad is not None],
        "momentum": state,
    }
