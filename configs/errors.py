"""The one error a user's settings can cause, and what a library's error says of it."""


class ConfigError(Exception):
    """A run refused before it starts. The message is one line: the flag, the reason, the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def in_one_line(error: BaseException) -> str:
    """A library's words, which may be many: the first 300 characters of them."""
    return " ".join(str(error).split())[:300]
