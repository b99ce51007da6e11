"""Floating-point formats: their limits, their spacing, and exact rounding to any of them.

A format with E exponent bits and M mantissa bits holds the numbers

    normal      (-1)^s × 2^(e - bias) × (1 + f / 2^M)      0 < e < 2^E - 1
    subnormal   (-1)^s × 2^(1 - bias) × (f / 2^M)          e = 0

with `bias = 2^(E-1) - 1`. The all-ones exponent is kept for infinity (f = 0) and NaN (f > 0), as
in IEEE 754-2019, section 3.4. A *finite-only* format ("fn", as FP8 E4M3 in Micikevicius et al.,
"FP8 Formats for Deep Learning", 2022, section 3) uses it for numbers too and keeps only the
all-ones pattern, as its NaN.
"""

import math
import struct
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Overflow = Literal["inf", "nan", "saturate"]


@dataclass(frozen=True)
class Fields:
    """The bit fields of one number, as strings of 0 and 1, and the number they encode."""

    sign: str
    exponent: str
    significand: str
    value: float
    meaning: str

    def __str__(self) -> str:
        return f"{self.sign} {self.exponent} {self.significand}"

    def __repr__(self) -> str:
        return f"{self}  ({self.meaning})"


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    `exponent_bits` is 2 to 11 and `mantissa_bits` 1 to 52, so that every number of the format is
    a float64. Formats are equal when they hold the same numbers; `name` is only a label.
    """

    exponent_bits: int
    mantissa_bits: int
    finite_only: bool = field(default=False, kw_only=True)
    name: str = field(default="", kw_only=True, compare=False)

    def __post_init__(self) -> None:
        for label, bits, low, high in (
            ("exponent_bits", self.exponent_bits, 2, 11),
            ("mantissa_bits", self.mantissa_bits, 1, 52),
        ):
            if not isinstance(bits, int) or isinstance(bits, bool):
                raise TypeError(f"{label} must be an int, got {bits!r}")
            if not low <= bits <= high:
                raise ValueError(f"{label} must be {low} to {high}, got {bits}")
        if self.finite_only and self.exponent_bits == 11:
            raise ValueError("a finite-only format has at most 10 exponent bits: float64 holds it")
        if not self.name:
            name = f"E{self.exponent_bits}M{self.mantissa_bits}{'FN' * self.finite_only}"
            object.__setattr__(self, "name", name)

    def __repr__(self) -> str:
        return f"{self.name} (1 + {self.exponent_bits} + {self.mantissa_bits} bits)"

    @staticmethod
    def of(dtype: torch.dtype) -> "FloatFormat":
        """Return the format of a torch dtype, for example FP16 for `torch.float16`."""
        if dtype not in _BY_DTYPE:
            known = ", ".join(str(d) for d in _BY_DTYPE)
            raise ValueError(f"no format for {dtype}; there is one for {known}")
        return _BY_DTYPE[dtype]

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype that stores this format, or None (TF32 is stored as float32)."""
        return next((dtype for dtype, native in _BY_DTYPE.items() if native == self), None)

    @property
    def bits(self) -> int:
        """Bits of one number, sign included (TF32 has 19)."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number, and of every subnormal one."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number."""
        return self.bias + self.finite_only

    @property
    def max(self) -> float:
        """The largest finite number."""
        top_pattern = 2.0 - self.eps * (1 + self.finite_only)
        return math.ldexp(top_pattern, self.max_exponent)

    @property
    def overflow_threshold(self) -> float:
        """The smallest magnitude that rounds to infinity: half an ulp above `max`."""
        return self.max + self.spacing(self.max) / 2

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with all its mantissa bits."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number. Half of it and everything below rounds to zero."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """The gap between 1 and the next larger number. Rounding errs by at most half of it."""
        return 2.0**-self.mantissa_bits

    def spacing(self, x: float) -> float:
        """Return the ulp at x: the gap from |x| to the next larger number of the format.

        Where x lies between two numbers, the gap between these. At `max` it is the gap below, as
        `math.ulp` has it; beyond `max` it is infinite, and NaN at NaN.
        """
        x = abs(float(x))
        if math.isnan(x) or x > self.max:
            return math.nan if math.isnan(x) else math.inf
        exponent = math.frexp(x)[1] - 1 if x else self.min_exponent
        return 2.0 ** (max(exponent, self.min_exponent) - self.mantissa_bits)

    def round(self, x: Tensor, overflow: Overflow | None = None) -> Tensor:
        """Round every element of x to this format: to nearest, ties to even.

        x is float32 or float64, of any shape and on any device; the result is a new tensor of
        the same dtype, shape and device, outside autograd. Signed zeros and NaN are kept.

        `overflow` says what becomes of magnitudes that round beyond `max`, infinity included:
        "inf" (the default where the format has an infinity), "nan" (the default where it has
        none) or "saturate" (`max`). Where the format reaches further than x's dtype, the range
        that both have counts. PyTorch's own conversion to float8_e4m3fn gives NaN in older
        releases and saturates in newer ones (pull request 178817).
        """
        if x.dtype not in _INTEGER:
            raise TypeError(f"x must be a float32 or float64 tensor, got {x.dtype}: convert it")
        native: Overflow = "nan" if self.finite_only else "inf"
        overflow = overflow or native
        if overflow not in (native, "saturate"):
            raise ValueError(f'{self.name} has overflow "{native}" or "saturate", not {overflow!r}')
        carrier = FloatFormat.of(x.dtype)
        limit = self._largest_shared_with(carrier)
        magnitude = x.detach().abs()
        if self.exponent_bits < carrier.exponent_bits:
            rounded = self._round_by_addition(magnitude, carrier)
            if overflow == "saturate":
                rounded.clamp_(max=limit)
            elif overflow == "inf":  # scaled so that what is beyond `max` overflows the carrier
                headroom = 2.0 ** (carrier.max_exponent - self.max_exponent)
                rounded.mul_(headroom).mul_(1 / headroom)
        else:
            is_nan = _ones_beyond(math.inf, magnitude)
            rounded = self._round_bits(magnitude, carrier)
            if overflow == "saturate":
                _bits(rounded).clamp_(max=_pattern(limit, x.dtype))
            _bits(rounded).bitwise_or_(is_nan)
        if overflow == "nan":
            _bits(rounded).bitwise_or_(_ones_beyond(limit, rounded))
        return rounded.copysign_(x.detach())

    def _round_by_addition(self, magnitude: Tensor, carrier: "FloatFormat") -> Tensor:
        """Round where the carrier (the format of x's dtype) has the larger exponent range.

        Add a power of two so large that the sum's last bit is worth one ulp of this format: the
        addition itself rounds, to nearest even. Subtracting it again is exact.
        """
        dropped = carrier.mantissa_bits - self.mantissa_bits
        if dropped < 1:  # only subnormal numbers have bits to lose, all of the same worth
            shift = self.smallest_subnormal * 2.0**carrier.mantissa_bits
            return torch.where(magnitude < shift, (magnitude + shift) - shift, magnitude)
        exponent_mask = (2**carrier.exponent_bits - 1) << carrier.mantissa_bits
        binade = (_bits(magnitude) & exponent_mask).view(magnitude.dtype)
        binade.clamp_(self.smallest_normal, 2.0**self.max_exponent)
        shift = 2.0**dropped
        return magnitude.add_(binade, alpha=shift).sub_(binade, alpha=shift)

    def _round_bits(self, magnitude: Tensor, carrier: "FloatFormat") -> Tensor:
        """Round where the exponent range is at least the carrier's, so that only bits are cut.

        On the bit pattern, as an integer: add half of the last kept bit (a little less when that
        bit is 0, so that a tie goes to even) and clear what is cut. A carry runs into the
        exponent, as it should. No float instruction sees the carrier's subnormal numbers, which
        a processor may be set to flush to zero. NaN is lost.
        """
        dropped = carrier.mantissa_bits - self.mantissa_bits
        if dropped < 1:
            return magnitude

        def cut(bits: Tensor) -> Tensor:
            last_kept = (bits >> dropped).bitwise_and_(1)
            return last_kept.add_(bits).add_(2 ** (dropped - 1) - 1).bitwise_and_(-(2**dropped))

        bits = _bits(magnitude)
        rounded = cut(bits)
        if self.exponent_bits > carrier.exponent_bits:
            # The carrier's subnormal numbers are normal here and keep M bits below their leading
            # one: their pattern is an integer, rounded as a float of that value.
            smallest_normal = 2**carrier.mantissa_bits
            integers = bits.clamp(max=smallest_normal).to(magnitude.dtype)
            integers = cut(_bits(integers)).view(magnitude.dtype).to(bits.dtype)
            rounded = torch.where(bits < smallest_normal, integers, rounded)
        return rounded.view(magnitude.dtype)

    def _largest_shared_with(self, carrier: "FloatFormat") -> float:
        """Return the largest number that this format and the carrier both hold."""
        shared_bits = min(self.mantissa_bits, carrier.mantissa_bits)
        largest = min(self.max, FloatFormat(carrier.exponent_bits, shared_bits).max)
        return largest - math.fmod(largest, carrier.spacing(largest))

    def fields(self, x: float) -> Fields:
        """Return the sign, exponent and significand bits of the number that x rounds to.

        The significand bits are the stored ones, without the implicit leading bit. NaN is shown
        as the quiet NaN with no payload.
        """
        value = self.round(torch.tensor(float(x), dtype=torch.float64, device="cpu")).item()
        size = abs(value)
        sign = int(math.copysign(1.0, value) < 0)
        all_ones = 2**self.exponent_bits - 1
        if math.isnan(value):
            quiet = 2**self.mantissa_bits - 1 if self.finite_only else 2 ** (self.mantissa_bits - 1)
            exponent, significand = all_ones, quiet
        elif math.isinf(value):
            exponent, significand = all_ones, 0
        else:
            ulps = int(size / self.spacing(size))
            normal = size >= self.smallest_normal
            exponent = math.frexp(size)[1] - 1 + self.bias if normal else 0
            significand = ulps - normal * 2**self.mantissa_bits
        stored = f"{significand:0{self.mantissa_bits}b}"
        if not math.isfinite(value) or value == 0:
            meaning = "nan" if math.isnan(value) else f"{value:+g}"
        else:
            power = max(exponent, 1) - self.bias
            meaning = f"{'+-'[sign]}{int(exponent > 0)}.{stored} × 2^{power} = {value!r}"
        return Fields(str(sign), f"{exponent:0{self.exponent_bits}b}", stored, value, meaning)


