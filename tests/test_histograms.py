"""amp_lab.histograms against counting one by one, and against really scaling and casting."""

import copy
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_lab import histograms
from amp_lab.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat
from amp_lab.histograms import Histogram, record_gradients, total

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DEVICES = ["cpu"]
DEVICES += ["cuda:0"] * torch.cuda.is_available() + ["mps:0"] * torch.backends.mps.is_available()


def random_floats(count: int, seed: int = 3) -> Tensor:
    """Random float32 bit patterns: all binades, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=generator)
    return patterns.view(torch.float32)


def near_powers_of_two() -> Tensor:
    """Every power of two, every 2^n - 2^(n-j), and one float32 step either side of each."""
    powers = 2.0 ** torch.arange(-126.0, 128.0, dtype=torch.float64)
    j = torch.arange(0, 24)
    below = powers[:, None] * (1 - 2.0**-j)
    points = torch.cat([powers, below[below >= 2.0**-125].flatten()]).float()
    infinity = torch.tensor(math.inf)
    points = torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity)])
    specials = torch.tensor([0.0, -0.0, 1e-45, -1e-39, math.inf, -math.inf, math.nan])
    return torch.cat([points, -points, specials])


def counted_one_by_one(x: Tensor) -> Counter:
    """Count by `math.frexp`: an exponent or the name of a special bin for each element."""
    counts = Counter()
    for value in x.double().flatten().tolist():
        if math.isnan(value) or math.isinf(value):
            counts["nan" if math.isnan(value) else "inf"] += 1
        elif abs(value) < 2.0**-126:
            counts["subnormal" if value else "zero"] += 1
        else:
            counts[math.frexp(value)[1] - 1] += 1
    return counts


def as_counter(histogram: Histogram) -> Counter:
    binades = histogram.binades()
    counts = Counter(dict(zip(binades.exponents, binades.counts, strict=True)))
    for name in ("zero", "subnormal", "inf", "nan"):
        counts[name] = getattr(binades, name)
    return +counts


def really_cast(x: Tensor, fmt: FloatFormat, log2_scale: int) -> tuple[int, int, int, int]:
    """Scale and cast; count what was flushed, is subnormal, normal, has overflowed."""
    x = x[(x != 0) & ~x.isnan()]
    scaled = x.double() * 2.0**log2_scale
    if fmt.dtype is not None and (scaled.float().double() == scaled).all() and fmt is not FP8_E4M3:
        cast = scaled.float().to(fmt.dtype).double().abs()
    else:
        cast = fmt.round(scaled).abs()
    flushed = (cast == 0).sum().item()
    subnormal = ((cast > 0) & (cast < fmt.smallest_normal)).sum().item()
    normal = ((cast >= fmt.smallest_normal) & (cast <= fmt.max)).sum().item()
    return flushed, subnormal, normal, x.numel() - flushed - subnormal - normal


def predicted(x: Tensor, fmt: FloatFormat, log2_scale: int) -> tuple[int, int, int, int]:
    outcome = Histogram(x.device).add(x).outcome(fmt, log2_scale)
    return outcome.flushed, outcome.subnormal, outcome.normal, outcome.overflowing


# Counting


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("points", [near_powers_of_two, lambda: random_floats(50_000)])
@pytest.mark.parametrize("detail", [True, False])
def test_binades_are_counted(points, detail, device):
    x = points()
    histogram = Histogram(device, detail=detail).add(x.to(device))
    assert as_counter(histogram) == counted_one_by_one(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_pattern(dtype):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert as_counter(Histogram().add(x)) == counted_one_by_one(x)
    assert as_counter(Histogram(detail=False).add(x)) == counted_one_by_one(x)
    of_input = Histogram().add(x).outcome(FloatFormat.of(dtype))
    if dtype == torch.float16:
        assert of_input.subnormal == 2 * (2**10 - 1)


@given(st.lists(st.floats(width=32)))
@settings(deadline=None)
def test_any_floats(values):
    x = torch.tensor(values, dtype=torch.float32)
    assert as_counter(Histogram().add(x)) == counted_one_by_one(x)
    assert as_counter(Histogram(detail=False).add(x)) == counted_one_by_one(x)


def test_float64_is_counted_where_float32_reaches():
    x = torch.tensor(
        [1e-300, 5e-324, 2.0**-126, 2.0**-127, 1e300, 2.0**128, 1.0, -0.0, -math.inf, math.nan],
        dtype=torch.float64,
    )
    counts = as_counter(Histogram().add(x))
    assert counts == {"zero": 1, "subnormal": 3, -126: 1, 0: 1, 127: 2, "inf": 1, "nan": 1}
    nearly = torch.tensor([2 - 2.0**-52, 2**-126 * (1 - 2.0**-53)], dtype=torch.float64)
    assert as_counter(Histogram().add(nearly)) == {0: 1, "subnormal": 1}


def test_binades_print_the_range_that_occurs():
    binades = Histogram().add(torch.tensor([0.75, 0.5, 5.0, 0.0])).binades()
    assert (binades.exponents, binades.counts) == ([-1, 0, 1, 2], [2, 0, 0, 1])
    empty = Histogram().binades()
    assert (empty.exponents, empty.counts, empty.zero, empty.nan) == ([], [], 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_and_layouts(dtype):
    x = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    for view in (x, x.permute(2, 0, 1), x[::2, 1::3, :7], x[0, 0, 0], x[:, :0], x[:1].expand_as(x)):
        assert as_counter(Histogram().add(view)) == counted_one_by_one(view)
    parameter = nn.Parameter(x)
    assert as_counter(Histogram().add(parameter)) == counted_one_by_one(x)


def test_streaming_and_adding(monkeypatch):
    x = random_floats(10_000)
    whole = Histogram().add(x)
    streamed = Histogram()
    for part in x.split(777):
        assert streamed.add(part) is streamed
    assert torch.equal(streamed.counts, whole.counts)
    both = Histogram().add(x[:5000]) + Histogram().add(x[5000:])
    assert torch.equal(both.counts, whole.counts)
    for block in (1000, 998):  # whole blocks, and one that is left over
        monkeypatch.setattr(histograms, "BLOCK", block)
        assert torch.equal(Histogram().add(x).counts, whole.counts)
        assert as_counter(Histogram(detail=False).add(x)) == as_counter(whole)


def test_adding_histograms_changes_neither():
    one, other = Histogram().add(torch.ones(3)), Histogram().add(torch.zeros(2))
    both = one + other
    both.add(torch.ones(10))
    assert as_counter(one) == {0: 3}
    assert as_counter(other) == {"zero": 2}
    assert as_counter(both) == {0: 13, "zero": 2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_recording_reads_nothing_back(dtype):
    # Meta tensors have no data: whatever needed a value on the host would raise.
    Histogram("meta").add(torch.empty(3, 4, dtype=dtype, device="meta"))
    histograms.Recording("meta").add(torch.empty(3, 4, dtype=dtype, device="meta"))


def test_the_path_of_other_devices_counts_the_same(monkeypatch):
    x = near_powers_of_two()
    bins = histograms._bins(histograms._float32_bits(x))
    expected = torch.zeros(256 * histograms.BINS, dtype=torch.int64)
    expected.scatter_add_(0, bins.long(), torch.ones(1, dtype=torch.int64).expand(len(bins)))
    assert torch.equal(Histogram().add(x).counts.flatten(), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA's synchronisation debug mode")
def test_no_synchronisation_on_cuda():
    histogram, x = Histogram("cuda"), torch.randn(1000, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        histogram.add(x).add(x.half()).add(x.double())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bad_tensors_are_refused():
    with pytest.raises(
        TypeError, match=r"floating-point tensors of 16 to 64 bits, got torch\.int32"
    ):
        Histogram().add(torch.ones(2, dtype=torch.int32))
    with pytest.raises(TypeError, match="complex64"):
        Histogram().add(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="the histogram is on cpu, the tensor on meta"):
        Histogram().add(torch.ones(2, device="meta"))


# Scaling and casting

IEEE = [FP16, BF16, TF32, FP8_E5M2, FloatFormat(4, 3), FloatFormat(6, 9), FloatFormat(2, 1)]
SCALES = [-30, -3, 0, 1, 10, 16, 24]


@pytest.mark.parametrize("log2_scale", SCALES)
@pytest.mark.parametrize("fmt", IEEE, ids=lambda fmt: fmt.name)
def test_outcome_is_that_of_really_scaling_and_casting(fmt, log2_scale):
    x = torch.cat([near_powers_of_two(), random_floats(100_000), torch.randn(100_000) * 1e-5])
    if fmt.exponent_bits == 8:  # float32's own subnormal numbers are counted coarsely
        x = x[(x.abs() >= 2.0**-126) | (x == 0)]
    assert predicted(x, fmt, log2_scale) == really_cast(x, fmt, log2_scale)


@pytest.mark.parametrize("log2_scale", SCALES)
@pytest.mark.parametrize("fmt", [FP8_E4M3, FloatFormat(3, 2, finite_only=True)])
def test_outcome_in_a_finite_only_format(fmt, log2_scale):
    x = torch.cat([near_powers_of_two(), random_floats(100_000)])
    tie = (fmt.max + fmt.spacing(fmt.max) / 2) / 2.0**log2_scale
    assert predicted(x, fmt, log2_scale) == really_cast(x, fmt, log2_scale)
    x = torch.tensor([tie]).nextafter(torch.tensor([0.0, math.inf]))
    assert predicted(x, fmt, log2_scale) == really_cast(x, fmt, log2_scale) == (0, 0, 1, 1)
    assert predicted(torch.tensor([tie]), fmt, log2_scale) == (0, 0, 0, 1)  # as documented


@pytest.mark.parametrize("fmt", IEEE, ids=lambda fmt: fmt.name)
@given(
    x=st.lists(st.floats(width=32).filter(lambda x: x == 0 or abs(x) >= 2.0**-126)),
    log2_scale=st.integers(-40, 40),
)
@settings(deadline=None)
def test_outcome_for_any_floats_and_scale(fmt, x, log2_scale):
    x = torch.tensor(x, dtype=torch.float32)
    assert predicted(x, fmt, log2_scale) == really_cast(x, fmt, log2_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", [FP16, BF16, FP8_E5M2])
def test_outcome_for_other_input_dtypes(fmt, dtype):
    x = (near_powers_of_two().double() * (1 + 2.0**-40)).to(dtype)
    x = torch.cat([x, near_powers_of_two().to(dtype)])
    x = x[(x.abs().double() >= 2.0**-126) | (x == 0)]
    x = x[(x.abs().double() < 2.0**128) | x.isinf()]
    for log2_scale in (-5, 0, 7):
        assert predicted(x, fmt, log2_scale) == really_cast(x, fmt, log2_scale)


def test_the_exact_limits_of_half_precision():
    x = torch.tensor([2**-25, 2**-25 * (1 + 2**-23), 2**-14 - 2**-25, 65519.996, 65520, math.inf])
    x = torch.cat([x, torch.tensor([2**-14 - 2**-25 - 2**-38, 0.0, math.nan])])
    outcome = Histogram().add(x).outcome(FP16)
    assert (outcome.flushed, outcome.subnormal, outcome.normal, outcome.overflowing) == (1, 2, 2, 2)
    assert outcome.nonzero == 7
    assert outcome.fraction(outcome.flushed) == 1 / 7


def test_outcome_of_nothing():
    outcome = Histogram().add(torch.zeros(3)).outcome(FP16)
    assert (outcome.nonzero, outcome.fraction(outcome.flushed)) == (0, 0.0)


def test_a_format_that_holds_everything_loses_nothing():
    x = random_floats(10_000)
    outcome = Histogram().add(x).outcome(FP32)
    assert outcome.flushed == 0
    assert outcome.overflowing == x.isinf().sum()


def test_without_detail_there_is_no_outcome():
    coarse = Histogram(detail=False).add(torch.tensor([1.0, 3.0]))
    mixed = Histogram().add(torch.tensor([0.0, 1.5])) + coarse
    assert as_counter(mixed) == {"zero": 1, 0: 2, 1: 1}
    for histogram in (coarse, mixed):
        with pytest.raises(ValueError, match=r"make it a Histogram\(detail=True\)"):
            histogram.outcome(FP16)


def test_scale_out_of_range_is_refused():
    with pytest.raises(ValueError, match="log2_scale must be -500 to 500, got 501"):
        Histogram().outcome(FP16, 501)


# Recording a model


class Awkward(nn.Module):
    """One layer called twice, an in-place module, tuple and dict outputs, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.shared = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.lstm = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.shared.weight  # tied

    def forward(self, x: Tensor) -> dict[str, object]:
        hidden = self.act(self.shared(self.frozen(x)))
        hidden = self.shared(hidden)
        sequence, state = self.lstm(hidden)
        with torch.no_grad():
            self.head(hidden)
        return {"out": self.head(sequence), "state": [state, "a string", 3]}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x)["out"] ** 2).mean()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Awkward()


