"""Where the time of a step goes, from a trace of torch.profiler: milliseconds by kind of work.

On a GPU its kernels and copies count, on a CPU the operators. What one name means is said in KINDS alone.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COMMUNICATION, OPTIMIZER, OTHER = "communication", "optimizer + clip", "other"
KINDS: dict[str, str] = {
    # Foreach kernels copy, too; FSDP's packing and unpacking are copies, not transfers.
    "copies and adds": r"foreach_copy|multi_tensor_apply.*copy|all_gather_copy_in|split_with_sizes_copy|chunk_cat",
    COMMUNICATION: r"nccl|^gloo:|^c10d::|^_c10d_functional::",
    # cuDNN's, FlashAttention 2 and 3 (a CUTLASS kernel), and those of torch's memory-efficient attention
    "attention": r"sdpa|flash|fmha|scaled_dot_product|softmax_warp|^aten::_?(safe_)?softmax",
    "loss": r"log_?softmax|cunn_softmax|nll_loss|cross_entropy",
    OPTIMIZER: r"adam|multi_tensor_apply|^aten::_foreach_|lpnorm|koptimizer",
    # cuBLAS names its kernels nvjet_*, *gemm*, *xmma* or cutlass_*; splitKreduce ends a product.
    "matrix products": r"gemm|nvjet|xmma|cutlass|cublas|gemv|splitkreduce|triton_tem_"
    r"|^aten::(addmm|mm|bmm|baddbmm|linear|matmul|_scaled_mm)$|mkl.*linear",
    "compiled elementwise": r"^triton_|compiledfxgraph|cpp_fused",
    "copies and adds ": r"memcpy|memset|copy|catarray|functor_add|fillfunctor"
    r"|^aten::(copy_|cat|clone|add|add_|fill_|zero_|_to_copy)$",
}
"""What a name means: the first that is found in it, without regard to case. Of kernels as public traces show them."""

_COMPUTING = ("matrix products", "attention", OPTIMIZER, "loss", "copies and adds", "compiled elementwise", OTHER)
ROWS = (*_COMPUTING, COMMUNICATION)
NOT_HIDDEN, IDLE = "of it not hidden", "idle"

_PATTERNS = [(kind.strip(), re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS.items()]
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_IN_OPTIMIZER = re.compile(r"^Optimizer\.step#")


class Work(NamedTuple):
    """Something that ran, in microseconds of the trace."""

    start: float
    end: float
    kind: str
    name: str


class TraceTimes(NamedTuple):
    """A step of a rank, on average."""

    num_steps: int
    step_ms: float
    by_kind_ms: dict[str, float]  # by ROWS, NOT_HIDDEN and IDLE
    other_names_ms: dict[str, float]  # the longest of what KINDS does not know
    idle_before_ms: dict[str, float]  # the longest of IDLE, by the name of what ended it

    @property
    def rows(self) -> dict[str, float]:
        return {"step": self.step_ms, **self.by_kind_ms}


def kind_of(name: str) -> str | None:
    """The kind of work that an event's name means; None if no pattern knows it."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), None)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, packed or not."""
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def step_times(events: Sequence[Mapping[str, Any]]) -> TraceTimes:
    """Averages over the steps that the profiler marked.

    Raises:
        ValueError: if it marked none.
    """
    marks = [event for event in events if str(event["name"]).startswith("ProfilerStep#")]
    marks = [event for event in marks if event.get("cat") != "gpu_user_annotation"]
    if not marks:
        raise ValueError("the trace has no ProfilerStep marks; record it with --use_profiler")
    begin = min(event["ts"] for event in marks)
    end = max(event["ts"] + event["dur"] for event in marks)
    on_device = any(event.get("cat") == "kernel" for event in events)
    works, others = (device_work if on_device else host_work)(events)
    inside = (work for work in works if work.end > begin and work.start < end)
    cut = [work._replace(start=max(work.start, begin), end=min(work.end, end)) for work in inside]
    per_step = 1e3 * len(marks)
    by_kind = {row: sum(w.end - w.start for w in cut if w.kind == row) / per_step for row in ROWS}
    transfers = merged((w.start, w.end) for w in cut if w.kind == COMMUNICATION)
    computing = merged((w.start, w.end) for w in cut if w.kind != COMMUNICATION)
    by_kind[NOT_HIDDEN] = (length(merged([*transfers, *computing])) - length(computing)) / per_step
    by_kind[IDLE] = (end - begin - length(merged([*transfers, *computing]))) / per_step
    longest, waits = ({name: time / per_step for name, time in _longest(of)} for of in (others, idle_before(cut)))
    return TraceTimes(len(marks), (end - begin) / per_step, by_kind, longest, waits)


