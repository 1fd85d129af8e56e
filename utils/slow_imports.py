"""Imports that take seconds: a line says so if they last, and Python's collector rests meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable

from utils.bytecode import keep_bytecode
from utils.progress import say_if_it_lasts
from utils.quiet import quiet_imports


def begin_imports() -> Callable[[], None]:
    """Begin to import torch and transformers. Returns a function to call when the imports have ended.

    The collector would go through the objects of all modules so far again and again, an eighth of the imports' time,
    and find none to free. Afterwards it leaves them alone: they stay until the process ends.
    """
    quiet_imports()
    keep_bytecode()
    said = say_if_it_lasts("importing torch and transformers")
    gc.disable()

    def ended() -> None:
        said()
        gc.freeze()
        gc.enable()

    return ended
