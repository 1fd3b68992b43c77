"""Charts: heat maps of expert load and timelines of stages for a terminal, and figures in files
(``--plot``).
"""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from tramontane.cluster.config.measurements import ExpertLoad
from tramontane.proto.errors import ConfigError
from tramontane.router.engine.activity_log import MicroBatchActivity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABEL, CELL = 6, 6  # characters
BUSIEST = "*"  # the busiest expert of its layer
SHADES = (  # upper bound of load over the layer's mean, and its style
    (0.5, "white on grey11"),
    (0.8, "white on grey27"),
    (1.25, "white on dark_green"),
    (1.5, "black on gold3"),
    (2.0, "black on dark_orange"),
    (float("inf"), "white on red3"),
)
PROMPTS, DECODES = "░▒▓", "▁▂▃▄▅▆▇█"  # distinguishable without colors
PROMPT_STYLE, DECODE_STYLE = "yellow", "cyan"
MIN_SHARE = 0.02  # of an interval that a character shows

Column = tuple[float, float]  # seconds of computing prompts and decodes


def heat_map(load: ExpertLoad, width: int) -> Text:
    """Render a row per layer and a column per expert, in each cell the percentage of its layer's
    tokens.

    No line is longer than ``width`` characters, which must be at least 12.

    20 experts in 80 characters are two blocks of ten.
    """
    num_experts = max(map(len, load))
    num_blocks = -(-num_experts // max((width - LABEL) // CELL, 1))
    block_size = -(-num_experts // num_blocks)
    blocks = [
        range(first, min(first + block_size, num_experts))
        for first in range(0, num_experts, block_size)
    ]
    return Text("\n\n").join(_block(load, experts) for experts in blocks)


def _block(load: ExpertLoad, experts: range) -> Text:
    head = Text(
        "layer".ljust(LABEL) + "".join(f"{expert:>{CELL - 1}} " for expert in experts), style="bold"
    )
    return Text("\n").join(
        [head, *(_row(layer, tokens, experts) for layer, tokens in enumerate(load) if tokens)]
    )


def _row(layer: int, tokens: tuple[int, ...], experts: range) -> Text:
    row = Text(f"{layer:>{LABEL - 1}} ")
    total, busiest = sum(tokens), tokens.index(max(tokens))
    for expert in experts:
        if total:
            mark = BUSIEST if expert == busiest else " "
            share = tokens[expert] / total
            row.append(f"{100 * share:>{CELL - 1}.1f}{mark}", cell_style(share * len(tokens)))
        else:
            row.append("- ".rjust(CELL))
    return row


def cell_style(times: float) -> str:
    """Return the style of an expert with ``times`` its layer's mean load."""
    return next(style for limit, style in SHADES if times <= limit)


def heat_legend() -> Text:
    """Return the legend of a heat map's shades, in at most 70 characters."""
    text = Text("times the layer's mean: ")
    for limit, style in SHADES[:-1]:
        text.append(f" to {limit:g} ", style)
    return text.append(" above ", SHADES[-1][1])


def busiest_summary(load: ExpertLoad) -> str:
    """Return the expert with the highest load relative to its layer's mean, over all layers."""
    shares = ((tokens, sum(tokens), layer) for layer, tokens in enumerate(load))
    peaks = [
        (max(tokens) * len(tokens) / total, layer, tokens.index(max(tokens)))
        for tokens, total, layer in shares
        if total
    ]
    if not peaks:
        return "no expert has received a token"
    times, layer, expert = max(peaks, key=lambda peak: peak[0])
    return f"busiest: expert {expert} of layer {layer}, {times:.2f} times its layer's mean"


def bin_activity(
    batches: Iterable[MicroBatchActivity], stage: int, began_at: float, column_s: float, num: int
) -> list[Column]:
    """Return the seconds that a stage computed in each of ``num`` columns. A mixed micro-batch is
    split by its tokens.

    Columns of 1 s from 10 on; 3 tokens of a prompt and a decode, computed from 10.5 to 12: [(0.375,
    0.125), (0.75, 0.25)].
    """
    prompts, decodes = [0.0] * num, [0.0] * num
    for batch in batches:
        share = batch.prefill_tokens / max(batch.prefill_tokens + batch.decodes, 1)
        for stage_id, started_at, busy_s, elapsed_s in batch.stages:
            if stage_id != stage or elapsed_s <= 0:
                continue
            begin, end = started_at - began_at, started_at - began_at + elapsed_s
            for column in range(max(int(begin // column_s), 0), min(int(end // column_s) + 1, num)):
                inside = min(end, (column + 1) * column_s) - max(begin, column * column_s)
                computing = max(inside, 0.0) * busy_s / elapsed_s
                prompts[column] += share * computing
                decodes[column] += (1 - share) * computing
    return list(zip(prompts, decodes, strict=True))


def render_timeline(shown: Sequence[Column], column_s: float) -> Text:
    """Render a character per column: the kind of work that took most time, and the busy share."""
    text = Text()
    for prompts_s, decodes_s in shown:
        level = (prompts_s + decodes_s) / column_s
        marks, style = (PROMPTS, PROMPT_STYLE) if prompts_s > decodes_s else (DECODES, DECODE_STYLE)
        mark = marks[min(int(level * len(marks)), len(marks) - 1)] if level >= MIN_SHARE else " "
        text.append(mark, style)
    return text


def timeline_legend() -> Text:
    """Return the legend of a timeline's characters."""
    return Text.assemble((PROMPTS, PROMPT_STYLE), " prompts  ", (DECODES, DECODE_STYLE), " decodes")


def check_plot_target(path: Path) -> None:
    """Check, before any measurement, that a figure can be written, with matplotlib, an extra.
    Raises ConfigError.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib; install it with: pip install 'tramontane[plot]'"
        )
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
