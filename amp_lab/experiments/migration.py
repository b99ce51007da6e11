"""From Apex to torch.amp, in pairs of programs that run and arrive at the same numbers."""

import inspect
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from html import escape
from textwrap import dedent

import torch
from torch import Tensor

from amp_lab import apex as amp
from amp_lab.experiments import migration_programs as programs
from amp_lab.experiments.apex import network


@dataclass(frozen=True)
class Pair:
    """One thing to do, written for Apex and for torch.amp."""

    what: str
    apex: Callable
    torch: Callable

    def same(self) -> bool:
        """Run both and return whether they end with the same numbers, to the last bit."""
        ours, theirs = _outcome(self.apex), _outcome(self.torch)
        return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def _outcome(program: Callable) -> list[Tensor]:
    """Return what a program returns, the weights it leaves, and what its optimizer holds."""
    model = network().fresh_model()
    optimizer = network().optimizer(model.parameters())
    with redirect_stdout(io.StringIO()):  # initialize says what it does
        returned = program(model, optimizer, list(network().batches(4)))
        numbers = [*model.parameters(), *amp.master_params(optimizer)]
        kept = [p.detach().clone() for p in numbers]
        amp.reset()
    return kept if returned is None else [*kept, torch.as_tensor(returned).detach()]


PAIRS = [
    Pair("A training step", programs.step_apex, programs.step_torch),
    Pair("Gradient clipping", programs.clip_apex, programs.clip_torch),
    Pair("Gradient accumulation", programs.accumulate_apex, programs.accumulate_torch),
    Pair("Several optimizers", programs.optimizers_apex, programs.optimizers_torch),
    Pair("A static loss scale", programs.static_apex, programs.static_torch),
    Pair("A checkpoint of the scale", programs.checkpoint_apex, programs.checkpoint_torch),
    Pair("A region without casts", programs.region_apex, programs.region_torch),
    Pair("A function in float32", programs.function_apex, programs.function_torch),
    Pair("Switched off", programs.disabled_apex, programs.disabled_torch),
    Pair("O2: master weights", programs.masters_apex, programs.masters_torch),
    Pair("O3: half everywhere", programs.half_apex, programs.half_torch),
]


def body(program: Callable) -> str:
    """Return the source of a program without its first line."""
    return dedent("".join(inspect.getsourcelines(program)[0][1:])).rstrip()


class Table:
    """Pairs side by side: as HTML in a notebook, as text elsewhere."""

    def __init__(self, pairs: list[Pair]) -> None:
        self.pairs = pairs

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th colspan="2" scope="colgroup" style="text-align:left">{pair.what}</th></tr>'
            f"<tr>{_cell(pair.apex)}{_cell(pair.torch)}</tr>"
            for pair in self.pairs
        )
        heads = "".join(
            f'<th scope="col" style="text-align:left">{api}</th>' for api in ("Apex", "torch.amp")
        )
        return f"<table><tr>{heads}</tr>{rows}</table>"

    def __repr__(self) -> str:
        texts = [
            f"# {pair.what}, with Apex\n{body(pair.apex)}\n\n"
            f"# {pair.what}, with torch.amp\n{body(pair.torch)}"
            for pair in self.pairs
        ]
        return "\n\n".join(texts)


def _cell(program: Callable) -> str:
    style = "text-align:left;vertical-align:top"
    code = f'<pre style="font-family:monospace">{escape(body(program))}</pre>'
    return f'<td style="{style}">{code}</td>'
