"""A process that has imported everything and forks a fresh process for each command line, in milliseconds.

    python -m tests.helpers.fork_server LISTENER      LISTENER: the number of a listening socket that it inherits

`tests/helpers/forked.py` starts it and speaks with it. A fork is as good as a new interpreter if nothing has happened
yet but imports: the server has one thread, no process group, no CUDA context and no random numbers drawn. Each fork
gets its own environment, folder, output, process group and signal handlers, and runs the script as `__main__`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import logging
import os
import pickle
import runpy
import selectors
import signal
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from tests.helpers.forked import WRITE_STACKS
from tests.helpers.forked_ranks import RankServer

ROOT = Path(__file__).resolve().parents[2]
AT_START = dict(os.environ)
# Imported late by runs, or by tests whose functions are run.
LATE = ("bitsandbytes", "safetensors.torch", "torch.distributed.checkpoint", "torch.distributed.run", "tensorboard")
LATE += ("torch.utils.tensorboard", "tensorboard.plugins.hparams.plugin_data_pb2", "peft.tuners.lora.bnb")
LATE += ("tools.export", "tools.generate", "numpy.ctypeslib", "pytest", "data.prompts", "rouge_score.rouge_scorer")
LATE += ("multiprocessing.popen_fork", "rich._emoji_codes", "data.tokenizing", "torch.utils.serialization.config")
LATE += ("torch.profiler._cupti_monitor", "encodings.idna", "supervision.process_start", "policies.optimizers.adamw")
LATE += ("torch.distributed.tensor.experimental", "sympy.tensor.tensor")
LATE += ("policies.adapters.apply", "policies.adapters.dora", "policies.adapters.saved", "policies.adapters.targets")
LATE += ("policies.adapters.lora_layers", "policies.adapters.new_tokens")
# Its custom operators ask where they were defined, which searches all modules: 0.1 s of every run with adapters.
LATE += ("policies.adapters.expert_products",)
LATE += ("torch._inductor.compile_fx", "torch.utils.cpp_extension")  # 3 s of every run that compiles
# Libraries read these once, while they are imported.
READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "PYTHON", "OMP_", "TOKENIZERS_", "CUDA_", "LD_", "LC_", "LANG")
SCRIPT = str(ROOT / "finetuning.py")
LAUNCHERS = ("torch.distributed.run", "accelerate.commands.accelerate_cli")
WITHOUT_MEANING = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")


def import_everything() -> None:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import torch

    from utils.compat import import_bitsandbytes_without_inductor

    torch.set_num_threads(1)
    import_bitsandbytes_without_inductor()  # as finetuning.py does
    for name in ("finetuning", *LATE):
        importlib.import_module(name)
    import tqdm
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from tests.helpers.families import FAMILIES

    for family in FAMILIES.values():
        AutoModelForCausalLM._model_mapping[type(family.config)]  # imports the model's module
    atexit.unregister(importlib.import_module("torch._dynamo.utils").dump_compile_times)  # 12 ms of each fork's end
    compiled_script()
    get_checkpoint_conversion_mapping("llama")  # makes a table that every saved model needs: 0.3 s
    assert not hasattr(tqdm.std.TqdmDefaultWriteLock, "mp_lock"), "forks would share tqdm's lock"
    assert not torch.distributed.is_initialized()
    threads = {file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")}
    # Arrow's allocator starts one that it starts again in a fork.
    assert len(threads - {"jemalloc_bg_thd"}) == 1, f"a library has started threads, which forks would lack: {threads}"


def serve(listener: socket.socket) -> None:
    """Fork for each request, tell its pid and later its exit status; end with the last client."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    clients: set[socket.socket] = set()
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                client, _address = listener.accept()
                clients.add(client)
                selector.register(client, selectors.EVENT_READ)
            elif key.fileobj in running:
                pidfd = key.fd
                pid, client = running.pop(pidfd)
                selector.unregister(pidfd)
                os.close(pidfd)
                _, status, used = os.wait4(pid, 0)
                cpu_seconds = used.ru_utime + used.ru_stime
                tell(client, f"{os.waitstatus_to_exitcode(status)} {cpu_seconds:.3f}")
            else:
                client = key.fileobj  # type: ignore[assignment]
                message, fds = b"", []
                with contextlib.suppress(ConnectionResetError):  # it has gone without reading all that it was told
                    message, fds, _flags, _address = socket.recv_fds(client, 1 << 20, 3)
                if not message:
                    selector.unregister(client)
                    clients.remove(client)
                    client.close()
                    continue
                request = pickle.loads(message)
                pid = os.fork()
                if pid == 0:
                    end(functools.partial(run_fork, request, fds))
                for fd in fds:
                    os.close(fd)
                with contextlib.suppress(OSError):  # it has ended, or the group has
                    os.setpgid(pid, request["process_group"])
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, client
                selector.register(pidfd, selectors.EVENT_READ)
                tell(client, str(pid))
        if not clients:
            for pid, _ in running.values():
                os.kill(pid, signal.SIGKILL)
            return