@pytest.fixture
def batch():
    return torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))


def all_hooks(model: nn.Module) -> list:
    hooks = []
    for module in model.modules():
        hooks += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    for parameter in model.parameters():
        hooks += list((parameter._backward_hooks or {}).values())
    return hooks


def test_weight_gradients_are_the_gradients(model, batch):
    with record_gradients(model) as recordings:
        loss_of(model, batch).backward()
    recorded = recordings.weight_gradients
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert set(recorded) == set(expected)
    assert "shared.weight" in recorded
    assert "head.weight" not in recorded  # tied: recorded once
    for name, gradient in expected.items():
        assert torch.equal(recorded[name].histogram.counts, Histogram().add(gradient).counts)
        assert recorded[name].max == gradient.abs().max()
        assert recorded[name].calls == 1


def test_accumulated_gradients_are_recorded_one_backward_at_a_time(model, batch):
    with record_gradients(model) as recordings:
        loss_of(model, batch).backward()
        loss_of(model, batch).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            once = Histogram().add(parameter.grad / 2)
            recording = recordings.weight_gradients[name]
            assert torch.equal(recording.histogram.counts, (once + once).counts)
            assert recording.calls == 2


def test_activation_gradients_are_those_of_the_outputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(7, 4)
    hidden = model[0](x)
    hidden.retain_grad()
    squashed = model[1](hidden)
    squashed.retain_grad()
    out = model[2](squashed)
    out.retain_grad()
    out.square().mean().backward()
    with record_gradients(model, activations=True) as recordings:
        model(x).square().mean().backward()
    recorded = recordings.activation_gradients
    assert list(recorded) == ["2", "1", "0"]  # nn.Sequential returns layer 2's output: once
    for name, tensor in (("0", hidden), ("1", squashed), ("2", out)):
        assert torch.equal(recorded[name].histogram.counts, Histogram().add(tensor.grad).counts)
        assert recorded[name].max == tensor.grad.abs().max()
        activation = recordings.activations[name].histogram
        assert torch.equal(activation.counts, Histogram().add(tensor.detach()).counts)
    both = total(recorded)
    assert both.outcome(FP16).nonzero == sum(
        (t.grad != 0).sum().item() for t in (hidden, squashed, out)
    )


