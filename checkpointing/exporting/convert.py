"""A checkpoint turned into a folder in Hugging Face format: planned, written tensor by tensor, read back, renamed."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from checkpointing.exporting.adapters import MergedTensors, load_adapter_config, merges_by_layer, put_adapter
from checkpointing.exporting.blueprint import (
    aliases,
    blueprint_of,
    build_blueprint,
    check_fit,
    find_stored,
    is_stored_as_named,
    load_pretrained,
    load_tokenizer,
    load_whole,
    open_base,
)
from checkpointing.exporting.safetensors_file import MAX_FILE_SIZE, Entry, check_model_files, write_model_files
from checkpointing.exporting.sources import Source
from checkpointing.exporting.stored import StoredTensors
from utils.compat import must_be_exact
from utils.errors import ConfigError, TrainingError

_ONE_COPY = "transformers stores this family's tensors under other names, so one whole copy of the model is in memory"


@dataclass(frozen=True)
class Plan:
    """What a folder will hold, and where it comes from."""

    source: Source
    tokenizer: Any
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


def plan_export(source: Source, *, merge: bool, dtype: torch.dtype | None) -> Plan:
    """Decide what to write; what cannot come out right is refused here, before anything is written.

    Args:
        merge: an adapter into its base. dtype: of floating-point tensors; None keeps that of the checkpoint, or,
            merged, that of the base's files.

    Raises:
        ConfigError: with the remedy.
    """
    if merge and not source.is_adapter:
        raise ConfigError(f"--merge: {source.path} holds no adapter but a whole model; leave --merge out")
    if merge:
        return _plan_merged(source, dtype)
    return _plan_adapter(source, dtype) if source.is_adapter else _plan_full(source, dtype)


def _plan_full(source: Source, dtype: torch.dtype | None) -> Plan:
    model = blueprint_of(source)
    if model is None:
        return _plan_whole(source, load_pretrained(source.settings, "auto"), dtype, [_ONE_COPY])
    if is_stored_as_named(model):
        stored_as = find_stored(model, source.tensors)
        entries = {name: source.tensors.index[stored_as[name]] for name in aliases(model) if name in stored_as}
        return _plan_model(source, model, entries, lambda name: source.tensors.read(stored_as[name]), dtype)
    return _plan_whole(source, load_whole(model, source.tensors), dtype, [_ONE_COPY])


def _plan_merged(source: Source, dtype: torch.dtype | None) -> Plan:
    base = open_base(str(source.base))
    model, config = build_blueprint(str(source.base)), load_adapter_config(source)
    if config.peft_type != "LORA":
        raise ConfigError(
            f"--merge: {source.path} is an adapter of the kind {config.peft_type.value}; only LoRA is merged"
        )
    if not is_stored_as_named(model):
        return _plan_merged_whole(source, config, base, dtype, f"{_ONE_COPY}, in fp32")
    check_fit(model, base, f"the base model {source.base}", str(source.base))
    names_of, stored_as = aliases(model), find_stored(model, base)
    adapted, _ = put_adapter(model, source, config)
    if not merges_by_layer(adapted, config):
        return _plan_merged_whole(source, config, base, dtype, "the whole model is merged at once, in fp32 in memory")
    merged = MergedTensors(base, stored_as, adapted)
    notes, names = [], []
    for name, group in names_of.items():
        changed = len(group) > 1 and merged.merged_names & set(group)
        notes += [_untie(model, group)] if changed else []
        names += group if changed else [name]
    entries = {name: merged.index[name] for name in names if name in stored_as}
    return _plan_model(source, model, entries, merged.read, dtype, notes)


def _plan_merged_whole(source: Source, config: Any, base: StoredTensors, dtype: torch.dtype | None, note: str) -> Plan:
    """For families whose files differ from the model, and adapters that are more than LoRA on layers."""
    adapted, _ = put_adapter(load_pretrained(str(source.base), torch.float32), source, config)
    model = adapted.get_base_model()
    notes = [note]
    uses = Counter(id(parameter) for _, parameter in adapted.named_parameters(remove_duplicate=False))
    for path, layer in adapted.named_modules():
        for name, parameter in layer.get_base_layer().named_parameters() if isinstance(layer, LoraLayer) else ():
            if uses[id(parameter)] > 1:
                owner, _, attribute = name.rpartition(".")
                own = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                setattr(layer.get_base_layer().get_submodule(owner), attribute, own)
                notes.append(_untie(model, [f"{path}.{name}"]))
    return _plan_whole(source, adapted.merge_and_unload(), dtype or _common_dtype(base.index), notes)


def _plan_whole(source: Source, model: Any, dtype: torch.dtype | None, notes: list[str]) -> Plan:
    """A model that is in memory, its tensors as files have them."""
    state = model.state_dict()
    tensors = revert_weight_conversion(model, {name: state[name] for name in aliases(model)})
    entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return _plan_model(source, model, entries, tensors.__getitem__, dtype, notes)


def _plan_model(
    source: Source,
    model: Any,
    stored: dict[str, Entry],
    read: Callable[[str], torch.Tensor],
    dtype: torch.dtype | None,
    notes: Sequence[str] = (),
) -> Plan:
    exact = {name: entry for name, entry in stored.items() if must_be_exact(model, name)}
    entries = _cast_entries(stored, dtype) | exact
    model.config.dtype = _common_dtype(entries)
    model.config.architectures = [type(model).__name__]

    def save_config(folder: Path) -> None:
        model.config.save_pretrained(folder)
        # As it is: transformers refuses to save some that it reads.
        generation = cached_file(source.settings, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
        if generation is not None:
            shutil.copyfile(generation, folder / GENERATION_CONFIG_NAME)

    return Plan(
        source,
        load_tokenizer(source.tokenizer),
        entries,
        lambda name: cast(name, read(name), entries[name].dtype),
        save_config,
        rounds=source.is_adapter or entries != stored,
        notes=list(notes),
    )


def _plan_adapter(source: Source, dtype: torch.dtype | None) -> Plan:
    """A folder as peft writes it; nothing of the base is read but its config.json."""
    config = load_adapter_config(source)
    _, tensors = put_adapter(build_blueprint(source.settings), source, config)
    stored = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    entries = _cast_entries(stored, dtype)
    config.base_model_name_or_path = source.base or config.base_model_name_or_path
    return Plan(
        source,
        load_tokenizer(source.tokenizer),
        entries,
        lambda name: cast(name, tensors[name], entries[name].dtype),
        lambda folder: config.save_pretrained(str(folder)),
        rounds=entries != stored,
        stem="adapter_model",
        max_file_size="1000GB",  # peft reads one file
    )


def _cast_entries(stored: dict[str, Entry], dtype: torch.dtype | None) -> dict[str, Entry]:
    return {
        name: Entry(entry.shape, dtype if dtype and entry.dtype.is_floating_point else entry.dtype)
        for name, entry in stored.items()
    }


def _common_dtype(entries: dict[str, Entry]) -> torch.dtype:
    """What most floating-point bytes are stored in."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries.values():
        sizes[entry.dtype] += entry.nbytes if entry.dtype.is_floating_point else 0
    return max(sizes, key=lambda dtype: sizes[dtype])


