"""The errors that end a run with one line, and the text of a library's error in one line."""


class RunError(Exception):
    """Ends a run with one line.

    Args:
        details: lines to print below it, such as where in a user's file it happened.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class ConfigError(RunError):
    """A run refused before it starts. The message is one line: the flag, the reason, the remedy."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(" ".join(message.splitlines()), details)


class TrainingError(RunError):
    """Training cannot go on. Raised on every rank; the message is all that the user needs."""


def shown(value: str) -> str:
    """A value as a message quotes it: in quotes, its middle left out if it is long."""
    if len(value) <= 200:
        return repr(value)
    return f"{value[:100]!r}...{value[-50:]!r} ({len(value):,} characters)"


def in_one_line(error: BaseException) -> str:
    """The first 300 characters of a library's error, without line breaks."""
    return " ".join(str(error).split())[:300]
