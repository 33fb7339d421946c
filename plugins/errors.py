"""Errors for people: one line that says what, where and what to do next.

Every layer raises these; the command line turns one into its message and exit code, Triton's models into a
message that starts with the code word in brackets. An `assert` is for our own invariants only.
"""

from typing import ClassVar


class ForgeError(Exception):
    """Base of all errors that a person is meant to read. The message is one line."""

    exit_code: ClassVar[int] = 1
    code_word: ClassVar[str] = "INTERNAL"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__

    def wire_message(self) -> str:
        """The message as clients of a server see it: `[CODE_WORD] text`."""
        return f"[{self.code_word}] {self}"


class InvalidArgument(ForgeError):
    """The caller's fault: a bad option, request or parameter."""

    code_word = "INVALID_ARG"


class CheckpointError(InvalidArgument):
    """A checkpoint that is damaged, incomplete, hostile or inconsistent."""


class UnsupportedModel(InvalidArgument):
    """A model, format or combination that trtforge does not do."""


class EngineFormatError(InvalidArgument):
    """An engine directory that is not whole, was changed, or needs another version."""


class RepositoryError(InvalidArgument):
    """A Triton model repository that cannot be served as it is."""


class EnvironmentProblem(ForgeError):
    """Something of this machine is missing or wrong: interpreter, library, port, shared memory."""


class EngineFailure(ForgeError):
    """The engine failed while it ran; our fault."""


class Overloaded(ForgeError):
    """The bounded queue is full; the request may be sent again after `retry_after_ms`."""

    code_word = "OVERLOADED"

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms

    def wire_message(self) -> str:
        return f"[{self.code_word}] retry_after_ms={self.retry_after_ms} {self}"


class Cancelled(ForgeError):
    """The client went away or asked to stop before there was anything to answer."""

    code_word = "CANCELLED"


class DeadlineExceeded(ForgeError):
    """The request's own deadline passed."""

    code_word = "DEADLINE"
