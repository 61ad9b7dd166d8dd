"""Errors and warnings, with the messages of the command line."""

from __future__ import annotations

from typing import Any


class NarrowsError(Exception):
    """A command that did not succeed: what is wrong, where, why, and what to try."""

    exit_code: int

    def __init__(self, message: str, exit_code: int) -> None:
        # Python's help is help().
        super().__init__(message.replace("For more information, try '--help'.", "").strip())
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        """Both arguments, so that errors pass through copies and pools of processes."""
        return type(self), (str(self), self.exit_code), vars(self)


class NoAnswer(NarrowsError):
    """No plan exists, a check failed, or a decision would be lost (exit code 1)."""


class InvalidInput(NarrowsError, ValueError):
    """A parameter or a file is invalid (exit code 2)."""


class EnvironmentFailure(NarrowsError):
    """The environment failed, as a full disk does: the same call may succeed later (exit code 75)."""


class NarrowsWarning(UserWarning):
    """A warning of a command that succeeds."""


def error(message: str, exit_code: int) -> NarrowsError:
    """The error of an exit code."""
    classes = {1: NoAnswer, 2: InvalidInput, 75: EnvironmentFailure}
    return classes.get(exit_code, NarrowsError)(message, exit_code)