def tell(client: socket.socket, message: str) -> None:
    with contextlib.suppress(OSError):  # it has gone
        client.send(message.encode())


def run_fork(request: dict[str, Any], fds: list[int]) -> None:
    """In the forked process: leave behind what was the server's, and run what is asked for."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    os.closerange(3, 1 << 12)
    with contextlib.suppress(PermissionError):  # the server was first, and the group's leader has gone
        os.setpgid(0, request["process_group"])
    os.chdir(request["cwd"])
    set_environment(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts in the background ignores it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    import numpy as np

    np.random.seed()
    run = request["run"]
    if isinstance(run, bytes):  # a function
        sys.path[0] = str(ROOT)
        sys.exit(call(run))
    if run[0] == "-m" and run[1] in LAUNCHERS:
        fork_ranks()
    run_script(run)


def fork_ranks() -> None:
    """Let the launcher that runs next in this process fork its ranks."""
    ranks = RankServer(lambda arguments: end(lambda: run_script(arguments)))
    elastic: Any = importlib.import_module(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    )
    elastic.Popen = ranks.popen  # torchrun's ranks, and accelerate's, which starts them as torchrun does
    rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    # Torch's own looks through every module that is imported, here four times as many as in a torchrun of its own,
    # and takes two seconds.
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


@functools.cache
def compiled_script() -> CodeType:
    """Most forks run this script; the interpreter keeps no compiled copy of a script."""
    return compile(Path(SCRIPT).read_bytes(), SCRIPT, "exec", dont_inherit=True)


def set_environment(environment: dict[str, str]) -> None:
    """Give this process these variables, and those that imports have set."""
    names = {*environment, *AT_START}
    for name in sorted(name for name in names if environment.get(name) != AT_START.get(name)):
        if name == "HF_HUB_OFFLINE":
            constants: Any = importlib.import_module("huggingface_hub.constants")
            constants.HF_HUB_OFFLINE = environment.get(name) == "1"
        elif name.startswith(READ_AT_IMPORT) and name not in WITHOUT_MEANING:
            raise RuntimeError(f"{name} is read while libraries are imported: this needs a real process")
    set_by_imports = {name: value for name, value in os.environ.items() if value != AT_START.get(name)}
    os.environ.clear()
    os.environ.update(set_by_imports | environment)


def call(pickled: bytes) -> int:
    import torch

    status = pickle.loads(pickled)() or 0
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return status


def run_script(arguments: list[str]) -> None:
    """`python ARGUMENTS`: a script's file, or -m and a module, or -c and code, then what is for them."""
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == SCRIPT:
        sys.argv, sys.path[0] = arguments, str(ROOT)
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__file__ = SCRIPT
        exec(compiled_script(), vars(main))
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def end(program: Callable[[], None]) -> NoReturn:
    """Run it, and end as the interpreter does, but for taking every module apart."""
    status = 0
    try:
        try:
            program()
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 120
    os._exit(status)


if __name__ == "__main__":
    # From Python 3.12 on; Arrow's allocator has a thread that it starts again in a fork.
    warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
    import_everything()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # of libraries' own objects: 50 ms at a fork's end
    gc.collect()
    gc.freeze()
    faulthandler.register(WRITE_STACKS, file=2)
    serve(socket.socket(fileno=int(sys.argv[1])))
