"""The same programs written for Apex and for torch.amp: what `migration` pairs, runs and shows.

`autocast()` and `GradScaler()` stand for `torch.autocast(device, torch.float16)` and
`torch.amp.GradScaler(device)`. Here they are `amp_lab`'s, so that the programs run on a CPU, too.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import amp_lab
from amp_lab import apex as amp
from amp_lab.devices import default_device
from amp_lab.experiments.apex import network


def autocast(enabled: bool = True) -> Any:
    """Return autocast to float16 on the device at hand, emulated on a CPU."""
    kind = default_device().type
    return amp_lab.autocast(kind, torch.float16, enabled, emulate=kind == "cpu")


def GradScaler(**options: Any) -> Any:
    """Return a GradScaler for the device at hand."""
    return amp_lab.GradScaler(default_device().type, **options)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a batch."""
    return network().loss(model(batch[0]), batch[1])


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return an optimizer for the first linear layer and one for all the rest."""
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    params = list(model.parameters())
    return [sgd(params[:2]), sgd(params[2:])]


def step_apex(model, optimizer, batches):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for batch in batches:
        with amp.scale_loss(loss_of(model, batch), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def step_torch(model, optimizer, batches):
    scaler = GradScaler()
    for batch in batches:
        with autocast():
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def clip_apex(model, optimizer, batches):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for batch in batches:
        with amp.scale_loss(loss_of(model, batch), optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def clip_torch(model, optimizer, batches):
    scaler = GradScaler()
    for batch in batches:
        with autocast():
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def accumulate_apex(model, optimizer, batches):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for i, batch in enumerate(batches):
        last = i % 2 == 1
        loss = loss_of(model, batch) / 2
        with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
            scaled_loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def accumulate_torch(model, optimizer, batches):
    scaler = GradScaler()
    for i, batch in enumerate(batches):
        with autocast():
            loss = loss_of(model, batch) / 2
        scaler.scale(loss).backward()
        if i % 2 == 1:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def optimizers_apex(model, optimizer, batches):
    optimizers = two_optimizers(model)
    model, optimizers = amp.initialize(model, optimizers, opt_level="O1")
    for batch in batches:
        with amp.scale_loss(loss_of(model, batch), optimizers) as scaled_loss:
            scaled_loss.backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


def optimizers_torch(model, optimizer, batches):
    optimizers = two_optimizers(model)
    scaler = GradScaler()
    for batch in batches:
        with autocast():
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        for each in optimizers:
            scaler.step(each)
            each.zero_grad()
        scaler.update()


def checkpoint_apex(model, optimizer, batches):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 1999}})
    with amp.scale_loss(loss_of(model, batches[0]), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


def checkpoint_torch(model, optimizer, batches):
    scaler = GradScaler()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 512.0, "_growth_tracker": 1999})
    with autocast():
        loss = loss_of(model, batches[0])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.state_dict()["scale"]


def region_apex(model, optimizer, batches):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    features = model[:4](batches[0][0])
    with amp.disable_casts():
        return model[4](features.float())


def region_torch(model, optimizer, batches):
    with autocast():
        features = model[:4](batches[0][0])
        with autocast(enabled=False):
            return model[4](features.float())


def function_apex(model, optimizer, batches):
    @amp.float_function
    def energy(x):
        return (x * x).sum()

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    return energy(model(batches[0][0]))


def function_torch(model, optimizer, batches):
    def energy(x):
        with autocast(enabled=False):
            x = x.float()
            return (x * x).sum()

    with autocast():
        return energy(model(batches[0][0]))


def disabled_apex(model, optimizer, batches):
    model, optimizer = amp.initialize(model, optimizer, enabled=False)
    for batch in batches:
        with amp.scale_loss(loss_of(model, batch), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def disabled_torch(model, optimizer, batches):
    scaler = GradScaler(enabled=False)
    for batch in batches:
        with autocast(enabled=False):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def static_apex(model, optimizer, batches):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0)
    for batch in batches:
        with amp.scale_loss(loss_of(model, batch), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def static_torch(model, optimizer, batches):
    scaler = GradScaler(init_scale=128.0, growth_interval=10**9)
    for batch in batches:
        with autocast():
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def masters_apex(model, optimizer, batches):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    for batch in batches:
        with amp.scale_loss(loss_of(model, batch), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def masters_torch(model, optimizer, batches):
    model.half()
    model[2].float()  # batch normalization
    low = list(model.parameters())
    masters = [p.detach().float().clone() for p in low]
    optimizer.param_groups[0]["params"] = masters
    for inputs, targets in batches:
        outputs = model(inputs.half()).float()
        (network().loss(outputs, targets) * 128.0).backward()
        for p, master in zip(low, masters, strict=True):
            master.grad, p.grad = p.grad.float() / 128.0, None
        optimizer.step()
        for p, master in zip(low, masters, strict=True):
            p.data.copy_(master)


def half_apex(model, optimizer, batches):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3")
    for batch in batches:
        with amp.scale_loss(loss_of(model, batch), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def half_torch(model, optimizer, batches):
    model.half()
    for inputs, targets in batches:
        outputs = model(inputs.half()).float()
        network().loss(outputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
