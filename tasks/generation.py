"""Generation, as all tasks share it: settings, the prompt of a sample, and the call of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from data.tokens.labels import IGNORE_INDEX
from utils.cudnn_attention import without_cudnn
from utils.errors import ConfigError
from utils.positions import positions_of
from utils.wording import plural

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

    from data.tokens.special_text import SpecialTokens
    from tasks.listening import Listener


@dataclass(frozen=True)
class GenerationSettings:
    """How the texts of an evaluation are generated. Everything else is as the model's generation_config.json says."""

    num_beams: int  # 1: greedy
    max_new_tokens: int
    padding_id: int  # in the unused positions of a batch
    end_ids: tuple[int, ...]  # tokens that end an answer, besides those of generation_config.json
    temperature: float = 0.0  # 0: nothing is drawn
    top_p: float = 1.0  # draw among the likeliest tokens that have this probability together


@dataclass(frozen=True)
class AnswerSettings:
    """How one prompt of a person is answered.

    Attributes:
        temperature: 0 takes the likeliest token each time; above, torch's random state decides.
        add_bos: put the processor's first token before the prompt, as training does except under a chat template. Only
            causal models ask; other processors know what belongs around a prompt.
        more_end_ids: tokens that end the answer, besides the processor's and the model's; of causal models.
        image: given if the task READS_IMAGES, and only then.
        may_be_shorter: take fewer than `max_new_tokens` if the model has not so many positions left; of causal models.
        special: the processor's special tokens, if the prompt may hold stand-ins for them; of models of text.
        listener: hears the answer while it is written; of models of text.
    """

    max_new_tokens: int
    temperature: float = 0.0
    add_bos: bool = True
    more_end_ids: Sequence[int] = ()
    image: Path | None = None
    may_be_shorter: bool = False
    special: SpecialTokens | None = None
    listener: Listener | None = None


class GeneratedAnswer(NamedTuple):
    """The model's answer to one prompt."""

    text: str
    is_cut: bool  # it has as many tokens as were asked for, and none that ends it


class GeneratingModel(Protocol):
    """A transformers model that generates text."""

    config: PreTrainedConfig
    generation_config: GenerationConfig

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def generate(self, **kwargs: Any) -> torch.Tensor: ...


class PromptedAnswer(NamedTuple):
    """A prompt, and the reference answer that generated text is compared with."""

    prompt: np.ndarray  # int32 [tokens]
    answer: np.ndarray  # int32 [tokens], at least one
    num_positions: int  # of the decoder that are taken before the first new token


def last_answer(labels: np.ndarray) -> slice:
    """The last run of label tokens, empty if there is none."""
    places = np.flatnonzero(labels != IGNORE_INDEX)
    if not len(places):
        return slice(0, 0)
    breaks = np.flatnonzero(np.diff(places) > 1)
    return slice(int(places[breaks[-1] + 1] if len(breaks) else places[0]), int(places[-1]) + 1)


def sampling(temperature: float, top_p: float = 1.0) -> dict[str, Any]:
    """The arguments of `model.generate` for a temperature.

    Args:
        temperature: 0 takes the likeliest token each time; above, torch's random state decides.
        top_p: draw among the likeliest tokens that have this probability together.
    """
    if temperature <= 0:
        return {"do_sample": False}
    # Without the cuts of generation_config.json.
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}


def check_positions(positions: int | None, num_taken: int, max_new_tokens: int) -> None:
    """Refuse an answer that could be longer than the model has positions for.

    Args:
        positions: of the decoder; None if it has no limit.
        num_taken: those before the answer.

    Raises:
        ConfigError: with what would fit.
    """
    if positions is None or num_taken + max_new_tokens <= positions:
        return
    room = positions - num_taken
    raise ConfigError(
        f"--max_new_tokens: {max_new_tokens:,} after the {plural(num_taken, 'token')} before the answer are more than "
        f"the {positions:,} positions of this model; give {f'at most {room:,}' if room > 0 else 'a shorter prompt'}"
    )


def num_new_tokens(positions: int | None, num_taken: int, settings: AnswerSettings) -> int:
    """The tokens that an answer may have.

    Args:
        positions, num_taken: as in `check_positions`.

    Raises:
        ConfigError: if the model has no positions for them.
    """
    room = settings.max_new_tokens if positions is None else positions - num_taken
    if settings.may_be_shorter and room > 0:
        return min(settings.max_new_tokens, room)
    check_positions(positions, num_taken, settings.max_new_tokens)
    return settings.max_new_tokens


def decoder_positions(model_config: PreTrainedConfig) -> int | None:
    """Tokens that a model's decoder has positions for; None if it has no limit."""
    return positions_of(model_config.get_text_config(decoder=True))


def own_end_ids(model: GeneratingModel) -> list[int]:
    """The tokens at which generation stops by the model's generation_config.json."""
    end_ids = model.generation_config.eos_token_id
    return end_ids if isinstance(end_ids, list) else [end_ids] if end_ids is not None else []


def answer_of(
    processor: Any, new_tokens: torch.Tensor, max_new_tokens: int, end_ids: Collection[int]
) -> GeneratedAnswer:
    """The answer whose tokens are these, int64 [tokens]."""
    is_cut = len(new_tokens) >= max_new_tokens and int(new_tokens[-1]) not in end_ids
    return GeneratedAnswer(processor.decode(new_tokens, skip_special_tokens=True).strip(), is_cut)


@without_cudnn()
def generate_tokens(
    model: GeneratingModel, inputs: Mapping[str, torch.Tensor], settings: GenerationSettings, *, in_step: bool
) -> torch.Tensor:
    """The tokens of `model.generate`, int64 [batch, tokens]: those of the decoder's input, then new ones.

    It draws random numbers at a temperature above 0.

    Args:
        in_step: call the model as often as every other rank does, until the last of them has finished.
    """
    return model.generate(
        **inputs,
        num_beams=settings.num_beams,
        max_new_tokens=settings.max_new_tokens,
        **sampling(settings.temperature, settings.top_p),
        # Given ids replace the model's own, so these are passed on with them.
        eos_token_id=sorted({*settings.end_ids, *own_end_ids(model)}),
        pad_token_id=settings.padding_id,
        # Sharded weights are gathered in every call, so a rank that stopped earlier would leave the others waiting.
        synced_gpus=in_step,
    )
