"""The fingerprint of a pipeline: with the same one, the same request gives the same tokens."""

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tramontane.proto.model_folder import RandomWeights, WeightSource
from tramontane.proto.plan import StagePlan
from tramontane.workers.device.numerics import Numerics
from tramontane.workers.weights.checkpoint import Fingerprint, short_digest

PREFIX = "fp_"  # as OpenAI's begin
NUM_DIGITS = 16


def weights_name(weights: WeightSource, files: Fingerprint, model: Path | None) -> str:
    """Name the weights by the fingerprint of the files that are read; for a model without files, by
    the model's name.
    """
    if not isinstance(weights, RandomWeights):
        return short_digest(files)
    return f"random weights of {short_digest(files) if files else model}"


def pipeline_fingerprint(
    weights: str, stages: Sequence[tuple[StagePlan, Numerics]], experts: Sequence[Numerics] = ()
) -> str:
    """Return the fingerprint of stages, in order, and of expert actors if there are any.

    If all are batch-invariant and compute in the same way it does not depend on how layers and
    experts are distributed.
    """
    first = stages[0][0]
    common = _common_parts([*(numerics for _, numerics in stages), *experts])
    split = (
        [(plan.first_layer, plan.last_layer, numerics) for plan, numerics in stages],
        list(experts),
    )
    parts = (
        version("tramontane"),
        weights,
        first.args,
        first.dtype,
        first.quantize,
        common or split,
    )
    return PREFIX + hashlib.sha256(repr(parts).encode()).hexdigest()[:NUM_DIGITS]


def _common_parts(workers: Sequence[Numerics]) -> list[tuple[str, str]] | None:
    """Return the parts of all workers, or None if a worker is not batch-invariant or two are
    unlike.
    """
    common: dict[str, str] = {}
    for worker in workers:
        is_alike = all(common.setdefault(part, name) == name for part, name in worker.parts)
        if not (worker.is_batch_invariant and is_alike):
            return None
    return sorted(common.items())
