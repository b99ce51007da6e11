"""What each level casts in a model: weights, buffers, inputs, outputs, state dicts."""

import copy
import inspect
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from amp_lab import apex as amp
from amp_lab.apex.nested import cast_floats

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()


class Probe(nn.Module):
    """Returns its arguments, and remembers with which dtypes they arrived."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return args[0] if len(args) == 1 else args


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.BatchNorm1d(16, affine=False),
        nn.Linear(16, 2),
        nn.LayerNorm(2),
    )


def initialize(model, level, **options):
    return amp.initialize(model, opt_level=level, verbosity=0, **options)


def dtypes(model) -> dict[str, torch.dtype]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.dtype for name, t in named if t.is_floating_point()}


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_o0_and_o1_leave_the_weights_in_float32(level):
    assert set(dtypes(initialize(convnet(), level)).values()) == {FLOAT}


def test_o2_casts_all_but_batch_normalization():
    found = dtypes(initialize(convnet(), "O2"))
    for name, dtype in found.items():
        assert dtype == (FLOAT if name.startswith(("1.", "4.")) else HALF), name
    assert len(found) == 12


def test_o3_casts_everything_that_is_floating_point():
    model = initialize(convnet(), "O3")
    assert set(dtypes(model).values()) == {HALF}
    assert model[1].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize(
    ("level", "options", "batchnorm"),
    [("O2", {"keep_batchnorm_fp32": "False"}, HALF), ("O3", {"keep_batchnorm_fp32": True}, FLOAT)],
)
def test_batch_normalization_by_override(level, options, batchnorm):
    model = initialize(convnet(), level, **options)
    assert model[1].weight.dtype == model[1].running_var.dtype == batchnorm
    assert model(torch.randn(4, 1, 4, 4)).dtype == FLOAT


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_forward_and_backward_run_and_return_float32_outside_o1(level, mode):
    model = initialize(convnet(), level)
    getattr(model, mode)()
    output = model(torch.randn(4, 1, 4, 4))
    assert output.dtype == FLOAT
    output.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_inputs_go_to_half_and_outputs_back_to_float32(level):
    model = initialize(Probe(), level)
    x, mask, index = torch.ones(2), torch.tensor([True]), torch.tensor([1])
    outputs = model(x, mask, index, x.double(), 3, "text", None, scale=x)
    assert [getattr(a, "dtype", a) for a in model.args] == [
        HALF, torch.bool, torch.int64, HALF, 3, "text", None,
    ]  # fmt: skip
    assert model.kwargs["scale"].dtype == HALF
    assert outputs[0].dtype == outputs[3].dtype == FLOAT
    assert outputs[1] is mask
    assert outputs[4:] == (3, "text", None)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_cast_model_outputs(level):
    model = initialize(Probe(), level, cast_model_outputs=torch.float64)
    assert model(torch.ones(2)).dtype == torch.float64


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_o0_casts_to_float32_and_o1_leaves_outputs_alone(level):
    model = initialize(Probe(), level)
    assert model(torch.ones(2).half()).dtype == (FLOAT if level == "O0" else HALF)


def test_cast_model_type_false_leaves_the_model_alone():
    model = initialize(Probe(), "O3", cast_model_type=False)
    assert model.weight.dtype == FLOAT
    assert model(torch.ones(2)).dtype == FLOAT


def test_parameters_stay_the_same_objects_and_ties_stay_tied():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    before = list(model.parameters())
    initialize(model, "O2")
    after = list(model.parameters())
    assert all(p is q for p, q in zip(before, after, strict=True))
    assert model[1].weight is model[0].weight
    amp.reset()
    assert model[0].weight.dtype == FLOAT


def test_recurrent_networks():
    model = initialize(nn.LSTM(3, 4, batch_first=True), "O2")
    output, (h, c) = model(torch.randn(2, 5, 3))
    assert {output.dtype, h.dtype, c.dtype} == {FLOAT}
    assert {p.dtype for p in model.parameters()} == {HALF}
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.randn(2, 5, 3), torch.tensor([5, 3]), batch_first=True
    )
    output, _ = model(packed)
    assert output.data.dtype == FLOAT


def test_forward_keeps_its_signature():
    class Named(nn.Linear):
        def forward(self, input, temperature=1.0):
            return super().forward(input) / temperature

    model = Named(2, 2)
    before = inspect.signature(model.forward)
    initialize(model, "O2")
    assert inspect.signature(model.forward) == before
    assert model(input=torch.ones(1, 2), temperature=2.0).dtype == FLOAT


def test_a_deep_copy_has_its_own_forward():
    """Averaged models are made with deepcopy; they must not call the original's weights."""
    model = initialize(nn.Linear(2, 1, bias=False), "O2")
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.weight)
    assert twin(torch.ones(1, 2)).item() == 0
    assert twin(torch.ones(1, 2)).dtype == FLOAT
    assert model(torch.ones(1, 2)).item() != 0


