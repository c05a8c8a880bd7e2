"""Every error a user can cause, in one tree.

    FiresteelError            base: a message that says what is wrong, and how to mend it
    ├── RecipeError           a setting is unknown, missing or contradictory
    ├── DataError             prompts or responses are missing, empty or malformed
    │   └── TemplateError     the chat template cannot be aligned with its tokens
    ├── TargetError           the target model cannot be found, read or used
    ├── HiddenStateError      captured states are wrong (constant, short, non-finite, corrupt ...)
    ├── ArtifactError         a stage's output is missing, stale, corrupt or of another kind
    ├── CheckpointError       a drafter checkpoint does not say what it must, or belongs elsewhere
    ├── TrainingError         training cannot start or must stop
    ├── VerificationError     the exported drafter does not do what validation promised
    └── ResourceError         not enough disk, memory or time; a missing optional dependency

The command line prints these without a traceback. Anything else that reaches the user is a bug.
"""

from __future__ import annotations

# A mend that several rooms give.
MOONCAKE_LIBRARIES = "Mooncake needs libibverbs and librdmacm, on Debian: apt-get install libibverbs1 librdmacm1"


class FiresteelError(Exception):
    """Base of the tree.

    Args:
        message: what is wrong, naming the file, row or setting.
        mend: what to do or type about it; printed on a line of its own.
    """

    def __init__(self, message: str, *, mend: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend

    def __str__(self) -> str:
        return self.message if self.mend is None else f"{self.message}\n  -> {self.mend}"


class RecipeError(FiresteelError):
    """A setting is unknown, missing or contradictory."""


class DataError(FiresteelError):
    """Prompts or responses are missing, empty or malformed."""


class TemplateError(DataError):
    """The chat template cannot be aligned with its tokens."""


class TargetError(FiresteelError):
    """The target model cannot be found, read or used."""


class HiddenStateError(FiresteelError):
    """Captured hidden states are wrong: constant, short, non-finite or corrupt."""


class ArtifactError(FiresteelError):
    """A stage's output is missing, stale, corrupt or of another kind."""


class CheckpointError(FiresteelError):
    """A drafter checkpoint does not say what it must, or belongs to another target."""


class TrainingError(FiresteelError):
    """Training cannot start or must stop."""


class VerificationError(FiresteelError):
    """The exported drafter does not do what validation promised."""


class ResourceError(FiresteelError):
    """Not enough disk, memory or time, or an optional dependency is missing."""
