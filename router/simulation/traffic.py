"""Synthetic traffic like recorded traffic: log-normal lengths, arrivals at random or in bursts."""

import math
import random
from dataclasses import dataclass

from tramontane.router.simulation.simulator import SimRequest


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Log-normal lengths with this mean, cut to the bounds; ``spread`` is the standard deviation of the logarithm."""

    mean: int
    spread: float
    max_tokens: int
    min_tokens: int = 1

    def draw(self, rng: random.Random) -> int:
        """Draw a length: mean = exp(mu + spread**2 / 2), so mu = log(mean) - spread**2 / 2."""
        drawn = rng.lognormvariate(math.log(self.mean) - self.spread**2 / 2, self.spread)
        return max(self.min_tokens, min(self.max_tokens, round(drawn)))


@dataclass(frozen=True, slots=True)
class TrafficModel:
    """Requests of random lengths.

    ``rate`` is in requests per second, or None where all arrive at the start. ``burst`` requests arrive at once.
    """

    num_requests: int
    prompt: LengthDistribution
    answer: LengthDistribution
    rate: float | None = None
    burst: int = 1

    def arrivals(self, seed: int = 0) -> tuple[SimRequest, ...]:
        """Draw Poisson arrivals of bursts: the time between two of them is exponential with mean burst / rate."""
        rng, now, drawn = random.Random(seed), 0.0, []
        for number in range(self.num_requests):
            if self.rate is not None and number % self.burst == 0:
                now += rng.expovariate(self.rate / self.burst)
            drawn.append(SimRequest(now, self.prompt.draw(rng), self.answer.draw(rng)))
        return tuple(drawn)
