"""What ends a comparison.

ComparisonError
├── BadDeployment      a deploy.yaml or a policy that cannot be started: what `python -m deploy check` says
├── DeploymentFailed   a server that did not start, or not in time: the end of its log
│   └── MachineBusy    because Ray was not up in its own time: it may be the next time
├── NoAnswers          a run without one whole answer: what the server said instead
└── BrokenAnswers      runs with answers that were not whole: how many, and what became of them
"""

from __future__ import annotations

from cache.counted import counted


class ComparisonError(Exception):
    """The message says what is wrong."""


class BadDeployment(ComparisonError):
    pass


class DeploymentFailed(ComparisonError):
    def __init__(self, label: str, log_tail: str, limit_s: float | None = None) -> None:
        """limit_s: it was still starting when these were over."""
        self.label = label
        what = "did not start" if limit_s is None else f"was not ready within {limit_s:g} s (--start-limit)"
        super().__init__(f"{label} {what}; the end of its log:\n{log_tail}")


class MachineBusy(DeploymentFailed):
    pass


class NoAnswers(ComparisonError):
    def __init__(self, what: str, num_due: int, problem: str) -> None:
        super().__init__(f"{what}: none of {counted(num_due, 'request')} got a whole answer. {problem}")


class BrokenAnswers(ComparisonError):
    def __init__(self, num_broken: int, num_due: int, problem: str) -> None:
        super().__init__(f"{num_broken} of {counted(num_due, 'answer')} not whole. {problem}")
