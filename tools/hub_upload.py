"""Uploads a folder in Hugging Face format to the hub, after saying what; again, it goes on where it stopped.

Nothing is deleted there, and what others wrote around the run's text in README.md stays.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from reporting.card.card_file import CARD
from reporting.card.edits import renewed
from tools.serving.folder import ServedFolder
from utils.errors import ConfigError, TrainingError, in_one_line
from utils.progress import shows_bars
from utils.units import readable
from utils.wording import plural

FLAG = "--push_to_hub"


@dataclass(frozen=True)
class Place:
    """A repository on the hub, which may not be there yet."""

    api: HfApi
    name: str  # OWNER/NAME
    is_new: bool
    files: tuple[str, ...]  # that are there
    private: bool


def find_place(name: str, *, public: bool) -> Place:
    """Ask the hub who this is and whether the repository is there; nothing is changed.

    Raises:
        ConfigError: without a token or a connection, for a name that cannot be one, or if private weights would become
            public.
    """
    api = HfApi()
    try:
        owner = api.whoami()["name"]
        name = name if "/" in name else f"{owner}/{name}"
        huggingface_hub.utils.validate_repo_id(name)
        try:
            found = api.model_info(name)
        except RepositoryNotFoundError:
            return Place(api, name, is_new=True, files=(), private=not public)
    except Exception as error:
        raise ConfigError(f"{FLAG}: {_reason(error, api, name)}") from error
    files = tuple(file.rfilename for file in found.siblings or [])
    if not found.private and not public:
        raise ConfigError(f"{FLAG}: {name} is there and public; give --public to upload to it, or another name")
    return Place(api, name, is_new=False, files=files, private=bool(found.private))


def upload(folder: ServedFolder, place: Place, say: Callable[[str], object]) -> None:
    """Say what is uploaded, and upload it, in one commit.

    Raises:
        ConfigError: if others could not load the folder.
        TrainingError: if the upload failed; the command that goes on with it.
    """
    if folder.is_adapter:
        check_for_others(folder.base)
    files = sorted(path for path in folder.path.iterdir() if _belongs(path))
    left_out = sorted(path.name for path in folder.path.iterdir() if not _belongs(path))
    sizes = {path.name: path.stat().st_size for path in files}
    what = f"{plural(len(files), 'file')}, {readable(sum(sizes.values()))}"
    kind = f"{'private' if place.private else 'public'}, {'new' if place.is_new else 'there already'}"
    say(f"to {place.api.endpoint}/{place.name} ({kind}): {what} of {folder.path}")
    for name, size in sizes.items():
        say(f"  {name} {readable(size) if size >= 2**20 else f'{size:,} bytes'}")
    if left_out:
        say(f"  not uploaded: {', '.join(left_out)} (folders, links and hidden files)")
    if others := sorted(name for name in place.files if name.endswith((".safetensors", ".bin")) and name not in sizes):
        say(f"  there and not in this folder: {', '.join(others)}; delete them there if they are an earlier upload's")
    if not shows_bars():
        huggingface_hub.utils.disable_progress_bars()
    try:
        if place.is_new:
            place.api.create_repo(place.name, private=place.private, exist_ok=True)
        added = [CommitOperationAdd(path.name, str(path)) for path in files if path.name != CARD]
        if (folder.path / CARD).is_file():
            added.append(CommitOperationAdd(CARD, _card(folder.path, place).encode()))
        place.api.create_commit(place.name, added, commit_message=f"Upload {folder.path.absolute().name}")
    except Exception as error:
        again = f"python -m tools.export {shlex.quote(str(folder.path))} {FLAG} {place.name}"
        again += "" if place.private else " --public"
        raise TrainingError(
            f"{FLAG}: {_reason(error, place.api, place.name)}; nothing is changed there, and what has arrived is not "
            f"sent again by: {again}"
        ) from error
    say(f"uploaded: {place.api.endpoint}/{place.name}")


def check_for_others(base: str) -> None:
    """Refuse an adapter whose base is a folder of this machine: nobody else finds it, and the path would be told.

    Raises:
        ConfigError: with the remedy.
    """
    if Path(base).expanduser().is_dir() or base.startswith(("/", ".", "~")):
        raise ConfigError(
            f"{FLAG}: the adapter names its base model by a path of this machine ({base}), where nobody else finds it; "
            "export it with --to DIR --base OWNER/NAME, the base's name on the hub, or with --merge"
        )


def _belongs(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and not path.name.startswith(".")


def _card(folder: Path, place: Place) -> str:
    """README.md: that of the hub with this one's text of the run, if there is one already."""
    own = (folder / CARD).read_text(encoding="utf-8")
    if CARD not in place.files:
        return own
    with tempfile.TemporaryDirectory() as temporary:
        there = place.api.hf_hub_download(place.name, CARD, local_dir=temporary)
        return renewed(own, Path(there).read_text(encoding="utf-8"))


def _reason(error: Exception, api: HfApi, name: str) -> str:
    """An error of the hub's library and its remedy, in one line, without the token."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token for the hub; `hf auth login` or the variable HF_TOKEN gives one"
    if isinstance(error, HFValidationError):
        return f"{name!r} is no name on the hub; give NAME or OWNER/NAME, of letters, digits, '-', '_' and '.'"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so the hub is not asked; unset it"
    if status == 401:
        return "the hub does not take the token; `hf auth login` or the variable HF_TOKEN gives another"
    if status == 403:
        return f"the token may not write to {name}; give a token with the right to write, or another name"
    token = huggingface_hub.get_token()
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # the library wraps some
    reason = f"{type(cause).__name__}: {in_one_line(cause)}"
    reason = reason.replace(token, "***") if token else reason
    return f"{api.endpoint} did not take it ({reason})"
