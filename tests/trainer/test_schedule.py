import math
from itertools import pairwise

import pytest

from trainer.config import ScheduleConfig
from trainer.schedule import learning_rate

TOTAL, PEAK = 1000, 3e-4


def rate(t, **settings):
    return learning_rate(t, peak=PEAK, schedule=ScheduleConfig(**settings), total=TOTAL)


def expected(t, kind, warmup, ratio, decay=200):
    """The formulas, written independently, piece by piece."""
    if t < warmup:
        return PEAK * (t / warmup)
    if kind == "constant":
        return PEAK
    low = PEAK * ratio
    if kind == "linear":
        return low + (PEAK - low) * (TOTAL - t) / (TOTAL - warmup)
    if kind == "cosine":
        return low + (PEAK - low) * math.cos(math.pi / 2 * (t - warmup) / (TOTAL - warmup)) ** 2
    return PEAK if t <= TOTAL - decay else low + (PEAK - low) * (TOTAL - t) / decay


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 100])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_equals_the_formula(kind, warmup, ratio):
    decay = {"decay": 200} if kind == "wsd" else {}
    for t in range(1, TOTAL + 1):
        got = rate(t, kind=kind, warmup=warmup, final_ratio=ratio, **decay)
        assert got == pytest.approx(expected(t, kind, warmup, ratio), rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_continuous_everywhere(kind):
    decay = {"decay": 200} if kind == "wsd" else {}
    rates = [rate(t, kind=kind, warmup=100, **decay) for t in range(1, TOTAL + 1)]
    steepest = max(abs(b - a) for a, b in pairwise(rates))
    assert steepest <= PEAK / 100 * 1.0001


def test_stays_at_its_end_after_the_total():
    assert rate(5000, kind="linear", final_ratio=0.1) == pytest.approx(PEAK * 0.1, rel=1e-12)


def test_an_own_total_counts_instead_of_the_curriculum():
    assert rate(500, kind="linear", total=500) == 0.0
    assert rate(500, kind="linear") == pytest.approx(PEAK / 2, rel=1e-12)
