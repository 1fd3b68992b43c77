"""A heat map of expert load for a terminal: a row per layer, a column per expert, in blocks that fit the width."""

from rich.text import Text

from tramontane.cluster.config.expert_load import ExpertLoad

LABEL, CELL = 6, 6  # characters
BUSIEST = "*"  # of its layer
SHADES = (  # upper bound of load over the layer's mean, and its style
    (0.5, "white on grey11"),
    (0.8, "white on grey27"),
    (1.25, "white on dark_green"),
    (1.5, "black on gold3"),
    (2.0, "black on dark_orange"),
    (float("inf"), "white on red3"),
)


def heat_map(load: ExpertLoad, width: int) -> Text:
    """Render in each cell the percentage of its layer's tokens.

    No line is longer than ``width`` characters, which must be at least 12.

    20 experts in 80 characters are two blocks of ten.
    """
    num_experts = max(map(len, load))
    num_blocks = -(-num_experts // max((width - LABEL) // CELL, 1))
    block_size = -(-num_experts // num_blocks)
    blocks = [range(first, min(first + block_size, num_experts)) for first in range(0, num_experts, block_size)]
    return Text("\n\n").join(_block(load, experts) for experts in blocks)


def _block(load: ExpertLoad, experts: range) -> Text:
    head = Text("layer".ljust(LABEL) + "".join(f"{expert:>{CELL - 1}} " for expert in experts), style="bold")
    return Text("\n").join([head, *(_row(layer, tokens, experts) for layer, tokens in enumerate(load))])


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


def legend() -> Text:
    """Return what the shades mean, in at most 70 characters."""
    text = Text("times the layer's mean: ")
    for limit, style in SHADES[:-1]:
        text.append(f" to {limit:g} ", style)
    return text.append(" above ", SHADES[-1][1])


def busiest_summary(load: ExpertLoad) -> str:
    """Return the expert with the highest load relative to its layer's mean, over all layers."""
    shares = ((tokens, sum(tokens), layer) for layer, tokens in enumerate(load))
    peaks = [(max(tokens) * len(tokens) / total, layer, tokens.index(max(tokens))) for tokens, total, layer in shares if total]
    if not peaks:
        return "no expert has received a token"
    times, layer, expert = max(peaks, key=lambda peak: peak[0])
    return f"busiest: expert {expert} of layer {layer}, {times:.2f} times its layer's mean"
