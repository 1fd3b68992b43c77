"""Benchmark of the scheduler's own time per micro-batch while many sequences decode.

    python tests/bench/scheduling.py [--sequences 256] [--steps 400] [--json]

The real scheduler and policy run against a modelled pipeline. Timed are scheduling, construction of
the micro-batch, and processing of its result: the median of the steps after the policy's cost model
is trained. In addition the time of the router's activity log, with one request per sequence.
"""

import argparse
import statistics
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from rich.table import Table
from targets import conclude

from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import MicroBatch, StageTiming, StepResult
from tramontane.router.engine.active_request import ActiveRequest
from tramontane.router.engine.activity_log import ActivityLog
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

STAGES = (1, 2, 4, 8)
WARM_UP = 200  # steps
CONTEXT, WINDOW, PAGE_SIZE, BUDGET = 32768, 4096, 16, 512


def measure(num_stages: int, num_sequences: int, num_steps: int) -> tuple[float, float, int]:
    """Return the median seconds of a step and of its logging, and the number of decodes of the last
    step.
    """
    ring = ring_pages(WINDOW, PAGE_SIZE, CONTEXT)
    cache = CachePlan(PAGE_SIZE, (WindowClass(WINDOW, ring, ring * num_sequences),))
    policy = BalancedPolicy(num_stages, BUDGET)
    scheduler = Scheduler(cache, SchedulerLimits(num_sequences, BUDGET, CONTEXT, 32_000), policy)
    sampling = SamplingParams(max_tokens=CONTEXT // 2, temperature=0.0)
    sequences = [
        Sequence(seq_id, tuple(range(10, 74)), sampling, CONTEXT) for seq_id in range(num_sequences)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    requests = {
        sequence.seq_id: ActiveRequest([sequence], lambda _: None, 0.0) for sequence in sequences
    }
    log = ActivityLog()
    now, free_at = 0.0, [0.0] * num_stages
    in_flight: deque[tuple[MicroBatch, tuple[StageTiming, ...]]] = deque()
    step_s, logging_s = [], []
    for _ in range(WARM_UP + num_steps):
        started, batches = time.perf_counter(), []
        while (batch := scheduler.schedule()) is not None:
            batches.append(batch)
        scheduling_s = time.perf_counter() - started
        in_flight.extend((batch, _timings(batch, now, free_at)) for batch in batches)
        batch, timings = in_flight.popleft()
        now = max(now, timings[-1].ended_at)
        result = StepResult(batch.epoch, batch.step_id, (50,) * len(batch.sampled_seq_ids), timings)
        started = time.perf_counter()
        events = scheduler.complete(batch, result)
        step_s.append(scheduling_s + time.perf_counter() - started)
        receivers = [requests[event.seq_id] for event in events]
        started = time.perf_counter()
        log.record(batch, result)
        log.record_tokens(receivers, now)
        logging_s.append(time.perf_counter() - started)
        for request in receivers:
            request.last_token_at = now
    return (
        statistics.median(step_s[WARM_UP:]),
        statistics.median(logging_s[WARM_UP:]),
        len(batch.decodes.seq_ids),
    )


def _timings(batch: MicroBatch, now: float, free_at: list[float]) -> tuple[StageTiming, ...]:
    """Return the timings of a micro-batch; each stage takes 1 ms and 20 us per token."""
    timings, busy = [], 1e-3 + 2e-5 * batch.num_tokens
    for stage in range(len(free_at)):
        now = max(now, free_at[stage])
        timings.append(StageTiming(stage, now, busy, batch.num_tokens))
        now = free_at[stage] = now + busy
    return tuple(timings)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = {stages: measure(stages, options.sequences, options.steps) for stages in STAGES}
    columns = ("stages", "decodes in a micro-batch", "us per step", "us to log it")
    table = Table(*columns, title=f"{options.sequences} sequences decode")
    for stages, (seconds, logging_s, decodes) in figures.items():
        table.add_row(str(stages), str(decodes), f"{seconds * 1e6:.0f}", f"{logging_s * 1e6:.0f}")
    rows = [
        {"stages": k, "step_s": s, "noting_s": logging, "decodes": n}
        for k, (s, logging, n) in figures.items()
    ]
    conclude([], table, data={"rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
