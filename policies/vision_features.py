"""A frozen vision encoder whose outputs are given with the batch, or computed once and kept.

The cut is at the encoder's own call. A projector after it is computed and may be trained, whatever the family; which of
the encoder's outputs the model reads is seen when it reads them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel

from data.images.vision_features import PREFIX
from utils.errors import ConfigError
from utils.model_parts import vision_part

Outputs = dict[str, torch.Tensor]
"""By the name of a field, or a field and the place in it: "pooler_output", "hidden_states.-2"."""


class SeenImages:
    """Stands around the vision encoder of a model.

    Args:
        model: whole: sharded, with adapters.
        base: transformers' model in it.
    """

    def __init__(self, model: nn.Module, base: PreTrainedModel) -> None:
        (self.encoder,) = vision_part(base)
        self._model, self._written = model, self.encoder.forward
        self._given: Outputs | None = None  # of the batch that the model is called with
        self._read: Outputs | None = None  # of a call that is watched
        self._dims: dict[str, int] = {}  # along which pictures follow each other
        self._dtypes: dict[str, torch.dtype] = {}
        self.encoder.forward = self._forward
        base.register_forward_pre_hook(self._take, with_kwargs=True)
        whole: Any = model

        def see(_: nn.Module, **inputs: torch.Tensor) -> None:
            _see(base, inputs)

        whole.see_images = MethodType(see, model)
        if isinstance(model, FSDPModule):  # weights outside the layers are gathered around it
            register_fsdp_forward_method(model, "see_images")

    @torch.no_grad()
    def outputs_of(self, inputs: Mapping[str, torch.Tensor]) -> Outputs:
        """The encoder's outputs that the model reads, for some pictures. Every rank must call this.

        Args:
            inputs: of the model, on its device, without text.
        """
        self._read = {}
        try:
            whole: Any = self._model
            whole.see_images(**inputs)
            return self._read
        finally:
            self._read = None

    def learn_layout(self, first: Outputs, second: Outputs, both: Outputs) -> None:
        """Find along which dimension the outputs of two pictures follow each other in those of both.

        Raises:
            ConfigError: if they do not, or a picture's depend on the other.
        """
        for name, together in both.items():
            one, other = first.get(name), second.get(name)
            dim = None if one is None or other is None else _joint(one, other, together)
            if one is None or other is None or dim is None:
                raise ConfigError(
                    f"--cache_vision_features: {name} of {type(self.encoder).__name__} for two images is not that of "
                    "one and that of the other; leave it out"
                )
            self._dims[name], self._dtypes[name] = dim, together.dtype

    def stored(self, outputs: Outputs) -> Outputs:
        """Outputs of a picture as they are kept: pictures follow each other along the first dimension."""
        return {PREFIX + name: value.movedim(self._dims[name], 0) for name, value in outputs.items()}

    def _take(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = {name: kwargs[name] for name in kwargs if name.startswith(PREFIX)}
        named = {name.removeprefix(PREFIX): bits for name, bits in given.items()}
        restored = {name: bits.view(self._dtypes[name]).movedim(0, self._dims[name]) for name, bits in named.items()}
        self._given = restored or None
        return args, {name: value for name, value in kwargs.items() if name not in given}

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        given, self._given = self._given, None  # generation calls the encoder before the model: not for this batch
        if given is not None:
            return _Given(given)
        output = self._written(*args, **kwargs)
        return output if self._read is None else _Watched(output, self._read)


@contextmanager
def features_given(base: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside this context the vision encoder answers with its outputs for these inputs, computed now. For plans."""
    (encoder,) = vision_part(base)
    written, found = encoder.forward, list[Any]()

    def note(*args: Any, **kwargs: Any) -> Any:
        output = written(*args, **kwargs)
        found.append(copy.copy(output))  # the model puts features into it
        return output

    try:
        encoder.forward = note
        with torch.no_grad():
            _see(base, inputs)
        encoder.forward = lambda *args, **kwargs: copy.copy(found[0])
        yield
    finally:
        del encoder.forward


def _see(base: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> None:
    """Compute the features of the images among a model's inputs."""
    inner: Any = base.base_model
    taken = inspect.signature(inner.get_image_features).parameters
    inner.get_image_features(**{name: value for name, value in inputs.items() if name in taken})


def why_features_change(encoder: nn.Module) -> str | None:
    """Why this encoder's outputs are not the same in each step, as a clause with a remedy; None if they are."""
    if any(parameter.requires_grad for parameter in encoder.parameters()):
        return "the vision encoder, or an adapter in it, is trained, so its features change; give --freeze_vision"
    for module in encoder.modules():
        own = [vars(module).get(name) for name in ("p", "dropout", "attention_dropout", "drop_path_rate")]
        if any(isinstance(value, float) and value > 0 for value in own):
            return f"the vision encoder has dropout ({type(module).__name__}), so its features change; leave it out"
    return None


def _joint(one: torch.Tensor, other: torch.Tensor, together: torch.Tensor) -> int | None:
    """The dimension along which two tensors make up a third, up to roundings."""
    for dim in range(together.dim()):
        shapes = [[*tensor.shape[:dim], *tensor.shape[dim + 1 :]] for tensor in (one, other, together)]
        if shapes[0] == shapes[1] == shapes[2] and one.shape[dim] + other.shape[dim] == together.shape[dim]:
            joined = torch.cat([one, other], dim).float()
            apart = torch.linalg.vector_norm(joined - together.float())
            # Sums of another order: some hundred roundings in deep encoders, and nothing like another picture.
            share = min(0.1, 256 * torch.finfo(together.dtype).eps)
            return dim if apart <= share * torch.linalg.vector_norm(joined) else None
    return None


class _Watched:
    """An encoder's output that notes which of its tensors are read."""

    def __init__(self, output: Any, read: Outputs) -> None:
        vars(self).update(_output=output, _noted=read)

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["_output"], name)
        if isinstance(value, torch.Tensor):
            self._noted[name] = value
        return _WatchedList(value, name, self._noted) if isinstance(value, (tuple, list)) else value


class _WatchedList:
    """The same of a field that is a list."""

    def __init__(self, values: Any, name: str, read: Outputs) -> None:
        self._values, self._name, self._noted = values, name, read

    def __getitem__(self, place: int) -> Any:
        self._noted[f"{self._name}.{place}"] = self._values[place]
        return self._values[place]

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self._values)))

    def __len__(self) -> int:
        return len(self._values)


class _Given:
    """An encoder's output made of those tensors."""

    def __init__(self, outputs: Outputs) -> None:
        lists: dict[str, dict[int, torch.Tensor]] = {}
        for name, value in outputs.items():
            field, is_list, place = name.partition(".")
            if is_list:
                lists.setdefault(field, {})[int(place)] = value
            else:
                setattr(self, field, value)
        for field, values in lists.items():
            setattr(self, field, _GivenList(values))


class _GivenList:
    def __init__(self, values: dict[int, torch.Tensor]) -> None:
        self._values = values

    def __getitem__(self, place: int) -> torch.Tensor:
        return self._values[place]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([self._values[place] for place in sorted(self._values)])

    def __len__(self) -> int:
        return len(self._values)
