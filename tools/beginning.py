"""How the tools begin, before imports that take seconds."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from supervision.exit_status import REFUSED, let_ctrl_c_end_this
from utils.compiled_code import keep_compiled_code
from utils.errors import ConfigError
from utils.printing import print_line
from utils.slow_imports import begin_imports
from utils.streams import keep_standard_streams


def begin_tool() -> None:
    """Prepare the standard streams, and let Ctrl-C end the process without a traceback until its work begins."""
    keep_standard_streams()
    let_ctrl_c_end_this()


def begin_importing(read_flags: Callable[[], object]) -> Callable[[], None]:
    """Begin a tool that imports torch, or end the process at once if `read_flags` refuses or shows the help.

    Returns:
        A function to call when the imports have ended.
    """
    begin_tool()
    try:
        read_flags()
        keep_compiled_code()
    except ConfigError as error:
        print_line(f"error: {error}", to_stderr=True)
        sys.exit(REFUSED)
    return begin_imports()


def begin_work() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, so that half-written files are deleted."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
