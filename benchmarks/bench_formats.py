"""Rounding a million float32 values: FloatFormat.round against PyTorch's conversions and numpy.

The peers: `x.to(dtype).float()`, the same conversion by ml_dtypes, and the formula by frexp and
ldexp that libraries of number formats use.
"""

import math
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch

from amp_lab.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, TF32, FloatFormat

COUNT, REPEATS = 1_000_000, 15
ML_DTYPES = {
    FP16: np.float16,
    BF16: ml_dtypes.bfloat16,
    FP8_E4M3: ml_dtypes.float8_e4m3fn,
    FP8_E5M2: ml_dtypes.float8_e5m2,
}


def by_frexp(x: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    """Round by exponent and significand: exact, and the shortest formula in numpy."""
    exponent = np.maximum(np.frexp(x)[1] - 1, fmt.min_exponent) - fmt.mantissa_bits
    rounded = np.ldexp(np.rint(np.ldexp(x, -exponent)), exponent)
    beyond = math.nan if fmt.finite_only else math.inf
    return np.where(np.abs(rounded) > fmt.max, np.copysign(beyond, x), rounded)


def main() -> None:
    x = torch.randn(COUNT, generator=torch.Generator().manual_seed(0))
    array = x.numpy()
    print(
        f"{'µs per million':<16}{'ours':>7}{'torch':>8}{'ml_dtypes':>11}{'frexp':>8}"
        f"{'torch/ours':>12}{'ml_dtypes/ours':>16}{'frexp/ours':>12}"
    )
    for fmt in (FP16, BF16, TF32, FP8_E4M3, FP8_E5M2):
        assert np.array_equal(fmt.round(x).numpy(), by_frexp(array, fmt))
        contenders: dict[str, Callable[[], object]] = {
            "ours": lambda fmt=fmt: fmt.round(x),
            "frexp": lambda fmt=fmt: by_frexp(array, fmt),
        }
        if fmt.dtype is not None:
            peer = ML_DTYPES[fmt]
            contenders["torch"] = lambda fmt=fmt: x.to(fmt.dtype).float()
            contenders["ml_dtypes"] = lambda peer=peer: array.astype(peer).astype(np.float32)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(REPEATS):
            for name, run in contenders.items():
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
        micros = {name: 1e6 * min(values) for name, values in times.items()}
        row = [f"{micros[name]:.0f}" if name in micros else "-" for name in ("torch", "ml_dtypes")]
        ratios = [
            f"{micros[name] / micros['ours']:.1f}" if name in micros else "-"
            for name in ("torch", "ml_dtypes", "frexp")
        ]
        print(
            f"{fmt.name:<16}{micros['ours']:>7.0f}{row[0]:>8}{row[1]:>11}{micros['frexp']:>8.0f}"
            f"{ratios[0]:>12}{ratios[1]:>16}{ratios[2]:>12}"
        )


if __name__ == "__main__":
    main()