def _untie(model: Any, names: list[str]) -> str:
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    return f"{names[0]} and the weight that it shared its values with are saved apart: the adapter changes one of them"


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in another dtype.

    Raises:
        TrainingError: where a finite number is too large for it, as many are for fp16.
    """
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(result.isfinite(), tensor.isfinite()):
        raise TrainingError(f"--dtype fp16: {name} holds numbers above 65504, fp16's largest; export bf16 or fp32")
    return result


def check_place(folder: Path, num_bytes: int = 0) -> None:
    """Refuse a folder that exists, or a disk on which it has no room.

    Raises:
        ConfigError: with the remedy.
    """
    if folder.exists():
        raise ConfigError(f"--to: {folder} exists already; give another folder, or remove it")
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--to: {parent} cannot be written; give a folder that can")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ConfigError(
            f"--to: {parent} has {free / 1e9:.1f} GB free, and {num_bytes / 1e9:.1f} GB are needed; free some, or give "
            "another disk"
        )


def write_export(
    plan: Plan, folder: Path, progress: Callable[[str, int], Any], verify: Callable[[Path], object] | None = None
) -> None:
    """Write FOLDER.incomplete, read it back, and rename it.

    Args:
        progress: (what, bytes) -> a progress bar of tqdm's kind. verify: looks at the folder before it is renamed, and
            raises where it does not like it.

    Raises:
        ConfigError: where the folder exists, the disk is too small, or the source is damaged; nothing was written.
        TrainingError: where what was written is not what it should be. Then no folder is left.
    """
    check_place(folder, plan.num_bytes)
    check_bytes = sum(path.stat().st_size for path, _ in plan.source.checksums)
    with progress("checksums", check_bytes) as bar:
        plan.source.check(bar.update)
    temporary = folder.with_name(folder.name + ".incomplete")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with progress("writing", plan.num_bytes) as bar:
            digests = write_model_files(
                temporary, plan.entries, plan.read, bar.update, stem=plan.stem, max_file_size=plan.max_file_size
            )
        plan.save_config(temporary)
        plan.tokenizer.save_pretrained(temporary)
        with progress("reading back", plan.num_bytes) as bar:
            check_model_files(temporary, plan.entries, digests, bar.update)
        if verify is not None:
            verify(temporary)
        temporary.rename(folder)
    except OSError as error:
        raise TrainingError(f"--to: {folder} cannot be written ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