def test_awkward_modules(model, batch):
    with record_gradients(model, activations=True) as recordings:
        loss_of(model, batch).backward()
    gradients, activations = recordings.activation_gradients, recordings.activations
    assert "frozen" not in gradients  # its output needs no gradient
    assert activations["frozen"].calls == 1
    assert activations["shared"].calls == 2
    assert gradients["shared"].calls == 1  # the other output is a view that act overwrites
    assert gradients["act"].calls == 1  # in place: not mistaken for the layer before it
    assert activations["lstm"].calls == 3  # (sequence, (h, c))
    assert gradients["lstm"].calls == 1  # h and c are not used
    assert activations["head"].calls == 2  # once without gradient
    assert gradients["head"].calls == 1
    assert "Awkward" not in gradients  # its outputs are those of inner modules


def test_in_place_activation_gradients_are_right():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    x = torch.randn(7, 4)
    out_of_place = nn.Sequential(layers[0], nn.ReLU(), layers[2])
    with record_gradients(out_of_place) as expected:
        out_of_place(x).square().mean().backward()
    with record_gradients(layers) as actual:
        layers(x).square().mean().backward()
    for name in ("0", "1", "2"):
        counts = actual.activation_gradients[name].histogram.counts
        assert torch.equal(counts, expected.activation_gradients[name].histogram.counts)


