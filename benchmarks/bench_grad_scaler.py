"""`unscale_` and the decision to step: ours, torch's fused kernel, and a bare multiplication.

The bare in-place multiplication is the limit that the memory sets: nothing that changes the
gradients can be faster.
"""

import time

import torch
from torch import nn

from amp_lab.grad_scaler import GradScaler

ROUNDS = 15


class Idle(torch.optim.Optimizer):
    """An optimizer whose step does nothing, so that the scaler's work alone is measured."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:
        pass


def measure(shapes: list[tuple[int, ...]]) -> dict[str, float]:
    """Return the fastest time of each contender in seconds, all rounds interleaved."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer, gradients = Idle(parameters), [p.grad for p in parameters]
    # A scale of almost 1 keeps the numbers in place however often they are unscaled.
    scalers = {"amp_lab": GradScaler, "torch": torch.amp.GradScaler}
    made = {n: c("cpu", init_scale=1.0000001, growth_interval=10**9) for n, c in scalers.items()}
    for scaler in made.values():
        scaler.scale(torch.ones(()))
    runs = {n: lambda s=s: s.step(optimizer) for n, s in made.items()}
    runs["multiply"] = lambda: [g.mul_(0.9999999) for g in gradients]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS if len(shapes) == 1 else 20 * ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
        for scaler in made.values():
            scaler.update()
    return {name: min(all_of_them) for name, all_of_them in times.items()}


def main() -> None:
    print(f"{'gradients':24s}{'amp_lab':>10s}{'torch':>10s}{'multiply':>10s}"
          f"{'/ torch':>10s}{'/ multiply':>12s}   target")  # fmt: skip
    cases = {"1 of 50,000,000": ([(50_000_000,)], "1.3 torch")}
    cases["100 of 64 x 64"] = ([(64, 64)] * 100, "1.5 torch")
    for name, (shapes, target) in cases.items():
        t = measure(shapes)
        ours, theirs, bare = (1e3 * t[k] for k in ("amp_lab", "torch", "multiply"))
        print(f"{name:24s}{ours:8.2f}ms{theirs:8.2f}ms{bare:8.2f}ms"
              f"{ours / theirs:10.2f}{ours / bare:12.2f}   {target}")  # fmt: skip


if __name__ == "__main__":
    main()
