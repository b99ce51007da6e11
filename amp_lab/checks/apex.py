"""Checks for 08_apex."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from amp_lab import apex as amp
from amp_lab.apex.loss_scaler import LossScaler
from amp_lab.checks import NotAnswered, call, demand, exercise, number
from amp_lab.experiments.apex import initialized, network

_SYMPTOMS = {
    "A": ("weights float16, BatchNorm float32, momentum float32", "O2"),
    "B": ("weights float32, the output of a Linear float16", "O1"),
    "C": ("weights float16, BatchNorm float16, momentum float16", "O3"),
}


@exercise(
    "Turn the first view to each level and compare.",
    "Only one level leaves the weights in float32 and still computes in half.",
    "Two levels have half weights. What does keep_batchnorm_fp32 say at each?",
    right="the dtypes of weights, outputs and optimizer state tell the levels apart.",
)
def which_level(answer: Any) -> None:
    """A dict from "A", "B", "C" to the opt level that a debugger's dtypes give away."""
    demand(isinstance(answer, dict), "the answer is to be a dict with the keys A, B and C.")
    if all(answer.get(key, ...) is ... for key in _SYMPTOMS):
        raise NotAnswered
    for key, (symptom, level) in _SYMPTOMS.items():
        said = answer.get(key)
        demand(said is not None and said is not ..., f"{key} has no level yet.")
        demand(said in ("O0", "O1", "O2", "O3"), f"{key}: {said!r} is no opt level.")
        demand(said == level, f"{key} ({symptom}) does not look like that under {said}.")


@exercise(
    "Go through it event by event and write down the exponent.",
    "An overflow halves the scale and sets the count of clean passes back to 0.",
    "2,000 clean passes double the scale once, and the count starts anew.",
    right="down by one at each overflow, up by one for each full 2,000 clean passes.",
)
def scale_after(answer: Any) -> None:
    """log2 of the scale: 1 overflow, 4,500 clean, 2 overflows, 1,999 clean, 1 overflow."""
    k = number(answer)
    scaler = LossScaler("dynamic")
    for events in ([True], [False] * 4500, [True] * 2, [False] * 1999, [True]):
        for overflow in events:
            scaler.unscale(torch.tensor([float("inf") if overflow else 1.0]), torch.float32)
            scaler.update_scale()
    truth = torch.tensor(scaler.loss_scale()).log2().item()
    demand(k == int(k), "the answer is to be a whole number, the exponent.")
    demand(k >= truth, f"at 2^{k:g} you have counted too many overflows or too few clean windows.")
    demand(k <= truth, f"at 2^{k:g} you have counted too few overflows or too many clean windows.")


@exercise(
    "Which tensors does the optimizer update under O2, and which have unscaled gradients?",
    "amp.master_params(optimizer) yields them.",
    "nn.utils.clip_grad_norm_ takes them as its first argument.",
    right="the master gradients are unscaled, and they are what the step uses.",
)
def clip(answer: Any) -> None:
    """A function (model, optimizer, max_norm) that clips after the scale_loss block under O2."""
    demand(callable(answer), "the answer is to be a function; keep the line that starts with def.")
    for max_norm in (0.5, 0.01):
        with initialized("O2") as (model, optimizer):
            inputs, targets = next(network().batches(1))
            with amp.scale_loss(network().loss(model(inputs), targets), optimizer) as scaled_loss:
                scaled_loss.backward()
            masters = list(amp.master_params(optimizer))
            before = [p.grad.clone() for p in masters if p.grad is not None]
            found = call(partial(answer, model, optimizer), max_norm)
            after = [p.grad for p in masters if p.grad is not None]
            norm, total = _norm(after), _norm(before)
            demand(
                norm <= 1.01 * max_norm,
                f"with max_norm={max_norm:g} the step still uses gradients of norm {norm:.3g}.",
            )
            demand(
                norm > 0.9 * min(max_norm, total),
                f"with max_norm={max_norm:g} the gradients are clipped to {norm:.3g}: too small.",
            )
            demand(
                torch.allclose(after[0] / norm, before[0] / total, rtol=1e-3, atol=1e-6),
                "clipping is to keep the direction of the gradient.",
            )
            demand(
                abs(number(found) - total) <= 0.01 * total,
                f"return the norm that was found: {found:.3g} is not that of the gradients.",
            )


def _norm(tensors: list[Tensor]) -> float:
    return torch.stack([t.norm() for t in tensors]).norm().item()


@exercise(
    "Three lines: the master's gradient, the step on the master, the copy back.",
    "Turn the gradient into float32 before you divide it: small quotients do not fit in half.",
    "half.copy_(master) rounds to half precision by itself. Does master keep its low bits?",
    right="float32 where the update is added, half where the network multiplies.",
)
def master_step(answer: Any) -> None:
    """A function (half, master, grad, loss_scale, lr) -> (new half, new master): one SGD step."""
    generator = torch.Generator().manual_seed(0)
    for scale, lr, size in ((1.0, 0.1, 1e-3), (1024.0, 1e-4, 1e-3), (2.0**16, 1.0, 1e-7)):
        # Gradients of 1e-7 are lost when they are divided in half precision.
        master = torch.randn(64, generator=generator) * 1000 * size
        grad = (torch.randn(64, generator=generator) * size * scale).half()
        expected = master - lr * (grad.float() / scale)
        pair = call(answer, master.half(), master.clone(), grad.clone(), scale, lr)
        demand(
            isinstance(pair, tuple) and len(pair) == 2,
            "return two tensors, the half weights and the master weights.",
        )
        low, new = pair
        shown = f"with loss scale {scale:g} and learning rate {lr:g}"
        demand(low.dtype == torch.float16, f"the first result is {low.dtype}, not torch.float16.")
        demand(new.dtype == torch.float32, f"the second result is {new.dtype}, not torch.float32.")
        error = (new - expected).abs().max().item()
        demand(error <= 1e-4 * size, f"{shown} the master weights are off by up to {error:.2g}.")
        demand(torch.equal(low, new.half()), f"{shown} the half weights are not master.half().")


@exercise(
    "Start from torch.amp.GradScaler('cpu').state_dict(): which two entries change?",
    "loss_scale is Apex's name for scale, unskipped its name for the count of clean steps.",
    "The count is called _growth_tracker. All other entries stay as GradScaler has them.",
    right="the scale and its count move over, and training goes on where it was.",
)
def convert(answer: Any) -> None:
    """A function from Apex's state dict to one that torch.amp.GradScaler loads."""
    for scale, unskipped in ((65536.0, 0), (512.0, 1234), (0.25, 7)):
        scaler = torch.amp.GradScaler("cpu")
        state = call(answer, {"loss_scaler0": {"loss_scale": scale, "unskipped": unskipped}})
        demand(isinstance(state, dict), "return a dict.")
        wanted = set(scaler.state_dict())
        missing, extra = wanted - set(state), set(state) - wanted
        demand(not missing, f"GradScaler also wants {', '.join(sorted(missing))}.")
        demand(not extra, f"GradScaler does not know {', '.join(sorted(extra))}.")
        scaler.load_state_dict(state)
        got = scaler.state_dict()
        demand(got["scale"] == scale, f"the scale is {got['scale']}, but Apex's was {scale}.")
        demand(
            got["_growth_tracker"] == unskipped,
            f"after {unskipped} clean steps it thinks of {got['_growth_tracker']}.",
        )
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            usual = torch.amp.GradScaler("cpu").state_dict()[name]
            demand(got[name] == usual, f"{name} is {got[name]}, which is neither's rule.")
