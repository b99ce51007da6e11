"""Regions: arguments, nesting, queries, custom functions, checkpoint, compile, threads, DDP."""

import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import amp_lab
from amp_lab import (
    FP8_E4M3,
    TF32,
    autocast,
    custom_bwd,
    custom_fwd,
    get_autocast_dtype,
    is_autocast_enabled,
)

BF16, FP16 = torch.bfloat16, torch.float16
each_low = pytest.mark.parametrize("low", [BF16, FP16], ids=str)
KINDS = [torch.autocast, autocast]


@pytest.fixture(autouse=True)
def _clean():
    torch.manual_seed(0)
    yield
    assert not is_autocast_enabled("cpu"), "a test left a region open"
    assert torch.overrides._get_current_function_mode_stack() == []


def result_dtype() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


# Arguments


def outcome(kind: Callable, *args: Any, **kwargs: Any) -> Any:
    """The error's type; or whether it warned, the state inside, and the result's dtype."""
    enabled, dtype = queries(kind)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with kind(*args, **kwargs):
                state = [f(device) for f in (enabled, dtype) for device in ("cpu", "cuda", "xpu")]
                return [len(caught), *state, result_dtype()]
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error)


def queries(kind: Callable) -> tuple[Callable, Callable]:
    if kind is autocast:
        return is_autocast_enabled, get_autocast_dtype
    return torch.is_autocast_enabled, torch.get_autocast_dtype


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("cpu",), {}),
        (("cpu:0",), {}),
        (("cpu", BF16), {}),
        (("cpu", FP16), {}),
        (("cpu", None), {}),
        (("cpu",), {"enabled": False}),
        (("cpu", FP16, False), {}),
        (("cpu", BF16, True, False), {}),
        (("cpu",), {"dtype": FP16, "enabled": True, "cache_enabled": None}),
        (("xpu",), {}),
        (("cpu", torch.float32), {}),
        (("cpu", torch.float64), {}),
        (("cpu", torch.int32), {}),
        (("xpu", torch.float32), {}),
        (("CPU",), {}),
        (("nonsense",), {}),
        (("meta",), {}),
        ((0,), {}),
        ((torch.device("cpu"),), {}),
        ((), {}),
        (("cpu", 16), {}),
        (("cpu", "bfloat16"), {}),
        (("cpu",), {"enabled": 1}),
        (("cpu",), {"cache_enabled": 1}),
        (("cpu",), {"nonsense": 1}),
    ],
)
def test_arguments_have_the_effect_that_they_have_in_torch(args, kwargs):
    with ThreadPoolExecutor(1) as pool:  # torch leaves its region half open after some errors
        expected = pool.submit(outcome, torch.autocast, *args, **kwargs).result()
    assert outcome(autocast, *args, **kwargs) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="warns where there is no CUDA")
def test_cuda_without_cuda_warns_and_disables():
    for kind in KINDS:
        with pytest.warns(UserWarning, match="CUDA is not available.* Disabling"):
            region = kind("cuda")
        with region:
            assert not is_autocast_enabled("cuda")
            assert result_dtype() == torch.float32
    autocast("cuda", enabled=False)


def test_unsupported_dtype_warns_and_says_which_are_supported():
    with pytest.warns(
        UserWarning, match="bfloat16 and torch.float16, not torch.float32.*Disabling"
    ):
        region = autocast("cpu", torch.float32)
    with region:
        assert result_dtype() == torch.float32


def test_float_format_needs_emulation():
    with pytest.raises(TypeError, match="emulate=True"):
        autocast("cpu", FP8_E4M3)
    with autocast("cpu", FP8_E4M3, emulate=True):
        assert get_autocast_dtype("cpu") == FP8_E4M3
        assert result_dtype() == torch.float32
        with autocast("cpu"):  # inherits no format that it cannot have
            assert get_autocast_dtype("cpu") == BF16
        with autocast("cpu", emulate=True):
            assert get_autocast_dtype("cpu") == FP8_E4M3
    with pytest.warns(UserWarning, match="Disabling"):
        autocast("cpu", torch.float32, emulate=True)
    assert autocast("cpu", TF32, emulate=True).enabled


