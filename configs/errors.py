"""The one error a user's settings can cause."""


class ConfigError(Exception):
    """A run refused before it starts. The message is one line: the flag, the reason, the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))