FP64 = FloatFormat(11, 52, name="FP64")
FP32 = FloatFormat(8, 23, name="FP32")
TF32 = FloatFormat(8, 10, name="TF32")
FP16 = FloatFormat(5, 10, name="FP16")
BF16 = FloatFormat(8, 7, name="BF16")
FP8_E4M3 = FloatFormat(4, 3, finite_only=True, name="FP8 E4M3")
FP8_E5M2 = FloatFormat(5, 2, name="FP8 E5M2")

_BY_DTYPE = {
    torch.float64: FP64,
    torch.float32: FP32,
    torch.float16: FP16,
    torch.bfloat16: BF16,
    torch.float8_e4m3fn: FP8_E4M3,
    torch.float8_e5m2: FP8_E5M2,
}
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def _bits(x: Tensor) -> Tensor:
    """Return x's bit patterns as integers: a view, not a copy."""
    return x.view(_INTEGER[x.dtype])


def _pattern(value: float, dtype: torch.dtype) -> int:
    """Return the bit pattern of one number."""
    floating, integer = ("f", "i") if dtype == torch.float32 else ("d", "q")
    return struct.unpack(integer, struct.pack(floating, value))[0]


def _ones_beyond(limit: float, magnitude: Tensor) -> Tensor:
    """Return integers: all bits 1 where magnitude is NaN or larger than the limit, else 0.

    The patterns of positive floats are ordered as their values, with infinity and then NaN on
    top. All ones is a NaN itself, so "or" with the result makes one.
    """
    sign_bit = torch.finfo(magnitude.dtype).bits - 1
    return (_pattern(limit, magnitude.dtype) - _bits(magnitude)) >> sign_bit
