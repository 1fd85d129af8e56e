"""Where a model's values come from: files of which each rank reads its slices, rank 0 that reads all, or a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from policies.quantization.packing import PackedWeight
from policies.weights.expert_files import StoredExperts
from policies.weights.stored import Stored
from policies.weights.tensor_names import plain_name
from ranks.collectives import on_rank_zero
from utils.compat import return_free_memory
from utils.errors import ConfigError
from utils.parameters import packed_weights
from utils.progress import progress_bar
from utils.wording import plural


@dataclass(frozen=True)
class Target:
    """A parameter or buffer that still needs its value."""

    tensor: torch.Tensor  # sharded or whole, as the layout keeps it
    packing: PackedWeight | None = None  # what packs the value, if the parameter is packed

    @property
    def shape(self) -> torch.Size:
        """The shape of the value, whole and not packed."""
        return self.tensor.shape if self.packing is None else self.packing.plain_shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the value is rounded to, before it may be packed."""
        return self.tensor.dtype if self.packing is None else self.packing.quantization.compute_dtype

    def check(self, whole: torch.Tensor, name: str) -> None:
        """Refuse a weight to be packed that is not finite, because packing would hide it.

        Raises:
            ConfigError: it names the weight.
        """
        if self.packing is None or not whole.numel():
            return
        # The extremes are NaN if a value is. `isfinite` of all would take as much memory again.
        if not torch.stack(whole.aminmax()).isfinite().all():
            raise ConfigError(
                f"--model_name: {name} holds NaN, infinity, or numbers too large for "
                f"{str(self.dtype).removeprefix('torch.')}, which quantizing would hide; get the model again, or give "
                "another"
            )

    def keep(self, whole: torch.Tensor) -> None:
        """Store this rank's part of the value. For a packed weight the value must be on the device that quantizes."""
        keep_part(self.tensor, whole if self.packing is None else self.packing.quantize(whole))
        if self.packing is not None and whole.device.type == "cpu":
            return_free_memory()  # else the freed tensors, of many sizes, leave gaps that stay


class Weights(Protocol):
    """Where a model's values come from."""

    @property
    def notes(self) -> list[str]:
        """Lines to print: the source of the weights, and anything noteworthy about its files."""

    def fill(self, model: PreTrainedModel, targets: dict[str, Target], device: torch.device) -> None:
        """Write the values of `targets`, named as in the model without adapters. Every rank must call this."""


@dataclass(frozen=True)
class FileWeights:
    """Every rank reads its own slices from the safetensors files."""

    stored: dict[str, Stored | StoredExperts]
    about_files: tuple[str, ...] = ()  # lines to print

    @property
    def notes(self) -> list[str]:
        num_files = len(set().union(*(place.paths for place in self.stored.values())))
        return [f"weights: each rank reads its own part of {plural(num_files, 'safetensors file')}", *self.about_files]

    def fill(self, model: PreTrainedModel, targets: dict[str, Target], device: torch.device) -> None:
        targets = {name: target for name, target in targets.items() if name in self.stored}
        with _progress(sum(self._bytes_read(target) for target in targets.values()), "B") as bar:
            # File by file, in the model's order, so each file is opened once.
            for path in dict.fromkeys(self.stored[name].path for name in targets):
                with safe_open(path, framework="pt") as file:
                    for name, target in targets.items():
                        if self.stored[name].path == path:
                            self._read(file, self.stored[name], target, device)
                            bar.update(self._bytes_read(target))

    @staticmethod
    def _read(file: Any, place: Stored | StoredExperts, target: Target, device: torch.device) -> None:
        """Read what this rank keeps into memory of its own, freed at once; the rest stays on disk."""
        if target.packing is not None:
            # Blocks and scales run through the whole weight, so every rank quantizes all of it, one weight at a time.
            whole = place.read(file, device=device).to(device, target.dtype)
            target.check(whole, place.key)
            target.keep(whole)
            return
        local, index = local_part(target.tensor)
        if local.numel():
            local.copy_(place.read(file, index, device))

    @staticmethod
    def _bytes_read(target: Target) -> int:
        if target.packing is not None:
            return target.shape.numel() * target.dtype.itemsize
        return local_part(target.tensor)[0].nbytes


@dataclass(frozen=True)
class WholeWeights:
    """Rank 0 reads the whole model through transformers; the other ranks receive one tensor at a time."""

    read: Callable[[], dict[str, torch.Tensor]]
    difference: str
    about_files: tuple[str, ...] = ()  # lines to print

    @property
    def notes(self) -> list[str]:
        reading = "weights: rank 0 reads them all and sends each rank its part"
        return [f"{reading} (files unlike the model: {self.difference})", *self.about_files]

    def fill(self, model: PreTrainedModel, targets: dict[str, Target], device: torch.device) -> None:
        whole: dict[str, torch.Tensor] = {}
        on_rank_zero(lambda: whole.update(self.read()))
        with _progress(sum(target.shape.numel() * target.dtype.itemsize for target in targets.values()), "B") as bar:
            for name, target in targets.items():
                if dist.get_rank() == 0:
                    # pop: rank 0 gives each tensor up once it is sent.
                    tensor = whole.pop(name).to(device, target.dtype).contiguous()
                else:
                    tensor = torch.empty(target.shape, device=device, dtype=target.dtype)
                dist.broadcast(tensor, src=0)
                target.check(tensor, name)
                target.keep(tensor)
                bar.update(tensor.nbytes)


