"""Length distributions: how many tokens a prompt or an output has. Knows no requests.

Written on the command line as `fixed:128`, `uniform:32:512`, `lognormal:MEAN:SIGMA:LOW:HIGH` or a name: `sharegpt-in`.
A log-normal draw outside [LOW, HIGH] is drawn again; MEAN is the mean of what comes out, bounds included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

_NORMAL = NormalDist()


class UsageError(Exception):
    """What was asked for makes no sense. The message is one sentence for the person at the terminal."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers in [low, high]. kind: fixed, uniform or lognormal."""

    kind: str
    low: int
    high: int
    mean: float = 0.0  # lognormal only: after cutting to [low, high]
    sigma: float = 0.0  # lognormal only: standard deviation of the logarithm
    mu: float = 0.0  # lognormal only: mean of the logarithm before cutting

    def draw(self, random: Random) -> int:
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            return random.randint(self.low, self.high)
        while True:
            length = round(random.lognormvariate(self.mu, self.sigma))
            if self.low <= length <= self.high:
                return length

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"fixed:{self.low}"
        if self.kind == "uniform":
            return f"uniform:{self.low}:{self.high}"
        return f"lognormal:{self.mean:g}:{self.sigma:g}:{self.low}:{self.high}"


def fixed(length: int) -> Lengths:
    return Lengths("fixed", length, length)


def uniform(low: int, high: int) -> Lengths:
    return Lengths("uniform", low, high)


def lognormal(mean: float, sigma: float, low: int, high: int) -> Lengths:
    """Log-normal, cut to [low, high], with the given mean after the cut. Raises UsageError if none has that mean."""
    floor, ceiling = math.log(low) - 10 * sigma, math.log(high) + 10 * sigma
    for _ in range(80):  # the cut mean grows with mu: bisection
        mu = (floor + ceiling) / 2
        if cut_mean(mu, sigma, low, high) < mean:
            floor = mu
        else:
            ceiling = mu
    if abs(cut_mean(mu, sigma, low, high) - mean) > 0.01 * mean:
        raise UsageError(f"No log-normal with sigma {sigma:g} between {low} and {high} has the mean {mean:g}.")
    return Lengths("lognormal", low, high, mean, sigma, mu)


def lognormal_between(low: int, high: int) -> Lengths:
    """Roughly log-normal on [low, high]: the median is their geometric mean, the bounds lie two sigmas away."""
    mu, sigma = (math.log(low) + math.log(high)) / 2, math.log(high / low) / 4
    return Lengths("lognormal", low, high, round(cut_mean(mu, sigma, low, high), 1), sigma, mu)


def cut_mean(mu: float, sigma: float, low: float, high: float) -> float:
    """Mean of a log-normal, given that it lies in [low, high]."""
    a, b = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
    mass = _NORMAL.cdf(b) - _NORMAL.cdf(a)
    if mass < 1e-12:
        return low if a > 0 else high
    return math.exp(mu + sigma**2 / 2) * (_NORMAL.cdf(b - sigma) - _NORMAL.cdf(a - sigma)) / mass


# Means as the PagedAttention paper (Kwon et al. 2023, figure 11) states them: ShareGPT 161.31 in, 337.99 out; Alpaca
# 19.31 in, 58.45 out. It states no spread; the sigmas are ours, for the long right tails its histograms show.
NAMED = {
    "sharegpt-in": lognormal(161.31, 1.2, 4, 2048),
    "sharegpt-out": lognormal(337.99, 0.9, 4, 2048),
    "alpaca-in": lognormal(19.31, 0.5, 4, 512),
    "alpaca-out": lognormal(58.45, 0.9, 4, 1024),
}


def parse_lengths(text: str) -> Lengths:
    """The distribution written as `text`. Raises UsageError."""
    if text in NAMED:
        return NAMED[text]
    kind, _, rest = text.partition(":")
    try:
        numbers = [float(number) for number in rest.split(":")] if rest else [float(kind)]
        if kind == "uniform" and len(numbers) == 2:
            lengths = uniform(int(numbers[0]), int(numbers[1]))
        elif kind == "lognormal" and len(numbers) == 4:
            lengths = lognormal(numbers[0], numbers[1], int(numbers[2]), int(numbers[3]))
        elif (kind == "fixed" or not rest) and len(numbers) == 1:
            lengths = fixed(int(numbers[0]))
        else:
            raise ValueError(text)
    except ValueError:
        names = ", ".join(NAMED)
        raise UsageError(
            f"Cannot read the length {text!r}: want fixed:N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA:LOW:HIGH, {names}."
        ) from None
    if not 1 <= lengths.low <= lengths.high:
        raise UsageError(f"A length must be at least 1 and its bounds in order, got {text!r}.")
    return lengths
