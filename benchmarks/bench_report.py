"""`precision_report` against the forward and backward pass that it watches.

The target is 2: what it costs beyond the pass is a histogram of every gradient and the largest
magnitude of every activation.
"""

import time

import torch
from torch import nn
from torch.nn import functional as F

from amp_lab import precision_report
from amp_lab.tasks import heatmaps

ROUNDS = 5


def convolutional():
    task = heatmaps()
    [batch] = task.batches(1, device=torch.device("cpu"))
    return task.fresh_model(device=torch.device("cpu")), task.loss, batch


def transformer():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Linear(256, 1000))
    inputs = torch.randn(8, 128, 256), torch.randint(0, 1000, (8, 128))
    return model, lambda out, targets: F.cross_entropy(out.flatten(0, 1), targets.flatten()), inputs


def small():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, F.cross_entropy, (torch.randn(64, 64), torch.randint(0, 10, (64,)))


def main() -> None:
    print(f"{'model':20s}{'plain':>10s}{'report':>10s}{'ratio':>8s}   target")
    for make in (convolutional, transformer, small):
        model, loss, batch = make()

        def loss_fn(model, batch, loss=loss):
            return loss(model(batch[0]), batch[1])

        times: dict[str, list[float]] = {"plain": [], "report": []}
        for _ in range(ROUNDS):
            start = time.perf_counter()
            loss_fn(model, batch).backward()
            middle = time.perf_counter()
            precision_report(model, loss_fn, batch)
            times["plain"].append(middle - start)
            times["report"].append(time.perf_counter() - middle)
        plain, report = (1e3 * min(times[name]) for name in ("plain", "report"))
        target = "2" if plain > 20 else "none: what it costs is fixed, some 10 ms"
        print(f"{make.__name__:20s}{plain:8.1f}ms{report:8.1f}ms{report / plain:8.2f}   {target}")


if __name__ == "__main__":
    main()
