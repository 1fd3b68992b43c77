"""Over how many micro-batches decodes are spread: what the cost model foretells, corrected by what rounds really take."""

from collections.abc import Mapping
from dataclasses import dataclass

WORTH_SPLITTING = 0.97  # decodes are cut into more micro-batches only if a round then takes at most this share of the time
HOPELESS = 2.0  # a spread whose round is foretold to take so many times the best is not tried
TRIAL_ROUNDS = 3  # what a spread is tried for
TRY_AGAIN = 128  # rounds until a spread is tried again; twice as many each time that it has not become the best
SMOOTHING = 0.3  # weight of the newest correction


@dataclass
class _SpreadStats:
    """Of one spread: real over foretold time, and when it will be tried again."""

    ratio: float = 1.0
    is_tried: bool = False
    patience: int = TRY_AGAIN
    rounds_left: int = 0


class SpreadTuner:
    """Chooses a spread m, which is how many micro-batches take part in a round of decodes.

    Foretold times know what stages take for their work, not that they may share cores, or what lies between them. So
    every spread has a ratio of real to foretold time, and those worth it are tried now and then.
    """

    def __init__(self) -> None:
        self._known: dict[int, _SpreadStats] = {}
        self._trial: tuple[int, int] | None = None  # which spread, and micro-batches left of it
        self._span: tuple[int, int, float, float] | None = None  # spread, micro-batches, real and foretold seconds so far
        self._last_end = 0.0

    def choose(self, rounds_s: Mapping[int, float]) -> int:
        """The spread for now, from the foretold seconds of a round with each."""
        if self._trial is not None and self._trial[0] in rounds_s:
            return self._trial[0]
        corrected = {m: seconds * self._of(m).ratio for m, seconds in rounds_s.items()}
        fastest = min(corrected.values())
        best = min(m for m, seconds in corrected.items() if seconds * WORTH_SPLITTING <= fastest)
        due = [m for m in rounds_s if m != best and self._is_due(m) and rounds_s[m] <= HOPELESS * rounds_s[best]]
        if not due or not self._of(best).is_tried:
            return best
        chosen = self._of(due[0])
        chosen.patience *= 2 if chosen.is_tried else 1
        self._trial = due[0], TRIAL_ROUNDS * due[0] + best  # those of the spread before are still in flight
        return due[0]

    def observe(self, spread: int, foretold_round_s: float, ended_at: float) -> None:
        """A micro-batch of decodes alone has left the last stage; ``spread`` 0: one that had prompts."""
        elapsed, self._last_end = ended_at - self._last_end, ended_at
        if self._span is None or self._span[0] != spread or not spread:
            self._span = (spread, 0, 0.0, 0.0) if spread else None
            return
        _, count, real, foretold = self._span
        self._span = spread, count + 1, real + elapsed, foretold + foretold_round_s / spread
        if self._trial is not None:
            self._trial = (self._trial[0], self._trial[1] - 1) if self._trial[1] > 1 else None
        if count + 1 >= TRIAL_ROUNDS * spread:
            self._learn(spread, self._span[2] / max(self._span[3], 1e-9))
            self._span = spread, 0, 0.0, 0.0

    def _learn(self, spread: int, ratio: float) -> None:
        known = self._of(spread)
        known.ratio = known.ratio + SMOOTHING * (ratio - known.ratio) if known.is_tried else ratio
        for other, each in self._known.items():
            each.rounds_left -= TRIAL_ROUNDS if other != spread else 0
        known.is_tried, known.rounds_left = True, known.patience

    def _is_due(self, spread: int) -> bool:
        return not self._of(spread).is_tried or self._of(spread).rounds_left <= 0

    def _of(self, spread: int) -> _SpreadStats:
        return self._known.setdefault(spread, _SpreadStats())
