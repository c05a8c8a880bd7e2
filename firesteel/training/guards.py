"""Guards: what keeps an unattended run from training on nonsense."""

from __future__ import annotations

import math
from dataclasses import dataclass

from firesteel.errors import TrainingError


@dataclass
class FiniteGuard:
    """Skips steps with non-finite loss or gradient, counts them, and stops training when there are too many.

    Attributes:
        budget: skipped steps that are forgiven.
        skipped: skipped so far.
    """

    budget: int
    skipped: int = 0

    def admits(self, loss: float, grad_norm: float, step: int) -> bool:
        """True if the step may be taken.

        Raises:
            TrainingError: the budget is used up.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return True
        self.skipped += 1
        if self.skipped > self.budget:
            raise TrainingError(
                f"step {step}: loss {loss}, gradient norm {grad_norm}; {self.skipped} steps were not finite, "
                f"train.nonfinite_budget={self.budget} forgives no more",
                mend="lower train.lr, or look for bad rows with `firesteel check RECIPE`; the last good state is kept and the same command resumes from it",
            )
        return False
