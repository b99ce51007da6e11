"""Functions of your own under O1: decorated, or registered by name."""

from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_lab import apex as amp

HALF, FLOAT, BF16, DOUBLE = torch.float16, torch.float32, torch.bfloat16, torch.float64


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()


def dtypes_of(*values, **named):
    """Return the dtypes that the arguments arrive with."""
    found = []
    for value in [*values, *named.values()]:
        found += [v.dtype if isinstance(v, torch.Tensor) else v for v in (
            value if isinstance(value, list) else [value]
        )]  # fmt: skip
    return found


ARGUMENTS = ([torch.ones(1), torch.ones(1).half()], torch.ones(1).bfloat16(), 3)
NAMED = {"index": torch.ones(1, dtype=torch.int64), "double": torch.ones(1).double()}
AS_GIVEN = [FLOAT, HALF, BF16, 3, torch.int64, DOUBLE]


@pytest.mark.parametrize(
    ("decorator", "expected"),
    [
        (amp.half_function, [HALF, HALF, HALF, 3, torch.int64, DOUBLE]),
        (amp.float_function, [FLOAT, FLOAT, FLOAT, 3, torch.int64, DOUBLE]),
        (amp.promote_function, [FLOAT, FLOAT, FLOAT, 3, torch.int64, DOUBLE]),
    ],
)
def test_decorated_functions_cast_while_casts_are_on(decorator, expected):
    function = decorator(dtypes_of)
    assert function.__name__ == "dtypes_of"
    assert function(*ARGUMENTS, **NAMED) == AS_GIVEN
    handle = amp.init()
    assert function(*ARGUMENTS, **NAMED) == expected
    with handle.disable_casts():
        assert function(*ARGUMENTS, **NAMED) == AS_GIVEN
    amp.reset()
    assert function(*ARGUMENTS, **NAMED) == AS_GIVEN


def test_promote_leaves_arguments_of_one_dtype():
    function = amp.promote_function(dtypes_of)
    amp.init()
    half = torch.ones(1).half()
    assert function(half, half) == [HALF, HALF]
    assert function(torch.ones(1), 2) == [FLOAT, 2]


def test_casts_are_differentiable():
    weight = nn.Parameter(torch.ones(2))
    amp.init()
    amp.half_function(lambda w: (3 * w).sum())(weight).backward()
    assert weight.grad.tolist() == [3.0, 3.0]
    assert weight.grad.dtype == FLOAT


@pytest.fixture
def library():
    """Somebody else's module."""
    module = ModuleType("library")
    module.f = dtypes_of
    return module


@pytest.mark.parametrize("start", ["init", "initialize"])
@pytest.mark.parametrize(
    ("register", "expected"),
    [
        (amp.register_half_function, [HALF, HALF]),
        (amp.register_float_function, [FLOAT, FLOAT]),
        (amp.register_promote_function, [FLOAT, FLOAT]),
    ],
)
def test_registered_functions_are_patched_from_then_on(library, register, expected, start):
    arguments = torch.ones(1), torch.ones(1).half()
    register(library, "f")
    assert library.f(*arguments) == [FLOAT, HALF]
    if start == "init":
        amp.init()
    else:
        amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert library.f(*arguments) == expected
    amp.reset()
    assert library.f is dtypes_of


def test_registrations_are_used_up_and_forgotten_by_reset(library):
    amp.register_half_function(library, "f")
    amp.reset()
    amp.init()
    assert library.f is dtypes_of


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_other_levels_patch_nothing(library, level):
    amp.register_half_function(library, "f")
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    assert library.f is dtypes_of


def test_functions_kept_from_before_reset_cast_no_more(library):
    amp.register_half_function(library, "f")
    amp.init()
    kept = library.f
    amp.reset()
    amp.init()
    assert kept(torch.ones(1)) == [FLOAT]


@pytest.mark.parametrize(
    "register",
    [amp.register_half_function, amp.register_float_function, amp.register_promote_function],
)
def test_a_name_that_is_not_there(library, register):
    with pytest.raises(ValueError, match="has no function 'g'"):
        register(library, "g")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch, "softmax"), (F, "softmax"), (torch.Tensor, "softmax")],
)
def test_your_word_counts_and_not_the_lists(owner, name):
    x = torch.ones(2).half()
    original = getattr(owner, name)
    amp.register_half_function(owner, name)
    amp.init()
    assert getattr(owner, name)(x.float(), 0).dtype == HALF
    assert torch.log_softmax(x, 0).dtype == FLOAT
    amp.reset()
    assert getattr(owner, name) is original
    assert name not in vars(torch.Tensor) or owner is not torch.Tensor


def test_torchs_functions_inside_your_own_are_cast_as_ever():
    @amp.half_function
    def attention(x):
        return (x @ x).softmax(-1)

    amp.init()
    assert attention(torch.ones(2, 2)).dtype == FLOAT
