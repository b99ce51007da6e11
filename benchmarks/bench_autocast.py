"""amp_lab.autocast against torch.autocast on the CPU in bfloat16: training steps, and single calls.

The target: a step of 1 ms takes at most 1.2 times as long, steps of 50 ms and more at most 1.05
times. What a call costs more is the way from torch's C++ to Python and back, about 1 µs for every
function and attribute of a tensor that is used in the region.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_lab

KINDS = {"torch": torch.autocast, "ours": amp_lab.autocast}


def mlp(width: int, batch: int) -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10)), torch.randn(batch, width)


def cnn(channels: int, size: int, batch: int) -> tuple[nn.Module, Tensor]:
    def block(channels_in: int, channels: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels, 3, padding=1)
        return [conv, nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(1, channels), *block(channels, channels), nn.Flatten()]
    head = nn.Linear(channels * (size // 4) ** 2, 10)
    return nn.Sequential(*layers, head), torch.randn(batch, 1, size, size)


class Pooled(nn.Module):
    """A sequence model, the mean over time, and a linear layer."""

    def __init__(self, sequence_model: nn.Module, width: int) -> None:
        super().__init__()
        self.sequence_model = sequence_model
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        result = self.sequence_model(x)
        output = result[0] if isinstance(result, tuple) else result
        return self.head(output.mean(dim=1))


def transformer(width: int, layers: int, batch: int, length: int) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return Pooled(encoder, width), torch.randn(batch, length, width)


def recurrent(
    kind: type[nn.RNNBase], width: int, batch: int, length: int
) -> tuple[nn.Module, Tensor]:
    return Pooled(kind(width, width, batch_first=True), width), torch.randn(batch, length, width)


STEPS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], int]] = {
    "MLP, 3 x 64": (lambda: mlp(64, 64), 300),
    "MLP, 3 x 256": (lambda: mlp(256, 128), 300),
    "CNN, 2 x 8 channels": (lambda: cnn(8, 8, 64), 300),
    "transformer, 1 x 64": (lambda: transformer(64, 1, 8, 8), 300),
    "GRU, 16, 8 time steps": (lambda: recurrent(nn.GRU, 16, 8, 8), 200),
    "LSTM, 16, 8 time steps": (lambda: recurrent(nn.LSTM, 16, 8, 8), 200),
    "CNN, 2 x 64 channels": (lambda: cnn(64, 28, 64), 12),
    "transformer, 2 x 256": (lambda: transformer(256, 2, 32, 32), 12),
    "GRU, 256, 32 time steps": (lambda: recurrent(nn.GRU, 256, 64, 32), 12),
}


def step_of(model: nn.Module, inputs: Tensor) -> Callable[[Callable], None]:
    targets = torch.randint(10, (len(inputs),))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(kind: Callable) -> None:
        optimizer.zero_grad()
        with kind("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

    return step


def side_by_side(run: Callable[[Callable], None], repeats: int) -> tuple[float, float, float]:
    """Return the fastest time of each in seconds, and the median ratio of neighbouring runs."""
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(repeats):
        for name, kind in KINDS.items():
            start = time.perf_counter()
            run(kind)
            times[name].append(time.perf_counter() - start)
    ratios = [ours / theirs for theirs, ours in zip(times["torch"], times["ours"], strict=True)]
    return min(times["torch"]), min(times["ours"]), median(ratios)


def calls() -> dict[str, Callable]:
    x, low = torch.randn(4, 4), torch.randn(4, 4).bfloat16()
    w, b = (torch.randn(s, requires_grad=True) for s in ((4, 4), (4,)))
    target = torch.arange(4)
    return {
        "x.shape": lambda: x.shape,
        "x + x": lambda: x + x,
        "F.relu(x)": lambda: F.relu(x),
        "F.layer_norm(x)": lambda: F.layer_norm(x, (4,)),
        "x @ x, cast twice": lambda: x @ x,
        "F.linear, weights cached": lambda: F.linear(low, w, b),
        "torch.cat, two dtypes": lambda: torch.cat([x, low]),
        "F.mse_loss": lambda: F.mse_loss(low, low),
        "F.cross_entropy": lambda: F.cross_entropy(low, target),
    }


def microseconds(call: Callable, kind: Callable, count: int = 1000) -> float:
    with kind("cpu", torch.bfloat16):
        start = time.perf_counter()
        for _ in range(count):
            call()
        return 1e6 * (time.perf_counter() - start) / count


def main() -> None:
    torch.manual_seed(0)
    print(f"{'training step, ms':<26}{'torch':>9}{'ours':>9}{'ratio':>8}{'median':>9}")
    for name, (build, repeats) in STEPS.items():
        step = step_of(*build())
        for kind in KINDS.values():
            step(kind)
        theirs, ours, ratio = side_by_side(step, repeats)
        print(f"{name:<26}{1e3 * theirs:>9.2f}{1e3 * ours:>9.2f}{ours / theirs:>8.2f}{ratio:>9.2f}")
    print(f"\n{'call, µs':<26}{'torch':>9}{'ours':>9}{'more':>8}")
    for name, call in calls().items():
        pairs = [[microseconds(call, kind) for kind in KINDS.values()] for _ in range(7)]
        theirs, ours = (min(column) for column in zip(*pairs, strict=True))
        print(f"{name:<26}{theirs:>9.2f}{ours:>9.2f}{ours - theirs:>8.2f}")


if __name__ == "__main__":
    main()
