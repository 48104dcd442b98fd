"""The errors shoal raises beyond Python's own.

A user's mistake is a ``ValueError`` or ``TypeError`` (or one of the children here that is both), and
its text names the value, the rule and the fix. Whatever reaches the command line ends as one line
and the exit status stored on the class.
"""

from __future__ import annotations


class ShoalError(Exception):
    """Base of shoal's own errors; ``exit_code`` is what a command or worker exits with."""

    exit_code: int = 1


class UsageError(ShoalError, ValueError):
    """A setting, argument or directory that cannot be used as given; nothing was written."""

    exit_code = 2


class DivergedError(ShoalError):
    """The loss or the gradient became non-finite; all workers stopped at the same step."""

    exit_code = 1


class ResumableStop(ShoalError):
    """The run stopped in order and can be resumed with the same command and ``--resume``."""

    exit_code = 75


class ExchangeFailed(ShoalError):
    """A peer was lost during an exchange; the step is not committed and its samples are drawn again."""
