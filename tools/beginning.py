"""How the tools begin, before imports that take seconds."""

from __future__ import annotations

import signal
from collections.abc import Callable

from supervision.exit_status import let_ctrl_c_end_this
from utils.progress import say_if_it_lasts
from utils.quiet import quiet_imports
from utils.streams import keep_standard_streams


def begin_tool() -> None:
    """Prepare the standard streams, and let Ctrl-C end the process without a traceback until its work begins."""
    keep_standard_streams()
    let_ctrl_c_end_this()


def begin_importing() -> Callable[[], None]:
    """Begin a tool that imports torch. Returns a function to call when the imports have ended."""
    begin_tool()
    quiet_imports()
    return say_if_it_lasts("importing torch and transformers")


def begin_work() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, so that half-written files are deleted."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
