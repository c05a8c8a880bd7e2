"""Guards: what keeps an unattended run from training on nonsense.

They look at what is the same on every rank (sums over all of them), so that all ranks decide alike, and keep what they remember in
`Progress`, so that a resumed run decides as one that was never interrupted.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Literal

from firesteel import recipe as recipes
from firesteel.errors import TrainingError
from firesteel.training.checkpoint import Progress

Verdict = Literal["take", "skip", "return"]
WINDOW = 50  # steps that are remembered
_FEWEST = 20  # losses that a median needs
_EARLY = 0.1  # acceptance length above 1 from which a fall means something


class StepGuard:
    """Decides whether a step may be taken.

    Args:
        settings: of the recipe.
        budget: non-finite steps that are forgiven in a run.
    """

    def __init__(self, settings: recipes.Watch, budget: int) -> None:
        self.settings, self.budget = settings, budget

    def judge(self, progress: Progress, loss: float, norm: float) -> tuple[Verdict, str, str]:
        """What to do with the step after `progress.step`; where it is not taken, the rule that says so, and what was seen.

        A step that is not finite or whose loss is a spike is skipped; with `watch.spikes` of them among the last `WINDOW` steps training
        is to go back to its last good state.

        Raises:
            TrainingError: the budget of non-finite steps is used up.
        """
        trouble = self._trouble(progress, loss, norm)
        if trouble is None:
            progress.losses = [*progress.losses, loss][-WINDOW:]
            return "take", "", ""
        step = progress.step + 1
        progress.troubles = [s for s in progress.troubles if s > step - WINDOW] + [step]
        return ("return" if len(progress.troubles) >= self.settings.spikes else "skip"), *trouble

    def _trouble(self, progress: Progress, loss: float, norm: float) -> tuple[str, str] | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            progress.skipped += 1
            if progress.skipped > self.budget:
                raise TrainingError(
                    f"step {progress.step + 1}: loss {loss}, gradient norm {norm}; {progress.skipped} steps were not finite, "
                    f"train.nonfinite_budget={self.budget} forgives no more",
                    mend="lower train.lr, or look for bad rows with `firesteel check RECIPE`; the last good state is kept and the same command resumes from it",
                )
            return "non-finite", f"loss {loss}, gradient norm {norm}"
        if self.settings.spike is not None and len(progress.losses) >= _FEWEST:
            usual = median(progress.losses)
            if loss > self.settings.spike * usual > 0:
                progress.spiked += 1
                return "spike", f"loss {loss:.3f} where {usual:.3f} is usual"
        return None

    def falls(self, progress: Progress, acceptance_length: float) -> bool:
        """Whether a validation is so much below the best one that training should go back."""
        most = progress.best - 1.0
        return self.settings.fall is not None and most >= _EARLY and acceptance_length - 1.0 < (1.0 - self.settings.fall) * most