def test_errors_leave_nothing_behind():
    with autocast("cpu", FP16):
        for arguments in (("nonsense",), ("cpu", 16), ("cpu", TF32)):
            with pytest.raises((TypeError, RuntimeError)):
                autocast(*arguments)
        assert get_autocast_dtype("cpu") == FP16
        assert result_dtype() == FP16


def test_signature_begins_with_torchs():
    import inspect

    theirs = list(inspect.signature(torch.autocast).parameters.values())
    ours = list(inspect.signature(autocast).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.default) for p in theirs
    ]
    assert [p.name for p in ours[len(theirs) :]] == ["emulate", "trace"]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


# Nesting and state


def test_queries():
    assert not is_autocast_enabled("cpu")
    assert get_autocast_dtype("cpu") == torch.get_autocast_dtype("cpu") == BF16
    assert get_autocast_dtype("cuda") == torch.get_autocast_dtype("cuda") == FP16
    for query, theirs in (
        (is_autocast_enabled, torch.is_autocast_enabled),
        (get_autocast_dtype, torch.get_autocast_dtype),
    ):
        for wrong in (3, "nonsense", "meta"):
            errors = []
            for function in (query, theirs):
                with pytest.raises((TypeError, RuntimeError)) as caught:
                    function(wrong)
                errors.append(caught.type)
            assert errors[0] is errors[1]


def states(kind: Callable) -> list:
    """What nested regions see, with one of another device and one disabled among them."""
    enabled, dtype = queries(kind)
    seen: list = []

    def look() -> None:
        seen.append((enabled("cpu"), dtype("cpu"), enabled("xpu"), result_dtype()))

    look()
    with kind("cpu", FP16):
        look()
        with kind("cpu", enabled=False):
            look()
            with kind("cpu"):
                look()
                with kind("xpu", BF16):
                    look()
                look()
            look()
        look()
        with kind("cpu", BF16):
            look()
        look()
    look()
    return seen


def test_nesting():
    assert states(autocast) == states(torch.autocast)


