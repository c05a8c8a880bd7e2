"""What changes while training goes on: how much of the budget is used, and the loss's weights."""

from __future__ import annotations

from firesteel import recipe as recipes
from firesteel.losses.types import LossWeights


def progress_of(settings: recipes.Train, *, step: int, epoch: float, seconds: float) -> float:
    """Share of the budget that is used, in [0, 1]: the largest over steps, epochs and minutes, whichever are set.

    With `max_minutes` the learning rate follows the clock, so two runs differ; with steps or epochs alone they are equal bit for bit.
    """
    shares = [
        step / settings.max_steps if settings.max_steps else 0.0,
        epoch / settings.epochs if settings.epochs else 0.0,
        seconds / (60.0 * settings.max_minutes) if settings.max_minutes else 0.0,
    ]
    return min(1.0, max(shares))


def loss_weights(settings: recipes.Loss, progress: float) -> LossWeights:
    """The loss at a point of training: within the first `warm_kl` of it, TV's weight moves from KL to TV.

    TV's gradient is proportional to the draft's probability where it exceeds the target's: an untrained drafter over a large
    vocabulary has hardly any, while KL pulls from the first step.
    """
    share = 1.0 if settings.warm_kl == 0 else min(1.0, progress / settings.warm_kl)
    return LossWeights(
        ce=settings.ce,
        tv=settings.tv * share,
        kl=settings.kl + settings.tv * (1.0 - share),
        reverse_kl=settings.reverse_kl,
        jsd=settings.jsd,
        confidence=settings.confidence,
        dpace=settings.position_weights == "dpace",
        dpace_smoothing=settings.dpace_smoothing,
    )
