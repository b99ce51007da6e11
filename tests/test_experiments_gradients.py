"""The gradient log and its histograms against really scaling and casting."""

import pytest
import torch

from amp_lab.experiments import gradients
from amp_lab.formats import BF16, FP16
from amp_lab.histograms import Histogram, record_gradients, total
from amp_lab.tasks import digits, heatmaps, train

CPU = torch.device("cpu")


@pytest.mark.parametrize("task", [digits(), heatmaps(32, 3, 8)], ids=lambda t: t.name)
@pytest.mark.parametrize("log2_scale", [0, 7, 16, 30])
def test_the_histograms_answer_is_what_scaling_and_casting_gives(task, log2_scale):
    [batch] = task.batches(1, device=CPU)
    model = task.fresh_model(device=CPU)
    with record_gradients(model) as recordings:
        task.loss(model(batch[0]), batch[1]).backward()
    activations, weights = gradients.really_scaled(model, task, batch, log2_scale)
    assert total(recordings.activation_gradients).outcome(FP16, log2_scale) == activations
    assert total(recordings.weight_gradients).outcome(FP16, log2_scale) == weights


def test_recording_changes_nothing():
    log = gradients.record(digits(), steps=4, device=CPU)
    plain = train(digits(), steps=4, device=CPU)
    watched = train(digits(), steps=4, device=CPU, watch=record_gradients)
    assert watched.losses == plain.losses
    assert log.steps == [0, 1, 2, 3]


def test_every():
    log = gradients.record(digits(), steps=7, every=3, device=CPU)
    assert log.steps == [0, 3, 6]
    assert len(log.activations) == len(log.weights) == len(log.largest) == 3
    every_step = gradients.record(digits(), steps=7, device=CPU)
    assert log.largest == every_step.largest[::3]
    for ours, theirs in zip(log.weights, every_step.weights[::3], strict=True):
        assert torch.equal(ours.counts, theirs.counts)
    assert torch.equal(log.all_weights().counts, sum(h.counts for h in log.weights))


def test_scale_window_is_where_nothing_is_lost():
    numbers = Histogram().add(torch.tensor([2.0**-30, 2.0**-20, 2.0**-5, 0.0]))
    low, high = gradients.scale_window(numbers, numbers)
    assert (low, high) == (6, 20)  # 2^-30 · 2^6 = 2^-24 and 2^-5 · 2^20 = 2^15
    assert gradients.scale_window(numbers, numbers, BF16)[0] < -30 + 1
    wide = Histogram().add(torch.tensor([2.0**-40, 2.0**10]))
    assert gradients.scale_window(wide, wide) is None


def test_a_third_and_more_is_lost_on_the_heatmaps():
    log = gradients.record(heatmaps(), steps=3, device=CPU)
    outcome = log.all_activations().outcome(FP16)
    assert outcome.fraction(outcome.flushed) > 1 / 3
    assert gradients.scale_window(log.all_activations(), log.all_weights()) is not None
