"""The broken runs of 10_diagnose are refused, right repairs pass, and wrong ones are told why."""

import ast
import pickle
from pathlib import Path

import nbformat
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_lab.autocast import clear_autocast_cache
from amp_lab.checks import diagnose as loops
from amp_lab.checks import diagnose_causes as causes
from amp_lab.checks import diagnose_dtypes as dtypes
from amp_lab.checks import diagnose_range as ranges
from amp_lab.experiments.diagnose import KIND, loss_in_half
from amp_lab.experiments.loss_scaling import half_precision

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "10_diagnose.ipynb"
CHECKS = {
    name: check
    for module in (loops, dtypes, ranges)
    for name, check in vars(module).items()
    if hasattr(check, "__wrapped__") and check.__module__ == module.__name__
}


def broken() -> dict:
    """The functions that the notebook defines, and what it imports for them."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    tree = ast.parse("\n".join(c.source for c in cells if c.cell_type == "code"))
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, kept)]
    names: dict = {}
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return names


@pytest.mark.parametrize("name", CHECKS)
def test_broken(name):
    result = CHECKS[name](broken()[name])
    assert not result.passed
    assert result.text.startswith("Not yet: ")


# 1. NaN at once


def standardise_wide(x):
    x = x.float()
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) / (variance + 1e-5).sqrt()


def standardise_centred(x):
    x = x - x.mean(-1, keepdim=True)
    return x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt()


def standardise_function(x):
    return F.layer_norm(x, x.shape[-1:])


def standardise_masked(x):
    return broken()["standardise"](x).nan_to_num()


# 2. The scale falls to zero


def distance_eps(outputs, targets):
    return ((outputs - targets).square().sum(-1) + 1e-9).sqrt().mean()


def distance_norm(outputs, targets):
    return torch.linalg.vector_norm(outputs - targets, dim=-1).mean()


def distance_rows(outputs, targets):
    squares = (outputs - targets).square().sum(-1)
    return squares[squares > 0].sqrt().sum() / len(squares)


def distance_eps_outside(outputs, targets):
    return ((outputs - targets).square().sum(-1).sqrt() + 1e-6).mean()


# 3. No inf checks were recorded


def accumulate_once(model, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for batch in micro_batches:
        scaler.scale(loss_in_half(model, batch) / len(micro_batches)).backward()
    scaler.step(optimizer)
    scaler.update()


def accumulate_sum(model, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    total = sum(loss_in_half(model, batch) for batch in micro_batches) / len(micro_batches)
    scaler.scale(total).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def accumulate_unscaling(model, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for batch in micro_batches:
        scaler.scale(loss_in_half(model, batch) / len(micro_batches)).backward()
        scaler.unscale_(optimizer)
        scaler.update()
    optimizer.step()


def accumulate_not_mean(model, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for batch in micro_batches:
        scaler.scale(loss_in_half(model, batch)).backward()
    scaler.step(optimizer)
    scaler.update()


# 4. Clipping


def clip_unscaled(model, optimizer, scaler, batch):
    optimizer.zero_grad()
    scaler.scale(loss_in_half(model, batch)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
    scaler.step(optimizer)
    scaler.update()


def clip_scaled_limit(model, optimizer, scaler, batch):
    optimizer.zero_grad()
    scaler.scale(loss_in_half(model, batch)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1 * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()


def clip_then_unscale(model, optimizer, scaler, batch):
    optimizer.zero_grad()
    scaler.scale(loss_in_half(model, batch)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def clip_not_at_all(model, optimizer, scaler, batch):
    optimizer.zero_grad()
    scaler.scale(loss_in_half(model, batch)).backward()
    scaler.step(optimizer)
    scaler.update()


# 5. Step twice


def two_updates(model, optimizer, scaler, *batches):
    for batch in batches:
        clip_not_at_all(model, optimizer, scaler, batch)


def two_by_hand(model, optimizer, scaler, first, second):
    for batch in (first, second):
        optimizer.zero_grad()
        (loss_in_half(model, batch) * 1024).backward()
        for parameter in model.parameters():
            parameter.grad /= 1024
        optimizer.step()


def two_in_one_sum(model, optimizer, scaler, first, second):
    optimizer.zero_grad()
    loss = loss_in_half(model, first) + loss_in_half(model, second)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def two_in_one(model, optimizer, scaler, first, second):
    accumulate_once(model, optimizer, scaler, [first, second])


def two_but_no_last_update(model, optimizer, scaler, first, second):
    clip_not_at_all(model, optimizer, scaler, first)
    optimizer.zero_grad()
    scaler.scale(loss_in_half(model, second)).backward()
    scaler.step(optimizer)


# 6. The schedule


def epoch_asking(model, optimizer, scaler, scheduler, batches):
    for batch in batches:
        clip_not_at_all(model, optimizer, scaler, batch)
        if not scaler.step_was_skipped(optimizer):
            scheduler.step()


def epoch_comparing(model, optimizer, scaler, scheduler, batches):
    for batch in batches:
        before = scaler.get_scale()
        clip_not_at_all(model, optimizer, scaler, batch)
        if scaler.get_scale() >= before:
            scheduler.step()


def epoch_growing(model, optimizer, scaler, scheduler, batches):
    for batch in batches:
        before = scaler.get_scale()
        clip_not_at_all(model, optimizer, scaler, batch)
        if scaler.get_scale() == before:
            scheduler.step()


# 7. Masks


def attention_joined(q, k, v, padding, other_text):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(padding | other_text, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v


def attention_wide(q, k, v, padding, other_text):
    scores = (q @ k.transpose(-2, -1)).float() / q.shape[-1] ** 0.5
    return (scores + padding * -1e9 + other_text * -1e9).softmax(-1) @ v


def attention_infinite(q, k, v, padding, other_text):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.masked_fill(padding | other_text, -torch.inf).softmax(-1) @ v


def attention_added_once(q, k, v, padding, other_text):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    lowest = torch.finfo(scores.dtype).min
    return (scores + (padding | other_text).to(scores.dtype) * lowest).softmax(-1) @ v


def attention_replacing_nan(*arguments):
    return attention_infinite(*arguments).nan_to_num()


def attention_without_padding(q, k, v, padding, other_text):
    return attention_joined(q, k, v, padding & False, other_text)


# 8. Epsilon


def rms_wide(x):
    x = x.float()
    return x / ((x * x).mean(-1, keepdim=True) + 1e-8).sqrt()


def rms_larger_eps(x):
    return x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt()


def rms_power(x):
    return x / ((x**2).mean(-1, keepdim=True) + 1e-8).sqrt()


def rms_eps_outside(x):
    return x / ((x * x).mean(-1, keepdim=True).sqrt() + 1e-8)


def rms_large_eps(x):
    return x / ((x * x).mean(-1, keepdim=True) + 1e-1).sqrt()


def rms_replacing_nan(x):
    return broken()["rms_norm"](x).nan_to_num(posinf=0, neginf=0)


def half_words(words, batches):
    words.data = words.data.half()


# 9. Binary cross entropy


def yes_with_logits(model, inputs, targets):
    with half_precision():
        return F.binary_cross_entropy_with_logits(model(inputs), targets)


def yes_wide_sigmoid(model, inputs, targets):
    with half_precision():
        logits = model(inputs)
    return F.binary_cross_entropy(logits.float().sigmoid(), targets)


def yes_wide_too_late(model, inputs, targets):
    with half_precision():
        probability = model(inputs).sigmoid()
    return F.binary_cross_entropy(probability.float(), targets)


def yes_in_float32(model, inputs, targets):
    return F.binary_cross_entropy_with_logits(model(inputs), targets)


# 10. model.half()


def train_in_region(model, optimizer, scaler, batches):
    for batch in batches:
        clip_not_at_all(model, optimizer, scaler, batch)


def train_under_native(model, optimizer, scaler, batches):
    for inputs, targets in batches:
        optimizer.zero_grad()
        with torch.autocast(KIND, torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def train_without_scaler(model, optimizer, scaler, batches):
    model.half()
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.half()), targets).backward()
        optimizer.step()


def train_there_and_back(model, optimizer, scaler, batches):
    train_without_scaler(model, optimizer, scaler, batches)
    model.float()


def train_in_float32(model, optimizer, scaler, batches):
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


# 11. Loss outside, backward inside


def regress_inside(model, optimizer, scaler, batch):
    optimizer.zero_grad()
    with half_precision():
        loss = F.mse_loss(model(batch[0]), batch[1]).sqrt()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def regress_wide(model, optimizer, scaler, batch):
    optimizer.zero_grad()
    with half_precision():
        outputs = model(batch[0])
    loss = (outputs.float() - batch[1]).square().mean().sqrt()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def regress_all_inside(*arguments):
    with half_precision():
        regress_inside(*arguments)


def regress_per_hundred(model, optimizer, scaler, batch):
    optimizer.zero_grad()
    with half_precision():
        loss = F.mse_loss(model(batch[0]) / 100, batch[1] / 100).sqrt()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


# 12. Two optimizers


def models_one_update(first, second, scaler, batch):
    for model, optimizer in (first, second):
        optimizer.zero_grad()
        scaler.scale(loss_in_half(model, batch)).backward()
    scaler.step(first[1])
    scaler.step(second[1])
    scaler.update()


def models_one_by_one(first, second, scaler, batch):
    for model, optimizer in (first, second):
        clip_not_at_all(model, optimizer, scaler, batch)


def models_one_forgotten(first, second, scaler, batch):
    models_one_update(first, first, scaler, batch)


def models_bare_second(first, second, scaler, batch):
    for model, optimizer in (first, second):
        optimizer.zero_grad()
        scaler.scale(loss_in_half(model, batch)).backward()
    scaler.step(first[1])
    second[1].step()
    scaler.update()


# 13. Resuming


def start_and_resume(fresh, train, batches, keep, load):
    old = fresh()
    train(*old, batches[:10])
    saved = [part.state_dict() for part in old[:2]], keep(old[2])
    model, optimizer, scaler = fresh()
    model.load_state_dict(saved[0][0])
    optimizer.load_state_dict(saved[0][1])
    train(model, optimizer, load(scaler, saved[1]), batches[10:])


def resume_state(fresh, train, batches):
    def load(scaler, state):
        scaler.load_state_dict(state)
        return scaler

    start_and_resume(fresh, train, batches, lambda scaler: scaler.state_dict(), load)


def resume_with_a_scaler_of_ones_own(fresh, train, batches):
    def load(_, state):
        scaler = torch.amp.GradScaler(KIND)
        scaler.load_state_dict(state)
        return scaler

    start_and_resume(fresh, train, batches, lambda scaler: scaler.state_dict(), load)


def resume_pickled(fresh, train, batches):
    start_and_resume(fresh, train, batches, pickle.dumps, lambda scaler, state: pickle.loads(state))


def resume_scale_only(fresh, train, batches):
    def load(scaler, scale):
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
        return scaler

    start_and_resume(fresh, train, batches, lambda scaler: scaler.get_scale(), load)


def resume_same_object(fresh, train, batches):
    start_and_resume(fresh, train, batches, lambda scaler: scaler, lambda scaler, old: old)


def resume_nothing(fresh, train, batches):
    train(*fresh(), batches)


# 14. no_grad and the cache


def consistency_two_regions(model, inputs, region):
    with region(), torch.no_grad():
        goal = model(inputs.flip(-1)).softmax(-1)
    with region():
        F.cross_entropy(model(inputs), goal).backward()


def consistency_no_cache(model, inputs, region):
    with region(cache_enabled=False):
        with torch.no_grad():
            goal = model(inputs.flip(-1)).softmax(-1)
        loss = F.cross_entropy(model(inputs), goal)
    loss.backward()


def consistency_cleared(model, inputs, region):
    with region():
        with torch.no_grad():
            goal = model(inputs.flip(-1)).softmax(-1)
        clear_autocast_cache()
        loss = F.cross_entropy(model(inputs), goal)
    loss.backward()


def consistency_detached(model, inputs, region):
    with region():
        goal = model(inputs.flip(-1)).softmax(-1).detach()
        loss = F.cross_entropy(model(inputs), goal)
    loss.backward()


def consistency_goal_with_gradient(model, inputs, region):
    with region():
        loss = F.cross_entropy(model(inputs), model(inputs.flip(-1)).softmax(-1))
    loss.backward()


def consistency_inference(model, inputs, region):
    with region():
        with torch.inference_mode():
            goal = model(inputs.flip(-1)).softmax(-1)
        loss = F.cross_entropy(model(inputs), goal)
    loss.backward()


# 15. Norm


def clip_wide(gradients, max_norm):
    norm = sum(g.float().square().sum() for g in gradients).sqrt()
    return [g * (max_norm / norm).clamp(max=1) for g in gradients]


def clip_by_largest(gradients, max_norm):
    largest = max(g.abs().max() for g in gradients)
    parts = [(g / largest).float() for g in gradients]
    norm = torch.linalg.vector_norm(torch.cat([p.flatten() for p in parts])) * largest.float()
    return [g.float() * (max_norm / norm).clamp(max=1) for g in gradients]


def clip_torch(gradients, max_norm):
    parameters = [torch.zeros_like(g, requires_grad=True) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    nn.utils.clip_grad_norm_(parameters, max_norm)
    return [parameter.grad for parameter in parameters]


def clip_values(gradients, max_norm):
    return [g.clamp(-max_norm, max_norm) for g in gradients]


# 16. Weight decay


def learn_with(words, batches, weight_decay=0.2, lr=0.5, after=lambda: None):
    optimizer = torch.optim.SGD([words], lr=lr, weight_decay=weight_decay)
    for counts, goal in batches:
        optimizer.zero_grad()
        with half_precision():
            vectors = counts @ words
        directions = vectors / vectors.norm(dim=-1, keepdim=True)
        (directions - goal).square().sum(-1).mean().backward()
        optimizer.step()
        after()


def learn_without_decay(words, batches):
    learn_with(words, batches, weight_decay=0.0)


def learn_keeping_length(words, batches):
    def lengthen():
        with torch.no_grad():
            words.mul_(1 / words.norm(dim=1, keepdim=True).clamp(max=1.0))

    learn_with(words, batches, after=lengthen)


def learn_small_rate(words, batches):
    learn_with(words, batches, lr=0.001)


def learn_clamped(words, batches):
    def clamp():
        with torch.no_grad():
            words.copy_(words.sign() * words.abs().clamp(min=2.0**-24))

    learn_with(words, batches, after=clamp)


RIGHT = [
    ("interrupted", resume_state),
    ("interrupted", resume_pickled),
    ("interrupted", resume_with_a_scaler_of_ones_own),
    ("consistency", consistency_two_regions),
    ("consistency", consistency_no_cache),
    ("consistency", consistency_cleared),
    ("consistency", consistency_detached),
    ("clip", clip_wide),
    ("clip", clip_by_largest),
    ("learn", learn_without_decay),
    ("learn", learn_keeping_length),
    ("train", train_in_region),
    ("train", train_under_native),
    ("regress", regress_inside),
    ("regress", regress_wide),
    ("two_models", models_one_update),
    ("two_models", models_one_by_one),
    ("attention", attention_joined),
    ("attention", attention_wide),
    ("rms_norm", rms_wide),
    ("rms_norm", rms_larger_eps),
    ("rms_norm", rms_power),
    ("yes_or_no", yes_with_logits),
    ("yes_or_no", yes_wide_sigmoid),
    ("clipped_step", clip_unscaled),
    ("clipped_step", clip_scaled_limit),
    ("two_steps", two_updates),
    ("two_steps", two_by_hand),
    ("epoch", epoch_asking),
    ("epoch", epoch_comparing),
    ("standardise", standardise_wide),
    ("standardise", standardise_centred),
    ("standardise", standardise_function),
    ("distance_loss", distance_eps),
    ("distance_loss", distance_norm),
    ("distance_loss", distance_rows),
    ("accumulate", accumulate_once),
    ("accumulate", accumulate_sum),
]
WRONG = [
    ("learn", half_words, "float32 matrix"),
    ("distance_loss", lambda *_: torch.zeros((), requires_grad=True), "depend on the outputs"),
    ("interrupted", resume_scale_only, "when it grows"),
    ("interrupted", resume_same_object, "new objects"),
    ("interrupted", resume_nothing, "first ten batches"),
    ("consistency", consistency_goal_with_gradient, "is the goal constant"),
    ("consistency", consistency_inference, "raised RuntimeError"),
    ("clip", clip_values, "direction has changed"),
    ("clip", clip_torch, "large gradients are zero"),
    ("learn", learn_small_rate, "not learned"),
    ("learn", learn_clamped, "lost their direction"),
    ("train", train_without_scaler, "swallow"),
    ("train", train_there_and_back, "on the way"),
    ("train", train_in_float32, "nothing of it runs in half"),
    ("regress", regress_all_inside, "inside the region"),
    ("regress", regress_per_hundred, "not those of float32"),
    ("two_models", models_one_forgotten, "already called"),
    ("two_models", models_bare_second, "the second model moved"),
    ("attention", attention_infinite, "the empty example"),
    ("attention", attention_added_once, "the empty example"),
    ("attention", attention_replacing_nan, "its gradient is not"),
    ("attention", attention_without_padding, "where it may not"),
    ("rms_norm", rms_eps_outside, "empty numbers is not finite"),
    ("rms_norm", rms_large_eps, "not what float32 computes"),
    ("rms_norm", rms_replacing_nan, "its gradient is not"),
    ("yes_or_no", yes_wide_too_late, "in float32 it is 12"),
    ("yes_or_no", yes_in_float32, "half precision any more"),
    ("clipped_step", clip_then_unscale, "hardly move"),
    ("clipped_step", clip_not_at_all, "not as in float32"),
    ("two_steps", two_in_one, "one step on both"),
    ("two_steps", two_in_one_sum, "one step on both"),
    ("two_steps", two_but_no_last_update, "already called"),
    ("epoch", epoch_growing, "the schedule has not counted"),
    ("epoch", lambda *a: None, "update() was called 0 times"),
    ("standardise", standardise_masked, "not what float32 computes"),
    ("distance_loss", distance_eps_outside, "its gradient is not"),
    ("distance_loss", lambda outputs, targets: targets.sum(), "made from the outputs"),
    ("distance_loss", F.mse_loss, "another loss"),
    ("accumulate", accumulate_unscaling, "count more than others"),
    ("accumulate", accumulate_not_mean, "not that of the mean loss"),
]


@pytest.mark.parametrize(("name", "repair"), RIGHT)
def test_right(name, repair):
    result = CHECKS[name](repair)
    assert result.passed, result


@pytest.mark.parametrize(("name", "repair", "says"), WRONG)
def test_wrong(name, repair, says):
    result = CHECKS[name](repair)
    assert not result.passed
    assert says in result.text


def test_every_case_has_two_right_repairs_and_a_wrong_one():
    for name in CHECKS:
        assert sum(case[0] == name for case in RIGHT) >= 2, name
        assert any(case[0] == name for case in WRONG), name


def test_diagnosis():
    for case, (right, look) in causes._CASES.items():
        for cause in causes.CAUSES:
            result = causes.diagnosis(cause, case)
            assert result.passed == (cause in right)
            assert result.passed or look in result.text
    assert "one of 'overflow'" in causes.diagnosis("bad luck", 1).text
    assert "numbered from 1 to 16" in causes.diagnosis("overflow", 17).text


def test_every_cause_is_that_of_a_case():
    assert set(causes.CAUSES) == set.union(*(right for right, _ in causes._CASES.values()))
    assert list(causes._CASES) == list(range(1, 17))
