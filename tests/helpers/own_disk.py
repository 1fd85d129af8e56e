"""Runs a script on a disk of its own, which nobody else sees and which is gone afterwards; what it holds is copied.

    python tests/helpers/own_disk.py FOLDER SIZE COPY SCRIPT [ARGUMENTS]      a tmpfs of that size over FOLDER

It ends with the script's status. For processes that are forked: mounting needs a process of one thread.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000


def enter_own_mounts() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:  # who may not mount is root in a namespace of users
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def main() -> None:
    folder, size, copy, *words = sys.argv[1:]
    enter_own_mounts()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    child = os.fork()
    if child == 0:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
        return
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    shutil.copytree(folder, copy)
    os._exit(status)


if __name__ == "__main__":
    main()