def test_regions_end_after_exceptions_and_break():
    for kind in KINDS:
        with pytest.raises(KeyError), kind("cpu"), kind("cpu", FP16):
            raise KeyError
        assert result_dtype() == torch.float32
        for _ in range(2):
            with kind("cpu"):
                break
        assert result_dtype() == torch.float32
        with pytest.raises(RuntimeError), kind("cpu"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        assert result_dtype() == torch.float32
    assert autocast("cpu").__exit__.__annotations__["return"]  # never swallows an exception


def test_one_region_is_entered_again_and_again():
    region = autocast("cpu", FP16)
    for _ in range(3):
        with region as entered:
            assert entered is region
            assert result_dtype() == FP16
            with region:
                assert result_dtype() == FP16
            assert result_dtype() == FP16
        assert result_dtype() == torch.float32


def test_an_outer_region_casts_nothing_a_second_time():
    x = torch.randn(2, 2)
    with autocast("cpu", FP16), autocast("cpu", BF16):
        assert torch.mm(x, x).dtype == BF16
        with autocast("cpu", enabled=False):
            assert torch.mm(x, x).dtype == torch.float32
        assert torch.equal(torch.mm(x, x), x.bfloat16() @ x.bfloat16())


def test_decorator():
    for kind in KINDS:

        @kind("cpu", FP16)
        def product(a: Tensor, *, b: Tensor) -> torch.dtype:
            """Docstring."""
            return (a @ b).dtype

        assert product.__name__ == "product"
        assert product.__doc__ == "Docstring."
        assert product(torch.ones(2, 2), b=torch.ones(2, 2)) == FP16
        assert result_dtype() == torch.float32

        @kind("cpu", enabled=False)
        def full_precision() -> torch.dtype:
            return result_dtype()

        with kind("cpu"):
            assert full_precision() == torch.float32
            assert result_dtype() == BF16
    with pytest.raises(TypeError, match="callable"):
        autocast("cpu")(3)


def test_decorated_recursion():
    """torch's region does not end after this: it remembers only the innermost state."""

    @autocast("cpu", FP16)
    def recursive(n: int) -> list[torch.dtype]:
        return [result_dtype(), *(recursive(n - 1) if n else []), result_dtype()]

    assert recursive(2) == [FP16] * 6
    assert result_dtype() == torch.float32


def test_decorated_forward():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        @autocast("cpu", FP16)
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    assert Model()(torch.ones(2)).dtype == FP16


def test_cache_setting_is_inherited():
    region = autocast("cpu", cache_enabled=False)
    with region:
        assert not autocast("cpu").cache_enabled
        with autocast("cpu", cache_enabled=True):
            assert autocast("cpu").cache_enabled
    assert autocast("cpu").cache_enabled


def test_default_device_of_factories_works_inside():
    with torch.device("cpu"), autocast("cpu"):
        assert result_dtype() == BF16
    with autocast("cpu"), torch.device("meta"):
        assert torch.ones(2, 2).device.type == "meta"


def test_inference_and_no_grad():
    w = torch.randn(3, 3, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        results = []
        for kind in KINDS:
            with mode(), kind("cpu"):
                results.append(w @ w)
            with kind("cpu"), mode():
                results.append(w @ w)
        assert all(torch.equal(r, results[0]) and r.dtype == BF16 for r in results)
        assert not any(r.requires_grad for r in results)


def test_whole_training_run_is_identical_to_torchs():
    weights = []
    for kind in KINDS:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
        )
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(5):
            x, t = torch.randn(8, 1, 8, 8), torch.randint(5, (8,))
            optimizer.zero_grad()
            with kind("cpu", BF16):
                loss = F.cross_entropy(model(x), t)
            loss.backward()
            optimizer.step()
        weights.append([*model.state_dict().values(), loss.detach()])
    assert all(map(torch.equal, *weights))


# Custom functions


def multiply(kind: Callable, cast_inputs: torch.dtype | None) -> tuple[type, dict]:
    """A matrix product as an autograd function; the dtypes seen inside."""
    module = torch.amp if kind is torch.autocast else amp_lab
    seen: dict = {}

    class Multiply(torch.autograd.Function):
        @staticmethod
        @module.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx: Any, a: Tensor, b: Tensor, extra: Any = None) -> Tensor:
            ctx.save_for_backward(a, b)
            y = a @ b
            seen["forward"] = (a.dtype, y.dtype, extra and [x.dtype for x in extra[0]])
            return y

        @staticmethod
        @module.custom_bwd(device_type="cpu")
        def backward(ctx: Any, g: Tensor) -> tuple:
            a, b = ctx.saved_tensors
            grad_a, grad_b = g @ b.t(), a.t() @ g
            seen["backward"] = (g.dtype, grad_a.dtype, result_dtype())
            return grad_a, grad_b, None

    return Multiply, seen


@pytest.mark.parametrize("cast_inputs", [None, torch.float32, BF16])
@pytest.mark.parametrize("region", ["none", "enabled", "disabled", "float16", "exited"])
def test_custom_fwd_and_bwd(cast_inputs, region):
    outcomes = []
    for kind in KINDS:
        torch.manual_seed(0)
        function, seen = multiply(kind, cast_inputs)
        a, b = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
        extra = ([torch.ones(1), torch.ones(1, dtype=torch.int64), torch.ones(1).double()],)
        inputs = (a, b) if region != "enabled" else ((a * 1).to(BF16), b)
        contexts = {
            "none": lambda kind=kind: kind("cpu", enabled=False),
            "disabled": lambda kind=kind: kind("cpu", FP16, enabled=False),
            "float16": lambda kind=kind: kind("cpu", FP16),
        }
        try:
            with contexts.get(region, lambda kind=kind: kind("cpu"))():
                y = function.apply(*inputs, extra)
                if region != "exited":
                    y.float().sum().backward()
            if region == "exited":
                y.float().sum().backward()
        except RuntimeError as error:
            outcomes.append(type(error))
            continue
        outcomes.append((y.dtype, seen, a.grad.tolist(), b.grad.tolist()))
    assert outcomes[0] == outcomes[1]


