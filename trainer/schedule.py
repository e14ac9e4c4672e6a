"""The learning rate: linear warm-up, then constant, linear, cosine or warm-up-stable-decay.

With t the steps (or tokens) seen at the end of the update, w the warm-up, T the total, r the final
ratio and peak the stage's learning rate:

    t <= w:    peak * t / w
    constant:  peak
    linear:    peak * (1 - (1 - r) * u)                         u = (t - w) / (T - w)
    cosine:    peak * (r + (1 - r) * (1 + cos(pi * u)) / 2)
    wsd:       peak until T - decay, then peak * (1 - (1 - r) * (t - (T - decay)) / decay)

After T the value stays at its end. Stages do not restart it, so it is continuous over their
boundaries (unless a stage sets an `lr` of its own).
"""

import math

from trainer.config import ScheduleConfig


def learning_rate(t: int, *, peak: float, schedule: ScheduleConfig, total: int) -> float:
    """Return the learning rate of the update that ends at `t`.

    Args:
        t: Steps or tokens (`schedule.unit`) at the end of the update, from 1.
        peak: Learning rate after warm-up.
        schedule: Kind, warm-up, decay and final ratio.
        total: Steps or tokens of the whole curriculum, used where `schedule.total` is null.
    """
    end = total if schedule.total is None else schedule.total
    if t <= schedule.warmup:
        return peak * t / schedule.warmup
    drop = 1.0 - schedule.final_ratio
    match schedule.kind:
        case "constant":
            return peak
        case "linear":
            return peak * (1.0 - drop * _share(t, schedule.warmup, end))
        case "cosine":
            turn = math.pi * _share(t, schedule.warmup, end)
            return peak * (schedule.final_ratio + drop * (1.0 + math.cos(turn)) / 2.0)
        case "wsd":
            assert schedule.decay is not None, "checked by ScheduleConfig.problems"
            return peak * (1.0 - drop * _share(t, end - schedule.decay, end))


def _share(t: int, start: int, end: int) -> float:
    """Return how much of start..end lies before t, 0 to 1."""
    return min(1.0, max(0.0, (t - start) / max(1, end - start)))