def idle_before(works: Iterable[Work]) -> dict[str, float]:
    """The time in which nothing ran, by the name of what ran next: what the host was late with."""
    idle, now = defaultdict[str, float](float), None
    for work in sorted(works):
        if now is not None and work.start > now:
            idle[work.name] += work.start - now
        now = work.end if now is None else max(now, work.end)
    return idle


def _longest(times: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])[:5]


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time as spans that do not meet, in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return result


def length(spans: Iterable[tuple[float, float]]) -> float:
    """The time of spans that do not meet."""
    return sum(end - start for start, end in spans)


def device_work(events: Sequence[Mapping[str, Any]]) -> tuple[list[Work], dict[str, float]]:
    """What ran on the GPU, and the time of each name that KINDS does not know.

    Kernels that an optimizer's step started are its own, whatever their names.
    """
    marks: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "gpu_user_annotation" and _IN_OPTIMIZER.match(event["name"]):
            marks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    works, others = [], defaultdict[str, float](float)
    for event in events:
        if event.get("cat") not in _ON_DEVICE:
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        in_step = any(first <= start and end <= last for first, last in marks[event["pid"], event["tid"]])
        kind = OPTIMIZER if in_step else kind_of(event["name"]) or OTHER
        works.append(Work(start, end, kind, event["name"]))
        if kind == OTHER:
            others[event["name"]] += end - start
    return works, others


def host_work(events: Sequence[Mapping[str, Any]]) -> tuple[list[Work], dict[str, float]]:
    """What ran on the CPU: each moment of a thread counts for the innermost operator, and what its name means.

    An operator that KINDS does not know counts as the one around it.
    """
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        is_range = event.get("cat") == "user_annotation" and (
            _IN_OPTIMIZER.match(event["name"]) or kind_of(event["name"]) is not None
        )
        if event.get("cat") == "cpu_op" or is_range:
            threads[event["pid"], event["tid"]].append(event)
    works, others = [], defaultdict[str, float](float)
    for of_thread in threads.values():
        for start, end, kind, name in _innermost(of_thread):
            works.append(Work(start, end, kind, name))
            if kind == OTHER:
                others[name] += end - start
    return works, others


def _innermost(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, str, str]]:
    """Start, end, kind and name of what a thread did, moment by moment. Its events lie inside each other."""
    pieces: list[tuple[float, float, str, str]] = []
    open_events: list[tuple[float, str, str]] = []  # end, kind, name
    now = 0.0

    def advance(to: float) -> None:
        nonlocal now
        if open_events and to > now:
            pieces.append((now, to, *open_events[-1][1:]))
        now = max(now, to)

    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, name = event["ts"], str(event["name"])
        while open_events and open_events[-1][0] <= start:
            advance(open_events[-1][0])
            open_events.pop()
        advance(start)
        around = open_events[-1][1] if open_events else OTHER
        kind = OPTIMIZER if _IN_OPTIMIZER.match(name) or around == OPTIMIZER else kind_of(name) or around
        end = start + event["dur"]
        if open_events:
            end = min(end, open_events[-1][0])
        open_events.append((end, kind, name))
    while open_events:
        advance(open_events[-1][0])
        open_events.pop()
    return pieces
