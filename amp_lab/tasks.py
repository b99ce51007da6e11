"""Small real tasks, and the one training loop that every experiment of the lab uses.

A `Task` is data, a model, a loss and an optimizer; `train` runs it. What differs between float32,
half precision, autocast and loss scaling are arguments of `train`, so two experiments that are
compared differ in nothing else: same seed, same initial weights, same batches in the same order.
The pictures are scikit-learn's bundled digits (1,797 handwritten digits of 8x8 pixels, from the
UCI "Optical Recognition of Handwritten Digits" data set): nothing is downloaded.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_lab.devices import default_device


@dataclass(frozen=True)
class Task:
    """One thing to learn: `loss(build()(inputs[i]), targets[i])` is to become small.

    Attributes:
        name: what it is called in figures and sentences.
        inputs: float32 tensor `(examples, ...)` on the CPU.
        targets: tensor `(examples, ...)` on the CPU.
        build: makes a fresh model on the CPU from torch's current random state.
        loss: `(outputs, targets) -> scalar tensor`.
        optimizer: makes the optimizer from the parameters.
        batch_size: examples in one step.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch_size: int

    def batches(
        self, steps: int, seed: int = 0, device: torch.device | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `steps` batches `(inputs, targets)`, reshuffling whenever the data is used up.

        The order comes from a generator on the CPU and so is the same on every device.
        """
        device = device or default_device()
        generator = torch.Generator().manual_seed(seed)
        per_epoch = len(self.inputs) // self.batch_size
        for step in range(steps):
            if step % per_epoch == 0:
                order = torch.randperm(len(self.inputs), generator=generator)
            start = step % per_epoch * self.batch_size
            chosen = order[start : start + self.batch_size]
            yield self.inputs[chosen].to(device), self.targets[chosen].to(device)

    def fresh_model(self, seed: int = 0, device: torch.device | None = None) -> nn.Module:
        """Build the model from `seed`, the same on every device, and leave torch's random state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().to(device or default_device())


@dataclass
class Run:
    """What `train` returns: the model and optimizer as they ended, and the loss of every step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)

    def final_loss(self, window: int = 10) -> float:
        """Mean of the last `window` losses: one batch's loss alone says little."""
        last = self.losses[-window:]
        return sum(last) / len(last)


def train(
    task: Task,
    *,
    steps: int,
    seed: int = 0,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    scaler: Any = None,
    weights_dtype: torch.dtype = torch.float32,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    watch: Callable[[nn.Module], AbstractContextManager] = nullcontext,
    after_backward: Callable[[int, nn.Module], None] | None = None,
    stop_at_nan: bool = False,
    progress: bool = False,
) -> Run:
    """Train a fresh model of `task` for `steps` steps and return the `Run`.

    Args:
        autocast: makes the context of forward pass and loss, for example
            `lambda: amp_lab.autocast("cpu", torch.float16, emulate=True)`; torch's own works too.
        scaler: an `amp_lab.GradScaler` or torch's; `None` trains without one.
        weights_dtype: dtype of the model's parameters, buffers and inputs, where floating-point.
        optimizer: takes the place of the task's own.
        watch: makes a context from the model in which the training runs, for example
            `amp_lab.histograms.record_gradients`.
        after_backward: called as `after_backward(step, model)` when gradients are there and not
            yet unscaled or stepped on: the place to record them.
        stop_at_nan: end after the first loss that is not finite, for runs that cannot recover.
            This reads the loss in every step, which makes the host wait for the device.
        progress: show a bar (in a notebook it is gone when the training is done).

    The loop is the one of PyTorch's "Automatic Mixed Precision examples", whatever is passed:
    scale, backward, step, update.
    """
    device = device or default_device()
    model = task.fresh_model(seed, device).to(weights_dtype)
    run = Run(model, (optimizer or task.optimizer)(model.parameters()))
    losses = []
    batches = _shown(task.batches(steps, seed, device), steps, task.name, progress)
    with watch(model):
        for step, (inputs, targets) in enumerate(batches):
            run.optimizer.zero_grad()
            if inputs.is_floating_point():  # characters and the like are integers
                inputs = inputs.to(weights_dtype)
            with autocast():
                loss = task.loss(model(inputs), targets)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if after_backward is not None:
                after_backward(step, model)
            if scaler is None:
                run.optimizer.step()
            else:
                scaler.step(run.optimizer)
                scaler.update()
            losses.append(loss.detach().float())
            if stop_at_nan and not losses[-1].isfinite():
                break
    # Read once at the end: reading a loss makes the host wait for the device.
    run.losses = torch.stack(losses).tolist()
    return run


def _shown(batches: Iterator, steps: int, name: str, progress: bool) -> Iterator:
    if not progress:
        return batches
    from tqdm.auto import tqdm

    return iter(tqdm(batches, total=steps, desc=name, leave=False))


@cache
def digit_images() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits: images `(1797, 1, 8, 8)` float32 in [0, 1], labels `(1797,)` int64."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


@cache
def digits() -> Task:
    """Read the digit: a network of two convolutions and two linear layers, cross entropy, SGD."""
    images, labels = digit_images()

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return Task("digits", images, labels, build, F.cross_entropy, sgd, batch_size=64)


@cache
def heatmaps(size: int = 64, layers: int = 4, channels: int = 16) -> Task:
    """Find the digit: where in a `size` x `size` picture is it, and which one?

    The answer is drawn as in pose estimation (one heatmap for each of the ten digits, a Gaussian
    bump of standard deviation 2 pixels at the digit's centre, all others empty). The loss is the
    mean squared error over examples x 10 x size x size outputs, a mean over so many numbers that
    the gradient of each one is tiny.
    """
    images, labels = digit_images()
    examples = 512
    generator = torch.Generator().manual_seed(0)
    corners = torch.randint(0, size - 8, (examples, 2), generator=generator)
    pictures = torch.zeros(examples, 1, size, size)
    targets = torch.zeros(examples, 10, size, size)
    pixels = torch.arange(size, dtype=torch.float32)
    for i, (top, left) in enumerate(corners.tolist()):
        pictures[i, :, top : top + 8, left : left + 8] = images[i]
        down, across = (torch.exp(-((pixels - c - 3.5) ** 2) / 8) for c in (top, left))
        targets[i, labels[i]] = down[:, None] * across[None, :]

    def build() -> nn.Module:
        blocks: list[nn.Module] = []
        for layer in range(layers):
            blocks += [
                nn.Conv2d(channels if layer else 1, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
        return nn.Sequential(*blocks, nn.Conv2d(channels, 10, 1))

    adam = partial(torch.optim.Adam, lr=1e-3)
    return Task("heatmaps", pictures, targets, build, F.mse_loss, adam, batch_size=32)


@cache
def counting() -> Task:
    """Count the digits: 1 to 5 of them are scattered over a picture of 64 x 64 pixels.

    The answer is a density map, as in crowd counting (Lempitsky and Zisserman, "Learning To Count
    Objects in Images", 2010): a Gaussian of standard deviation 4 pixels at each digit that sums to
    1, so that the map sums to their number. Spread over so many pixels it is small, at most about
    0.01 a digit, and the loss is the mean squared error over 32 x 64 x 64 of them.
    """
    images, _ = digit_images()
    size, examples = 64, 512
    generator = torch.Generator().manual_seed(0)
    pictures, densities = torch.zeros(2, examples, 1, size, size)
    pixels = torch.arange(size, dtype=torch.float32)
    for i, count in enumerate(torch.randint(1, 6, (examples,), generator=generator).tolist()):
        corners = torch.randint(0, size - 8, (count, 2), generator=generator).tolist()
        chosen = torch.randint(0, len(images), (count,), generator=generator)
        for (top, left), image in zip(corners, images[chosen], strict=True):
            place = pictures[i, :, top : top + 8, left : left + 8]
            place.copy_(torch.maximum(place, image))
            down, across = (torch.exp(-((pixels - c - 3.5) ** 2) / 32) for c in (top, left))
            densities[i, 0] += torch.outer(down / down.sum(), across / across.sum())

    def build() -> nn.Module:
        last = nn.Conv2d(16, 16, 1)  # begins with the empty map
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)  # type: ignore[arg-type]
        return nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            last,
            nn.PixelShuffle(4),
        )

    adam = partial(torch.optim.Adam, lr=2e-3)
    return Task("counting", pictures, densities, build, F.mse_loss, adam, batch_size=32)


@cache
def fine_tuning() -> Task:
    """Fine-tune: a network that reads digits gets pictures that are moved one pixel to the right.

    One hidden layer of 2,048 units, trained for 100 steps on the digits as they are; then Adam with
    a learning rate of 1e-6, small so that what was learned before is not lost. Adam changes a
    weight by about its learning rate in each step, which is less than half an ulp of float16 for
    every weight above 2^-8.
    """
    images, labels = digit_images()

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 10))

    adam = torch.optim.Adam
    before = Task("digits as they are", images, labels, network, F.cross_entropy, adam, 64)

    def build() -> nn.Module:
        return train(before, steps=100, seed=torch.initial_seed(), device=torch.device("cpu")).model

    moved = images.roll(1, dims=3)
    slowly = partial(adam, lr=1e-6)
    return Task("fine-tuning", moved, labels, build, F.cross_entropy, slowly, batch_size=64)
