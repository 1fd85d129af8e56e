"""The two errors that end a run with one line, and another library's error in one line."""


class ConfigError(Exception):
    """A run refused before it starts. The message is one line: the flag, the reason, the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class TrainingError(Exception):
    """Training cannot go on; the message is all that the user needs. Raised on every rank."""


def in_one_line(error: BaseException) -> str:
    """A library's words, which may be many: the first 300 characters of them."""
    return " ".join(str(error).split())[:300]
