"""URLs: refused where a path is wanted, and printed without their secrets."""

from __future__ import annotations

import re

from utils.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one slash: pathlib joins two
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s/'\"]*)@")
_PARAMETER = re.compile(
    r"([?&][\w.-]*(?:token|signature|sig|password|passwd|pwd|secret|key|credential)[\w.-]*=)[^\s&'\"#]+", re.IGNORECASE
)
_MASK = "***"


def is_url(path: str) -> bool:
    """Whether a path is meant as a URL, such as s3://bucket/run."""
    return _URL.match(path) is not None


def refuse_url(flag: str, path: str) -> None:
    """Refuse a URL as the place of files that are written. It would become a local folder of that name.

    Raises:
        ConfigError: naming the flag.
    """
    if is_url(path):
        raise ConfigError(
            f"{flag}: {path} is a URL, and only folders of this machine are written; give a folder, a mounted one say, "
            "or copy its files there afterwards"
        )


def without_secrets(text: str) -> str:
    """The text with the passwords, tokens and keys in its URLs masked."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(rf"\1{_MASK}", _USER.sub(_masked_user, text))


def _masked_user(found: re.Match[str]) -> str:
    """`user:***@`. A lone name may be a token where http takes one, and is a user's elsewhere (ssh://git@host)."""
    scheme, user = found.groups()
    name, colon, _ = user.partition(":")
    if colon:
        return f"{scheme}{name}:{_MASK}@"
    return f"{scheme}{_MASK}@" if scheme.lower().startswith("http") else found.group()
