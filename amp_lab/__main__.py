"""The report from a shell: `python -m amp_lab report module:function`."""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from amp_lab.report import precision_report

_EPILOG = """\
The function takes no arguments and returns a dict with the arguments of
amp_lab.precision_report: "model", "loss_fn" and "batches" (a list), and, if you
like, "optimizer" or "learning_rate". The module is found as `python -m` finds
one: in the current folder, or installed.

    def report_on():
        model = Net()
        return {
            "model": model,
            "loss_fn": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            "batches": list(itertools.islice(loader, 3)),
        }
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status: 0, or 2 where the function cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m amp_lab")
    commands = parser.add_subparsers(required=True, metavar="report")
    report = commands.add_parser(
        "report",
        help="do I need a GradScaler?",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("target", metavar="module:function", help="what returns model and batches")
    report.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    report.add_argument("--learning-rate", type=float, help="that of Adam, to try its updates")
    report.add_argument("--tolerance", type=_share, help="share of the magnitude that may be lost")
    report.add_argument("--json", type=_writable, metavar="FILE", help="also write the numbers")
    report.add_argument("--html", type=_writable, metavar="FILE", help="also write a page")
    report.add_argument("--figure", type=_picture, metavar="FILE", help="also draw a picture")
    options = parser.parse_args(arguments)
    try:
        parts = _parts(_function(options.target)())
        if options.learning_rate is not None and "optimizer" in parts:
            raise _UsageError("the function returns an optimizer: leave out --learning-rate")
    except _UsageError as error:
        print(f"python -m amp_lab report: {error}", file=sys.stderr)
        return 2
    for name in ("learning_rate", "tolerance"):
        if getattr(options, name) is not None:
            parts[name] = getattr(options, name)
    model, loss_fn, batches = (parts.pop(name) for name in ("model", "loss_fn", "batches"))
    found = precision_report(model, loss_fn, *batches, dtype=getattr(torch, options.dtype), **parts)
    print(found)
    if options.json:
        options.json.write_text(json.dumps(found.to_dict(), indent=1) + "\n")
    if options.html:
        options.html.write_text(f"<!doctype html><meta charset='utf-8'>{found._repr_html_()}\n")
    if options.figure:
        found.figure().savefig(options.figure)
    return 0


class _UsageError(Exception):
    """What is wrong with the function that was named, as a sentence."""


def _function(target: str) -> Callable[[], Any]:
    module_name, _, name = target.partition(":")
    if not name or not module_name or "/" in target:
        raise _UsageError(f"write module:function, for example train:report_on, got {target!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports something that is not
        raise _UsageError(f"no module {module_name!r} in this folder, and none installed") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise _UsageError(f"{module_name} has no function {name!r}")
    return function


def _parts(returned: Any) -> dict[str, Any]:
    known = {"model", "loss_fn", "batches", "optimizer", "learning_rate"}
    if not isinstance(returned, dict):
        raise _UsageError(
            f"the function is to return a dict, got a {type(returned).__name__}: see --help"
        )
    missing, unknown = {"model", "loss_fn", "batches"} - set(returned), set(returned) - known
    if missing or unknown:
        wrong = [f"{n!r} is missing" for n in sorted(missing)]
        wrong += [f"{n!r} is not known" for n in sorted(map(str, unknown))]
        raise _UsageError(f"in the dict that the function returns {', '.join(wrong)}")
    if not isinstance(returned["batches"], list | tuple) or not returned["batches"]:
        raise _UsageError('"batches" is to be a list with at least one batch')
    return dict(returned)


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError("a share lies between 0 and 1")
    return share


def _writable(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"no file can be written at {text}")
    return path


def _picture(text: str) -> Path:
    path = _writable(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError("a figure is a .png, .svg or .pdf")
    return path


if __name__ == "__main__":
    sys.exit(main())