def test_state_dict_is_float32_also_of_submodules():
    model = initialize(convnet(), "O3")
    assert {t.dtype for t in model.state_dict().values()} == {FLOAT, torch.int64}
    assert model[0].state_dict()["weight"].dtype == FLOAT
    assert torch.equal(model.state_dict()["0.weight"], model[0].weight.float())


def test_state_dict_has_the_master_weights():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 2)).sum() / 100, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    master, _ = amp.master_params(optimizer)
    saved = model.state_dict()["weight"]
    assert torch.equal(saved, master)
    assert not torch.equal(saved, model.weight.float())
    assert torch.equal(saved.half(), model.weight)


def test_load_state_dict_reaches_the_master_weights():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    state = {"weight": torch.tensor([[1 + 2.0**-20, 0.1]]), "bias": torch.tensor([0.2])}
    model.load_state_dict(state)
    for master, saved in zip(amp.master_params(optimizer), state.values(), strict=True):
        assert torch.equal(master, saved)
    assert torch.equal(model.weight, state["weight"].half())


def test_load_state_dict_still_refuses_other_shapes_and_keys():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"weight": torch.ones(1, 2)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_model_in_low_precision_is_refused(dtype):
    with pytest.raises(RuntimeError, match=f"weight is {dtype} already"):
        initialize(nn.Linear(2, 2).to(dtype), "O1")
    model = nn.BatchNorm1d(2)
    model.running_mean = model.running_mean.to(dtype)
    with pytest.raises(RuntimeError, match="running_mean is"):
        initialize(model, "O2")


def test_wrapped_model_is_refused():
    with pytest.raises(RuntimeError, match="wrapped in DataParallel already"):
        initialize(nn.DataParallel(nn.Linear(2, 2)), "O2")


Point = namedtuple("Point", "x y")


@dataclass
class Batch:
    """A user's own batch class: `.to` casts it."""

    x: torch.Tensor

    def to(self, dtype):
        return Batch(self.x.to(dtype))


def test_cast_floats_keeps_every_container():
    x, i = torch.ones(1), torch.ones(1, dtype=torch.long)
    module = nn.Linear(1, 1)
    value = {
        "list": [x, (x, i)],
        "point": Point(x, "y"),
        "ordered": OrderedDict(a=x),
        "batch": Batch(x),
        "set": {1, 2},
        "array": x.numpy(),
        "module": module,
    }
    cast = cast_floats(value, HALF)
    assert cast["list"][0].dtype == cast["list"][1][0].dtype == HALF
    assert cast["list"][1][1] is i
    assert isinstance(cast["point"], Point)
    assert cast["point"].x.dtype == HALF
    assert cast["point"].y == "y"
    assert type(cast["ordered"]) is OrderedDict
    assert cast["ordered"]["a"].dtype == HALF
    assert cast["batch"].x.dtype == HALF
    assert cast["set"] == {1, 2}
    assert cast["array"] is value["array"]
    assert cast["module"] is module
    assert module.weight.dtype == FLOAT
    assert value["list"][0].dtype == value["ordered"]["a"].dtype == FLOAT
