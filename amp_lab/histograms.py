"""Histograms of magnitudes by powers of two, and recording a model's gradients in them.

No logarithm is taken: the exponent field of a floating-point number *is* the binade it lies in.
Inside a binade the bins close in on the next power of two, because that is where formats differ:
a number overflows, or rounds up out of the subnormal range, within half an ulp below a power of
two, and flushes to zero up to exactly one. So the bins of the binade that ends at 2^n are

    {2^(n-1)}   (2^(n-1), 2^n - 3·2^(n-3))   …   [2^n - 2^(n-j), 2^n - 3·2^(n-j-2))   …

which lets one histogram answer for every format and every loss scale 2^k after the fact.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from amp_lab.formats import FloatFormat

BLOCK = 2**20  # elements counted at a time: the intermediate integers stay in the cache
_COUNTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BINS = 64  # columns for the bins of one binade, of which 47 are used


@dataclass(frozen=True)
class Binades:
    """Of `counts[i]` magnitudes in [2^e, 2^(e + 1)), e = exponents[i], `powers[i]` are just 2^e."""

    zero: int
    subnormal: int  # of float32, below 2^-126; those of float16 lie in the binades below 2^-14
    exponents: list[int]
    counts: list[int]
    powers: list[int]
    inf: int
    nan: int


@dataclass(frozen=True)
class Outcome:
    """What becomes of the non-zero numbers (NaN left out) when they are scaled and cast."""

    flushed: int
    subnormal: int
    normal: int
    overflowing: int

    @property
    def nonzero(self) -> int:
        """How many there are."""
        return self.flushed + self.subnormal + self.normal + self.overflowing

    def fraction(self, count: int) -> float:
        """Return a count as a fraction of the non-zero numbers; 0 where there are none."""
        return count / self.nonzero if self.nonzero else 0.0


class Histogram:
    """Counts of magnitudes, in 128 KiB on the device of the data, however much is added.

    Adding never waits for the device; reading (`binades`, `outcome`) does. Without `detail` only
    binades are told apart, which is faster on a CPU and enough for all but `outcome`.
    """

    def __init__(self, device: torch.device | str = "cpu", *, detail: bool = True) -> None:
        self.detail = detail
        with torch.inference_mode(False):  # else nothing could be added outside of it
            self.counts = torch.zeros(256, BINS, dtype=torch.int64, device=device)

    def add(self, x: Tensor) -> "Histogram":
        """Count the elements of x (float16, bfloat16, float32 or float64, any shape).

        float64 is counted where float32 reaches; smaller numbers count as float32's subnormal
        numbers, larger ones as just below 2^128.
        """
        if x.device != self.counts.device:
            raise ValueError(f"the histogram is on {self.counts.device}, the tensor on {x.device}")
        for block in x.detach().resolve_neg().reshape(-1).split(BLOCK):
            bits = _float32_bits(block)
            if x.device.type != "cpu":  # where bincount would make the host wait
                bins = _bins(bits).long()
                self.counts.view(-1).scatter_add_(0, bins, torch.ones_like(bins))
            elif self.detail:
                counts = torch.bincount(_bins(bits), minlength=self.counts.numel())
                self.counts += counts.view_as(self.counts)
            else:
                self._add_binades(bits)
        return self

    def _add_binades(self, bits: Tensor) -> None:
        """Count by the exponent field alone; look closer only where zero, infinity, NaN can be."""
        exponents = (bits >> 23).to(torch.uint8)  # the cast drops the sign
        if len(bits) == BLOCK:  # many: count them in pairs, which are half as many
            pairs = exponents.view(torch.int16).int().add_(2**15)
            table = torch.bincount(pairs, minlength=2**16).view(256, 256)
            rows = table.sum(dim=0) + table.sum(dim=1).roll(128)
        else:
            rows = torch.bincount(exponents, minlength=256)
        self.counts[:, _ANYWHERE] += rows
        for row in (0, 255):
            if rows[row]:
                exact = (bits & (2**31 - 1)).eq(row << 23).sum()
                self.counts[row, _POWER_OF_TWO] += exact
                self.counts[row, _ANYWHERE] -= exact

    def __add__(self, other: "Histogram") -> "Histogram":
        """Return the histogram of both data together, on the device of the first."""
        both = Histogram(self.counts.device, detail=self.detail and other.detail)
        both.counts += self.counts + other.counts.to(self.counts.device)
        return both

    def binades(self) -> Binades:
        """Return the counts by binade, from the smallest to the largest that occur."""
        table = self.counts.cpu()
        exact = table[:, _POWER_OF_TWO]
        rest, normal = table.sum(dim=1) - exact, table.sum(dim=1)[1:255]
        occupied = normal.nonzero().flatten().tolist() or [0, -1]
        first, last = occupied[0], occupied[-1] + 1
        return Binades(
            zero=int(exact[0]),
            subnormal=int(rest[0]),
            exponents=list(range(first - 126, last - 126)),
            counts=normal[first:last].tolist(),
            powers=exact[1:255][first:last].tolist(),
            inf=int(exact[255]),
            nan=int(rest[255]),
        )

    def outcome(self, fmt: FloatFormat, log2_scale: int = 0) -> Outcome:
        """Return what happens when every number is multiplied by 2^log2_scale and cast to fmt.

        The counts are exactly those of really scaling (as real numbers) and casting, but for two
        things: in a finite-only format a number exactly half an ulp above `max` counts as
        overflowing (464 in FP8 E4M3, which rounds to 448), and float32's subnormal numbers share
        coarse bins, which matters where fmt.smallest_subnormal / 2^log2_scale <= 2^-126.
        """
        if not self.detail:
            raise ValueError("only binades were counted: make it a Histogram(detail=True)")
        if abs(log2_scale) > 500:
            raise ValueError(f"log2_scale must be -500 to 500, got {log2_scale}")
        counts = self.counts.cpu()
        occupied = (counts > 0) & (_LARGEST > 0)  # a few hundred of all the bins
        counts, cast = counts[occupied], fmt.round(_LARGEST[occupied] * 2.0**log2_scale)
        flushed = int(counts[cast == 0].sum())
        subnormal = int(counts[(cast > 0) & (cast < fmt.smallest_normal)].sum())
        normal = int(counts[(cast >= fmt.smallest_normal) & (cast <= fmt.max)].sum())
        return Outcome(flushed, subnormal, normal, int(counts.sum()) - flushed - subnormal - normal)


def _float32_bits(x: Tensor) -> Tensor:
    """Return bit patterns (int32) of float32 numbers that lie in the same bins as x."""
    if x.dtype == torch.float64:
        return _narrowed(x.view(torch.int64))
    if x.dtype not in _COUNTED:
        raise TypeError(f"a histogram takes floating-point tensors of 16 to 64 bits, got {x.dtype}")
    return x.float().view(torch.int32)


def _narrowed(bits: Tensor) -> Tensor:
    """Turn float64 bit patterns into float32 ones in the same bins.

    They are rounded to odd: the last bit is set when anything was cut off, so that no number moves
    onto, or across, one that float32 holds. What float32 does not reach becomes its nearest number.
    """
    infinity, infinity32, cut = 0x7FF << 52, 0xFF << 23, 2**29 - 1
    bits = bits & (2**63 - 1)
    inexact = ((bits & cut) + cut) >> 29
    narrowed = (((bits >> 29) | inexact) - ((1023 - 127) << 23)).clamp_(1, infinity32 - 1)
    narrowed = torch.where(bits == 0, 0, narrowed)
    return torch.where(bits >= infinity, infinity32 + (bits > infinity).long(), narrowed).int()


def _bins(bits: Tensor) -> Tensor:
    """Return the bin of each float32 bit pattern (int32, any sign), as int32.

    With `gap` the distance to the next power of two, in units of the last place, the bin inside
    the binade is given by the exponent and the first mantissa bit of 4·gap - 1 as a float32. The
    "- 1" puts 2^n - 2^(n-j) itself into the upper bin, which is where a tie rounds. A power of
    two has gap 2^23, and 2^25 - 1 is the one such integer that float32 rounds up: a bin of its
    own. 256 is the least tail; cutting to 14 bits drops the sign.
    """
    tail = torch.rsub(bits, -1, alpha=4).bitwise_and_(2**25 - 1).float().view(torch.int32)
    tail >>= 22
    return tail.sub_(256).add_(bits >> 23, alpha=BINS).bitwise_and_(256 * BINS - 1)


def _largest_of_each_bin() -> Tensor:
    """Return the largest magnitude in each bin (float64, as `Histogram.counts`); 0 if unused."""
    gaps = [2**23, 1] + [2**i + 1 for i in range(23)] + [3 * 2**i + 1 for i in range(22)]
    next_powers = torch.arange(1, 257)[:, None] * 2**23
    patterns = (next_powers - torch.tensor(gaps)).int()
    largest = torch.zeros(256, BINS, dtype=torch.float64)
    largest.view(-1)[_bins(patterns).long()] = patterns.view(torch.float32).double()
    return largest


_LARGEST = _largest_of_each_bin()
_POWER_OF_TWO = int(_bins(torch.zeros(1, dtype=torch.int32)))  # column of 2^n, zero and infinity
_ANYWHERE = 0  # a column that _bins never gives


class Recording:
    """What was recorded under one name: `histogram`, `calls` (how many tensors) and `max`.

    `max`, the largest magnitude so far, is a float32 scalar on the device; NaN once one occurs.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.histogram = Histogram(device)
        self.max = torch.zeros((), dtype=torch.float32, device=device)
        self.calls = 0

    def add(self, x: Tensor) -> None:
        """Count one tensor."""
        x = (x.coalesce().values() if x.is_sparse else x).detach()  # sparse: of an nn.Embedding
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        self.histogram.add(x)
        if x.numel():
            low, high = x.aminmax()  # a norm of order infinity takes ten times as long
            self.max = torch.maximum(self.max, torch.maximum(high, -low).to(self.max))
        self.calls += 1


