"""What a frozen vision encoder made of each picture, kept on disk: `--cache_vision_features`.

A file holds the model's inputs of one picture, with the encoder's output instead of pixels. Its name is a digest of the
picture's bytes, its folder one of all else that the output follows from. So runs may share the files and write them at
the same time: each is written whole, and two of one name are equal.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from data.images.opening import ImageSource, open_image, source_bytes
from data.tokens.spans import BadExample
from utils.atomic_write import write_atomically

PREFIX = "vision_features."
"""Of the names of the encoder's outputs among a batch's inputs."""

NUM_TOKENS = "num_tokens"  # how many tokens of the text stand for the picture
_STALE_SECONDS = 86_400.0  # no write takes as long, and no disk's clock is as far from this machine's
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class FeatureStore:
    """The files of one vision encoder, processor and precision."""

    folder: Path

    def has(self, digest: str) -> bool:
        """Whether the file of a picture with this digest is there, as long as its header says: a machine that crashed
        may leave a part of one."""
        try:
            with safe_open(self._file(digest), "pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def remove_stale(self) -> None:
        """Remove files that a killed run was writing. Those of the last day stay: a live run may write them."""
        for half in self.folder.glob("*.tmp"):
            with suppress(OSError):  # another run has removed it, or the folder is another user's
                if time.time() - half.stat().st_mtime > _STALE_SECONDS:
                    half.unlink()

    def write(self, source: ImageSource, inputs: Mapping[str, torch.Tensor]) -> None:
        """
        Raises:
            OSError: if the disk or the folder refuses.
        """
        plain = {name: value.detach().cpu().contiguous() for name, value in inputs.items()}
        write_atomically(self._file(digest_of(source)), save(plain))

    def read(self, source: ImageSource) -> dict[str, torch.Tensor]:
        """The model's inputs of a picture, as `write` got them. Outputs are integers with their bits: batches travel as
        NumPy arrays, which have no bf16, and nothing casts integers.

        Raises:
            BadExample: if the picture cannot be read, or its file is not there or broken.
        """
        try:
            found = load_file(self._file(digest_of(source)))
        except (OSError, SafetensorError) as error:
            open_image(source)  # which says what is wrong with it
            raise BadExample(
                f"its vision features are not in {self.folder}; start the run again, which computes them"
            ) from error
        return {name: as_bits(value) if name.startswith(PREFIX) else value for name, value in found.items()}

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.safetensors"


def digest_of(source: ImageSource) -> str:
    """What a picture's file is called, by its bytes.

    Raises:
        BadExample: if they cannot be read.
    """
    return hashlib.sha256(source_bytes(source)).hexdigest()


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return values.view(_BITS[values.element_size()])


def stand_in(pixels: torch.Tensor) -> torch.Tensor:
    """A tensor as long as an input of pixels, whose numbers only say whether there is a picture: tiles of zeros, which
    fill up, are left out by their families.

    Args:
        pixels: [..., channels, height, width], or [patches, numbers].

    Returns:
        [..., 1, 1, 1], or [patches, 1].
    """
    dims = (-3, -2, -1) if pixels.dim() > 3 else (-1,)
    return (pixels != 0).float().amax(dim=dims, keepdim=True)


def pictures_of(parts: Sequence[Any], share: int, num_shares: int) -> Iterator[Sequence[ImageSource]]:
    """The pictures of each sample of a share. Neighbours are of one share: they may be of one conversation. Pictures
    that a dataset holds are read when they are asked for, since those of all samples may not fit into memory.

    Args:
        parts: `data.images.samples.ImageSamples`, or None.
    """
    for samples in filter(None, parts):
        first, last = (len(samples) * place // num_shares for place in (share, share + 1))
        for index in range(first, last):
            try:
                yield samples[index].image_sources()
            except BadExample:
                yield []  # training meets it, too, and names its row


def blank_source(image: Any) -> bytes:
    """A picture as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()
