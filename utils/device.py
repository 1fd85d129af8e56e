"""Facts of a rank's device that decisions depend on. Plans have them of devices that are not here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from utils.host_memory import host_bytes

if TYPE_CHECKING:
    import torch


class DeviceFacts(NamedTuple):
    """The facts of one device."""

    type: Literal["cpu", "cuda"]
    memory_bytes: int  # by its driver; for a CPU the host's memory
    has_bf16: bool  # whether it computes in bf16 natively. A CPU emulates it, so bf16 is not its default
    has_float8: bool = False  # whether it multiplies float8: NVIDIA cards of compute capability 8.9 and higher
    has_grouped_products: bool = False  # whether torch multiplies all experts by one kernel: capability 9.0 and higher


def facts_of(device: torch.device) -> DeviceFacts:
    """The facts of a device of this machine."""
    import torch  # takes seconds; a flag that is refused should not wait for it

    if device.type != "cuda":
        return DeviceFacts("cpu", host_bytes(), has_bf16=False)
    properties = torch.cuda.get_device_properties(device)
    capability = torch.cuda.get_device_capability(device)
    has_float8 = capability >= (8, 9) and torch.version.hip is None
    return DeviceFacts(
        "cuda",
        properties.total_memory,
        has_bf16=capability[0] >= 8,
        has_float8=has_float8,
        has_grouped_products=capability[0] >= 9,
    )
