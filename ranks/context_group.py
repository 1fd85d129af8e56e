"""The ranks that share the tokens of each row (context parallelism): neighbours, so that they are on one node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.distributed.device_mesh import init_device_mesh

from ranks.environment import Environment
from ranks.process_group import set_timeouts


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share rows with this one, itself included."""

    size: int = 1  # 1: each rank has rows of its own
    rank: int = 0  # this rank's place in it, and that of its tokens in a row
    name: str = ""  # of its process group, as torch has it; empty in a plan, and until it is joined

    @property
    def shares_rows(self) -> bool:
        return self.size > 1


def join_context_group(group: ContextGroup, env: Environment) -> ContextGroup:
    """The group with its process group. Every rank must call this."""
    if not group.shares_rows:
        return group
    shape = (env.world_size // group.size, group.size)
    mesh = init_device_mesh(env.device.type, shape, mesh_dim_names=("data", "context"))
    set_timeouts()  # of the mesh's own groups
    return replace(group, name=mesh.get_group("context").group_name)