def test_custom_fwd_and_bwd_without_arguments_and_errors():
    for module in (torch.amp, amp_lab):
        decorated = module.custom_fwd(lambda ctx, x: x, device_type="cpu")

        class Context:
            pass

        assert decorated(Context(), 3) == 3
        for decorate in (module.custom_fwd, module.custom_bwd):
            with pytest.raises(ValueError, match="device_type"):
                decorate(device_type=0)
            with pytest.raises(TypeError):
                decorate(lambda: 0)


def test_custom_bwd_returns_to_emulation():
    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, g: Tensor) -> Tensor:
            assert get_autocast_dtype("cpu") == FP8_E4M3
            assert is_autocast_enabled("cpu")
            return g * 2

    x = torch.ones(2, requires_grad=True)
    with autocast("cpu", FP8_E4M3, emulate=True):
        y = Double.apply(x)
    y.sum().backward()
    assert x.grad.tolist() == [2, 2]


# Checkpoint


def gradients(
    model: nn.Module, x: Tensor, context: AbstractContextManager, call: Callable
) -> list[Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(2)
    with context:
        y = call(model, x)
    loss = y.float().square().mean()
    return (
        [y, *torch.autograd.grad(loss, [*model.parameters()])] if False else backward(loss, model)
    )


def backward(loss: Tensor, model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@each_low
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant, low):
    """The second forward pass runs in the backward pass, after the region: in its precision."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 6))
    seen: list[torch.dtype] = []
    model[3].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    x = torch.randn(5, 6)
    plain = gradients(model, x, autocast("cpu", low), lambda m, x: m(x))
    results = [
        gradients(
            model, x, kind("cpu", low), lambda m, x: checkpoint(m, x, use_reentrant=use_reentrant)
        )
        for kind in KINDS
    ]
    assert set(seen) == {low}
    assert len(seen) == (5 if use_reentrant else 3)  # the other kind stops before the last layer
    assert all(map(torch.equal, plain, results[1]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_remembers_all_that_the_region_was(use_reentrant):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    x = torch.randn(5, 6)

    def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=use_reentrant)

    def in_part(model: nn.Module, x: Tensor) -> Tensor:
        with autocast("cpu", enabled=False):
            return checkpointed(model, x)

    for region in (
        lambda: autocast("cpu", FP16, emulate=True),
        lambda: autocast("cpu", FP8_E4M3, emulate=True),
        lambda: autocast("cpu", BF16, cache_enabled=False),
    ):
        expected = gradients(model, x, region(), lambda m, x: m(x))
        assert all(map(torch.equal, expected, gradients(model, x, region(), checkpointed)))
    full = gradients(model, x, autocast("cpu", enabled=False), lambda m, x: m(x))
    assert all(map(torch.equal, full, gradients(model, x, autocast("cpu"), in_part)))
    assert all(map(torch.equal, full, gradients(model, x, nullcontext(), checkpointed)))


def test_checkpoint_inside_a_backward_within_the_region_and_nested():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    x = torch.randn(5, 6, requires_grad=True)
    losses = []
    for kind in KINDS:
        with kind("cpu", BF16):
            y = checkpoint(
                lambda x: checkpoint(model, x.tanh(), use_reentrant=False), x, use_reentrant=False
            )
            loss = F.mse_loss(y, x)
            losses.append(backward(loss, model))
        losses[-1].append(x.grad)
        x.grad = None
    assert all(map(torch.equal, *losses))


def test_checkpoint_sequential():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)])
    x = torch.randn(3, 4)
    results = [
        gradients(
            model,
            x,
            kind("cpu"),
            lambda m, x: checkpoint_sequential(m, 2, x, use_reentrant=False),
        )
        for kind in KINDS
    ]
    assert all(map(torch.equal, *results))


# torch.compile


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.recurrent = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(self.layer(x))[0]


MODELS = {
    "layers": lambda: (
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4)),
        torch.randn(5, 8),
    ),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten()),
        torch.randn(2, 1, 8, 8),
    ),
    "composites": lambda: (Attention(), torch.randn(3, 5, 8)),
}


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
def test_compile(name, backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    model, x = MODELS[name]()
    expected = gradients(model, x, torch.autocast("cpu"), lambda m, x: m(x))

    def inside(x: Tensor) -> Tensor:
        with autocast("cpu"):
            return model(x)

    for function, region in ((model, autocast("cpu")), (inside, autocast("cpu", enabled=False))):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(function, backend=counter)
        for _ in range(2):
            ours = gradients(model, x, region, lambda m, x, f=compiled: f(x))
            assert all(map(torch.equal, expected, ours))
        if name != "composites" and torch.__version__ >= "2.13":  # earlier ones break the graph
            assert counter.frame_count == 1, "one graph, the casts in it"
            casts = [n for n in counter.graphs[0].graph.nodes if n.target == "bfloat16"]
            assert casts
    torch._dynamo.reset()


# Threads and processes


def test_state_belongs_to_the_thread():
    for kind in KINDS:
        with ThreadPoolExecutor(1) as pool:
            with kind("cpu", FP16):
                assert pool.submit(result_dtype).result() == torch.float32
                assert pool.submit(is_autocast_enabled, "cpu").result() is False
            region = kind("cpu", FP16)
            assert pool.submit(region(result_dtype)).result() == FP16


def test_threads_as_dataparallel_runs_them():
    """Replicas in threads, forward decorated: identical to one after the other."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    parts = torch.randn(8, 16, 8)
    forward = autocast("cpu", BF16)(model)  # one region object in all threads
    expected = [forward(part) for part in parts]
    barrier = threading.Barrier(4)

    def work(k: int) -> list[Tensor]:
        barrier.wait()
        results = [forward(parts[k]) for _ in range(50)]
        assert not is_autocast_enabled("cpu")
        return results

    with ThreadPoolExecutor(4) as pool:
        for k, results in enumerate(pool.map(work, range(4))):
            assert all(torch.equal(r, expected[k]) and r.dtype == BF16 for r in results)


DDP_PROGRAM = """
import os, sys, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from amp_lab import autocast
rank, port = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
)
results = []
for kind in (torch.autocast, autocast):
    for static_graph in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))
        model = DistributedDataParallel(model, static_graph=static_graph)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            with kind("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
del model, optimizer, loss  # before the group that they talk over
torch.distributed.barrier()
torch.distributed.destroy_process_group()
# Python's shutdown, in which gloo's threads now and then abort, is not what is tested.
os._exit(0)
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_distributed_data_parallel():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", DDP_PROGRAM]
    processes = [
        subprocess.Popen([*command, str(rank), port], stderr=subprocess.PIPE, env=environment)
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()


# torch.func


def test_function_transforms():
    w, x = torch.randn(3, 3), torch.randn(4, 3)

    def loss(w: Tensor, row: Tensor) -> Tensor:
        return (row @ w).float().square().sum()

    results = []
    for kind in KINDS:
        with kind("cpu"):
            results.append(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x))
    assert torch.equal(*results)


# Regions in generators


def test_regions_that_end_in_another_order_than_they_began():
    def region(*args: Any, **kwargs: Any) -> Any:
        with autocast(*args, **kwargs):
            yield

    def product() -> torch.dtype:
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    first, second = region("cpu", torch.float16), region("cpu", torch.bfloat16)
    off = region("cpu", enabled=False)
    for generator in (first, second, off):
        next(generator)
    first.close()
    assert product() == torch.float32
    off.close()
    assert product() == torch.bfloat16
    assert is_autocast_enabled("cpu")
    with autocast("cpu", enabled=False):
        assert product() == torch.float32
    second.close()
    assert product() == torch.float32
    assert not is_autocast_enabled("cpu")
    assert torch._C._len_torch_function_stack() == 0


def test_a_region_that_was_not_entered_is_not_left():
    with pytest.raises(RuntimeError, match="not entered"):
        autocast("cpu").__exit__(None, None, None)