@dataclass
class Recordings:
    """Recordings by the name of the module (activations) or of the parameter (weights)."""

    activation_gradients: dict[str, Recording] = field(default_factory=dict)
    weight_gradients: dict[str, Recording] = field(default_factory=dict)
    activations: dict[str, Recording] = field(default_factory=dict)


def total(recordings: Mapping[str, Recording]) -> Histogram:
    """Return one histogram of everything in, for example, `recordings.weight_gradients`."""
    return sum((recording.histogram for recording in recordings.values()), start=Histogram())


@contextmanager
def record_gradients(model: nn.Module, *, activations: bool = False) -> Iterator[Recordings]:
    """Record the magnitudes of a model's gradients while the block runs.

    Recorded are the gradient of every module's output (and with `activations` the output itself)
    and, for every parameter that requires a gradient, the gradient that one backward pass adds to
    it. A tensor that several modules return, as `nn.Sequential` returns its last layer's, is
    recorded once, under the innermost. The root module goes by its class name. Results do not
    change; after the block all hooks are gone, and later backward passes are not recorded.
    PyTorch drops the hooks of an output that is a view and is then overwritten in place
    (`nn.ReLU(inplace=True)` after a 3-d `nn.Linear`).
    """
    recordings = Recordings()
    active, known = True, {id(module) for module in model.modules()}
    seen: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
    handles = [model.register_forward_pre_hook(lambda *_: seen.clear())]

    def record(store: dict[str, Recording], name: str, x: Tensor) -> None:
        if active:  # a graph may outlive the block, with our hooks in it
            with torch._C.DisableTorchFunction():  # not for autocast or another mode to see
                store.setdefault(name, Recording(x.device)).add(x)

    def record_output(name: str, module: nn.Module, _inputs: object, output: object) -> None:
        if not active or id(module) not in known:  # a copy that was made in the block
            return
        for x in _floating_tensors(output):
            version = 0 if x.is_inference() else x._version  # in-place modules return their input
            if seen.get((id(x), version)) is x:
                continue
            seen[id(x), version] = x
            if activations:
                record(recordings.activations, name, x)
            if x.requires_grad:
                handle = x.register_hook(partial(record, recordings.activation_gradients, name))
                if x.is_leaf:  # other tensors go away with their graph
                    handles.append(handle)

    try:
        for name, module in model.named_modules():
            name = name or type(model).__name__
            handles.append(module.register_forward_hook(partial(record_output, name)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = partial(record, recordings.weight_gradients, name)
                handles.append(parameter.register_hook(hook))
        yield recordings
    finally:
        active = False
        for handle in handles:
            handle.remove()


def _floating_tensors(output: object) -> Iterator[Tensor]:
    """Yield what can be counted in a module's output, through tuples, lists and dicts."""
    if isinstance(output, Tensor):
        if output.dtype in _COUNTED and output.layout is torch.strided:
            yield output
    elif isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _floating_tensors(part)
