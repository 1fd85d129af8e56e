"""The software that a run computes with: versions of packages, and this repository's own code."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

from utils.optional_packages import is_installed

_PACKAGES = ("torch", "transformers", "peft", "datasets", "accelerate", "tokenizers", "safetensors")
_OPTIONAL = ("flash-attn-4", "flash-linear-attention", "mamba-ssm", "causal-conv1d")
_ROOT = Path(__file__).resolve().parents[1]
_NOT_TRAINING = ("tests", "tools", "benchmarks")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide what a run computes, by name."""
    names = (*_PACKAGES, *filter(is_installed, _OPTIONAL))
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in names}


def git_commit() -> str | None:
    """The commit of this code, marked "-dirty" if files differ from it; None outside a checkout.

    Not by `git describe --dirty`, which would write the checkout's index each time.
    """
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    # "(initial)" stands there without a commit; other lines than comments are changed files.
    commit = next((line.split()[2] for line in lines if re.match("# branch.oid [0-9a-f]", line)), None)
    is_dirty = any(not line.startswith("#") for line in lines)
    return f"{commit}-dirty" if commit and is_dirty else commit


def code_checksum() -> str:
    """A digest of the Python files that a run may import. It needs no git, and tells changed copies apart."""
    rooms = {path.parent for path in _ROOT.glob("*/__init__.py") if path.parent.name not in _NOT_TRAINING}
    paths = [*_ROOT.glob("*.py"), *(path for room in (*rooms, _ROOT / "datasets") for path in room.rglob("*.py"))]
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
