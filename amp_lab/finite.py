"""Multiply gradients in place and find out whether all were finite, in one pass over memory.

Gradients are large and this is done in every step, so the memory is what takes the time. On a CPU
they are worked on in blocks that stay in its cache between the check and the multiplication; on
an accelerator no result is read back, because that would make the host wait.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

BLOCK = 2**20  # elements: 4 MiB of float32; smaller ones wait too often for the other threads


def scale_and_check_(gradients: Sequence[Tensor], factor: Tensor | None) -> Tensor:
    """Multiply all gradients by `factor` in place, after checking them.

    Args:
        gradients: dense floating-point tensors of one device and one dtype, of any shape.
        factor: 0-dimensional float32 tensor on that device, or None to check only.

    Returns:
        0-dimensional float32 tensor on that device: 1.0 if any gradient held an infinity or NaN
        (before the multiplication, which may overflow), else 0.0.
    """
    on_cpu = gradients[0].device.type == "cpu"
    return (_on_cpu if on_cpu else _on_accelerator)(gradients, factor)


def _on_cpu(gradients: Sequence[Tensor], factor: Tensor | None) -> Tensor:
    # A factor of magnitude 1 or less makes no finite number infinite, and none can make an
    # infinite one finite: the order does not matter, and what was just written is in the cache.
    multiply_first = factor is not None and abs(factor.item()) <= 1
    found = False
    for block in _blocks(gradients):
        if factor is not None and multiply_first:
            torch._foreach_mul_(block, factor)
        found = found or not _is_finite(block)
        if factor is not None and not multiply_first:
            torch._foreach_mul_(block, factor)
    return torch.tensor(float(found))


def _on_accelerator(gradients: Sequence[Tensor], factor: Tensor | None) -> Tensor:
    filled = [g for g in gradients if g.numel()]
    if not filled:
        return torch.zeros((), device=gradients[0].device)
    # The largest magnitude is NaN where any value is, and infinite where any value is.
    largest = torch.stack(torch._foreach_norm(filled, torch.inf))
    if factor is not None:
        torch._foreach_mul_(filled, factor)
    return largest.isfinite().logical_not().any().float()


def _blocks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of about BLOCK elements: large ones cut, small ones together."""
    together: list[Tensor] = []
    size = 0
    for tensor in tensors:
        count = tensor.numel()
        if count >= BLOCK:
            # What is not contiguous cannot be cut without copying it.
            pieces = tensor.view(-1).split(BLOCK) if tensor.is_contiguous() else [tensor]
            yield from ([piece] for piece in pieces)
            continue
        together.append(tensor)
        size += count
        if size >= BLOCK:
            yield together
            together, size = [], 0
    if together:
        yield together


def _is_finite(block: list[Tensor]) -> bool:
    """Tell whether all numbers are finite, on a CPU.

    A sum is the fastest look at all of them: infinity and NaN do not vanish from it. It may
    itself overflow, so a sum that is not finite is only a reason to look more closely: at the
    extremes, which are both NaN where any number is (and take a tenth of `isfinite`'s time).
    """
    together = block[0] if len(block) == 1 else _joined(block)
    if math.isfinite(together.sum().item()):
        return True
    return all(math.isfinite(extreme.item()) for extreme in together.aminmax())


def _joined(tensors: list[Tensor]) -> Tensor:
    """Copy tensors into one; a hundred looks at small tensors cost more than the copy."""
    try:
        return torch.cat(tensors)  # layers of one width; flattening first takes twice as long
    except RuntimeError:
        return _flatten_dense_tensors(tensors)
