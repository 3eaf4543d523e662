"""What the pictures of reports have in common: their file, matplotlib, their style."""

import pathlib
import sys

from report_file import ReportError


def picture_path(name):
    """The path to write to. Raises ReportError for a kind that is not written."""
    out = pathlib.Path(name)
    if out.suffix not in (".svg", ".png"):
        raise ReportError(f"{out}: ends in '{out.suffix}'; .svg and .png can be written")
    return out


def load_pyplot():
    """matplotlib.pyplot, for files only. Raises ReportError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ReportError(f"{sys.executable} has no matplotlib: {error}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "kvarn"  # equal reports give equal files
    return pyplot


def use_plain_style(pyplot):
    """No frame, a pale grid."""
    pyplot.rcParams.update({
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#888888",
        "axes.grid": True,
        "grid.color": "#EEEEEE",
        "axes.axisbelow": True,
    })


def save(figure, out, dpi=125):
    """Raises ReportError where the file cannot be written."""
    try:
        figure.savefig(out, dpi=dpi, metadata={"Date": None} if out.suffix == ".svg" else {})
    except OSError as error:
        raise ReportError(f"{out}: cannot be written: {error}") from error
