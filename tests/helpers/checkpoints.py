"""Checkpoint folders for tests, with the layout that a run writes, of models that stand in for trained ones."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpointing.marks import KEY
from checkpointing.tensor_files import whole_tensors, write_tensors

FILES = {
    "SHARDED_STATE_DICT": "rank-00000.safetensors",
    "FULL_STATE_DICT": "state.safetensors",
    "distcp": "__0_0.distcp",  # of earlier versions, sharded
    "state.pt": "state.pt",  # of earlier versions, in one file
}
"""The file that holds the tensors of a checkpoint, by the checkpoint's kind."""


class Command:
    """An object that runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.witness}",)


def changed(model: Any, seed: int = 0) -> Any:
    """The model with random changes, as if it had been trained; a new adapter's second factor would be zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model.eval()


def flat_state(model: Any, *, optimizer: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: an adapter's trained parameters, else everything; shared weights once."""
    has_adapters = isinstance(model, peft.PeftModel)
    state = {f"model.{n}": p.detach() for n, p in model.named_parameters() if p.requires_grad or not has_adapters}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if not has_adapters:
        state |= {f"model.{n}": t for n, t in model.state_dict().items() if n not in parameters}
    if optimizer:
        moments = ("exp_avg", "exp_avg_sq")
        names = [name.removeprefix("model.") for name in state]
        state |= {f"optimizer.state.{n}.{key}": torch.randn(7) for n in names for key in moments}
    return state


def save_settings(folder: Path, model: Any, base: Path) -> None:
    """Write huggingface/ and the state.json that names the base."""
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    inner.config.save_pretrained(folder / "huggingface")
    if isinstance(model, peft.PeftModel):
        model.peft_config["default"].base_model_name_or_path = str(base)
        model.peft_config["default"].save_pretrained(str(folder / "huggingface"))
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "huggingface")
    settings = {"train_config": {"model_name": str(base)}}
    (folder / "state.json").write_text(json.dumps({"step": 20, "epoch": 1, "world_size": 1, "settings": settings}))


def crc32_of(path: Path) -> str:
    """As COMPLETE has it; the file is read in blocks, since some tests write gigabytes."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def complete(folder: Path) -> None:
    """Write COMPLETE for the files in the folder."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": crc32_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "COMPLETE"
    }
    (folder / "COMPLETE").write_text(json.dumps({"files": files}))


def save_checkpoint(
    folder: Path, model: Any, base: Path, *, kind: str = "SHARDED_STATE_DICT", optimizer: bool = True
) -> Path:
    """A training checkpoint, saved by one process; `kind` is a key of `FILES`."""
    folder.mkdir(parents=True)
    state = flat_state(model, optimizer=optimizer)
    if kind == "state.pt":
        torch.save(state, folder / kind)
    elif kind == "distcp":
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    else:
        write_tensors(folder / FILES[kind], whole_tensors(state))
    save_settings(folder, model, base)
    (folder / "rng-00000.json").write_text("{}")
    complete(folder)
    return folder


def with_lora(base: Path | nn.Module, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A model with an adapter that changes its logits."""
    model = base if isinstance(base, nn.Module) else AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | settings
    return changed(peft.get_peft_model(model, peft.LoraConfig(**settings)))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """fp32 [2, 24, vocab], for tokens that the models of all tests have."""
    ids = torch.randint(60, (2, 24), generator=torch.Generator().manual_seed(5))
    return model.eval()(input_ids=ids, use_cache=False).logits.float()


def load_plain(folder: Path, dtype: torch.dtype | str = torch.float32) -> Any:
    """The model as plain transformers loads it, with no tensor missing and none too many."""
    auto: Any = AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model


def forget_marks(folder: Path) -> None:
    """Make of a checkpoint what an earlier version wrote, whose files did not say which checkpoint they are of."""
    values = json.loads((folder / "state.json").read_bytes())
    kept = {name: value for name, value in values.items() if name not in ("format", "epochs")}
    (folder / "state.json").write_text(json.dumps(kept))
    for file in [*folder.glob("rank-*.safetensors"), *folder.glob("state.safetensors")]:
        with safe_open(file, framework="pt") as opened:
            metadata = {name: value for name, value in opened.metadata().items() if name != KEY}
        file.write_bytes(save(load_file(file), metadata))
    for file in folder.glob("rng-*.json"):
        states = json.loads(file.read_bytes())
        file.write_text(json.dumps({name: value for name, value in states.items() if name != KEY}))
    complete(folder)
