"""The figure of the recipes lesson: a recipe, its float32 control, and the common mistake."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from amp_lab.plots.style import BLUE, GREY, VERMILLION, axes_of


def training_curves(
    figure: Figure,
    name: str,
    control: Sequence[float],
    recipe: Sequence[float],
    mistake: Sequence[float],
) -> str:
    """Draw three training curves; `mistake` is empty where the mistake raised an error."""
    [axes] = axes_of(figure)
    axes.plot(control, color=GREY, linewidth=4, alpha=0.6, label="float32")
    axes.plot(recipe, color=BLUE, label="mixed precision")
    if mistake:
        axes.plot(mistake, color=VERMILLION, linestyle="--", label="the mistake")
    axes.set_ylim(0, 1.3 * max(*control, *recipe))
    axes.set(xlabel="training step", ylabel="loss")
    axes.set_title(name, loc="left")
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    apart = abs(final(recipe) / final(control) - 1) > 0.05
    fate = "raises an error"
    if mistake:
        off = abs(final(mistake) / final(control) - 1) > 0.05
        fate = "ends elsewhere" if off else "ends near it, too"
    return (
        f"{name}: mixed precision ends {'elsewhere than' if apart else 'within 5% of'} float32; "
        f"the mistake {fate}."
    )


def final(losses: Sequence[float]) -> float:
    """Return the mean of the last five losses."""
    return sum(losses[-5:]) / len(losses[-5:])
