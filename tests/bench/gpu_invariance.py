"""Batch invariance on a GPU: rows of gpu_rows.py that compare bits, and what ``--batch-invariant``
costs.
"""

import statistics
import traceback
from collections.abc import Iterator
from dataclasses import replace

import torch
from gpu_checks import BATCHES, Check, forced_logits, four_layers
from gpu_speed import PREFILL_BUDGET, STEPS, WARM_STEPS, Figure, Size, Walls
from gpu_stage import MISTRAL_7B, MIXTRAL_8X7B, Runner, running

from tramontane.proto.model_args import ModelArgs, MoeArgs

# of 32: the share of every kernel in a step is that of the whole model, but for the head's
COST_LAYERS = 8


def invariance_checks(device: str, small: bool) -> Iterator[Check]:
    """Count the kernels that fail their checks, and the steps of a stage in which a sequence has
    other logits in company.

    A stage that differs token by token and in chunks refuses to start, which is an error of this
    group.
    """
    if device != "cpu":  # where they run by the interpreter, in tests
        yield _failing_kernels(device)
    dense = four_layers(small)
    sparse = replace(dense, moe=MoeArgs(8, 2), hidden_dim=dense.hidden_dim // 4)
    for name, args in (("dense", dense), ("experts", sparse)):
        with running(
            args, device, max_num_seqs=max(BATCHES), max_len=512, batch_invariant=True
        ) as runner:
            alone = forced_logits(runner, 1)
            differing = [
                batch
                for batch in BATCHES[1:]
                for pair in zip(alone, forced_logits(runner, batch), strict=True)
                if _differ(*pair)
            ]
        detail = f"batches {sorted(set(differing))}" if differing else ""
        yield Check(
            f"batch invariance, {name}: steps with other logits in company",
            float(len(differing)),
            1.0,
            detail,
        )


def _differ(alone_1V: torch.Tensor, among_SV: torch.Tensor) -> bool:
    return not torch.equal(alone_1V[0], among_SV[0])


def _failing_kernels(device: str) -> Check:
    import attention_checks  # these import Triton
    import product_checks

    failing = []
    for name, check in (product_checks.CHECKS | attention_checks.CHECKS).items():
        try:
            check(device)
        except Exception:
            traceback.print_exc()
            failing.append(name)
    return Check(
        "batch invariance: kernels that are wrong or differ in company",
        float(len(failing)),
        1.0,
        "; ".join(failing),
    )


def invariance_cost(size: Size, _wall: Walls) -> Iterator[Figure]:
    """Compare the speed with ``--batch-invariant`` with that without it, which is 1."""
    for name, args in (("Mistral 7B", MISTRAL_7B), ("Mixtral 8x7B", MIXTRAL_8X7B)):
        seconds = {
            wanted: _measure(size, _some_layers(size, args), wanted) for wanted in (False, True)
        }
        for job, without in seconds[False].items():
            detail = f"{without * 1e3:.2f} ms without, {seconds[True][job] * 1e3:.2f} ms with"
            yield Figure(
                f"--batch-invariant: speed of {name}, {job}, over that without",
                without / seconds[True][job],
                "1",
                None,
                detail,
            )


def _some_layers(size: Size, args: ModelArgs) -> ModelArgs:
    return size.model(replace(args, n_layers=COST_LAYERS, windows=args.windows[:COST_LAYERS]))


def _measure(size: Size, args: ModelArgs, batch_invariant: bool) -> dict[str, float]:
    """Return the seconds of a prompt and of decode steps."""
    seconds = {}
    with running(
        args,
        size.device,
        max_num_seqs=64,
        max_len=size.tokens(9216),
        batch_invariant=batch_invariant,
    ) as runner:
        for batch, context in ((1, 1024), (64, 1024), (1, 8192)):
            runner.prefill(batch, size.tokens(context), PREFILL_BUDGET)
            seconds[f"decode, batch {batch}, context {context}"] = _step_seconds(runner)
        rounds = [runner.prefill(1, size.tokens(2048), PREFILL_BUDGET) for _ in range(3)]
        seconds["prefill of 2048"] = statistics.median(rounds)
    return seconds


def _step_seconds(runner: Runner) -> float:
    runner.decode(WARM_STEPS)
    return statistics.median(runner.decode(min(STEPS, runner.room)).whole)
