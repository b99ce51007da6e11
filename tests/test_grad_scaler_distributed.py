"""Two processes on a CPU (gloo): DistributedDataParallel, and sharded gradients."""

import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from amp_lab.grad_scaler import GradScaler

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def data_parallel(rank):
    """Both ranks see the same averaged gradients: the same steps are skipped, bit for bit."""
    results = []
    for make in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = make("cpu", growth_interval=2)
        for step in range(6):
            x = torch.full((3, 4), 1.0 + rank)
            if step == 2 and rank == 1:
                x[0, 0] = float("inf")
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((scaler.state_dict(), [p.tolist() for p in model.parameters()]))
    assert results[0] == results[1]
    gathered = [None, None]
    dist.all_gather_object(gathered, results[0])
    assert gathered[0] == gathered[1]
    assert results[0][0]["scale"] != 65536.0


def sharded(rank):
    """Each rank has gradients of its own; the infinity of one lets both skip, none or empty too."""
    for fused in (False, True):
        p, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([p, unused], lr=0.1, fused=fused)
        scaler = GradScaler("cpu", process_group=dist.group.WORLD)
        scaler.scale(torch.ones(()))
        for bad_rank, skipped in ((0, True), (1, True), (None, False)):
            before = p.detach().clone()
            p.grad = torch.full((3,), float("nan") if rank == bad_rank else 1.0)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.step_was_skipped(optimizer) is skipped
            assert torch.equal(p, before) is skipped
        assert scaler.get_scale() == 16384.0
    # A rank whose shard has no gradient at all still takes part.
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), float("inf")) if rank == 0 else None
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32768.0


def worker(rank, port, name, failures):
    try:
        torch.set_num_threads(1)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        globals()[name](rank)
        dist.destroy_process_group()
    except Exception:
        failures.put(f"rank {rank}:\n{traceback.format_exc()}")


@pytest.mark.parametrize("name", ["data_parallel", "sharded"])
def test_two_ranks(name):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    failures = context.Queue()
    workers = [context.Process(target=worker, args=(r, port, name, failures)) for r in (0, 1)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
            pytest.fail("a rank hangs")
    assert failures.empty(), failures.get()
    assert [process.exitcode for process in workers] == [0, 0]
