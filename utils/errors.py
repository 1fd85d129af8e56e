"""The two errors that end a run with one line, and the text of a library's error in one line."""


class ConfigError(Exception):
    """A run refused before it starts. The message is one line: the flag, the reason, the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class TrainingError(Exception):
    """Training cannot go on. Raised on every rank; the message is all that the user needs."""


def in_one_line(error: BaseException) -> str:
    """The first 300 characters of a library's error, without line breaks."""
    return " ".join(str(error).split())[:300]
