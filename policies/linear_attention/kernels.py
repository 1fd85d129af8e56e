"""Optional packages whose kernels keep the documents of a packed row apart, and which of them serve a run."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch.torch_version import TorchVersion

from utils.device import DeviceFacts

_PIP = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
_WRONG_ON_HOPPER = "3.4", "3.7.1"  # versions of Triton, from and before
_OF_KERNELS = {"fla": "fla.ops.gated_delta_rule", "mamba_ssm": "mamba_ssm.ops.triton.ssd_combined"}  # modules of them
_FILE = "requirements-linear-attention.txt"


class Kernels(NamedTuple):
    """The packages whose kernels this run calls, all for GPUs."""

    fla: bool = False  # flash-linear-attention: delta rules, and a convolution
    mamba_ssm: bool = False  # Mamba-2's scan, alone and with all that surrounds it
    causal_conv1d: bool = False  # a convolution


def find_kernels(device: DeviceFacts) -> Kernels:
    """The kernels for such a device; none for a CPU."""
    return Kernels(*(device.type == "cuda" and not _missing(package) for package in Kernels._fields))


def is_there(package: str) -> bool:
    """Whether a package is installed, and, on a machine with a GPU, whether it can be imported.

    Without a GPU, as for a plan, it is not imported: these packages need Triton.
    """
    if find_spec(package) is None:
        return False
    if torch.cuda.is_available():
        try:
            import_module(_OF_KERNELS.get(package, package))
        except Exception:  # of a package that does not fit this machine: any; transformers leaves it out, too
            return False
    return True


def _missing(package: str) -> list[str]:
    """The package, or what it needs on this machine's GPU, unless it is there."""
    needed = [package, "tilelang"] if package == "fla" and _needs_tilelang() else [package]
    return [name for name in needed if not is_there(name)]


def _needs_tilelang() -> bool:
    """Whether flash-linear-attention leaves a kernel of gated rules' backward to tilelang.

    Some versions of Triton compile it wrongly for Hopper, and the package refuses them
    (https://github.com/fla-org/flash-linear-attention/issues/640).
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    first, fixed = _WRONG_ON_HOPPER
    return first <= TorchVersion(version("triton")) < fixed


def missing_packages(packages: Iterable[str]) -> str | None:
    """What a line says of the packages that are not there, with the command that installs them; None if all are."""
    missing = sorted(name for package in packages for name in _missing(package))
    if not missing:
        return None
    command = f"pip install -r {_FILE}" if {"fla", "tilelang"}.issuperset(missing) else f"see {_FILE}"
    return f"without {' and '.join(_PIP.get(name, name) for name in missing)} ({command})"