def test_a_module_called_twice_is_recorded_twice():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    with record_gradients(model) as recordings:
        model(torch.ones(2, 4)).sum().backward()
    assert recordings.activation_gradients["0"].calls == 2
    assert recordings.weight_gradients["0.weight"].calls == 1  # one gradient, of both calls


def test_a_single_layer_goes_by_its_class(batch):
    layer = nn.Linear(4, 2)
    with record_gradients(layer) as recordings:
        layer(batch).sum().backward()
    assert set(recordings.activation_gradients) == {"Linear"}
    assert set(recordings.weight_gradients) == {"weight", "bias"}


def test_results_do_not_change(model, batch):
    loss_of(model, batch).backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with record_gradients(model, activations=True):
        loss_of(model, batch).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (gradient is None and parameter.grad is None) or torch.equal(
            parameter.grad, gradient
        )


def test_hooks_are_gone_even_after_an_error(model, batch):
    kept = []

    def body_that_raises() -> None:
        with record_gradients(model) as recordings:
            assert all_hooks(model)
            kept.extend([recordings, loss_of(model, batch)])
            raise KeyError

    with pytest.raises(KeyError):
        body_that_raises()
    recordings, late = kept
    assert all_hooks(model) == []
    late.backward()  # the graph still has hooks in it, but they record nothing
    assert recordings.activation_gradients == recordings.weight_gradients == {}


