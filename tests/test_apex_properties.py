"""The four levels, their overrides, and which of them contradict each other."""

import pytest
import torch

from amp_lab.apex.properties import LEVELS, level_with_overrides

DEFAULTS = {
    # cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}


@pytest.mark.parametrize("level", DEFAULTS)
def test_defaults_are_those_of_the_documentation(level):
    p = level_with_overrides(level)
    assert p == LEVELS[level]
    assert (p.enabled, p.opt_level) == (True, level)
    assert (
        p.cast_model_type,
        p.patch_torch_functions,
        p.keep_batchnorm_fp32,
        p.master_weights,
        p.loss_scale,
    ) == DEFAULTS[level]


@pytest.mark.parametrize(
    ("level", "name", "given", "result"),
    [
        ("O0", "loss_scale", "dynamic", "dynamic"),
        ("O1", "loss_scale", 128, 128.0),
        ("O1", "loss_scale", "128.0", 128.0),
        ("O1", "cast_model_type", False, False),
        ("O1", "cast_model_type", torch.float32, torch.float32),
        ("O1", "patch_torch_functions", "False", False),
        ("O2", "keep_batchnorm_fp32", "False", False),
        ("O2", "master_weights", "False", False),
        ("O2", "cast_model_type", torch.bfloat16, torch.bfloat16),
        ("O3", "keep_batchnorm_fp32", "True", True),
        ("O3", "master_weights", True, True),
    ],
)
def test_overrides_beat_defaults_and_may_be_strings(level, name, given, result):
    changed = level_with_overrides(level, **{name: given})
    assert getattr(changed, name) is result or getattr(changed, name) == result
    others = {f: v for f, v in vars(changed).items() if f != name}
    assert others == {f: v for f, v in vars(LEVELS[level]).items() if f != name}


@pytest.mark.parametrize(
    ("level", "override", "says"),
    [
        ("O1", {"cast_model_type": torch.float16}, "cast_model_type=torch.float16 contradicts"),
        ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32 contradicts"),
        ("O1", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32 contradicts"),
        ("O1", {"master_weights": True}, "master_weights contradicts"),
        ("O1", {"master_weights": False}, "master_weights contradicts"),
        ("O0", {"patch_torch_functions": True}, "only 'O1' patches"),
        ("O2", {"patch_torch_functions": "True"}, "only 'O1' patches"),
        ("O3", {"patch_torch_functions": True}, "only 'O1' patches"),
        ("02", {}, "a capital letter O and a digit"),
        ("O4", {}, "Unknown opt_level"),
        (None, {}, "Unknown opt_level"),
    ],
)
def test_contradictions_are_named(level, override, says):
    with pytest.raises(RuntimeError, match=says):
        level_with_overrides(level, **override)


@pytest.mark.parametrize(
    "override",
    [
        {"keep_batchnorm_fp32": "yes"},
        {"keep_batchnorm_fp32": 1},
        {"master_weights": "dynamic"},
        {"patch_torch_functions": 0.0},
        {"loss_scale": "Dynamic"},
        {"loss_scale": 0},
        {"loss_scale": -1.0},
        {"loss_scale": float("nan")},
        {"loss_scale": "inf"},
        {"loss_scale": [1.0]},
        {"cast_model_type": "float16"},
        {"cast_model_type": torch.int8},
        {"cast_model_type": True},
    ],
)
def test_what_is_no_value_of_a_property_is_refused(override):
    (name,) = override
    with pytest.raises(ValueError, match=f"^{name} must be"):
        level_with_overrides("O2", **override)


def test_describe_has_a_line_for_each_property():
    lines = LEVELS["O2"].describe().splitlines()
    assert [line.split(":")[0].strip() for line in lines] == list(vars(LEVELS["O2"]))
    assert lines[2] == "    cast_model_type       : torch.float16"
