"""The errors that end a run with one line, and the text of a library's error in one line."""

from collections.abc import Iterator

_HEAD_CHARACTERS, _TAIL_CHARACTERS = 2000, 500


class RunError(Exception):
    """Ends a run with one line.

    Args:
        details: lines to print below it, such as where in a user's file it happened.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details

    def parts(self) -> Iterator[str]:
        """The texts that one rank prints: the line first, then whatever takes longer to find out."""
        yield "\n".join(filter(None, (str(self), self.details)))


class ConfigError(RunError):
    """Refuses a run before it starts. The message is one line: the flag, the reason, the remedy.

    The middle of a very long message is left out; it quotes a very long value.
    """

    def __init__(self, message: str, details: str = "") -> None:
        line = " ".join(message.splitlines())
        if (num_left_out := len(line) - _HEAD_CHARACTERS - _TAIL_CHARACTERS) > 0:
            line = f"{line[:_HEAD_CHARACTERS]} [... {num_left_out:,} characters ...] {line[-_TAIL_CHARACTERS:]}"
        super().__init__(line, details)


class TrainingError(RunError):
    """Training cannot go on. Raised on every rank; the message is enough for the user."""


def in_one_line(error: BaseException | str) -> str:
    """The first 300 characters of a library's error, or of a part of it, without line breaks."""
    return " ".join(str(error).split())[:300]
