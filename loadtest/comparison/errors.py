"""What ends a comparison.

ComparisonError
├── BadDeployment      a deploy.yaml or a policy that cannot be started: what `python -m deploy check` says
├── DeploymentFailed   a server that did not start: the end of its log
├── NoAnswers          a run without one whole answer: what the server said instead
└── BrokenAnswers      runs with answers that were not whole: how many, and what became of them
"""

from __future__ import annotations


class ComparisonError(Exception):
    """The message says what is wrong."""


class BadDeployment(ComparisonError):
    pass


class DeploymentFailed(ComparisonError):
    def __init__(self, label: str, log_tail: str) -> None:
        self.label = label
        super().__init__(f"{label} did not start; the end of its log:\n{log_tail}")


class NoAnswers(ComparisonError):
    def __init__(self, what: str, num_due: int, problem: str) -> None:
        super().__init__(f"{what}: none of {num_due} requests got a whole answer. {problem}")


class BrokenAnswers(ComparisonError):
    def __init__(self, num_broken: int, num_due: int, problem: str) -> None:
        super().__init__(f"{num_broken} of {num_due} answers were not whole. {problem}")
