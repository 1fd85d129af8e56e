"""A checkpoint as llama-recipes saved it: FSDP1's sharded state dict and train_params.yaml, from two processes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def save(model_folder: Path, folder: Path, full_file: Path) -> None:
    """Train one step and save in both of llama-recipes' formats. Each of two ranks calls this."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.resize_token_embeddings(model.config.vocab_size + 1)  # for its <PAD>
    sharded = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    ids = torch.randint(600, (1, 32), generator=torch.Generator().manual_seed(rank))
    sharded(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with FSDP.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
        state = {"model": sharded.state_dict(), "optim": FSDP.optim_state_dict(sharded, optimizer)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), planner=DefaultSavePlanner())
    with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        whole = sharded.state_dict()
    if rank == 0:
        torch.save(whole, full_file)
        params = {
            "model_name": str(model_folder),
            "enable_fsdp": "True",
            "sharding_strategy": "ShardingStrategy.FULL_SHARD",
        }
        (folder / "train_params.yaml").write_text(yaml.dump(params, indent=4))
    dist.destroy_process_group()
