"""Means over samples with their 95 % intervals: a bootstrap, and Wilson's for scores that are 0 or 1.

The bootstrap draws samples with replacement within each task and length (Efron 1979; percentile intervals). With
`question=multi`, the questions about one context are drawn together. The draws are the same for every method, so that
the difference of two means over the same samples is a paired one.

`scipy.stats.bootstrap` pairs samples of one length or draws within strata, not both: a call for each stratum, measure
and method would pair by a shared seed, but takes 1.4 ms where draws that all share take 0.02 ms, and refuses strata of
one sample.
"""

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LONE = 0.05
"""Largest share of a mean that may come from strata of one sample, which no bootstrap can draw from."""
LEAST_SAMPLES = 10
"""A bootstrap of fewer samples is too narrow: of 2 samples its interval ends at their values."""
_SEED = 95
_Z = 1.96

Interval = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Estimate:
    """A mean over `n` equally weighted samples, or contexts of several samples, with the same variance.

    `draws` [RESAMPLES] float32 are the means of the bootstrap's samples; it `is_share` where every sample is 0 or 1,
    and `is_drawn` where parts with at least two samples to draw from make up all of it, up to a share of `LONE`.
    """

    value: float
    draws: NDArray[np.float32]
    n: float
    is_share: bool
    is_drawn: bool

    @functools.cached_property
    def interval(self) -> Interval | None:
        """Ends of the 95 % interval; None where a single sample, or a few equal ones, say nothing about it."""
        if self.is_share:
            return wilson_interval(self.value, self.n)
        if not self.is_drawn:
            return None
        low, high = np.percentile(self.draws, [2.5, 97.5])
        if low == high and self.n < LEAST_SAMPLES:
            return None
        return float(low), float(high)

    @property
    def ends(self) -> Interval:
        """The interval, or the value twice where there is none."""
        return self.interval or (self.value, self.value)

    def __float__(self) -> float:
        return self.value

    def __sub__(self, other: "Estimate") -> "Estimate":
        """The mean difference, paired: both must be over the same samples."""
        return Estimate(
            value=self.value - other.value,
            draws=self.draws - other.draws,
            n=min(self.n, other.n),
            is_share=False,
            is_drawn=self.is_drawn and other.is_drawn,
        )


def estimate(
    values: Sequence[float], stratum: str, contexts: Sequence[str] | None = None, *, can_be_share: bool = False
) -> Estimate:
    """The mean of samples, whose order is the same wherever estimates of one `stratum` (task and length) are compared.

    Samples of the same of `contexts` are drawn together; by default each is alone. With `can_be_share` the mean is a
    proportion where every value is 0 or 1 and every sample is alone.
    """
    if contexts is None:
        contexts = [str(index) for index in range(len(values))]
    index_of_context: dict[str, int] = {}
    for context in contexts:
        index_of_context.setdefault(context, len(index_of_context))
    n = len(index_of_context)
    columns = [index_of_context[context] for context in contexts]
    counts = _counts(n, zlib.crc32(stratum.encode()))[:, columns]
    draws = counts @ np.asarray(values, np.float32) / counts.sum(axis=1)
    return Estimate(
        value=math.fsum(values) / len(values),
        draws=np.asarray(draws, np.float32),
        n=n,
        is_share=can_be_share and n == len(values) and set(values) <= {0.0, 1.0},
        is_drawn=n > 1,
    )


def weighted(parts: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """The weighted mean of estimates of different strata; the weights add up to 1.

    A stratum of one sample contributes its value to every draw.
    """
    values = []
    draws = []
    variances = []
    weights_not_drawn = []
    for weight, part in zip(weights, parts, strict=True):
        values.append(weight * part.value)
        draws.append(np.float32(weight) * part.draws)
        variances.append(weight * weight / part.n)
        if not part.is_drawn:
            weights_not_drawn.append(weight)
    return Estimate(
        value=math.fsum(values),
        draws=np.sum(draws, axis=0),
        n=1 / math.fsum(variances),
        is_share=all(part.is_share for part in parts),
        is_drawn=math.fsum(weights_not_drawn) <= LONE,
    )


def wilson_interval(share: float, n: float) -> Interval:
    """95 % Wilson score interval (Wilson 1927) of the mean of `n` values that are 0 or 1."""
    centre = (share + _Z * _Z / (2 * n)) / (1 + _Z * _Z / n)
    half = _Z / (1 + _Z * _Z / n) * math.sqrt(max(share * (1 - share), 0.0) / n + _Z * _Z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


@functools.lru_cache(maxsize=4)
def _counts(n: int, stratum: int) -> NDArray[np.float32]:
    """[RESAMPLES, n]: how often each draw takes each sample."""
    generator = np.random.default_rng([_SEED, stratum, n])
    return generator.multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float32)
