"""Exact statements about counts: Clopper-Pearson bounds, McNemar's test."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np


def tail(k: int, n: int, p: float) -> float:
    """P(X ≤ k) for X binomial with n trials of probability p, 0 < p < 1: summed term by term, as logarithms."""
    return _summed(0, k, n, _choose(n), p)


def _choose(n: int) -> np.ndarray:
    """log C(n, j) for j of 0..n."""
    factorials = np.fromiter(map(math.lgamma, range(1, n + 2)), np.float64, n + 1)
    whole: np.ndarray = factorials[n] - factorials - factorials[::-1]
    return whole


def _summed(first: int, last: int, n: int, choose: np.ndarray, p: float) -> float:
    j = np.arange(first, last + 1)
    terms = choose[first : last + 1] + j * math.log(p) + (n - j) * math.log1p(-p)
    return min(1.0, float(np.exp(terms).sum()))


@lru_cache(maxsize=1024)
def clopper_pearson(k: int, n: int, alpha: float) -> tuple[float, float]:
    """Bounds of a probability of which k of n trials succeeded, each wrong with probability alpha / 2 at most.

    Clopper and Pearson, Biometrika 26 (1934): the lower bound is the p at which k or more would be seen with
    probability alpha / 2, the upper one that at which k or fewer would. Of no trials nothing is known: (0, 1).
    """
    if not 0 <= k <= n:
        raise ValueError(f"{k} of {n}")
    choose = _choose(n)

    def falls_to(half: float, first: int, last: int, rises: bool) -> float:
        """The p at which P(first ≤ X ≤ last), which rises or falls with p throughout, equals ``half``."""
        low, high = 0.0, 1.0
        while low < (p := (low + high) / 2) < high:
            if (_summed(first, last, n, choose, p) < half) == rises:
                low = p
            else:
                high = p
        return low if rises else high  # outward, so that rounding does not narrow the interval

    lower = 0.0 if k == 0 else falls_to(alpha / 2, k, n, rises=True)
    upper = 1.0 if k == n else falls_to(alpha / 2, 0, k, rises=False)
    return lower, upper


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p of McNemar's test: were two drafters equally good, how odd is such a split of the positions
    where just one of them is right?"""
    n, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * tail(fewer, n, 0.5)) if n else 1.0
