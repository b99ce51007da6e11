"""The patients of notebook 10: small models to break, and what it takes to look at them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from amp_lab.autocast import autocast
from amp_lab.casting import CastMode
from amp_lab.devices import default_device
from amp_lab.experiments.loss_scaling import Trace, from_history, half_precision
from amp_lab.grad_scaler import GradScaler
from amp_lab.tasks import Task, digits

KIND = default_device().type

Batch = tuple[Tensor, Tensor]
Step = Callable[[nn.Module, torch.optim.Optimizer, GradScaler, Batch], Any]


@cache
def reading() -> Task:
    """Read the digit with one hidden layer of 32 units: a step takes a millisecond."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    return replace(digits(), build=build)


def batches(count: int) -> list[Batch]:
    """Return the first batches of `reading`, `(64, 1, 8, 8)` and `(64,)`."""
    return list(reading().batches(count))


def patient(
    init_scale: float = 2.0**10, growth_interval: int = 2000
) -> tuple[nn.Module, torch.optim.Optimizer, GradScaler]:
    """Return model, SGD and a scaler with a history, the same ones in every call."""
    model = reading().fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = GradScaler(KIND, init_scale, growth_interval=growth_interval, history_size=1000)
    return model, optimizer, scaler


def loss_in_half(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of a batch; the forward pass runs in half precision."""
    inputs, targets = batch
    with half_precision():
        return F.cross_entropy(model(inputs), targets)


def attempt(function: Callable, *arguments: Any) -> str:
    """Call the function; return "no error", or the error's type and the start of its message."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).split(':')[0]}"
    return "no error"


def operations(function: Callable, *arguments: Any) -> list[str]:
    """Call the function in half precision; list its operations as "mean -> float16"."""
    with autocast(KIND, torch.float16, emulate=True, trace=True) as region:
        function(*arguments)
    return [f"{call.op} -> {str(call.output).removeprefix('torch.')}" for call in region.trace]


def flat(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return the elements of all tensors in one float32 vector; None, no gradient, is left out."""
    return torch.cat([t.detach().float().flatten() for t in tensors if t is not None])


def movement(model: nn.Module) -> float:
    """Return the Euclidean distance of a patient's weights from where they started."""
    start = flat(list(reading().fresh_model().parameters()))
    return (flat(list(model.parameters())) - start).norm().item()


def padded_points() -> tuple[nn.Linear, torch.optim.Optimizer, GradScaler, Batch]:
    """Return a linear model with optimizer and scaler, and 16 points of which 4 are padding."""
    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(16, 3, generator=generator), torch.tensor([[1.0, 2, 0], [0, 1, 1]])
    inputs[12:] = 0
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(weight.flip(0))
    model.to(default_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points = inputs.to(default_device()), (inputs @ weight.t()).to(default_device())
    return model, optimizer, GradScaler(KIND, 2.0**16, history_size=1000), points


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    batch: Batch,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    steps: int,
) -> list[float]:
    """Train in half precision, always on the same batch; return the loss of every step."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with half_precision():
            loss = loss_function(model(batch[0]), batch[1])
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return losses


def gradient_norm(model: nn.Module) -> float:
    """Return the Euclidean norm of all gradients of the model."""
    return flat([p.grad for p in model.parameters()]).norm().item()


def charts(steps: int = 60) -> dict[str, Trace]:
    """Return the history of the scale in four runs, by name: one well, three not so well."""

    def of_patient(init_scale: float, growth_interval: int, outlier: int = 0) -> Trace:
        model, optimizer, scaler = patient(init_scale, growth_interval)
        data = batches(steps)
        for i in range(0, steps, outlier) if outlier else ():
            data[i] = data[i][0] * 1e5, data[i][1]  # as if somebody forgot to divide
        train(model, optimizer, scaler, data)
        return from_history(scaler.history)

    model, optimizer, scaler, points = padded_points()
    fit(
        model, optimizer, scaler, points, lambda y, t: (y - t).square().sum(-1).sqrt().mean(), steps
    )
    return {
        "a good start": of_patient(2.0**24, 20),
        "case 2": from_history(scaler.history),
        "outliers in the data": of_patient(2.0**16, 7, outlier=10),
        "a start too low": of_patient(2.0, 2000),
    }


def two_texts() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values `(2, 6, 8)` with two masks, True where not to look.

    Padding `(2, 1, 6)`, and what belongs to another text `(2, 6, 6)`. In the first example two
    texts of three tokens, the last one padding; the second example is empty. Its scores are
    negative.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 6, 8, generator=generator) for _ in range(3))
    q[1], k[1] = -4.0, 4.0
    padding, other_text = torch.zeros(2, 1, 6).bool(), torch.zeros(2, 6, 6).bool()
    padding[0, 0, 5], padding[1] = True, True
    other_text[0, :3, 3:], other_text[0, 3:, :3], other_text[1] = True, True, True
    device = default_device()
    return q.to(device), k.to(device), v.to(device), padding.to(device), other_text.to(device)


def sure_and_wrong() -> tuple[nn.Linear, Tensor, Tensor]:
    """Return a linear model whose logit for the one input is 12, the input, and the target 0."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(4.0)
    device = default_device()
    return model.to(device), torch.full((1, 1), 3.0, device=device), torch.zeros(1, 1).to(device)


def prices() -> tuple[nn.Linear, torch.optim.Optimizer, GradScaler, Batch]:
    """Return a linear model with optimizer and scaler, and 16 numbers around 500 to learn."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 3, generator=generator)
    targets = 500 + 50 * inputs.sum(1, keepdim=True)
    model = nn.Linear(3, 1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.to(default_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    scaler = GradScaler(KIND, 2.0**10, history_size=1000)
    return model, optimizer, scaler, (inputs.to(default_device()), targets.to(default_device()))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    batches: Iterable[Batch],
) -> None:
    """Train a patient in half precision, with nothing broken."""
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(loss_in_half(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()


def normed() -> nn.Module:
    """Return a network that reads digits with a layer norm behind its first layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10)
    return nn.Sequential(*layers).to(default_device())


class older_autocast(autocast):
    """A float16 region whose cache of casts behaves as torch's did up to pull request 165068.

    What is in it serves every later use, whether it was cast with a gradient or without.
    """

    def __init__(self, cache_enabled: bool = True) -> None:
        super().__init__(KIND, torch.float16, cache_enabled=cache_enabled, emulate=True)

    def _make_mode(self) -> CastMode | None:
        mode = super()._make_mode()
        if mode is not None and mode.cache is not None:
            cache, cast = mode.cache, mode.to_low
            mode.to_low = lambda x: cache[id(x)][1] if id(x) in cache else cast(x)  # type: ignore[method-assign]
        return mode


def words_and_texts() -> tuple[nn.Parameter, list[Batch]]:
    """Return vectors `(40, 8)` of forty words and 300 batches of texts without the last eight.

    A batch is the counts of words `(16, 40)` and the unit vectors `(16, 8)` to learn from them,
    which are those of another matrix.
    """
    generator = torch.Generator().manual_seed(0)
    start, truth = (torch.randn(40, 8, generator=generator) for _ in range(2))
    texts = []
    for _ in range(300):
        counts = torch.randint(0, 3, (16, 40), generator=generator).float()
        counts[:, 32:] = 0
        goal = F.normalize(counts @ truth, dim=-1)
        texts.append((counts.to(default_device()), goal.to(default_device())))
    return nn.Parameter(start.to(default_device()) / 8), texts


def first_not_finite(function: Callable, *arguments: Any) -> str | None:
    """Call the function in half precision; name its first operation that returns inf or NaN."""
    with half_precision(), _Finder() as finder:
        function(*arguments)
    return finder.found


class _Finder(TorchFunctionMode):
    found: str | None = None

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.found is None and isinstance(result, Tensor) and not result.isfinite().all():
            worst = "NaN" if result.isnan().any() else "inf"
            self.found = f"{func.__name__.strip('_')} returns {worst} in {str(result.dtype)[6:]}"
        return result
