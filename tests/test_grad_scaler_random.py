"""Random training programs on torch's GradScaler and on ours end in the same bits.

Left out: fused SGD with momentum whose first step is skipped. torch's fused kernel then leaves the
momentum buffer that it had allocated uninitialised, and reads it in the next step.
"""

import random

import pytest
import torch
from torch import nn

from amp_lab.grad_scaler import GradScaler

from .test_grad_scaler import bits

INF, NAN = float("inf"), float("nan")
PROGRAMS = 600
OPTIMIZERS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    ("SGD", {"lr": 0.1, "fused": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "foreach": True}),
    ("Adam", {"lr": 0.01, "fused": True}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.5}),
    ("Adagrad", {"lr": 0.01, "fused": True}),
]
SCALES = [2.0**-126, 1e-30, 0.1, 1.0, 3.0, 1000.0, 65536.0, 2.0**24, 1e30, 1e38]


class Program:
    """One random program: the optimizers, and for every iteration what happens in it."""

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        self.scaler = {
            "init_scale": pick.choice(SCALES),
            "growth_factor": pick.choice([2.0, 1.5, 4.0]),
            "backoff_factor": pick.choice([0.5, 0.3, 0.25]),
            "growth_interval": pick.randint(1, 4),
        }
        self.optimizers = [pick.choice(OPTIMIZERS) for _ in range(pick.randint(1, 2))]
        self.sparse = [name == "SGD" and pick.random() < 0.3 for name, _ in self.optimizers]
        self.dtypes = [pick.choice([torch.float32, torch.float32, torch.float64]) for _ in (0, 1)]
        self.iterations = [self._iteration(pick) for _ in range(pick.randint(2, 6))]

    def _iteration(self, pick: random.Random) -> list[dict]:
        return [
            {
                "seed": pick.randrange(10**6),
                "bad": pick.choice([None, None, None, INF, -INF, NAN]),
                "place": pick.randrange(6),
                "unscale": pick.random() < 0.4,
                "clip": pick.random() < 0.3,
                "without": pick.random() < 0.1,
            }
            for _ in self.optimizers
        ]

    def run(self, make) -> list:
        scaler = make("cpu", **self.scaler)
        scaler.scale(torch.ones(()))
        parameters, optimizers = [], []
        for (name, options), sparse, dtype in zip(
            self.optimizers, self.sparse, self.dtypes, strict=False
        ):
            if sparse:
                options = {"lr": 0.1}
            start = torch.linspace(-1, 1, 6, dtype=dtype).view(3, 2)
            own = [nn.Parameter(start.clone()), nn.Parameter(start.flatten().clone())]
            own = own[:1] if sparse else own
            parameters.append(own)
            optimizers.append(getattr(torch.optim, name)(own, **options))
        states = []
        for iteration in self.iterations:
            for own, optimizer, sparse, what in zip(
                parameters, optimizers, self.sparse, iteration, strict=True
            ):
                self._backward(own, sparse, what, scaler.get_scale())
                if what["unscale"]:
                    scaler.unscale_(optimizer)
                    if what["clip"] and not sparse:
                        nn.utils.clip_grad_value_(own, 0.5)
                scaler.step(optimizer)
            scaler.update()
            states.append(bits(scaler.state_dict()))
        end = [(own, [p.grad for p in own]) for own in parameters]
        return [states, bits(end), [bits(o.state_dict()["state"]) for o in optimizers]]

    @staticmethod
    def _backward(own: list, sparse: bool, what: dict, scale: float) -> None:
        generator = torch.Generator().manual_seed(what["seed"])
        for i, p in enumerate(own):
            gradient = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            gradient = (gradient * scale).to(p.dtype)
            if what["bad"] is not None and i == len(own) - 1:
                gradient.view(-1)[what["place"]] = what["bad"]
            if sparse:
                gradient = gradient.to_sparse(1)
            p.grad = None if what["without"] and i == 0 and len(own) > 1 else gradient


@pytest.mark.parametrize("block", range(10))
def test_random_programs(block):
    for seed in range(block * PROGRAMS // 10, (block + 1) * PROGRAMS // 10):
        program = Program(seed)
        assert program.run(GradScaler) == program.run(torch.amp.GradScaler), f"seed {seed}"


def test_the_programs_are_varied():
    """The test above would pass with programs in which nothing happens."""
    programs = [Program(seed) for seed in range(PROGRAMS)]
    steps = [s for p in programs for i in p.iterations for s in i]
    assert sum(s["bad"] is not None for s in steps) > 500
    assert sum(any(p.sparse) for p in programs) > 30
    assert {name for p in programs for name, _ in p.optimizers} == {n for n, _ in OPTIMIZERS}
    assert sum(o.get("fused", False) for p in programs for _, o in p.optimizers) > 100
