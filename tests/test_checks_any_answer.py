"""No check of any lesson answers a strange answer with a traceback, or takes it for right."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import amp_lab.checks
from amp_lab.checks import Result
from amp_lab.histograms import Histogram

STRANGE = [
    "text",
    -1,
    0,
    1.5,
    float("nan"),
    float("inf"),
    [],
    [1, 2],
    {},
    {"model": 3},
    torch.ones(2),
    torch.float16,
    object(),
    lambda: 1,
    lambda *arguments: None,
    lambda *arguments: "text",
    lambda *arguments: float("nan"),
    lambda *arguments: arguments[0],
    lambda *arguments: 1 / 0,
    int,
]
CHECKS = {
    f"{module.name}.{name}": check
    for module in pkgutil.iter_modules(amp_lab.checks.__path__)
    for name, check in vars(importlib.import_module(f"amp_lab.checks.{module.name}")).items()
    if inspect.isfunction(check)
    and hasattr(check, "__wrapped__")
    and check.__module__ == f"amp_lab.checks.{module.name}"
}


def test_all_lessons_are_here():
    assert len(CHECKS) >= 30


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHECKS)
def test_strange_answers(name):
    check = CHECKS[name]
    more = [Histogram().add(torch.ones(3))] * (
        len(inspect.signature(check.__wrapped__).parameters) - 1
    )
    for strange in STRANGE:
        result = check(strange, *more)
        assert isinstance(result, Result)
        assert not result.passed, f"{strange!r} passed"
        assert len(result.hints) == 3
        assert all(result.hint().startswith("Hint") for _ in range(4))
