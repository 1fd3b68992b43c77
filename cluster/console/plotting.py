"""What ``--plot`` needs: matplotlib, which is an extra, and a file that can be written."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tramontane.proto.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot_target(path: Path) -> None:
    """Before anything is measured. Raises ConfigError if the picture could not be written."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'tramontane[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in endings:
        raise ConfigError(f"--plot {path} must end in one of {', '.join(endings)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def save_figure(picture: "Figure", path: Path) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        picture.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error