def test_hooks_on_a_returned_parameter_are_removed():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.weight

    model = Table()
    with record_gradients(model) as recordings:
        model().sum().backward()
    assert all_hooks(model) == []
    assert recordings.activation_gradients["Table"].calls == 1


def test_user_hooks_stay(model):
    handle = model.shared.register_forward_hook(lambda *_: None)
    with record_gradients(model):
        pass
    assert len(all_hooks(model)) == 1
    handle.remove()


def test_inference_and_sparse_gradients():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Identity(), nn.Linear(4, 1))
    with record_gradients(model, activations=True) as recordings:
        with torch.inference_mode():
            model(torch.tensor([1, 2]))
        model(torch.tensor([1, 2])).sum().backward()
    assert recordings.activations["0"].calls == 2
    assert "1" not in recordings.activations  # nn.Identity returns its input
    assert recordings.weight_gradients["0.weight"].histogram.outcome(FP16).nonzero == 8


def test_scaled_half_precision_gradients_in_training_loop(model, batch):
    # What the gradient-histogram lesson does: the prediction for a loss scale from a float32 run
    # equals the count in gradients that were really scaled and cast.
    scale = 2.0**10
    with record_gradients(model) as plain:
        (loss_of(model, batch) * 1e-6).backward()
    model.zero_grad()
    with record_gradients(model) as scaled:
        (loss_of(model, batch) * 1e-6 * scale).backward()
    for name, recording in plain.weight_gradients.items():
        predicted = recording.histogram.outcome(FP16, log2_scale=10)
        assert predicted == scaled.weight_gradients[name].histogram.outcome(FP16)
        gradient = dict(model.named_parameters())[name].grad
        assert predicted.flushed == ((gradient != 0) & (gradient.half() == 0)).sum()


def test_conjugate_and_negative_views_are_counted():
    model = nn.ParameterDict({"p": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    with record_gradients(model) as recordings:
        (model["p"].conj() * torch.tensor([1 + 1j, 2])).real.sum().backward()
    assert recordings.weight_gradients["p"].max == 2
    assert Histogram().add(torch.tensor([1 + 2j]).conj().imag).binades().counts == [1]


def test_outputs_that_cannot_be_counted_are_left_out():
    class Odd(nn.Module):
        def forward(self, x):
            return x.detach().to(torch.float8_e4m3fn), x.detach().to_sparse(), x * 2

    model = Odd()
    with record_gradients(model, activations=True) as recordings:
        model(torch.ones(2, 2))
    assert recordings.activations["Odd"].calls == 1


def test_a_copy_made_while_recording_is_not_recorded():
    model = nn.Sequential(nn.Linear(2, 2))
    with record_gradients(model) as recordings:
        copied = copy.deepcopy(model)
        copied(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
    assert recordings.activation_gradients["0"].calls == 1
    assert recordings.weight_gradients["0.weight"].calls == 1


def test_a_sum_made_in_inference_mode_can_be_added_to():
    with torch.inference_mode():
        both = Histogram() + Histogram()
    assert both.add(torch.ones(1)).binades().counts == [1]
