"""Timelines of stages for a terminal: a character per interval, for prefill or decodes."""

from collections.abc import Iterable, Sequence

from rich.text import Text

from tramontane.router.engine.activity_log import MicroBatchModel

PROMPTS, DECODES = "░▒▓", "▁▂▃▄▅▆▇█"  # distinguishable without colors
PROMPT_STYLE, DECODE_STYLE = "yellow", "cyan"
MIN_SHARE = 0.02  # of an interval that a character shows

Column = tuple[float, float]  # seconds of computing prompts and decodes


def bin_activity(batches: Iterable[MicroBatchModel], stage: int, began_at: float, column_s: float, num: int) -> list[Column]:
    """Return the seconds that a stage computed in each of ``num`` columns. A mixed micro-batch is split by its tokens.

    Columns of 1 s from 10 on; 3 tokens of a prompt and a decode, computed from 10.5 to 12: [(0.375, 0.125), (0.75, 0.25)].
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


def legend() -> Text:
    """Return what the characters mean."""
    return Text.assemble((PROMPTS, PROMPT_STYLE), " prompts  ", (DECODES, DECODE_STYLE), " decodes")
