"""amp_lab.tasks: the same run from the same seed, and a loop that is PyTorch's own."""

import pytest
import torch
from torch import nn

from amp_lab.tasks import digits, heatmaps, train

CPU = torch.device("cpu")


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    task = digits()
    reference = load_digits()
    assert task.inputs.shape == (1797, 1, 8, 8)
    assert torch.equal(task.inputs.flatten(1) * 16, torch.tensor(reference.data).float())
    assert task.targets.tolist() == reference.target.tolist()


def test_batches_depend_on_the_seed_alone_and_cover_an_epoch():
    task = digits()
    torch.manual_seed(1)
    first = [x.clone() for x, _ in task.batches(28, seed=3, device=CPU)]
    torch.manual_seed(2)
    again = [x for x, _ in task.batches(28, seed=3, device=CPU)]
    other = [x for x, _ in task.batches(28, seed=4, device=CPU)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    # 28 batches of 64 are one epoch of 1,792 different pictures (1,797 less the ragged end).
    seen = torch.cat([x.flatten(1) for x, _ in task.batches(28, seed=3, device=CPU)])
    assert len(torch.unique(seen, dim=0)) > 1780
    # Two epochs are two different orders.
    two = [x for x, _ in task.batches(56, seed=3, device=CPU)]
    assert not torch.equal(two[0], two[28])


def test_fresh_models_are_equal_and_leave_the_random_state():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = digits().fresh_model(1, CPU), digits().fresh_model(1, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_heatmaps_have_one_bump_at_the_digit():
    task = heatmaps(size=32, layers=2, channels=4)
    sums = task.targets.flatten(2).amax(-1)
    assert (sums.gt(0.8).sum(1) == 1).all()
    picture, target = task.inputs[0, 0], task.targets[0].amax(0)
    down, across = divmod(int(target.argmax()), 32)
    rows, columns = picture.nonzero().unbind(1)
    assert abs(rows.float().mean() - down) < 4
    assert abs(columns.float().mean() - across) < 4


def by_hand(task, steps, seed):
    model = task.fresh_model(seed, CPU)
    optimizer = task.optimizer(model.parameters())
    losses = []
    for inputs, targets in task.batches(steps, seed, CPU):
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_train_is_the_plain_loop_bit_for_bit():
    run = train(digits(), steps=5, seed=7, device=CPU)
    losses, model = by_hand(digits(), 5, 7)
    assert run.losses == losses
    for a, b in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_train_with_torchs_scaler_and_autocast():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run = train(
        digits(),
        steps=3,
        device=CPU,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16),
        scaler=scaler,
    )
    reference = train(digits(), steps=3, device=CPU)
    assert scaler.state_dict()["_growth_tracker"] == 3
    assert run.losses == pytest.approx(reference.losses, rel=0.02)
    assert run.losses != reference.losses


def test_weights_dtype_converts_model_and_inputs():
    run = train(digits(), steps=2, device=CPU, weights_dtype=torch.bfloat16)
    assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
    assert all(isinstance(loss, float) for loss in run.losses)


def test_after_backward_sees_gradients_before_the_step():
    seen = []

    def look(step: int, model: nn.Module) -> None:
        seen.append((step, all(p.grad is not None for p in model.parameters())))

    train(digits(), steps=3, device=CPU, after_backward=look)
    assert seen == [(0, True), (1, True), (2, True)]


def test_digits_are_learned():
    run = train(digits(), steps=150, device=CPU)
    assert run.final_loss() < 0.3 < run.losses[0]
