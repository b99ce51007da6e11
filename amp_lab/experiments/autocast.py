"""The autocast lesson in numbers: what ran in which precision, and where float16 goes wrong."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_lab.autocast import autocast
from amp_lab.devices import default_device
from amp_lab.op_trace import Call
from amp_lab.tasks import digit_images


class Reader(nn.Module):
    """A one-layer attention network that reads a digit as a sequence of eight rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.norm = nn.LayerNorm(32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.classify = nn.Linear(32, 10)

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows `(batch, 8, 8)` to logits `(batch, 10)`."""
        x = self.norm(self.embed(rows))
        scores = torch.matmul(self.query(x), self.key(x).transpose(1, 2)) / 32**0.5
        attended = torch.matmul(torch.softmax(scores, -1), self.value(x))
        return self.classify((x + attended).mean(1))


@dataclass(frozen=True)
class Flow:
    """What a traced step did: its calls, and the dtypes of the gradients that came back.

    Attributes:
        calls: the operations of the forward pass, in order.
        gradients: by module, the dtype of the gradient of its output.
        weights: by parameter, the dtype of its `.grad`.
    """

    calls: list[Call]
    gradients: dict[str, torch.dtype]
    weights: dict[str, torch.dtype]


def trace_step() -> Flow:
    """Run forward, loss and backward of `Reader` on one batch of digits, in emulated float16."""
    device = default_device()
    images, labels = digit_images()
    rows, targets = images[:32, 0].to(device), labels[:32].to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Reader().to(device)
    gradients: dict[str, torch.dtype] = {}

    def watch(name: str) -> Callable:
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            output.register_hook(lambda g: gradients.__setitem__(name, g.dtype))

        return hook

    for name, module in model.named_children():
        module.register_forward_hook(watch(name))
    with autocast(device.type, torch.float16, emulate=True, trace=True) as region:
        loss = F.cross_entropy(model(rows), targets)
    loss.backward()
    weights = {n: p.grad.dtype for n, p in model.named_parameters() if p.grad is not None}
    return Flow(region.trace, gradients, weights)


# What the lesson lets go wrong in half precision.
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, 0),
    "exp": torch.exp,
    "pow": lambda x: torch.pow(x, 3),
    "sum": lambda x: x.sum(0, keepdim=True),
    "norm": lambda x: torch.linalg.vector_norm(x, keepdim=True),
}


def half_error(operation: str, log2_scale: float) -> float:
    """Return the error of an operation with float16 input and float16 result.

    The inputs are 1,000 numbers from 2^(log2_scale - 1) to just under 2^log2_scale. The error is
    the largest difference from the float64 result, relative to the largest result; infinite where
    the result is infinite or NaN, or where all of it became zero.
    """
    x = torch.linspace(0.5, 0.999, 1000, dtype=torch.float64) * 2.0**log2_scale
    function = OPERATIONS[operation]
    exact = function(x)
    # torch's float16 kernels compute in float32 inside and round the result once; float64 inside
    # gives the same numbers on every device.
    half = function(x.half().double()).half().double()
    if not half.isfinite().all() or not half.any():
        return math.inf
    return ((half - exact).abs().max() / exact.abs().max()).item()


def casts_of(weight_uses: int, cache_enabled: bool) -> int:
    """Return how many casts autograd recorded for a weight that is used several times."""
    device = default_device()
    weight = nn.Parameter(torch.ones(4, 4, device=device))
    with autocast(device.type, torch.bfloat16, cache_enabled=cache_enabled):
        outputs = [torch.mm(torch.ones(2, 4, device=device), weight) for _ in range(weight_uses)]
    seen, queue = set(), [output.grad_fn for output in outputs]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [following for following, _ in node.next_functions]
    return sum("ToCopy" in node.name() for node in seen)
