"""The loss-scaling lesson's numbers against GradScaler itself."""

import pytest
import torch

from amp_lab.experiments import loss_scaling
from amp_lab.grad_scaler import GradScaler
from amp_lab.tasks import digits, heatmaps, train


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("start", [1.0, 2.0**16, 2.0**24])
def test_replay_is_what_the_scaler_does(start, interval):
    generator = torch.Generator().manual_seed(0)
    largest = (2.0 ** torch.randint(-12, 4, (60,), generator=generator)).tolist()
    trace = loss_scaling.replay(largest, init_scale=start, growth_interval=interval)
    scaler = GradScaler("cpu", start, growth_interval=interval, history_size=60)
    scaler.scale(torch.ones(()))
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.1)
    for magnitude in largest:
        # float16 is where the overflow happens; the gradient arrives as float32.
        p.grad = torch.tensor([magnitude * scaler.get_scale()]).half().float()
        scaler.step(optimizer)
        scaler.update()
    assert loss_scaling.from_history(scaler.history) == trace


def test_ceilings():
    [low, none] = loss_scaling.ceilings([0.5, 0.0])
    assert low == 131040
    assert none == float("inf")


def test_static_scales():
    task = heatmaps(32, 3, 8)
    [batch] = task.batches(1)
    model = task.fresh_model()
    _, unscaled = loss_scaling.zero_gradients(model, task, batch, 1.0)
    _, right = loss_scaling.zero_gradients(model, task, batch, 2.0**12)
    _, too_large = loss_scaling.zero_gradients(model, task, batch, 2.0**40)
    assert right < 0.02
    assert right <= unscaled
    assert not too_large < 1


def test_orders():
    def run(*order):
        return loss_scaling.train_in_order(digits(), order, steps=4)

    correct = run(*loss_scaling.CORRECT)
    assert correct.error == ""
    assert len(correct.losses) == 4
    clipped_first = run("scale", "backward", "clip", "unscale_", "step", "update")
    assert clipped_first.error == ""
    assert clipped_first.moved < correct.moved / 1000
    assert run("scale", "backward", "step", "unscale_", "update").error.startswith("RuntimeError")
    assert run("scale", "backward", "update", "step").error.startswith("AssertionError")
    with pytest.raises(ValueError, match="no call"):
        run("scal")


def test_half_precision_is_the_same_with_torchs_scaler():
    ours = train(digits(), steps=3, autocast=loss_scaling.half_precision, scaler=GradScaler("cpu"))
    theirs = train(
        digits(), steps=3, autocast=loss_scaling.half_precision, scaler=torch.amp.GradScaler("cpu")
    )
    assert ours.losses == theirs.losses
