"""`amp_lab.GradScaler` against torch's: the same program on both, compared bit for bit."""

import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.finite import _on_accelerator, scale_and_check_
from amp_lab.grad_scaler import GradScaler

CLASSES = {"torch": torch.amp.GradScaler, "amp_lab": GradScaler}
INF, NAN = float("inf"), float("nan")


def bits(value):
    """Make a value comparable to the last bit, NaN included."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            value = value.coalesce()
            return ("sparse", bits(value.indices()), bits(value.values()))
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return (value.dtype, tuple(value.shape), bytes(raw.tolist()))
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [bits(entry) for entry in value]
    return value


def outcome(make, program):
    """Run a program with one class; return what it returns, or the type of its error."""
    try:
        return bits(program(make))
    except Exception as error:
        return type(error)


def same(program):
    """Assert that the program does the same with both classes; return what it did."""
    reference = outcome(CLASSES["torch"], program)
    ours = outcome(CLASSES["amp_lab"], program)
    assert ours == reference
    return ours


def parameter(*gradient, dtype=torch.float32):
    p = nn.Parameter(torch.ones(len(gradient), dtype=dtype))
    p.grad = torch.tensor(gradient, dtype=dtype)
    return p


def started(make, **options):
    scaler = make("cpu", **options)
    scaler.scale(torch.ones(()))
    return scaler


# scale


def test_scale_a_tensor():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        same(lambda make, d=dtype: make("cpu").scale(torch.tensor([1.5, -2.0], dtype=d)))


def test_scale_nested_lists_tuples_and_generators():
    def program(make):
        x = torch.arange(3.0)
        scaled = make("cpu").scale([x, (x, [x + 1])])
        lazy = make("cpu", init_scale=4.0).scale(x + i for i in range(2))
        return [type(scaled), type(scaled[1]), scaled[0], scaled[1][1][0], list(lazy)]

    same(program)


def test_scale_keeps_the_graph():
    def program(make):
        x = torch.ones(2, requires_grad=True)
        make("cpu", init_scale=8.0).scale((x * 3).sum()).backward()
        return x.grad

    assert same(program)[0] is torch.float32


@pytest.mark.parametrize("wrong", [3.0, None, [torch.ones(1), 3.0]])
def test_scale_refuses_other_things(wrong):
    assert same(lambda make: make("cpu").scale(wrong)) is ValueError


def test_the_scale_tensor_is_created_by_the_first_scale():
    def program(make):
        scaler = make("cpu", init_scale=32.0)
        before = scaler._scale is None, scaler.get_scale()
        scaler.scale(torch.ones(()))
        return before, scaler._scale, scaler._growth_tracker

    same(program)


def test_disabled():
    def program(make):
        scaler = make("cpu", enabled=False)
        x, p = torch.ones(2), parameter(1.0)
        optimizer = torch.optim.SGD([p], lr=0.1)
        loss = scaler.scale(x)
        scaler.unscale_(optimizer)
        result = scaler.step(optimizer, closure=lambda: torch.tensor(3.0))
        scaler.update()
        scaler.load_state_dict({})
        return loss is x, p, result, scaler.state_dict(), scaler.get_scale(), scaler.is_enabled()

    same(program)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
def test_cuda_without_cuda_warns_and_disables(make):
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = make()
    assert not scaler.is_enabled()


# unscale_


@pytest.mark.parametrize("scale", [65536.0, 3.0, 2.0**-126, 1e38, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_unscale_to_the_last_bit(scale, dtype):
    def program(make):
        scaler = started(make, init_scale=scale)
        p = parameter(*torch.randn(500, generator=torch.Generator().manual_seed(0)), dtype=dtype)
        optimizer = torch.optim.SGD([p], lr=0.1)
        scaler.unscale_(optimizer)
        return p.grad, scaler.step(optimizer), p, scaler.update(), scaler.state_dict()

    same(program)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("at", [0, 1, 7, 8, 15, 16, 17, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_bad_value_anywhere_is_found(bad, at, dtype):
    def program(make):
        values = torch.arange(100.0)
        values[at] = bad
        p = parameter(*values, dtype=dtype)
        scaler, optimizer = started(make), torch.optim.SGD([p], lr=0.1)
        scaler.step(optimizer)
        scaler.update()
        return p, p.grad, scaler.get_scale()

    assert same(program)[2] == 32768.0


def test_huge_finite_gradients_are_finite():
    """Their sum overflows, they do not."""

    def program(make):
        p = parameter(*[3e38] * 50)
        scaler, optimizer = started(make), torch.optim.SGD([p], lr=0.1)
        scaler.step(optimizer)
        scaler.update()
        return p, scaler.get_scale(), scaler._get_growth_tracker()

    assert same(program)[2] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_not_finite_among_huge_numbers_is_found(dtype):
    """Wherever it stands; a sum that overflows does not tell."""
    huge = torch.full((200,), torch.finfo(dtype).max, dtype=dtype)
    huge[::2] *= -1
    huge[:20] = huge[0]
    assert not scale_and_check_([huge], None)
    for place in range(200):
        for bad in (INF, -INF, NAN):
            values = huge.clone()
            values[place] = bad
            assert scale_and_check_([values], None), f"{bad} at {place}"


@pytest.mark.parametrize("place", [0, 2**19, 2**20 - 1, 2**20, 1_100_000, 1_199_999])
def test_large_gradients_are_checked_in_every_block(place):
    def program(make):
        p = nn.Parameter(torch.zeros(1200, 1000))
        p.grad = torch.full((1200, 1000), 3.0)
        p.grad.view(-1)[place] = NAN
        small = parameter(1.0, 2.0)
        scaler, optimizer = started(make), torch.optim.SGD([small, p], lr=0.1)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return p.grad, small, small.grad, scaler.get_scale()

    assert same(program)[3] == 32768.0


@pytest.mark.parametrize("scale", [0.25, 2.0**-126, 1.0, 4.0])
def test_unscaling_that_overflows_is_no_infinity_found(scale):
    """What is checked are the scaled gradients: dividing by a scale below 1 may overflow."""

    def program(make):
        p = parameter(3e38, 1.0)
        scaler, optimizer = started(make, init_scale=scale), torch.optim.SGD([p], lr=1e-40)
        scaler.step(optimizer)
        scaler.update()
        return p, p.grad, scaler.state_dict()

    same(program)


def test_float16_gradients_are_refused_before_anything_is_changed():
    def program(make):
        first, half = parameter(6.0), parameter(1.0, dtype=torch.float16)
        scaler, optimizer = started(make), torch.optim.SGD([first, half], lr=0.1)
        with pytest.raises(ValueError, match=r"FP16|float16"):
            scaler.unscale_(optimizer)
        kept = first.grad.clone()
        scaler.step(optimizer)
        return kept

    assert same(program) is ValueError


def test_sparse_gradients():
    def program(make):
        embedding = nn.Embedding(5, 2, sparse=True)
        with torch.no_grad():
            embedding.weight.fill_(1.0)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        scaler = make("cpu", init_scale=1024.0)
        scaler.scale(embedding(torch.tensor([1, 3, 3])).sum()).backward()
        scaler.unscale_(optimizer)
        gradient = embedding.weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
        return gradient, embedding.weight, scaler.state_dict()

    same(program)


def test_sparse_float16_gradients_are_coalesced_before_the_check():
    """Two halves of 40000 at one place are finite each, and their sum is not."""

    def program(make):
        p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
        index, values = torch.tensor([[1, 1]]), torch.tensor([4e4, 4e4], dtype=torch.float16)
        p.grad = torch.sparse_coo_tensor(index, values, (4,), check_invariants=True)
        optimizer = torch.optim.SGD([p], lr=0.1)
        optimizer._step_supports_amp_scaling = True
        seen = []
        optimizer.step = lambda: seen.append(bool(optimizer.found_inf))
        scaler = started(make)
        scaler.step(optimizer)
        return seen, p.grad.is_coalesced()

    if hasattr(torch.amp.GradScaler, "_check_inf_per_device"):
        assert same(program) == [[True], True]


def test_no_gradients_none_gradients_empty_gradients():
    def program(make):
        without, empty, p = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0)), parameter(8.0)
        empty.grad = torch.ones(0)
        scaler, optimizer = started(make), torch.optim.SGD([without, empty, p], lr=1.0)
        scaler.step(optimizer)
        scaler.update()
        return without, p

    same(program)


def test_gradients_that_are_not_contiguous():
    def program(make):
        p = nn.Parameter(torch.zeros(1400, 800))
        p.grad = torch.arange(1_120_000.0).view(800, 1400).t()
        image = nn.Parameter(torch.zeros(2, 3, 4, 4))
        image.grad = torch.randn(2, 3, 4, 4).mul(0).add(2).to(memory_format=torch.channels_last)
        scaler, optimizer = started(make), torch.optim.SGD([p, image], lr=1.0)
        scaler.unscale_(optimizer)
        return p.grad, image.grad, p.grad.stride(), image.grad.stride()

    same(program)


def test_several_dtypes_at_once():
    def program(make):
        ps = [parameter(3.0, 4.0, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16)]
        scaler, optimizer = started(make, init_scale=3.0), torch.optim.SGD(ps, lr=1.0)
        scaler.step(optimizer)
        scaler.update()
        return ps, [p.grad for p in ps]

    same(program)


# step


def test_only_the_optimizer_with_the_infinity_is_skipped():
    def program(make):
        good, bad = parameter(1.0), parameter(INF)
        first, second = torch.optim.SGD([good], lr=0.1), torch.optim.SGD([bad], lr=0.1)
        scaler = started(make)
        results = scaler.step(first), scaler.step(second)
        scaler.update()
        return good, bad, results, scaler.get_scale()

    assert same(program)[3] == 32768.0


def test_there_is_no_second_check_after_unscale():
    def program(make):
        p = parameter(1.0)
        scaler, optimizer = started(make), torch.optim.SGD([p], lr=1.0)
        scaler.unscale_(optimizer)
        p.grad.fill_(INF)
        scaler.step(optimizer)
        scaler.update()
        return p, scaler.get_scale()

    assert same(program)[1] == 65536.0


def test_arguments_and_results_of_the_optimizers_step():
    def program(make):
        p = parameter(1.0)
        scaler, optimizer = started(make), torch.optim.SGD([p], lr=1.0)
        result = scaler.step(optimizer, lambda: torch.tensor(7.0))
        scaler.update()
        with pytest.raises(RuntimeError, match=r"(?i)closure"):
            scaler.step(optimizer, closure=lambda: torch.tensor(7.0))
        return result, p

    same(program)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("bad", [1.0, INF])
@pytest.mark.parametrize("unscale", [False, True])
def test_fused_optimizers(name, bad, unscale):
    def program(make):
        p = parameter(65536.0, bad, -3.0)
        optimizer = getattr(torch.optim, name)([p], lr=0.1, fused=True)
        scaler = started(make)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        left = [hasattr(optimizer, a) for a in ("grad_scale", "found_inf")]
        scaler.update()
        return p, optimizer.state_dict()["state"], left, scaler.state_dict()

    same(program)


def test_what_a_fused_optimizer_is_given():
    def program(make):
        seen = []

        class Fused(torch.optim.SGD):
            _step_supports_amp_scaling = True

            def step(self):
                seen.extend(
                    [self.grad_scale, self.found_inf, self.param_groups[0]["params"][0].grad]
                )

        scaler = started(make)
        optimizer = Fused([parameter(5.0, NAN)], lr=0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([5.0, 6.0])
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        return seen

    same(program)


# update


@pytest.mark.parametrize("scale", [1.0, 3.0, 0.1, 1e38, 3e38, 2.0**-126, 2.0**-149])
@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.1, 0.9), (1.0000001, 0.3)])
def test_update_rounds_once_from_float64(scale, growth, backoff):
    def program(make):
        trace = []
        options = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": 2}
        scaler = started(make, init_scale=scale, **options)
        for gradient in (1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0, NAN, NAN, 1.0):
            p = parameter(gradient)
            scaler.step(torch.optim.SGD([p], lr=0.1))
            scaler.update()
            trace += [scaler._scale.clone(), scaler._growth_tracker.clone()]
        return trace

    same(program)


def test_growth_that_would_overflow_leaves_the_scale_and_resets_the_tracker():
    def program(make):
        scaler = started(make, init_scale=2.0**127, growth_interval=1)
        scaler.step(torch.optim.SGD([parameter(1.0)], lr=0.1))
        scaler.update()
        return scaler.get_scale(), scaler._get_growth_tracker()

    assert same(program) == [2.0**127, 0]


def test_update_to_a_new_scale():
    def program(make):
        scaler = started(make)
        scaler.update(12.5)
        first = scaler.get_scale()
        new = torch.tensor(3.0)
        scaler.update(new)
        new.fill_(9.0)
        return first, scaler.state_dict()

    same(program)


def test_a_new_scale_may_have_a_dimension():
    scaler = started(GradScaler)
    scaler.update(torch.tensor([3.0]))
    assert scaler.get_scale() == 3.0


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(2), torch.ones((), requires_grad=True), torch.ones((), device="meta")],
    ids=["two elements", "requires grad", "other device"],
)
def test_update_refuses_a_wrong_new_scale(wrong):
    assert same(lambda make: started(make).update(wrong)) is AssertionError


# state


def test_either_loads_the_others_checkpoint():
    def run(make, state=None, steps=5):
        scaler = started(make, growth_interval=3)
        if state:
            scaler.load_state_dict(state)
        for _ in range(steps):
            scaler.step(torch.optim.SGD([parameter(1.0)], lr=0.1))
            scaler.update()
        return scaler.state_dict()

    ours, theirs = CLASSES["amp_lab"], CLASSES["torch"]
    states = [run(b, run(a)) for a in (ours, theirs) for b in (ours, theirs)]
    assert states[0] == states[1] == states[2] == states[3]
    assert list(states[0]) == list(states[3])


def test_load_before_and_after_the_first_scale():
    state = {"scale": 7.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 9}
    state["_growth_tracker"] = 4

    def program(make):
        fresh, used = make("cpu"), started(make)
        fresh.load_state_dict(state)
        used.load_state_dict(state)
        fresh.scale(torch.ones(()))
        return fresh.state_dict(), used.state_dict(), fresh._scale, used._scale

    same(program)


def test_a_state_with_a_missing_key_changes_nothing():
    for missing in GradScaler("cpu").state_dict():
        scaler = started(GradScaler)
        before = scaler.state_dict()
        state = {k: 3 for k in before if k != missing}
        with pytest.raises(KeyError):
            scaler.load_state_dict(state)
        assert scaler.state_dict() == before


def test_pickling():
    def program(make):
        fresh, used = make("cpu", init_scale=8.0), started(make)
        used.step(torch.optim.SGD([parameter(INF)], lr=0.1))
        used.update()
        copies = [pickle.loads(pickle.dumps(s)) for s in (fresh, used)]
        states = [c.state_dict() for c in copies]
        return states, [c.scale(torch.ones(())) for c in copies]

    same(program)


def test_pickling_in_mid_iteration_is_refused():
    def program(make):
        scaler = started(make)
        scaler.unscale_(torch.optim.SGD([parameter(1.0)], lr=0.1))
        pickle.dumps(scaler)

    assert same(program) is AssertionError


def test_getters_and_setters():
    def program(make):
        scaler = make("cpu")
        scaler.set_growth_factor(3.0)
        scaler.set_backoff_factor(0.1)
        scaler.set_growth_interval(7)
        numbers = scaler.get_growth_factor(), scaler.get_backoff_factor()
        return numbers, scaler.get_growth_interval(), scaler.state_dict()

    same(program)


# misuse


def optimizer_of(*gradient):
    return torch.optim.SGD([parameter(*gradient)], lr=0.1)


def unscale_twice(make):
    scaler, optimizer = started(make), optimizer_of(1.0)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_after_step(make):
    scaler, optimizer = started(make), optimizer_of(1.0)
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def step_twice(make):
    scaler, optimizer = started(make), optimizer_of(1.0)
    scaler.step(optimizer)
    scaler.step(optimizer)


MISUSE = {
    "growth factor of 1": lambda make: make("cpu", growth_factor=1.0),
    "backoff factor of 1": lambda make: make("cpu", backoff_factor=1.0),
    "unscale before scale": lambda make: make("cpu").unscale_(optimizer_of(1.0)),
    "step before scale": lambda make: make("cpu").step(optimizer_of(1.0)),
    "update before scale": lambda make: make("cpu").update(),
    "unscale twice": unscale_twice,
    "unscale after step": unscale_after_step,
    "step twice": step_twice,
    "update without a check": lambda make: started(make).update(),
    "step with no gradients": lambda make: started(make).step(
        torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    ),
    "closure": lambda make: started(make).step(optimizer_of(1.0), closure=lambda: None),
    "load an empty state": lambda make: make("cpu").load_state_dict({}),
    "float16 gradients": lambda make: started(make).step(
        torch.optim.SGD([parameter(1.0, dtype=torch.float16)], lr=0.1)
    ),
}


@pytest.mark.parametrize("program", MISUSE.values(), ids=MISUSE)
def test_misuse_raises_what_torch_raises(program):
    error = same(program)
    assert isinstance(error, type)
    assert issubclass(error, Exception)


@pytest.mark.parametrize("program", MISUSE.values(), ids=MISUSE)
def test_messages_say_more_than_a_name(program):
    with pytest.raises((RuntimeError, AssertionError, ValueError)) as caught:
        program(GradScaler)
    assert len(str(caught.value).split()) >= 5


# what torch's class lacks


def test_off_by_default_and_not_in_the_state():
    plain = started(GradScaler)
    extra = started(GradScaler, min_scale=1.0, history_size=10)
    assert extra.state_dict() == plain.state_dict()
    plain.step(optimizer_of(1.0))
    plain.update()
    assert plain.history == []


def test_history_is_bounded():
    scaler = started(GradScaler, history_size=3, growth_interval=2)
    for gradient in (1.0, INF, 1.0, 1.0, NAN):
        scaler.step(optimizer_of(gradient))
        scaler.update()
    told = [(u.scale, u.new_scale, u.skipped) for u in scaler.history]
    assert told == [(32768, 32768, False), (32768, 65536, False), (65536, 32768, True)]
    assert pickle.loads(pickle.dumps(scaler)).history == scaler.history


@pytest.mark.parametrize("fused", [False, True])
def test_step_was_skipped(fused):
    p = parameter(1.0)
    other = optimizer_of(1.0)
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=fused)
    scaler = started(GradScaler)
    assert not scaler.step_was_skipped(optimizer)
    for gradient, skipped in ((INF, True), (1.0, False), (NAN, True)):
        p.grad.fill_(gradient)
        scaler.step(optimizer)
        scaler.step(other)
        assert scaler.step_was_skipped(optimizer) is skipped
        scaler.update()
        assert scaler.step_was_skipped(optimizer) is skipped
        assert not scaler.step_was_skipped(other)


def test_a_scheduler_that_follows_has_no_warning():
    """The warning that the scheduler stepped before the optimizer is an error in these tests."""
    p = parameter(INF)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    scaler = started(GradScaler)
    for gradient in (INF, 1.0, 1.0):
        p.grad.fill_(gradient)
        scaler.step(optimizer)
        scaler.update()
        if not scaler.step_was_skipped(optimizer):
            scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]


def test_min_scale_stops_the_fall_and_warns_once():
    scaler = started(GradScaler, init_scale=4.0, min_scale=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            scaler.step(optimizer_of(NAN))
            scaler.update()
    assert scaler.get_scale() == 1.0
    [warning] = caught
    assert "min_scale = 1" in str(warning.message)
    assert warning.filename == __file__


def test_min_scale_is_for_backoff_only():
    scaler = started(GradScaler, init_scale=64.0, min_scale=16.0)
    scaler.update(1.0)
    scaler.step(optimizer_of(1.0))
    scaler.update()
    assert scaler.get_scale() == 1.0
    scaler.step(optimizer_of(NAN))
    with pytest.warns(UserWarning, match="min_scale"):
        scaler.update()
    assert scaler.get_scale() == 16.0


def test_a_negative_scale_below_1_overflows_where_torchs_does():
    results = []
    for kind in (GradScaler, torch.amp.GradScaler):
        scaler = started(kind, init_scale=-1e-30)
        optimizer = optimizer_of(1e10)
        scaler.step(optimizer)
        scaler.update()
        [weight] = optimizer.param_groups[0]["params"]
        results.append((weight.item(), scaler.get_scale()))
    assert results[0] == results[1]


def test_complex_gradients_are_refused_and_left_alone():
    parameter = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    for kind in (GradScaler, torch.amp.GradScaler):
        scaler = started(kind)
        with pytest.raises(NotImplementedError):
            scaler.step(torch.optim.SGD([parameter], lr=0.1))
        assert parameter.grad == 1


@pytest.mark.parametrize("wrong", [0.0, -1.0, 1e6, NAN])
def test_a_wrong_min_scale(wrong):
    with pytest.raises(ValueError, match="min_scale"):
        GradScaler("cpu", min_scale=wrong)


def test_non_finite_parameters_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    model[1].weight.grad[0, 1] = NAN
    model[0].bias.grad[0] = INF
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    assert scaler.non_finite_parameters(optimizer, model) == ["0.bias", "1.weight"]
    numbers = ["group 0, parameter 1", "group 0, parameter 2"]
    assert scaler.non_finite_parameters(optimizer) == numbers


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_training_step(fused, unscales):
    """As torch's class, compiled too; the history as in a step that is not."""

    def train(make, compiled=True, **options):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = make("cpu", growth_interval=2, **options)

        def step(x):
            scaler.scale(model(x).sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

        run = torch.compile(step, backend="eager") if compiled else step
        for i in range(6):
            run(torch.full((2, 3), INF if i in (2, 4) else 1.0))
            optimizer.zero_grad()
        return bits([*model.parameters(), scaler.state_dict()]), scaler

    theirs, _ = train(torch.amp.GradScaler)
    ours, scaler = train(GradScaler, history_size=9)
    assert ours == theirs
    assert scaler.history == train(GradScaler, compiled=False, history_size=9)[1].history
    assert [update.skipped for update in scaler.history] == [False, False, True, False, True, False]


class Operations(TorchDispatchMode):
    """The names of all operations that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("bad", [1.0, INF, -INF, NAN])
@pytest.mark.parametrize("fused", [False, True])
def test_the_host_waits_once_a_step_and_never_with_a_fused_optimizer(
    monkeypatch, fused, bad, unscales
):
    """The path of accelerators, run on a CPU: results as torch's, without torch's kernels."""

    def program(make):
        p, q, empty = parameter(1.0, bad), parameter(3.0), parameter()
        optimizer = torch.optim.SGD([p, q, empty], lr=0.1, fused=fused)
        scaler = started(make)
        with Operations() as operations:
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        if make is GradScaler:
            # To read a value back, the host waits for the accelerator.
            reads = operations.names.count("aten::_local_scalar_dense")
            assert reads == (0 if fused else 1)
            assert not any("_amp_" in name for name in operations.names)
        else:
            assert any("_amp_" in name for name in operations.names)
        return p, q, p.grad, q.grad, scaler.state_dict()

    monkeypatch.setattr("amp_lab.grad_scaler.scale_and_check_", _on_accelerator)
    same(program)
