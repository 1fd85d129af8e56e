"""--cache_vision_features: what the frozen vision encoder makes of each image, computed before the first step."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
import transformers

from checkpointing.base_fingerprint import base_fingerprint
from data.cache_folder import cache_folder, not_kept
from data.images.opening import DECODING, ImageSource, import_pillow, open_image
from data.images.vision_features import (
    NUM_TOKENS,
    FeatureStore,
    blank_source,
    digest_of,
    pictures_of,
    stand_in,
)
from data.processors.processor_loading import blank_image
from data.processors.written_images import ImageWriter
from data.tokens.spans import BadExample
from policies.adapters.folder import find_saved_adapter
from policies.building import BuiltModel
from policies.sharding import reshard
from policies.vision_features import SeenImages, why_features_change
from policies.weights.fingerprint import fingerprint_files
from ranks.collectives import gather_to_all
from ranks.environment import Environment, print_rank_zero
from resolving.inputs import Inputs
from tasks.image_batches import stacked
from utils.errors import ConfigError
from utils.progress import say_if_it_lasts
from utils.units import GIB
from utils.wording import plural

_TRIED = ((96, 64), (64, 160))  # pixels of two images, as wide and high
_SAMPLES_OF_ROUND = 64  # whose pictures' bytes are in memory together


def with_vision_features(built: BuiltModel, inputs: Inputs, env: Environment) -> Inputs:
    """The inputs with the features of all images, computed where they are not kept yet. Every rank must call this.

    The ranks of a machine share its images, so a folder of one machine alone serves, too.

    Raises:
        ConfigError: if the encoder is trained or random, its family depends on the images beside one, or the folder
            cannot be written.
    """
    if not inputs.resolved.config.train_config.cache_vision_features:
        return inputs
    seen = SeenImages(built.model, built.empty.model)
    if (reason := why_features_change(seen.encoder)) is not None:
        raise ConfigError(f"--cache_vision_features: {reason}")
    finder = _Finder(seen, ImageWriter.of(inputs.processor), env)
    finder.try_two()
    store = FeatureStore(cache_folder() / "finetuning-vision-features" / _key(seen, built, inputs, env))
    began, tried = time.monotonic(), say_if_it_lasts("computing vision features")
    if env.local_rank == 0:
        store.remove_stale()
    num_images, num_made = fill(finder, store, [inputs.data.train, inputs.data.evaluation], env)
    tried()
    reshard(built.model)
    print_rank_zero(
        env,
        f"vision features of {plural(num_images, 'image')} and a blank one: {num_made:,} computed in "
        f"{time.monotonic() - began:.1f} s, {_size_gib(store, env):.2f} GiB in {store.folder}",
    )
    return replace(inputs, vision_features=store)


def _size_gib(store: FeatureStore, env: Environment) -> float:
    """What the folder holds; 0 on other ranks than the one that prints it, as there may be a million files."""
    files = store.folder.glob("*.safetensors") if env.rank == 0 else []
    return sum(file.stat().st_size for file in files) / GIB


def fill(finder: _Finder, store: FeatureStore, parts: Sequence[Any], env: Environment) -> tuple[int, int]:
    """Compute what is missing; how many images a machine's ranks found in their shares, and how many all computed.

    The ranks meet after each round: sharded layers are gathered by all, and a disk that is full stops all.
    """
    blank, seen, num_made = blank_source(blank_image()), set[str](), 0
    shares = pictures_of(parts, env.local_rank, env.local_world_size)
    more = chain([[blank]] if env.local_rank == 0 else [], shares)
    while any(gather_to_all(bool(round_ := [*islice(more, _SAMPLES_OF_ROUND)]))):
        missing = _missing(store, chain.from_iterable(round_), seen)
        refusal: ConfigError | None = None
        for place in range(max(gather_to_all(len(missing)))):
            picture = missing[place] if place < len(missing) else blank
            found = finder.inputs_of(picture)
            if place < len(missing) and found is not None and refusal is None:
                refusal = _write(store, picture, found)
                num_made += refusal is None
        if first := next(filter(None, gather_to_all(refusal)), None):
            raise first
    num_found = len(seen) - (env.local_rank == 0)  # without the blank one
    counts = gather_to_all((num_found, num_made))
    return sum(found for found, _ in counts[: env.local_world_size]), sum(made for _, made in counts)


def _missing(store: FeatureStore, pictures: Iterable[ImageSource], seen: set[str]) -> list[ImageSource]:
    """Those that have no file, each once.

    Args:
        seen: digests of pictures that were looked for before; these are added.
    """
    missing = []
    for picture in pictures:
        with suppress(BadExample):  # training meets it, too, and names its row
            digest = digest_of(picture)
            if digest not in seen and not store.has(digest):
                missing.append(picture)
            seen.add(digest)
    return missing


def _write(store: FeatureStore, picture: ImageSource, found: dict[str, torch.Tensor]) -> ConfigError | None:
    try:
        store.folder.mkdir(parents=True, exist_ok=True)
        store.write(picture, found)
    except OSError as error:
        return not_kept(error, "vision features") or ConfigError(f"--cache_vision_features: {error}")
    return None


class _Finder:
    """Computes the inputs of one image, with the encoder's outputs instead of pixels."""

    def __init__(self, seen: SeenImages, writer: ImageWriter, env: Environment) -> None:
        self._seen, self._writer, self._device = seen, writer, env.device

    def inputs_of(self, picture: ImageSource) -> dict[str, torch.Tensor] | None:
        """None if the image cannot be read, or is refused by the processor: then a blank one is seen."""
        try:
            pixels, num_tokens = self._writer.pixel_inputs([open_image(picture)])
        except Exception:  # training meets it, too, and names its row
            self._outputs(self._writer.pixel_inputs([blank_image()])[0])
            return None
        outputs = self._seen.stored(self._outputs(pixels))
        plain = {name: stand_in(value) if name == "pixel_values" else value for name, value in pixels.items()}
        return plain | outputs | {NUM_TOKENS: torch.tensor(num_tokens)}

    def try_two(self) -> None:
        """Find how outputs of pictures follow each other, and that they do not depend on each other.

        Raises:
            ConfigError: if they do.
        """
        images = [_shaded(size) for size in _TRIED]
        alone = [self._writer.pixel_inputs([image])[0] for image in images]
        both, _ = self._writer.pixel_inputs(images)
        for name, value in both.items():
            joined = stacked([inputs[name] for inputs in alone])
            if joined.shape != value.shape or not torch.equal(joined, value):
                raise ConfigError(
                    f"--cache_vision_features: {type(self._writer.processor).__name__} makes another {name} of images "
                    "that are in one sample than of each alone; leave it out"
                )
        self._seen.learn_layout(*map(self._outputs, (*alone, both)))

    def _outputs(self, pixels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._seen.outputs_of({name: value.to(self._device) for name, value in pixels.items()})


def _shaded(size: tuple[int, int]) -> Any:
    """An image whose parts differ."""
    return import_pillow().linear_gradient("L").resize(size).convert("RGB")


def _key(seen: SeenImages, built: BuiltModel, inputs: Inputs, env: Environment) -> str:
    """A digest of all that features follow from besides the picture."""
    config, precision = inputs.resolved.config.train_config, inputs.resolved.policies.precision
    encoder: Any = seen.encoder
    # An adapter of an earlier run may be in the encoder, too, and frozen with it.
    adapter = config.from_peft_checkpoint and fingerprint_files(
        [path for path in find_saved_adapter(config.from_peft_checkpoint).iterdir() if path.is_file()]
    )
    facts = [
        *(config.model_name if config.random_weights else "", base_fingerprint(built.model, config), adapter),
        *(encoder.config.to_json_string(), encoder.config._attn_implementation, str(precision.compute_dtype)),
        *(ImageWriter.of(inputs.processor).cache_key(), str(env.device_facts)),
        *(config.compile, inputs.resolved.policies.vision_as_written),
        *(torch.__version__, transformers.__version__, import_pillow().__version__, DECODING),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
