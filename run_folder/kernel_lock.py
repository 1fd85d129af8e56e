"""Locks that the kernel keeps on an open file, and lets go when it is closed or its process ends.

They are byte-range locks of the open file (`F_OFD_SETLK` of fcntl(2)), and not those of flock(2): a file server that
exports the disk gives byte-range locks of its clients to its own kernel, so they exclude each other.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

import psutil

from utils.small_files import open_regular

_STRUCT_FLOCK = struct.Struct("hhqqi4x")  # of fcntl(2) on 64-bit Linux: type, whence, start, length, process
_LOCAL_DISKS = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "tmpfs", "xfs", "zfs"}


def is_on_local_disk(folder: Path) -> bool:
    """Whether no other host writes to the folder's disk, but through this machine's kernel.

    On other file systems a lock may be kept by each host for itself (BeeGFS, Lustre with localflock, most of FUSE), or
    outlive a host that died (NFS 3), or be lost without a word when the network was away (NFS 4).
    """
    place = Path(os.path.realpath(folder))
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}  # a later one hides
    nearest = next((mounts[parent] for parent in (place, *place.parents) if parent in mounts), None)
    return nearest in _LOCAL_DISKS


def lock_file(file: int) -> bool:
    """Lock an open file, written to by nobody else. False if the kernel or its file system has no such locks.

    Args:
        file: a descriptor, open for writing.
    """
    if not hasattr(fcntl, "F_OFD_SETLK"):
        return False
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _STRUCT_FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether an open file of any process is locked, also of another container, or on the server of this disk."""
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return False
    wanted = _STRUCT_FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with open_regular(path) as file:
            found: tuple[int, ...] = _STRUCT_FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, wanted))
    except OSError:
        return False
    return found[0] != fcntl.F_UNLCK
