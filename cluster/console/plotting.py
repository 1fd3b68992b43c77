"""Checks and output of ``--plot``, which needs matplotlib, an extra."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tramontane.proto.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot_target(path: Path) -> None:
    """Check, before anything is measured, that the figure can be written. Raises ConfigError."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'tramontane[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in endings:
        raise ConfigError(f"--plot {path} must end in one of {', '.join(endings)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure. Raises ConfigError if the file cannot be written."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error
