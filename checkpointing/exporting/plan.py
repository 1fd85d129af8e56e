"""The contents of an exported folder, decided before anything is written: names, shapes, dtypes, and their origin."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from checkpointing.continuation import as_list, stop_at
from checkpointing.exporting.adapters import (
    MergedTensors,
    load_adapter_config,
    merge_layer,
    merges_by_layer,
    put_adapter,
)
from checkpointing.exporting.blueprint import (
    blueprint_of,
    build_blueprint,
    fill_blueprint,
    fit,
    load_pretrained,
    load_tokenizer,
    open_base,
)
from checkpointing.exporting.model_source import ModelSource
from checkpointing.exporting.safetensors_file import MAX_FILE_SIZE
from checkpointing.exporting.stored_tensors import StoredTensors
from policies.config_overrides import write_config_overrides
from policies.pretrained import generation_settings
from policies.weights.stored import Entry
from policies.weights.tensor_names import find_stored, is_stored_as_named, names_in_files
from utils.compat import must_be_exact
from utils.errors import ConfigError, TrainingError
from utils.processor_type import Processor

_ONE_COPY = "transformers stores this family's tensors under other names, so one whole copy of the model is in memory"
_AT_ONCE = "the whole model is merged at once, in memory"


@dataclass(frozen=True)
class ExportPlan:
    """The contents of the folder to write."""

    source: ModelSource
    tokenizer: Processor
    entries: dict[str, Entry]  # by the name in the files
    read: Callable[[str], torch.Tensor]
    save_config: Callable[[Path], object]
    rounds: bool  # whether numbers change on the way
    notes: list[str] = field(default_factory=list)
    stem: str = "model"  # of the files' names
    max_file_size: str = MAX_FILE_SIZE

    @property
    def dtype(self) -> torch.dtype:
        return _common_dtype(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


def plan_export(source: ModelSource, auto_model: Any, *, merge: bool, dtype: torch.dtype | None) -> ExportPlan:
    """Decide the folder's contents. Exports that cannot come out right are refused here, before anything is written.

    Args:
        auto_model: the transformers class of the model.
        merge: merge an adapter into its base.
        dtype: of floating-point tensors; None keeps that of the checkpoint, or of the base's files if merged.

    Raises:
        ConfigError: with the remedy.
    """
    if merge and not source.is_adapter:
        raise ConfigError(f"--merge: {source.path} holds no adapter but a whole model; leave --merge out")
    if merge:
        return _plan_merged(source, auto_model, dtype)
    return _plan_adapter(source, auto_model, dtype) if source.is_adapter else _plan_full(source, auto_model, dtype)


def _plan_full(source: ModelSource, auto_model: Any, dtype: torch.dtype | None) -> ExportPlan:
    model, notes = blueprint_of(source, auto_model)
    if model is None:
        return _plan_whole(source, load_pretrained(source.settings, auto_model, "auto"), dtype, [_ONE_COPY])
    if is_stored_as_named(model):
        stored_as = find_stored(model, source.tensors.index)
        entries = {name: source.tensors.index[stored_as[name]] for name in names_in_files(model) if name in stored_as}
        return _plan_model(source, model, entries, lambda name: source.tensors.read(stored_as[name]), dtype, notes)
    return _plan_whole(source, fill_blueprint(model, source.tensors), dtype, [*notes, _ONE_COPY])


def _plan_merged(source: ModelSource, auto_model: Any, dtype: torch.dtype | None) -> ExportPlan:
    base = open_base(str(source.base))
    model, config = build_blueprint(str(source.base), auto_model, rope=source.rope), load_adapter_config(source)
    if config.peft_type != "LORA":
        kind = peft.PeftType(config.peft_type).value
        raise ConfigError(f"--merge: {source.path} is an adapter of the kind {kind}; only LoRA is merged")
    assert isinstance(config, peft.LoraConfig)
    if not is_stored_as_named(model):
        return _plan_merged_whole(source, auto_model, config, base, dtype, _ONE_COPY)
    if source.new_parts:
        return _plan_merged_whole(source, auto_model, config, base, dtype, _AT_ONCE)
    notes = fit(model, base, f"the base model {source.base}", str(source.base))
    names_of, stored_as = names_in_files(model), find_stored(model, base.index)
    adapted, _ = put_adapter(model, source, config)
    if not merges_by_layer(adapted, config):
        return _plan_merged_whole(source, auto_model, config, base, dtype, _AT_ONCE)
    merged = MergedTensors(base, stored_as, adapted)
    # Merged under one of its names, a tied weight differs under the others: files then hold each.
    differ = [group for group in names_of.values() if len(group) > 1 and merged.merged_names & set(group)]
    notes += [_untie(model, group) for group in differ]
    names = _every_name(names_of) if differ else list(names_of)
    entries = {name: merged.index[name] for name in names if name in stored_as}
    return _plan_model(source, model, entries, merged.read, dtype, notes)


def _plan_merged_whole(
    source: ModelSource,
    auto_model: Any,
    config: peft.LoraConfig,
    base: StoredTensors,
    dtype: torch.dtype | None,
    note: str,
) -> ExportPlan:
    """For families whose files differ from the model, and adapters that are more than LoRA on layers and experts."""
    dtypes = {entry.dtype for entry in base.index.values() if entry.dtype.is_floating_point}
    # A layer is merged in fp32, so the others need no more memory than files have for them.
    read_in = dtypes.pop() if len(dtypes) == 1 else torch.float32
    whole = load_pretrained(str(source.base), auto_model, read_in, source.rope, source.new_parts)
    own_names = set(whole.state_dict())
    adapted, _ = put_adapter(whole, source, config)
    model: Any = adapted.get_base_model()
    untied = []
    # peft merges in place, which would change a tied weight under all of its names.
    uses = Counter(id(parameter) for _, parameter in adapted.named_parameters(remove_duplicate=False))
    for path, layer in adapted.named_modules():
        for name, parameter in layer.get_base_layer().named_parameters() if isinstance(layer, LoraLayer) else ():
            if uses[id(parameter)] > 1:
                owner, _, attribute = name.rpartition(".")
                own = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                setattr(layer.get_base_layer().get_submodule(owner), attribute, own)
                untied.append(_untie(model, [f"{path}.{name}"]))
    dtype = dtype or _common_dtype(base.index)
    for layer in [module for module in adapted.modules() if isinstance(module, LoraLayer)]:
        # fp16, too, is only rounded to when it is written: numbers may be too large for it.
        merge_layer(layer, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    merged = adapted.merge_and_unload()
    if unmerged := sorted(set(merged.state_dict()) - own_names):  # peft leaves an adapter of an adapted layer there
        layer = unmerged[0].partition(".token_adapter")[0]
        raise ConfigError(
            f"--merge: {source.path} has LoRA and trained rows of tokens on {layer}, which peft cannot merge; use the "
            "adapter on its base"
        )
    return _plan_whole(source, merged, dtype, [note, *untied], is_untied=bool(untied))


def _plan_whole(
    source: ModelSource, model: PreTrainedModel, dtype: torch.dtype | None, notes: list[str], *, is_untied: bool = False
) -> ExportPlan:
    """For a model in memory, its tensors converted to what files hold.

    Args:
        is_untied: its config says so, though some weights may still have several names.
    """
    state = model.state_dict()
    names_of = names_in_files(model)
    names = _every_name(names_of) if is_untied else list(names_of)
    tensors = revert_weight_conversion(model, {name: state[name] for name in names})
    entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return _plan_model(source, model, entries, tensors.__getitem__, dtype, notes)


def _plan_model(
    source: ModelSource,
    model: PreTrainedModel,
    stored: dict[str, Entry],
    read: Callable[[str], torch.Tensor],
    dtype: torch.dtype | None,
    notes: Sequence[str] = (),
) -> ExportPlan:
    exact = {name: entry for name, entry in stored.items() if must_be_exact(model, name)}
    entries = _cast_entries(stored, dtype) | exact
    model.config.dtype = _common_dtype(entries)
    model.config.architectures = [type(model).__name__]

    generation, left_out = generation_settings(source.generation)
    if source.is_adapter and generation is not None and model.can_generate():  # config.json is the base's
        end_ids = as_list(generation.eos_token_id) or as_list(model.generation_config.eos_token_id)
        if end_ids:  # a model may name none
            stop_at(model, end_ids)

    def save_config(folder: Path) -> None:
        model.config.save_pretrained(folder)
        if not left_out:
            _copy_generation_config(source, folder)

    return ExportPlan(
        source,
        load_tokenizer(source.tokenizer),
        entries,
        lambda name: cast(name, read(name), entries[name].dtype),
        save_config,
        rounds=source.is_adapter or entries != stored,
        notes=[*notes, *([left_out] if left_out else [])],
    )


def _plan_adapter(source: ModelSource, auto_model: Any, dtype: torch.dtype | None) -> ExportPlan:
    """A folder as peft writes it. Of the base, only config.json is read."""
    config = load_adapter_config(source)
    _, tensors = put_adapter(build_blueprint(source.settings, auto_model, rope=source.rope), source, config)
    stored = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    entries = _cast_entries(stored, dtype)
    config.base_model_name_or_path = source.base or config.base_model_name_or_path

    def save_config(folder: Path) -> None:
        config.save_pretrained(str(folder))
        write_config_overrides(folder, source.rope)
        if source.generation != source.base:
            _copy_generation_config(source, folder)

    return ExportPlan(
        source,
        load_tokenizer(source.tokenizer),
        entries,
        lambda name: cast(name, tensors[name], entries[name].dtype),
        save_config,
        rounds=entries != stored,
        stem="adapter_model",
        max_file_size="1000GB",  # peft reads one file
    )


def _copy_generation_config(source: ModelSource, folder: Path) -> None:
    """Copy generation_config.json, if there is one: transformers refuses to save some that it reads."""
    file = cached_file(source.generation, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    if file is not None:
        shutil.copyfile(file, folder / GENERATION_CONFIG_NAME)


def _cast_entries(stored: dict[str, Entry], dtype: torch.dtype | None) -> dict[str, Entry]:
    return {
        name: Entry(entry.shape, dtype if dtype and entry.dtype.is_floating_point else entry.dtype)
        for name, entry in stored.items()
    }


def _common_dtype(entries: dict[str, Entry]) -> torch.dtype:
    """The dtype of most floating-point bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries.values():
        sizes[entry.dtype] += entry.nbytes if entry.dtype.is_floating_point else 0
    return max(sizes, key=lambda dtype: sizes[dtype])


def _every_name(names_of: dict[str, list[str]]) -> list[str]:
    """Also those that tied weights have besides: a config that says untied says it of all."""
    return [name for names in names_of.values() for name in names]


def _untie(model: PreTrainedModel, names: list[str]) -> str:
    # A model of text and images has a flag in either config.
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    return f"{names[0]} and the weight that it shared its values with are saved apart: the adapter changes one of them"


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in another dtype.

    Raises:
        TrainingError: if a finite number is too large for fp16.
    """
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(result.isfinite(), tensor.isfinite()):
        raise TrainingError(f"--dtype fp16: {name} holds numbers above 65504, fp16's largest; export bf16 or fp32")
    return result
