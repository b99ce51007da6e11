"""The training experiment: three tasks, three answers, on five seeds."""

import math

import pytest
import torch

from amp_lab import tasks
from amp_lab.experiments import necessity
from amp_lab.experiments.necessity import MODES, Result, run

STEPS = {"counting": 100, "digits": 100, "fine-tuning": 400}


@pytest.mark.parametrize(
    ("make", "no_scaler", "half_weights"),
    [
        (tasks.counting, "falls behind", "as float32"),
        (tasks.digits, "as float32", "as float32"),
        (tasks.fine_tuning, "as float32", "learns nothing"),
    ],
)
def test_three_tasks_three_answers_on_five_seeds(make, no_scaler, half_weights):
    task = make()
    expected = {
        "autocast, no scaler": no_scaler,
        "autocast + GradScaler": "as float32",
        "half weights + GradScaler": half_weights,
        "bfloat16, no scaler": "as float32",
    }
    found = necessity.recheck(task, STEPS[task.name], list(expected))
    assert found == {mode: [verdict] * 5 for mode, verdict in expected.items()}


def test_counting_without_a_scaler_is_worse_than_guessing_and_with_one_good():
    task = tasks.counting()
    results = necessity.compare(task, 100, ["autocast, no scaler", "autocast + GradScaler"])
    guess = necessity.count_error(task, None)
    error = {name: necessity.count_error(task, r.model) for name, r in results.items()}
    assert error["autocast, no scaler"] > guess > 3 * error["autocast + GradScaler"]
    assert error["autocast + GradScaler"] == pytest.approx(error["float32"], rel=0.05)


def test_static_scales_that_are_too_small_or_too_large():
    task = tasks.counting()
    results = necessity.static_scales(task, 50, [-8, 0, 16, 40])
    reference = run(task, MODES["float32"], 50)
    assert results[-8].verdict(reference) == "learns nothing"
    assert results[0].verdict(reference) == "falls behind"
    assert results[16].verdict(reference) == "as float32"
    assert results[40].verdict(reference) == "learns nothing"
    assert results[40].after == results[40].before  # every step was skipped


def test_pure_half_with_adam_ends_with_the_first_nan():
    """Adam's epsilon of 1e-8 is zero in float16, and 0/0 is no number."""
    result = run(tasks.counting(), MODES["pure half"], 20)
    assert len(result.losses) == 2
    assert math.isnan(result.losses[-1])
    assert result.verdict(run(tasks.counting(), MODES["float32"], 5)) == "not finite"


def test_torchs_own_classes_give_the_same_answer():
    task, modes = tasks.counting(), ["autocast, no scaler", "autocast + GradScaler"]
    ours = necessity.compare(task, 40, modes)
    theirs = necessity.compare(task, 40, modes, own=False)
    for mode in modes:
        verdict = ours[mode].verdict(ours["float32"])
        assert theirs[mode].verdict(theirs["float32"]) == verdict
        assert (verdict == "as float32") is (mode == modes[1])


def test_half_weights_are_float16_numbers_and_the_rest_is_not():
    task = tasks.fine_tuning()
    result = run(task, MODES["half weights + GradScaler"], 2)
    for p in result.model.parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p, p.half().float())


def test_progress_and_verdict():
    model = torch.nn.Linear(1, 1)
    reference = Result([], before=10.0, after=2.0, model=model)
    for after, progress, verdict in (
        (2.0, 1.0, "as float32"),
        (2.3, 0.9625, "as float32"),
        (6.0, 0.5, "falls behind"),
        (9.5, 0.0625, "learns nothing"),
        (12.0, -0.25, "learns nothing"),
        (math.inf, math.nan, "not finite"),
    ):
        result = Result([], before=10.0, after=after, model=model)
        assert result.progress(reference) == pytest.approx(progress, nan_ok=True)
        assert result.verdict(reference) == verdict


def test_density_maps_sum_to_the_count():
    task = tasks.counting()
    counts = task.targets.sum((1, 2, 3))
    assert counts.min() == pytest.approx(1, abs=1e-3)
    assert counts.max() == pytest.approx(5, abs=1e-3)
    torch.testing.assert_close(counts, counts.round(), atol=1e-3, rtol=0)
    assert task.targets.max() < 0.05
