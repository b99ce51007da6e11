"""Milliseconds and bytes for a page: a flipbook's persistent figure against the usual ways."""

import io
import time
from collections.abc import Callable

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from amp_lab.experiments import rounding
from amp_lab.plots import rounding as plots
from amp_lab.plots.style import new_figure

UPDATES = [2.0**-k for k in range(9, 15)]
ROUNDS = 5


def draw(figure: Figure, update: float) -> None:
    outcome = rounding.apply_update(1.0, update)
    plots.number_line(figure, rounding.neighbours(1.0), outcome)


def main() -> None:
    kept, saved = new_figure(8, 2.6), new_figure(8, 2.6)
    canvas = FigureCanvasAgg(kept)

    def persistent(update: float) -> bytes:
        draw(kept, update)
        png = io.BytesIO()
        canvas.print_png(png)
        return png.getvalue()

    def savefig(update: float) -> bytes:
        draw(saved, update)
        png = io.BytesIO()
        saved.savefig(png, dpi=saved.dpi, bbox_inches="tight")
        return png.getvalue()

    def fresh(update: float) -> bytes:
        import matplotlib.pyplot as plt

        figure = plt.figure(figsize=(8, 2.6), dpi=saved.dpi)
        draw(figure, update)
        png = io.BytesIO()
        figure.savefig(png)
        plt.close(figure)
        return png.getvalue()

    ways: dict[str, Callable[[float], bytes]] = {
        "persistent figure, print_png": persistent,
        "savefig, tight": savefig,
        "fresh pyplot figure": fresh,
    }
    best = dict.fromkeys(ways, float("inf"))
    size = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            pages = [way(update) for update in UPDATES]
            best[name] = min(best[name], (time.perf_counter() - start) / len(UPDATES))
            size[name] = sum(map(len, pages)) / len(pages)
    ours = best["persistent figure, print_png"]
    print(f"{'':32s}{'ms a page':>10s}{'ratio':>8s}{'kB a page':>11s}")
    for name, seconds in best.items():
        print(f"{name:32s}{1e3 * seconds:10.1f}{seconds / ours:8.2f}{size[name] / 1e3:11.1f}")


if __name__ == "__main__":
    main()
