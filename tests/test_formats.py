"""amp_lab.formats against PyTorch's own conversions, ml_dtypes, numpy and exact rationals."""

import math
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amp_lab.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FP64, TF32, FloatFormat

NATIVE = [FP16, BF16, FP8_E4M3, FP8_E5M2]
DEVICES = ["cpu"]
DEVICES += ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
# Releases of PyTorch differ in what float8_e4m3fn makes of overflow; ask this one.
TORCH_SATURATES = math.isfinite(torch.tensor(math.inf).to(torch.float8_e4m3fn).float().item())
TORCH_OVERFLOW = {FP8_E4M3: "saturate" if TORCH_SATURATES else "nan"}


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit (so zeros by their sign too), and NaN where NaN is expected."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    differ = (actual != expected) | (actual.signbit() != expected.signbit())
    differ &= ~(actual.isnan() & expected.isnan())
    assert not differ.any(), (actual[differ][:5], expected[differ][:5])


def every_half() -> Tensor:
    """All 65,536 float16 patterns, as float32."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()


def numbers(fmt: FloatFormat) -> Tensor:
    """Every non-negative finite number of a format of at most 16 bits, in order, as float64.

    Built from the definition of the format, not by its own rounding.
    """
    pattern = torch.arange(2 ** (fmt.bits - 1), dtype=torch.float64)
    exponent = (pattern / 2**fmt.mantissa_bits).floor()
    fraction = pattern / 2**fmt.mantissa_bits - exponent
    power = 2.0 ** (exponent.clamp(min=1) - (2 ** (fmt.exponent_bits - 1) - 1))
    values = (fraction + (exponent > 0)) * power
    return values[:-1] if fmt.finite_only else values[exponent < 2**fmt.exponent_bits - 1]


def boundaries(fmt: FloatFormat) -> Tensor:
    """Every number and midpoint of a format, and one float32 step either side, as float32."""
    values = numbers(fmt)
    beyond = 2 * values[-1] - values[-2]  # where the next number would be
    values = torch.cat([values, beyond[None]])
    midpoints = (values[1:] + values[:-1]) / 2
    exact = torch.cat([values, midpoints])
    points = exact.float()
    assert torch.equal(points.double()[exact < 2.0**128], exact[exact < 2.0**128])
    infinity = torch.tensor(math.inf)
    extremes = torch.tensor([0.0, 1e-45, 1e-40, 1.1e-38, 3.4e38, math.inf, math.nan])
    points = torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity), extremes])
    return torch.cat([points, -points])


INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def random_patterns(count: int, dtype: torch.dtype, seed: int = 2) -> Tensor:
    """Uniformly random bit patterns: every binade, subnormals, infinities, quiet and other NaN."""
    integer = INTEGER[dtype]
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.iinfo(integer)
    return torch.randint(bounds.min, bounds.max, (count,), dtype=integer, generator=generator).view(
        dtype
    )


def exactly_rounded(x: float, fmt: FloatFormat, saturate: bool = False) -> float:
    """Round with exact rationals: the reference that the definition gives."""
    if math.isnan(x):
        return x
    bias = 2 ** (fmt.exponent_bits - 1) - 1
    top = bias + 1 if fmt.finite_only else bias
    ulps = 2 ** (fmt.mantissa_bits + 1) - (2 if fmt.finite_only else 1)
    largest = ulps * Fraction(2) ** (top - fmt.mantissa_bits)
    beyond = float(largest) if saturate else math.nan if fmt.finite_only else math.inf
    if math.isinf(x):
        return math.copysign(beyond, x)
    size = abs(Fraction(x))
    power = max(math.frexp(x)[1] - 1, 1 - bias)
    ulp = Fraction(2) ** (power - fmt.mantissa_bits)
    rounded = round(size / ulp) * ulp  # Python rounds a Fraction's tie to even
    return math.copysign(beyond if rounded > largest else float(rounded), x)


# Limits


@pytest.mark.parametrize("fmt", [FP64, FP32, *NATIVE])
def test_limits_agree_with_torch(fmt):
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max
    assert fmt.eps == info.eps
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.dtype.itemsize * 8 == fmt.bits
    assert FloatFormat.of(fmt.dtype) is fmt


@pytest.mark.parametrize("fmt", NATIVE)
def test_smallest_subnormal_is_the_pattern_one(fmt):
    integer = torch.int16 if fmt.bits == 16 else torch.uint8
    assert fmt.smallest_subnormal == torch.ones((), dtype=integer).view(fmt.dtype).double().item()


def test_published_limits():
    assert (FP16.max, FP16.smallest_normal, FP16.smallest_subnormal) == (65504, 2**-14, 2**-24)
    assert (FP8_E4M3.max, FP8_E4M3.smallest_subnormal) == (448, 2**-9)
    assert (FP8_E5M2.max, FP8_E5M2.smallest_subnormal) == (57344, 2**-16)
    assert (TF32.bits, TF32.eps, TF32.smallest_normal, TF32.dtype) == (19, 2**-10, 2**-126, None)
    assert (FP32.smallest_subnormal, FP64.smallest_subnormal) == (2**-149, 2**-1074)


@pytest.mark.parametrize(
    "name",
    ["float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "bfloat16"],
)
def test_limits_agree_with_ml_dtypes(name):
    info = ml_dtypes.finfo(getattr(ml_dtypes, name))
    fmt = FloatFormat(info.nexp, info.nmant, finite_only=name.endswith("fn"))
    assert fmt.max == float(info.max)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert (fmt.min_exponent, fmt.bits) == (info.minexp, info.bits)


def test_a_format_is_its_bits():
    assert FloatFormat(exponent_bits=5, mantissa_bits=10) == FP16
    assert hash(FloatFormat(5, 10, name="half")) == hash(FP16)
    assert FloatFormat(4, 3) != FP8_E4M3
    assert FloatFormat(4, 3).dtype is None
    assert str(FloatFormat(3, 4)) == "E3M4 (1 + 3 + 4 bits)"
    assert FloatFormat(3, 4, finite_only=True).name == "E3M4FN"
    assert repr(FP16) == "FP16 (1 + 5 + 10 bits)"


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ((1, 10), "exponent_bits must be 2 to 11, got 1"),
        ((12, 10), "exponent_bits must be 2 to 11, got 12"),
        ((5, 0), "mantissa_bits must be 1 to 52, got 0"),
        ((5, 53), "mantissa_bits must be 1 to 52, got 53"),
    ],
)
def test_sizes_without_room_are_refused(bits, message):
    with pytest.raises(ValueError, match=message):
        FloatFormat(*bits)


def test_other_bad_parameters_are_refused():
    with pytest.raises(TypeError, match=r"exponent_bits must be an int, got 5\.0"):
        FloatFormat(5.0, 10)
    with pytest.raises(TypeError, match="mantissa_bits must be an int, got True"):
        FloatFormat(5, True)
    with pytest.raises(ValueError, match="at most 10 exponent bits"):
        FloatFormat(11, 3, finite_only=True)
    with pytest.raises(ValueError, match=r"no format for torch\.int32; there is one for .*float16"):
        FloatFormat.of(torch.int32)


# Rounding, against PyTorch and ml_dtypes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", NATIVE)
@pytest.mark.parametrize("points", ["every_half", "boundaries", "random"])
def test_round_equals_torch(fmt, points, device):
    x = {
        "every_half": every_half,
        "boundaries": lambda: boundaries(fmt),
        "random": lambda: random_patterns(1_000_000, torch.float32),
    }[points]()
    rounded = fmt.round(x.to(device), overflow=TORCH_OVERFLOW.get(fmt))
    assert rounded.device.type == device
    assert_same(rounded.cpu(), x.to(fmt.dtype).float())


@pytest.mark.parametrize("fmt", NATIVE)
@settings(deadline=None)
@given(x=st.floats(width=32))
def test_round_equals_torch_on_any_float(fmt, x):
    x = torch.tensor(x)
    assert_same(fmt.round(x, overflow=TORCH_OVERFLOW.get(fmt)), x.to(fmt.dtype).float())


@pytest.mark.parametrize("fmt", NATIVE)
def test_float64_input_equals_torch_where_float32_holds_it(fmt):
    x = torch.cat([every_half(), boundaries(fmt)])
    rounded = fmt.round(x.double(), overflow=TORCH_OVERFLOW.get(fmt))
    assert_same(rounded, x.to(fmt.dtype).double())


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("bfloat16", BF16),
        ("float8_e5m2", FP8_E5M2),
        ("float8_e4m3fn", FP8_E4M3),
        ("float8_e4m3", FloatFormat(4, 3)),
        ("float8_e3m4", FloatFormat(3, 4)),
    ],
)
def test_round_equals_ml_dtypes(name, fmt):
    x = torch.cat([boundaries(fmt), random_patterns(300_000, torch.float32), every_half()])
    with np.errstate(all="ignore"):
        expected = x.numpy().astype(getattr(ml_dtypes, name)).astype(np.float32)
    assert_same(fmt.round(x), torch.from_numpy(expected))


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"])
def test_round_equals_ml_dtypes_where_it_has_no_nan(name):
    # These formats use every pattern for a number; ours keeps the last one as its NaN.
    info = ml_dtypes.finfo(getattr(ml_dtypes, name))
    fmt = FloatFormat(info.nexp, info.nmant, finite_only=True)
    x = torch.cat([boundaries(fmt), random_patterns(300_000, torch.float32)])
    with np.errstate(all="ignore"):
        expected = x.numpy().astype(getattr(ml_dtypes, name)).astype(np.float32)
    expected = torch.from_numpy(expected)
    shared = expected.abs() <= fmt.max
    shared &= x.isfinite()
    assert shared.sum() > x.numel() / 4
    assert fmt.max < float(info.max)
    assert_same(fmt.round(x)[shared], expected[shared])


# Rounding, against exact rationals

ODD_FORMATS = [
    *(FP64, FP32, TF32, *NATIVE),
    FloatFormat(2, 1),  # the smallest
    FloatFormat(2, 1, finite_only=True),
    FloatFormat(3, 2, finite_only=True),
    FloatFormat(10, 9, finite_only=True),
    FloatFormat(8, 7, finite_only=True),  # reaches beyond float32
    FloatFormat(9, 5),  # float32's subnormal numbers are normal numbers here
    FloatFormat(11, 22),
    FloatFormat(11, 30),
    FloatFormat(9, 23),
    FloatFormat(5, 22),
    FloatFormat(5, 23),  # only subnormal numbers of float32 input are rounded
    FloatFormat(7, 30),
    FloatFormat(4, 52),
    FloatFormat(10, 52),
    FloatFormat(8, 22),
    FloatFormat(8, 30),
]


def floats_around(fmt: FloatFormat, width: int) -> st.SearchStrategy[float]:
    """Floats of all sizes, most of them near numbers, ties and limits of the format."""
    dtype = np.float32 if width == 32 else np.float64

    def near(power: int, ulps: int, steps: int) -> float:
        half_ulp = 2.0 ** (max(power, fmt.min_exponent) - fmt.mantissa_bits - 1)
        with np.errstate(all="ignore"):
            x = dtype(min(2.0 ** min(power, 1023) + ulps * half_ulp, 1.7e308))
            for _ in range(abs(steps)):
                x = np.nextafter(x, dtype(math.copysign(math.inf, steps)))
        return float(x)

    lowest = max(fmt.min_exponent - fmt.mantissa_bits - 3, -1074)
    nearby = st.builds(
        near,
        st.integers(lowest, fmt.max_exponent + 2),
        st.integers(0, 2 ** (fmt.mantissa_bits + 1)) | st.integers(0, 4),
        st.integers(-1, 1),
    )
    return nearby | nearby.map(lambda x: -x) | st.floats(width=width)


@pytest.mark.parametrize("overflow", [None, "saturate"])
@pytest.mark.parametrize("fmt", ODD_FORMATS, ids=lambda fmt: fmt.name)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_float64_is_rounded_exactly(fmt, overflow, data):
    x = data.draw(floats_around(fmt, 64))
    rounded = fmt.round(torch.tensor(x, dtype=torch.float64), overflow=overflow)
    expected = exactly_rounded(x, fmt, saturate=overflow == "saturate")
    assert_same(rounded, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("fmt", ODD_FORMATS, ids=lambda fmt: fmt.name)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_float32_is_rounded_exactly(fmt, data):
    x = data.draw(floats_around(fmt, 32))
    expected = torch.tensor(exactly_rounded(x, fmt))  # beyond float32: infinity
    if fmt.finite_only and expected.isinf():
        expected = torch.tensor(math.copysign(math.nan, x))
    assert_same(fmt.round(torch.tensor(x)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", ODD_FORMATS, ids=lambda fmt: fmt.name)
def test_many_numbers_are_rounded_exactly(fmt, dtype):
    # Random patterns with few bits set: numbers, ties and their neighbours in every binade.
    few_bits = random_patterns(800, dtype)
    for seed in (3, 4, 5):
        mask = random_patterns(800, dtype, seed)
        few_bits = (few_bits.view(INTEGER[dtype]) & mask.view(INTEGER[dtype])).view(dtype)
    exponents = torch.linspace(fmt.min_exponent - fmt.mantissa_bits - 2, fmt.max_exponent + 1, 500)
    near_one = 1 + few_bits[:500].abs().nan_to_num(0, 0, 0).clamp(max=1)
    inside = near_one * 2.0 ** exponents.to(dtype).round()
    x = torch.cat([random_patterns(500, dtype), few_bits, inside, -inside])
    expected = torch.tensor([exactly_rounded(v, fmt) for v in x.tolist()], dtype=torch.float64)
    expected = expected.to(dtype)
    if fmt.finite_only:
        expected[expected.isinf()] = math.nan
    assert_same(fmt.round(x), expected)


def test_no_double_rounding_from_float64():
    just_above_a_tie = torch.tensor(1 + 2**-11 + 2**-40, dtype=torch.float64)
    assert FP16.round(just_above_a_tie) == 1 + 2**-10
    assert FP16.round(just_above_a_tie.float()) == 1  # float32 made it the tie


def test_the_limits_of_half_precision():
    x = torch.tensor([65519.996, 65520, 2**-25, 2**-25 * (1 + 2**-23), 1 + 2**-11, 1.0001])
    assert FP16.round(x).tolist() == [65504, math.inf, 0, 2**-24, 1, 1]


@pytest.mark.parametrize(
    "fmt", [FP32, FP64, FloatFormat(8, 40), FloatFormat(9, 23), FloatFormat(11, 52)]
)
def test_a_wider_format_changes_nothing(fmt):
    x = random_patterns(100_000, torch.float32)
    rounded = fmt.round(x)
    assert_same(rounded, x)
    assert rounded.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("fmt", ODD_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("overflow", [None, "saturate"])
def test_nan_and_its_sign_are_kept(fmt, overflow):
    patterns = [0x7F800001, 0x7FC00000, 0x7FFFFFFF]  # the first is a signalling NaN
    nan = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    nan = torch.cat([nan, nan.neg()])
    rounded = fmt.round(nan, overflow)
    assert rounded.isnan().all()
    assert rounded.signbit().tolist() == nan.signbit().tolist() == [False] * 3 + [True] * 3


def test_rounding_twice_is_rounding_once():
    x = random_patterns(100_000, torch.float32)
    for fmt in ODD_FORMATS:
        once = fmt.round(x)
        assert_same(fmt.round(once), once)


# Rounding: the argument, shapes, devices, processor modes


def test_overflow_is_the_callers_choice():
    x = torch.tensor([464.0, 465.0, -1e9, math.inf, math.nan])
    assert str(FP8_E4M3.round(x).tolist()) == "[448.0, nan, nan, nan, nan]"
    saturated = FP8_E4M3.round(x, overflow="saturate")
    assert str(saturated.tolist()) == "[448.0, 448.0, -448.0, 448.0, nan]"
    x = torch.tensor([65519.0, 65520.0, -math.inf, math.nan])
    assert str(FP16.round(x, overflow="inf").tolist()) == "[65504.0, inf, -inf, nan]"
    saturated = FP16.round(x, overflow="saturate")
    assert str(saturated.tolist()) == "[65504.0, 65504.0, -65504.0, nan]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturation_stays_in_format_and_dtype(dtype):
    x = torch.tensor([math.inf, torch.finfo(dtype).max, -math.inf, math.nan], dtype=dtype)
    for fmt in ODD_FORMATS:
        largest, also, negative, nan = fmt.round(x, overflow="saturate")
        assert largest == also == -negative
        assert nan.isnan()
        assert largest.isfinite()
        assert fmt.round(largest) == largest
        step = max(fmt.spacing(largest), FloatFormat.of(dtype).spacing(largest))
        assert (largest + step).item() > fmt.max or (largest + step).isinf()


def test_bad_arguments_of_round():
    x = torch.ones(2)
    with pytest.raises(ValueError, match='FP8 E4M3 has overflow "nan" or "saturate", not \'inf\''):
        FP8_E4M3.round(x, overflow="inf")
    with pytest.raises(ValueError, match='FP16 has overflow "inf" or "saturate", not \'nan\''):
        FP16.round(x, overflow="nan")
    with pytest.raises(TypeError, match=r"float32 or float64 tensor, got torch\.float16"):
        FP16.round(x.half())
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        FP16.round(torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("fmt", [FP16, BF16, FP8_E4M3, FloatFormat(5, 23), FloatFormat(9, 4)])
def test_any_shape(fmt):
    x = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(0))
    expected = fmt.round(x.flatten()).view(x.shape)
    assert_same(fmt.round(x.permute(2, 0, 1)), expected.permute(2, 0, 1))
    assert_same(fmt.round(x[::2, 1::3, :7]), expected[::2, 1::3, :7])
    assert_same(fmt.round(x[0, 0, 0]), expected[0, 0, 0])
    assert_same(fmt.round(x[:, :0]), x[:, :0])
    assert_same(fmt.round(x[:1].expand(4, 8, 10)), expected[:1].expand(4, 8, 10))
    assert fmt.round(torch.empty(0)).shape == (0,)


@pytest.mark.parametrize("fmt", [FP16, BF16, FP32, FP8_E4M3])
def test_input_is_left_alone_and_no_graph_is_built(fmt):
    x = torch.nn.Parameter(every_half())
    before = x.detach().clone()
    rounded = fmt.round(x)
    assert_same(x.detach(), before)
    assert not rounded.requires_grad
    assert type(rounded) is Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_when_the_processor_flushes_subnormal_numbers(dtype):
    x = random_patterns(50_000, dtype)
    x = torch.cat(
        [x, x * 2.0**-1000, torch.arange(1, 200).to(dtype) * torch.finfo(dtype).tiny / 64]
    )
    formats = [fmt for fmt in ODD_FORMATS if fmt.round(x).dtype == dtype]
    overflows = (None, "saturate")
    expected = [fmt.round(x, overflow) for fmt in formats for overflow in overflows]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        assert (torch.tensor(1e-40) * torch.ones(8) == 0).all()
        actual = [fmt.round(x, overflow) for fmt in formats for overflow in overflows]
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


# Spacing


def test_spacing_equals_numpy_and_math():
    halves = every_half()
    halves = halves[~halves.signbit() & (halves < FP16.max)]
    expected = np.spacing(halves.half().numpy()).astype(np.float64).tolist()
    assert [FP16.spacing(x) for x in halves.tolist()] == expected
    assert [FP16.spacing(-x) for x in halves.tolist()] == expected
    for x in [0.0, 5e-324, 1e-310, 2.0**-1022, 1.0, -3.7, 1e300]:
        assert FP64.spacing(x) == math.ulp(x)


@pytest.mark.parametrize("fmt", [*NATIVE, FloatFormat(3, 2), FloatFormat(2, 1, finite_only=True)])
def test_spacing_is_the_gap_to_the_next_number(fmt):
    values = numbers(fmt)
    gaps = values.diff()
    assert [fmt.spacing(x) for x in values[:-1].tolist()] == gaps.tolist()
    inside = (values[:-1] + 0.75 * gaps).tolist()  # not a number of the format
    assert [fmt.spacing(-x) for x in inside] == gaps.tolist()


def test_spacing_at_the_edges():
    assert FP16.spacing(FP16.max) == 32
    assert FP16.spacing(torch.tensor(65504.0)) == 32
    assert FP16.spacing(65505) == FP16.spacing(-math.inf) == math.inf
    assert math.isnan(FP16.spacing(math.nan))


# Bit fields


@pytest.mark.parametrize("fmt", NATIVE)
def test_fields_are_the_stored_bits(fmt):
    integer = torch.int16 if fmt.bits == 16 else torch.int8
    patterns = torch.arange(2**fmt.bits)[:: 7 if fmt.bits == 16 else 1]
    for pattern, value in zip(
        patterns.tolist(), patterns.to(integer).view(fmt.dtype).float().tolist(), strict=True
    ):
        fields = fmt.fields(value)
        if not math.isnan(value):
            assert str(fields).replace(" ", "") == f"{pattern:0{fmt.bits}b}"
            assert fields.value == value
        else:
            assert "1" in fields.significand
            assert set(fields.exponent) == {"1"}


@settings(deadline=None)
@given(st.floats(allow_nan=False))
def test_fields_of_float64(x):
    assert (
        str(FP64.fields(x)).replace(" ", "")
        == f"{struct.unpack('>Q', struct.pack('>d', x))[0]:064b}"
    )


@settings(deadline=None)
@given(st.floats(allow_nan=False, width=32))
def test_fields_of_float32(x):
    assert (
        str(FP32.fields(x)).replace(" ", "")
        == f"{struct.unpack('>I', struct.pack('>f', x))[0]:032b}"
    )


def test_fields_print_well():
    assert repr(FP16.fields(1.0001)) == "0 01111 0000000000  (+1.0000000000 × 2^0 = 1.0)"
    fields = FP16.fields(torch.tensor(-6e-8))
    assert (fields.sign, fields.exponent, fields.significand) == ("1", "00000", "0000000001")
    assert fields.meaning == "-0.0000000001 × 2^-14 = -5.960464477539063e-08"
    assert repr(FP16.fields(1e6)) == "0 11111 0000000000  (+inf)"
    assert repr(FP16.fields(-0.0)) == "1 00000 0000000000  (-0)"
    assert repr(FP16.fields(math.nan)) == "0 11111 1000000000  (nan)"
    assert repr(FP8_E4M3.fields(1000)) == "0 1111 111  (nan)"
