"""Each recipe trains as its float32 control does, and each mistake has its symptom."""

import pytest
import torch

from amp_lab.experiments import recipes
from amp_lab.plots.recipes import final


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.clipping,
        recipes.accumulation,
        recipes.gan,
        recipes.gradient_penalty,
        recipes.custom_function,
        recipes.checkpointing,
    ],
)
def test_mixed_precision_follows_float32(recipe):
    control, mixed = recipe(12, mixed=False), recipe(12, mixed=True)
    assert len(control) == 12
    assert mixed != control  # it did run in half precision
    assert final(mixed) == pytest.approx(final(control), rel=0.05)


def test_clipping_scaled_gradients_stands_still():
    mistake = recipes.clipping(12, mixed=True, mistake=True)
    assert abs(final(mistake) - mistake[0]) < abs(
        final(recipes.clipping(12, mixed=True)) - mistake[0]
    )


def test_update_in_every_micro_step_is_an_error():
    with pytest.raises(AssertionError, match="No inf checks"):
        recipes.accumulation(2, mixed=True, mistake=True)


def test_update_between_two_steps_changes_the_second():
    assert recipes.gan(12, mixed=True, mistake=True) != recipes.gan(12, mixed=True)


def test_the_penalty_of_scaled_gradients_explodes():
    mistake = recipes.gradient_penalty(30, mixed=True, mistake=True)
    assert final(mistake) > 2 * final(recipes.gradient_penalty(30, mixed=False))


def test_a_function_without_decorators_mixes_dtypes():
    with pytest.raises(RuntimeError, match="dtype"):
        recipes.custom_function(2, mixed=True, mistake=True)


def test_checkpointing_needs_the_random_state():
    right = recipes.checkpointing(6, mixed=True)
    assert right != recipes.checkpointing(6, mixed=True, mistake=True)
    assert right == recipes.checkpointing(6, mixed=True)


def test_the_schedule_follows_the_steps_that_were_taken():
    assert recipes.scheduled(2, mixed=True) == [0.05, 0.05]  # both skipped
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        assert recipes.scheduled(2, mixed=True, mistake=True) == [0.025, 0.0125]


def test_resuming():
    straight = recipes.resumed(14)
    assert recipes.resumed(14, stop=8) == straight
    assert recipes.resumed(14, stop=8, mistake=True) != straight


def test_inference_leaves_the_weights_in_float32():
    s = recipes.setup(True)
    inputs = recipes.digits().inputs[:8].to(recipes.default_device())
    with torch.inference_mode(), recipes.half_precision():
        assert s.model(inputs).dtype == torch.float16
    assert {p.dtype for p in s.model.parameters()} == {torch.float32}
