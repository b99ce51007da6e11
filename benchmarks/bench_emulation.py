"""Training steps under emulated float16, against float32 and against torch's float16 on the CPU.

The target: at least 10 times faster than `torch.autocast("cpu", torch.float16)` and at most 1.5
times the float32 step, for the network of convolutions and for the transformer.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F

import amp_lab

BATCH, CLASSES = 64, 10
ROUNDS = 15
EVERY = {"float32": 1, "emulated": 1, "torch": 5}  # torch's float16 step takes seconds


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Return four 3x3 convolutions with batch norm, two linear layers, and images of 3x32x32."""

    def block(channels_in: int, channels: int) -> list[nn.Module]:
        return [
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]

    layers = [
        *(*block(3, 32), *block(32, 32), nn.MaxPool2d(2)),
        *(*block(32, 64), *block(64, 64), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
    ]
    return nn.Sequential(*layers), torch.randn(BATCH, 3, 32, 32)


class Classifier(nn.Module):
    """A sequence model and a linear layer on the mean over time."""

    def __init__(self, sequence_model: nn.Module, width: int) -> None:
        super().__init__()
        self.sequence_model = sequence_model
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.sequence_model(x)
        output = result[0] if isinstance(result, tuple) else result
        return self.head(output.mean(dim=1))


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Return two encoder layers of width 256 and sequences of 32."""
    layer = nn.TransformerEncoderLayer(256, nhead=8, dim_feedforward=1024, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    return Classifier(encoder, 256), torch.randn(BATCH, 32, 256)


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    """Return a GRU of 128 units and sequences of 32; torch has no float16 LSTM on every CPU."""
    return Classifier(nn.GRU(64, 128, batch_first=True), 128), torch.randn(BATCH, 32, 64)


def training_step(
    model: nn.Module, inputs: torch.Tensor
) -> Callable[[AbstractContextManager], None]:
    targets = torch.randint(CLASSES, (BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(context: AbstractContextManager) -> None:
        optimizer.zero_grad()
        with context:
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    torch.manual_seed(0)
    contexts = {
        "float32": nullcontext,
        "emulated": lambda: amp_lab.autocast("cpu", torch.float16, emulate=True),
        "torch": lambda: torch.autocast("cpu", torch.float16),
    }
    print(
        f"{'training step, ms':<18}{'float32':>9}{'emulated':>10}{'torch float16':>15}"
        f"{'torch/emulated':>16}{'emulated/float32':>18}"
    )
    for build in (convolutions, transformer, recurrent):
        step = training_step(*build())
        times: dict[str, list[float]] = {name: [] for name in contexts}
        for round_ in range(ROUNDS):
            for name, context in contexts.items():
                if round_ % EVERY[name] == 0:
                    start = time.perf_counter()
                    step(context())
                    times[name].append(time.perf_counter() - start)
        float32, emulated, native = (1000 * min(times[name]) for name in contexts)
        print(
            f"{build.__name__:<18}{float32:>9.1f}{emulated:>10.1f}{native:>15.1f}"
            f"{native / emulated:>16.1f}{emulated / float32:>18.2f}"
        )


if __name__ == "__main__":
    main()
