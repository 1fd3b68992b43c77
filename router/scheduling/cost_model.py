"""How long a stage takes for a micro-batch, learned from the times that come back with every result.

Which times the cost model learns of a pipeline, and what they say of a micro-batch as a whole.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.policy import BatchWork

SCALES = np.array([1.0, 1 / 256, 1 / 2**16, 1 / 32, 1 / 2**14])  # so that each feature is about one where it matters
MIN_OBSERVATIONS = 12  # observations before the model is believed
REFIT_EVERY = 16
DECAY = 0.99  # what was seen 70 micro-batches ago counts half
RIDGE = 1e-3  # how much the fit holds on to what it was where nothing varies
OUTLIER_CLIP = 3.0  # a time counts as at most so many times what was predicted: something else was in the way


class CostModel:
    """Seconds of every stage as a linear function of the work: least squares with exponential forgetting.

    Coefficients are at least zero: what comes out below is left out, and the rest is fitted again.
    """

    def __init__(self, num_stages: int, forget: float = DECAY) -> None:
        self._forget = forget
        self._products_FF = np.zeros((len(SCALES), len(SCALES)))
        self._answers_FS = np.zeros((len(SCALES), num_stages))
        self._weights_FS = np.zeros((len(SCALES), num_stages))
        self._num_observed = 0
        self._recent: list[
            tuple[BatchWork, Sequence[float]]
        ] = []  # since the last fit: taken in together, arrays are slow to begin
        self.version = 0  # grows with every fit

    @property
    def is_ready(self) -> bool:
        return self._num_observed >= MIN_OBSERVATIONS

    def observe(self, work: BatchWork, seconds: Sequence[float]) -> None:
        """``seconds`` of every stage."""
        self._recent.append((work, seconds))
        self._num_observed += 1
        if self._num_observed == MIN_OBSERVATIONS or self._num_observed % REFIT_EVERY == 0:
            self.refit()

    def predict(self, works: Sequence[BatchWork]) -> NDArray[np.float64]:
        """For each of these micro-batches, of every stage: [works, stages]."""
        times_WS: NDArray[np.float64] = _features(works) @ self._weights_FS
        return times_WS

    def refit(self) -> None:
        """All stages at once; then, of each that has coefficients below zero, what is left without them."""
        self._accumulate()
        doubt = RIDGE * np.trace(self._products_FF)
        matrix_FF = self._products_FF + doubt * np.eye(len(SCALES))
        answers_FS = self._answers_FS + doubt * self._weights_FS
        fitted_FS = np.linalg.solve(matrix_FF, answers_FS)
        for stage in np.flatnonzero((fitted_FS < 0).any(axis=0)):
            fitted_FS[:, stage] = _not_negative(matrix_FF, answers_FS[:, stage], fitted_FS[:, stage])
        self._weights_FS = fitted_FS
        self.version += 1

    def _accumulate(self) -> None:
        """With N new observations an old one counts forget**N times, the first new one forget**(N - 1), the last one once."""
        if not self._recent:
            return
        works, seconds = zip(*self._recent, strict=True)
        x_NF, y_NS = _features(works), np.array(seconds, dtype=np.float64)
        if self.version:
            y_NS = np.minimum(y_NS, OUTLIER_CLIP * np.maximum(x_NF @ self._weights_FS, 1e-6))
        ages_N = np.arange(len(works))[::-1]
        weighted_FN = (x_NF * self._forget ** ages_N[:, None]).T
        self._products_FF = self._forget ** len(works) * self._products_FF + weighted_FN @ x_NF
        self._answers_FS = self._forget ** len(works) * self._answers_FS + weighted_FN @ y_NS
        self._recent.clear()


def _not_negative(
    matrix_FF: NDArray[np.float64], answer_F: NDArray[np.float64], fitted_F: NDArray[np.float64]
) -> NDArray[np.float64]:
    kept = np.flatnonzero(fitted_F > 0)
    while len(kept):
        part = np.linalg.solve(matrix_FF[np.ix_(kept, kept)], answer_F[kept])
        if (part >= 0).all():
            break
        kept = kept[part > 0]
    result = np.zeros_like(fitted_F)
    if len(kept):
        result[kept] = part
    return result


def _features(works: Sequence[BatchWork]) -> NDArray[np.float64]:
    """[works, features]"""
    counts = [(1.0, w.prefill_tokens, w.prefill_keys, w.decodes, w.decode_keys) for w in works]
    features_WF: NDArray[np.float64] = np.asarray(counts, dtype=np.float64) * SCALES
    return features_WF


Seconds = NDArray[np.float64]


class CostColumns:
    """Columns of the cost model: what each stage computes; and, where experts are on actors of their own, what the busiest
    of those does for all stages together, and how long each stage waits for them where it does nothing else.

    Two stages compute 2 and 3 ms, experts 4 ms in all, answers take 3 and 3 ms: columns [2, 3, 4, 3, 3], the slowest takes 4,
    the way through is 2 + 3 + 3 + 3 = 11.
    """

    def __init__(self, num_stages: int, has_expert_actors: bool) -> None:
        self._num_stages, self._has_expert_actors = num_stages, has_expert_actors

    @property
    def num_columns(self) -> int:
        return 2 * self._num_stages + 1 if self._has_expert_actors else self._num_stages

    def columns(self, timings: Sequence[StageTiming]) -> list[float]:
        """Of one micro-batch, in seconds."""
        busy = [timing.busy_s for timing in timings]
        if not self._has_expert_actors:
            return busy
        return [*busy, sum(timing.experts_busy_s for timing in timings), *(timing.expert_wait_s for timing in timings)]

    def bottleneck_and_latency(self, times_WC: Seconds) -> tuple[Seconds, Seconds]:
        """For each micro-batch: how long it keeps whoever has most to do, and how long it takes from one end to the other."""
        stages_WS, rest = times_WC[:, : self._num_stages], times_WC[:, self._num_stages :]
        through_W: Seconds = stages_WS.sum(axis=1) + rest[:, 1:].sum(axis=1)
        slowest_W: Seconds = times_WC[:, : self._num_stages + 1].max(axis=1)
        return slowest_W, through_W
