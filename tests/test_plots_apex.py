"""The pages of the Apex lesson: drawn without error, and described truly."""

import pytest

from amp_lab.experiments import apex
from amp_lab.plots import apex as plots
from amp_lab.plots.style import new_figure

DTYPES = {level: apex.dtypes(level) for level in ("O0", "O2")}


def test_casts():
    figure = new_figure()
    assert plots.casts(figure, DTYPES, "O0") == ("O0: float32 for " + ", ".join(DTYPES["O0"]) + ".")
    sentence = plots.casts(figure, DTYPES, "O2")
    half, full = sentence.split("; ")
    assert half.startswith("O2: float16 for inputs inside, output of Linear")
    assert "weights of BatchNorm" in full
    assert "momentum" in full
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words.count("float16") == list(DTYPES["O2"].values()).count("float16")


@pytest.mark.parametrize(
    ("scale", "verdict", "sentence"),
    [
        (65536.0, "learns", "O2 with loss scale 2^16: it learns as float32 does."),
        (2.0**-24, "does not learn", "O2 with loss scale 2^-24: it does not learn, "),
        ("dynamic", "NaN", "O2 with loss scale dynamic: the loss is NaN, "),
    ],
)
def test_training(scale, verdict, sentence):
    figure = new_figure()
    drawn = plots.training(figure, "O2", scale, [2.0, 1.0], [2.0, 0.5], verdict)
    assert drawn.startswith(sentence)
    reference, losses = (line.get_ydata() for line in figure.axes[0].lines)
    assert list(reference) == [2.0, 0.5]
    assert list(losses) == [2.0, 1.0]


def test_same_curve_counts_equal_steps():
    figure = new_figure()
    sentence = plots.same_curve(figure, [2.0, 1.0, 0.5], [2.0, 1.0 + 1e-15, 0.5])
    assert sentence == "The losses of both APIs are equal to the last bit in 2 of 3 steps."


def test_shares_moved():
    figure = new_figure()
    sentence = plots.shares_moved(figure, {"O2": 0.95, "O3": 0.1, "bf16": 0.03}, 1e-4)
    assert sentence.endswith("have moved, all but those of O3 and bf16.")
    assert [round(bar.get_width()) for bar in figure.axes[0].patches] == [95, 10, 3]
    sentence = plots.shares_moved(figure, {"O2": 0.95}, 0.1)
    assert sentence.endswith("at every level.")
