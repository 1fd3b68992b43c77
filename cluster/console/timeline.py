"""When a stage computed, for a terminal: a character for each piece of time, prompts and decodes apart."""

from collections.abc import Iterable, Sequence

from rich.text import Text

from tramontane.router.engine.activity_log import MicroBatchModel

PROMPTS, DECODES = "░▒▓", "▁▂▃▄▅▆▇█"  # told apart without colours as well
PROMPT_STYLE, DECODE_STYLE = "yellow", "cyan"
LEAST = 0.02  # share of its time that a character shows

Column = tuple[float, float]  # seconds of computing prompts and decodes


def bin_activity(batches: Iterable[MicroBatchModel], stage: int, began_at: float, column_s: float, num: int) -> list[Column]:
    """How long a stage computed in each of ``num`` columns of time. A micro-batch with both counts by its tokens.

    Columns of 1 s from 10 on; 3 tokens of a prompt and a decode, computed from 10.5 to 12: [(0.375, 0.125), (0.75, 0.25)].
    """
    prompts, decodes = [0.0] * num, [0.0] * num
    for batch in batches:
        share = batch.prefill_tokens / max(batch.prefill_tokens + batch.decodes, 1)
        for own, started_at, busy_s, elapsed_s in batch.stages:
            if own != stage or elapsed_s <= 0:
                continue
            begin, end = started_at - began_at, started_at - began_at + elapsed_s
            for column in range(max(int(begin // column_s), 0), min(int(end // column_s) + 1, num)):
                inside = min(end, (column + 1) * column_s) - max(begin, column * column_s)
                computing = max(inside, 0.0) * busy_s / elapsed_s
                prompts[column] += share * computing
                decodes[column] += (1 - share) * computing
    return list(zip(prompts, decodes, strict=True))


def render_timeline(shown: Sequence[Column], column_s: float) -> Text:
    """Each character: what took most of the time, and how much of it was computed in."""
    text = Text()
    for prompts_s, decodes_s in shown:
        level = (prompts_s + decodes_s) / column_s
        marks, style = (PROMPTS, PROMPT_STYLE) if prompts_s > decodes_s else (DECODES, DECODE_STYLE)
        mark = marks[min(int(level * len(marks)), len(marks) - 1)] if level >= LEAST else " "
        text.append(mark, style)
    return text


def legend() -> Text:
    return Text.assemble((PROMPTS, PROMPT_STYLE), " prompts  ", (DECODES, DECODE_STYLE), " decodes")
