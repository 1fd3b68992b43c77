"""Colors of tokens by the expert with the largest weight."""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.color import Color
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.console.prompts import text_model_args
from tramontane.proto.errors import ConfigError

BLACK = Color.from_rgb(0, 0, 0)


@dataclass(frozen=True, slots=True)
class TokenColors:
    """Hues, evenly spaced over the experts of a layer."""

    layer: int
    num_experts: int

    def style(self, expert: int) -> Style:
        """Return black on the expert's hue; every second one is darker, so that neighbors differ if
        there are many experts.
        """
        red, green, blue = colorsys.hsv_to_rgb(
            expert / self.num_experts, 0.55, 0.75 if expert % 2 else 1.0
        )
        return Style(color=BLACK, bgcolor=Color.from_rgb(255 * red, 255 * green, 255 * blue))

    def legend(self) -> Text:
        """Return every expert in its color."""
        experts = [(f" {expert} ", self.style(expert)) for expert in range(self.num_experts)]
        return Text.assemble(f"layer {self.layer}, the heaviest expert of each token: ", *experts)

    def colorize(self, pieces: Sequence[str], experts: Sequence[int]) -> Segments:
        """Color one piece per token; pieces after the last expert are plain. A color ends at the
        end of its line.
        """
        segments = []
        for piece, expert in zip_longest(pieces, experts):
            style = None if expert is None else self.style(expert)
            for number, line in enumerate(piece.split("\n")):
                segments += [Segment.line()] * bool(number) + [Segment(line, style)] * bool(line)
        return Segments(segments)


def check_layer(config: EngineConfig, layer: int) -> int:
    """Return the number of experts in this layer. Raises ConfigError if there are none."""
    args = text_model_args(config)
    if args.moe is None:
        raise ConfigError(f"--show-experts {layer}: the model {config.model_name} has no experts")
    if layer not in args.moe_layers:
        first, last = args.moe_layers.start, args.moe_layers.stop - 1
        raise ConfigError(
            f"--show-experts {layer}: that layer has no experts; the model's layers {first} to"
            f" {last} have some"
        )
    return args.moe.num_experts
