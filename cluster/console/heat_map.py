"""Which experts the tokens go to, for a terminal: a row per layer, a column per expert, as many as fit; the others below."""

from rich.text import Text

from tramontane.cluster.config.expert_load import ExpertLoad

LABEL, CELL = 6, 6  # characters
BUSIEST = "*"  # of its layer
SHADES = (  # up to so many times its layer's mean an expert looks so
    (0.5, "white on grey11"),
    (0.8, "white on grey27"),
    (1.25, "white on dark_green"),
    (1.5, "black on gold3"),
    (2.0, "black on dark_orange"),
    (float("inf"), "white on red3"),
)


def heat_map(load: ExpertLoad, width: int) -> Text:
    """Each cell: percent of the tokens that its layer's experts were given. No line is longer than ``width`` characters,
    if it is 12 at least.

    20 experts in 80 characters are two blocks of ten.
    """
    num_experts = max(map(len, load))
    num_blocks = -(-num_experts // max((width - LABEL) // CELL, 1))
    wide = -(-num_experts // num_blocks)
    blocks = [range(first, min(first + wide, num_experts)) for first in range(0, num_experts, wide)]
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
    """The look of an expert that does so many times its layer's mean."""
    return next(style for limit, style in SHADES if times <= limit)


def legend() -> Text:
    """What the shades mean, in at most 70 characters."""
    text = Text("times the layer's mean: ")
    for limit, style in SHADES[:-1]:
        text.append(f" to {limit:g} ", style)
    return text.append(" above ", SHADES[-1][1])


def busiest_summary(load: ExpertLoad) -> str:
    """Of all layers, the expert that does most beside its layer's mean."""
    shares = ((tokens, sum(tokens), layer) for layer, tokens in enumerate(load))
    peaks = [(max(tokens) * len(tokens) / total, layer, tokens.index(max(tokens))) for tokens, total, layer in shares if total]
    if not peaks:
        return "no expert has been given a token"
    times, layer, expert = max(peaks, key=lambda peak: peak[0])
    return f"busiest: expert {expert} of layer {layer}, {times:.2f} times its layer's mean"
