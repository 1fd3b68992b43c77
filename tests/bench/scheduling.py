"""What the scheduler itself takes per micro-batch while many sequences decode.

    python tests/bench/scheduling.py [--sequences 256] [--steps 400] [--json]

The real scheduler and policy against a modelled pipeline, timed: choosing, making the micro-batch, and taking in its
result. Median of the steps after the policy has learned what stages take. Beside it what the router's activity log takes,
where every sequence is a client that hears of its token.
"""

import argparse
import json
import statistics
import time
from collections import deque

from rich.console import Console
from rich.table import Table

from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import MicroBatch, StageTiming, StepResult
from tramontane.router.engine.active_request import ActiveRequest
from tramontane.router.engine.activity_log import ActivityLog
from tramontane.router.scheduling.admission import SchedulerLimits
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence

STAGES = (1, 2, 4, 8)
WARM_UP = 200  # steps
CONTEXT, WINDOW, PAGE_SIZE, BUDGET = 32768, 4096, 16, 512


def measure(num_stages: int, num_sequences: int, num_steps: int) -> tuple[float, float, int]:
    """Median seconds of a step and of its noting, and how many decodes the last one had."""
    ring = ring_pages(WINDOW, PAGE_SIZE, CONTEXT)
    cache = CachePlan(PAGE_SIZE, (WindowClass(WINDOW, ring, ring * num_sequences),))
    policy = BalancedPolicy(num_stages, BUDGET)
    scheduler = Scheduler(cache, SchedulerLimits(num_sequences, BUDGET, CONTEXT, 32_000), policy)
    sampling = SamplingParams(max_tokens=CONTEXT // 2, temperature=0.0)
    sequences = [Sequence(seq_id, tuple(range(10, 74)), sampling, CONTEXT) for seq_id in range(num_sequences)]
    for sequence in sequences:
        scheduler.add(sequence)
    requests = {sequence.seq_id: ActiveRequest([sequence], lambda _: None, 0.0) for sequence in sequences}
    log = ActivityLog()
    now, free_at = 0.0, [0.0] * num_stages
    in_flight: deque[tuple[MicroBatch, tuple[StageTiming, ...]]] = deque()
    taken, noting = [], []
    for _ in range(WARM_UP + num_steps):
        started, made = time.perf_counter(), []
        while (batch := scheduler.schedule()) is not None:
            made.append(batch)
        choosing = time.perf_counter() - started
        in_flight.extend((batch, _timings(batch, now, free_at)) for batch in made)
        batch, timings = in_flight.popleft()
        now = max(now, timings[-1].ended_at)
        result = StepResult(batch.epoch, batch.step_id, (50,) * len(batch.sampled_seq_ids), timings)
        started = time.perf_counter()
        events = scheduler.complete(batch, result)
        taken.append(choosing + time.perf_counter() - started)
        hearing = [requests[event.seq_id] for event in events]
        started = time.perf_counter()
        log.record(batch, result)
        log.record_tokens(hearing, now)
        noting.append(time.perf_counter() - started)
        for request in hearing:
            request.last_token_at = now
    return statistics.median(taken[WARM_UP:]), statistics.median(noting[WARM_UP:]), len(batch.decodes.seq_ids)


def _timings(batch: MicroBatch, now: float, free_at: list[float]) -> tuple[StageTiming, ...]:
    """Each stage takes a millisecond and 20 us per token."""
    timings, busy = [], 1e-3 + 2e-5 * batch.num_tokens
    for stage in range(len(free_at)):
        now = max(now, free_at[stage])
        timings.append(StageTiming(stage, now, busy, batch.num_tokens))
        now = free_at[stage] = now + busy
    return tuple(timings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = {stages: measure(stages, options.sequences, options.steps) for stages in STAGES}
    if options.json:
        print(json.dumps([{"stages": k, "step_s": s, "noting_s": noting, "decodes": n} for k, (s, noting, n) in figures.items()]))
        return
    table = Table(
        "stages", "decodes in a micro-batch", "us a step", "us to note it", title=f"{options.sequences} sequences decode"
    )
    for stages, (seconds, noting, decodes) in figures.items():
        table.add_row(str(stages), str(decodes), f"{seconds * 1e6:.0f}", f"{noting * 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
