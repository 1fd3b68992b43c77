"""The summary of a run: tables for people, JSON for programs."""

import colorsys
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rich.color import Color
from rich.console import Group
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.measurements import StageDevice
from tramontane.cluster.console.prompts import text_model_args
from tramontane.proto.errors import ConfigError
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import FinishReason
from tramontane.proto.step import ExpertTiming
from tramontane.router.engine.stats import UsageMeter

ExpertIds = dict[str, list[tuple[int, ...]]]  # layer to the experts of each token


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. ``experts``: of the new tokens except the last; empty, like ``prompt_experts``,
    if not requested.

    ``error``: the reason if ``finish`` is an error, else "".
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    prompt_experts: ExpertIds
    experts: ExpertIds
    error: str = ""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A finished run. Seconds count from the start of the process; ``devices`` are known only for
    JSON output.
    """

    completions: tuple[Completion, ...]
    plan: PipelinePlan
    usage: UsageMeter
    devices: tuple[StageDevice, ...]
    ready_after_s: float
    first_token_after_s: float
    fingerprint: str = ""  # of the pipeline; "" if it is not known
    # tokens that were drafted, and accepted; None without speculation
    drafts: tuple[int, int] | None = None


def render_summary(outcome: GenerateResult) -> Group:
    """Render a table of the stages, and below it a line about the pipeline."""
    plan, usage = outcome.plan, outcome.usage
    tables = [stage_table(plan, usage), *([expert_table(plan, usage)] if plan.experts else [])]
    return Group(*tables, _pipeline_line(outcome))


def cache_note(plan: PipelinePlan) -> str:
    """Describe the maximum cache of a sequence and of all sequences, and the options for it."""
    return f"{plan.describe_cache()}, {plan.max_model_len} positions per sequence (--max-model-len)"


def stage_table(plan: PipelinePlan, usage: UsageMeter) -> Table:
    """Render per stage: layers, busy share, tokens and micro-batches; with expert actors also the
    exposed wait for them.
    """
    table = Table()
    for name in (
        "stage",
        "layers",
        "busy",
        *(("exposed wait",) if plan.experts else ()),
        "tokens",
        "micro-batches",
    ):
        table.add_column(name, justify="right")
    for stage, used in zip(plan.stages, usage.stages, strict=True):
        shares = [used.busy_s, *((used.exposed_wait_s,) if plan.experts else ())]
        table.add_row(
            f"{stage.stage_id + 1}/{stage.num_stages}",
            f"{stage.first_layer}-{stage.last_layer - 1}",
            *(f"{usage.share(seconds):.0%}" for seconds in shares),
            str(used.num_tokens),
            str(used.num_batches),
        )
    return table


def expert_table(plan: PipelinePlan, usage: UsageMeter) -> Table:
    """Render per expert actor: number of experts, busy share, and rows: a token counts once for
    each of its experts.
    """
    assert plan.experts is not None
    table = Table()
    for name in ("expert actor", "experts", "busy", "rows"):
        table.add_column(name, justify="right")
    timings = {timing.actor_id: timing for timing in usage.experts}
    for actor in plan.experts.actors:
        _, busy_s, rows = timings.get(actor.actor_id, ExpertTiming(actor.actor_id, 0.0, 0))
        busy = f"{usage.share(busy_s):.0%}"
        table.add_row(
            f"{actor.actor_id + 1}/{actor.num_actors}", str(len(actor.experts)), busy, str(rows)
        )
    return table


def stages_json(
    plan: PipelinePlan, usage: UsageMeter, devices: Sequence[StageDevice]
) -> list[dict[str, Any]]:
    """Return an object per stage, for JSON, with all that ``parse_stage_times`` reads."""
    return [
        {
            "layers": [stage.first_layer, stage.last_layer - 1],
            "busy_share": usage.busy_share(stage.stage_id),
            "tokens": used.num_tokens,
            "micro_batches": used.num_batches,
            "device": device.name,
            "speed": device.speed,
        }
        | ({"exposed_wait_share": usage.share(used.exposed_wait_s)} if plan.experts else {})
        for stage, used, device in zip(plan.stages, usage.stages, devices, strict=True)
    ]


def experts_as_data(plan: PipelinePlan, usage: UsageMeter) -> dict[str, Any]:
    """Return the entry of the expert actors, for JSON; empty if there are none."""
    actors = [
        {"actor": actor, "busy_share": usage.share(busy_s), "rows": rows}
        for actor, busy_s, rows in usage.experts
    ]
    return {"experts": actors} if plan.experts else {}


def _pipeline_line(outcome: GenerateResult) -> str:
    usage, drafts = outcome.usage, outcome.drafts
    accepted = f"\n{drafts[1]} of {drafts[0]} drafted tokens were accepted" if drafts else ""
    return (
        f"bubble {usage.bubble:.0%}, {usage.tokens_per_s:.0f} new tokens/s over {usage.span_s:.1f}"
        f" s\nready after {outcome.ready_after_s:.1f} s, first token after"
        f" {outcome.first_token_after_s:.1f} s{accepted}"
    )


def truncation_note(outcome: GenerateResult, max_tokens: int) -> str | None:
    """Return a note if the context ended answers before ``max_tokens`` did: both have the finish
    reason ``length``.
    """
    answers = outcome.completions
    lengths = [len(answer.token_ids) for answer in answers if answer.finish is FinishReason.LENGTH]
    short = sorted(length for length in lengths if length < max_tokens)
    if not short:
        return None
    subject = (
        "the answer ends" if len(answers) == 1 else f"{len(short)} of {len(answers)} answers end"
    )
    count = (
        f"{short[0]} new tokens fit"
        if short[0] == short[-1]
        else f"{short[0]} to {short[-1]} new tokens fit"
    )
    context = outcome.plan.max_model_len
    return (
        f"{subject} at the context of {context} positions: {count} after the prompt, and"
        f" --max-tokens is {max_tokens}"
    )


def as_json(outcome: GenerateResult) -> str:
    """Return the run as one line of JSON."""
    usage = outcome.usage
    completions = [
        {
            "prompt": c.prompt,
            "text": c.text,
            "token_ids": list(c.token_ids),
            "finish_reason": c.finish.value,
        }
        | ({"prompt_experts": c.prompt_experts, "experts": c.experts} if c.prompt_experts else {})
        | ({"error": c.error} if c.error else {})
        for c in outcome.completions
    ]
    return json.dumps(
        {
            "completions": completions,
            "stages": stages_json(outcome.plan, usage, outcome.devices),
            "bubble": usage.bubble,
            "tokens_per_s": usage.tokens_per_s,
            "ready_after_s": outcome.ready_after_s,
            "first_token_after_s": outcome.first_token_after_s,
            "system_fingerprint": outcome.fingerprint or None,
        }
        | experts_as_data(outcome.plan, usage)
        | (
            {"draft_tokens": outcome.drafts[0], "accepted_tokens": outcome.drafts[1]}
            if outcome.drafts
            else {}
        )
    )


# Colors of tokens by the expert with the largest weight.

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