@dataclass(frozen=True)
class RandomWeights:
    """Each layer is drawn whole on the device, from its own seed, and cut: the values are the same in every layout."""

    seed: int

    @property
    def notes(self) -> list[str]:
        return ["weights: random"]

    def fill(self, model: PreTrainedModel, targets: dict[str, Target], device: torch.device) -> None:
        undrawn = {id(target.tensor): target for target in targets.values()}
        owners = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
        # Of a model of which only some tensors are drawn, only the parts that hold them.
        parts = [part for part in _parts_to_draw(model) if _holds_any(part[1], undrawn)]
        with _progress(len(parts), "part") as bar:
            for name, modules in parts:
                # Each part of a composite model is drawn by the model that it belongs to.
                owner = owners[max((o for o in owners if f"{name}.".startswith(f"{o}." if o else "")), key=len)]
                digest = hashlib.sha256(f"{self.seed} {plain_name(name)}".encode()).digest()
                # Seeded by name: the values do not depend on what was drawn before, so neither on the layout.
                with torch.random.fork_rng([device] if device.type == "cuda" else []):
                    torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
                    _draw(modules, owner, undrawn, device)
                bar.update(1)


@dataclass(frozen=True)
class WithNewParts:
    """Weights of files that lack some tensors, such as those of a new head: these are drawn from the run's seed."""

    stored: Weights
    drawn: frozenset[str]
    seed: int
    in_adapter: Collection[str]  # modules that a saved adapter holds, whose values come after these

    @property
    def notes(self) -> list[str]:
        names = sorted(name for name in self.drawn if not any(f".{part}." in f".{name}" for part in self.in_adapter))
        if not names:
            return self.stored.notes
        shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
        return [*self.stored.notes, f"weights: {plural(len(names), 'tensor')} of a new head drawn at random: {shown}"]

    def fill(self, model: PreTrainedModel, targets: dict[str, Target], device: torch.device) -> None:
        self.stored.fill(model, {name: t for name, t in targets.items() if name not in self.drawn}, device)
        RandomWeights(self.seed).fill(model, {name: targets[name] for name in targets.keys() & self.drawn}, device)


def with_new_parts(stored: Weights, drawn: Collection[str], seed: int, in_adapter: Collection[str] = ()) -> Weights:
    """The weights of files, and those drawn that they lack, if any."""
    return WithNewParts(stored, frozenset(drawn), seed, in_adapter) if drawn else stored


def _holds_any(modules: list[nn.Module], undrawn: dict[int, Target]) -> bool:
    return any(id(parameter) in undrawn for module in modules for parameter in module.parameters(recurse=False))


def _parts_to_draw(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """The modules that are drawn together, children before parents: each layer as a whole, since some models scale a
    child's weights from its parent, then every other module that has parameters."""
    in_layers: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and id(module) not in in_layers:
            for index, layer in enumerate(module):
                in_layers.update(id(inner) for inner in layer.modules())
                yield f"{name}.{index}", list(layer.modules())[::-1]
    for name, module in model.named_modules():
        if id(module) not in in_layers and next(module.parameters(recurse=False), None) is not None:
            yield name, [module]


def most_drawn_bytes(model: nn.Module) -> int:
    """The bytes of the largest part of the model while random weights are drawn for it."""
    return max(
        sum(whole.nbytes for *_, whole in _stand_ins(part, torch.device("meta"))) for _, part in _parts_to_draw(model)
    )


def _stand_ins(
    modules: Sequence[nn.Module], device: torch.device
) -> Iterator[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
    """Each parameter of these modules: its module, its name there, itself, and a whole one to be drawn in its place."""
    for module in modules:
        packed = packed_weights(module)
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            shape, dtype = parameter.shape, torch.float32
            if key in packed:  # all experts of a layer are one part, and large; packing rounds them to this dtype first
                shape, dtype = packed[key].plain_shape, packed[key].quantization.compute_dtype
            # NaN marks what the model's initialization leaves out.
            whole = torch.full(shape, torch.nan, device=device, dtype=dtype)
            yield module, key, parameter, nn.Parameter(whole, requires_grad=False)


def _draw(modules: list[nn.Module], owner: PreTrainedModel, undrawn: dict[int, Target], device: torch.device) -> None:
    """Let the model's own initialization write into whole tensors that stand in for the parameters."""
    stand_ins = list(_stand_ins(modules, device))
    try:
        for module, key, _, whole in stand_ins:
            module._parameters[key] = whole
        for module in modules:
            owner._init_weights(module)
    finally:
        for module, key, parameter, _ in stand_ins:
            module._parameters[key] = parameter
    while stand_ins:  # each is given up once its part is kept
        _, _, parameter, whole = stand_ins.pop(0)
        target = undrawn.pop(id(parameter), None)  # None: an adapter's, or shared with a module that drew it
        if target is not None:
            if whole.numel() and whole.amax().isnan():  # NaN if any is: the model did not initialize it
                whole.normal_(std=0.02)
            target.keep(whole)


def local_part(target: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """This rank's part of a tensor, and its place in the whole."""
    if not isinstance(target, DTensor):
        return target, tuple(slice(0, size) for size in target.shape)
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return target.to_local(), tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))


def keep_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of the whole tensor into `target`, which may be sharded."""
    local, index = local_part(target)
    local.copy_(whole[index])


def _progress(total: int, unit: str) -> Any:
    return progress_bar("weights", total=total, unit=unit, unit_scale=unit == "B")
