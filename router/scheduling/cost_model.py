"""The cost model: how long each stage takes for a micro-batch, learned from the timings that return
with every result.

``CostModel`` fits the times; ``CostColumns`` chooses which times are fitted and combines them into
times of the whole pipeline.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.policy import BatchWork

# so that the features are about one in relevant ranges
SCALES = np.array([1.0, 1 / 256, 1 / 2**16, 1 / 32, 1 / 2**14])
MIN_OBSERVATIONS = 12  # micro-batches before the model is used
REFIT_EVERY = 16  # micro-batches
DECAY = 0.99  # a micro-batch that was observed 70 micro-batches ago counts half
RIDGE = 1e-3  # how strongly the fit keeps its previous coefficients where the work does not vary
# a time is clipped to this multiple of its prediction, as an outlier
OUTLIER_CLIP = 3.0

Seconds = NDArray[np.float64]


class CostModel:
    """Seconds of every column as a linear function of the work: least squares with exponential
    forgetting.

    Coefficients are at least zero: negative ones are removed, and the others are fitted again.
    """

    def __init__(self, num_columns: int, decay: float = DECAY) -> None:
        self._decay = decay
        self._products_FF = np.zeros((len(SCALES), len(SCALES)))
        self._targets_FC = np.zeros((len(SCALES), num_columns))
        self._weights_FC = np.zeros((len(SCALES), num_columns))
        self._num_observed = 0
        # Observations since the last fit. They are accumulated together, because numpy's overhead
        # per call is large.
        self._recent: list[tuple[BatchWork, Sequence[float]]] = []
        self.version = 0  # grows with every fit

    @property
    def is_ready(self) -> bool:
        """Whether enough micro-batches have been observed."""
        return self._num_observed >= MIN_OBSERVATIONS

    def observe(self, work: BatchWork, seconds: Sequence[float]) -> None:
        """Record the seconds of every column for this work."""
        self._recent.append((work, seconds))
        self._num_observed += 1
        if self._num_observed == MIN_OBSERVATIONS or self._num_observed % REFIT_EVERY == 0:
            self.refit()

    def predict(self, works: Sequence[BatchWork]) -> Seconds:
        """Return the seconds of every column for each micro-batch: [works, columns]."""
        times_WC: Seconds = _features(works) @ self._weights_FC
        return times_WC

    def refit(self) -> None:
        """Fit all columns together; then fit each that has negative coefficients again without
        them.
        """
        self._accumulate()
        ridge = RIDGE * np.trace(self._products_FF)
        matrix_FF = self._products_FF + ridge * np.eye(len(SCALES))
        targets_FC = self._targets_FC + ridge * self._weights_FC
        fitted_FC = np.linalg.solve(matrix_FF, targets_FC)
        for column in np.flatnonzero((fitted_FC < 0).any(axis=0)):
            fitted_FC[:, column] = _fit_nonnegative(
                matrix_FF, targets_FC[:, column], fitted_FC[:, column]
            )
        self._weights_FC = fitted_FC
        self.version += 1

    def _accumulate(self) -> None:
        """Add the recent observations: of N the last counts once, the first decay**(N - 1) times,
        an older one decay**N times.
        """
        if not self._recent:
            return
        works, seconds = zip(*self._recent, strict=True)
        x_NF, y_NC = _features(works), np.array(seconds, dtype=np.float64)
        if self.version:
            y_NC = np.minimum(y_NC, OUTLIER_CLIP * np.maximum(x_NF @ self._weights_FC, 1e-6))
        ages_N = np.arange(len(works))[::-1]
        weighted_FN = (x_NF * self._decay ** ages_N[:, None]).T
        self._products_FF = self._decay ** len(works) * self._products_FF + weighted_FN @ x_NF
        self._targets_FC = self._decay ** len(works) * self._targets_FC + weighted_FN @ y_NC
        self._recent.clear()


class CostColumns:
    """The times of a pipeline that the cost model learns.

    One column per stage: its compute time. Where experts run in expert actors, also one for the
    time of the busiest actors for all stages together, and one per stage for its wait for experts
    while it does nothing else.

    Two stages compute 2 and 3 ms, experts 4 ms in all, waits are 3 and 3 ms: columns [2, 3, 4, 3,
    3], the slowest takes 4, the way through is 2 + 3 + 3 + 3 = 11.
    """

    def __init__(self, num_stages: int, has_expert_actors: bool) -> None:
        self._num_stages, self._has_expert_actors = num_stages, has_expert_actors

    @property
    def num_columns(self) -> int:
        """Columns of the cost model."""
        return 2 * self._num_stages + 1 if self._has_expert_actors else self._num_stages

    def columns(self, timings: Sequence[StageTiming]) -> list[float]:
        """Return the seconds of every column for one micro-batch."""
        busy = [timing.busy_s for timing in timings]
        if not self._has_expert_actors:
            return busy
        return [
            *busy,
            sum(timing.experts_busy_s for timing in timings),
            *(timing.expert_wait_s for timing in timings),
        ]

    def bottleneck_and_latency(self, times_WC: Seconds) -> tuple[Seconds, Seconds]:
        """Return for each micro-batch the time of the busiest stage (or of the experts), and the
        time through all stages.
        """
        stages_WS, rest = times_WC[:, : self._num_stages], times_WC[:, self._num_stages :]
        latency_W: Seconds = stages_WS.sum(axis=1) + rest[:, 1:].sum(axis=1)
        bottleneck_W: Seconds = times_WC[:, : self._num_stages + 1].max(axis=1)
        return bottleneck_W, latency_W


def _fit_nonnegative(
    matrix_FF: NDArray[np.float64], target_F: NDArray[np.float64], fitted_F: NDArray[np.float64]
) -> NDArray[np.float64]:
    kept = np.flatnonzero(fitted_F > 0)
    while len(kept):
        part = np.linalg.solve(matrix_FF[np.ix_(kept, kept)], target_F[kept])
        if (part >= 0).all():
            break
        kept = kept[part > 0]
    result = np.zeros_like(fitted_F)
    if len(kept):
        result[kept] = part
    return result


def _features(works: Sequence[BatchWork]) -> NDArray[np.float64]:
    """Return the scaled features of each micro-batch: [works, features]."""
    counts = [(1.0, w.prefill_tokens, w.prefill_keys, w.decodes, w.decode_keys) for w in works]
    features_WF: NDArray[np.float64] = np.asarray(counts, dtype=np.float64) * SCALES
    return features_WF
