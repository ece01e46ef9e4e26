"""Where the time of a step goes, by the profiler: kernels of a GPU, or operations of a CPU, sorted into a few parts.

A name says what a kernel is; where it does not (an elementwise kernel may belong to anything), what has launched it
does: the update of the stepper, or the kernel of the cross-entropy.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]

from lockstep.engine.step import UPDATE
from lockstep.kernels import linear_cross_entropy

PRODUCTS, ATTENTION, POINTWISE = "matrix products", "attention", "pointwise and reductions"
OPTIMIZER, ENTROPY, COPIES = "optimizer and clipping", "cross-entropy", "copies and collectives"
OTHER = "other"
PARTS = (PRODUCTS, ATTENTION, POINTWISE, OPTIMIZER, ENTROPY, COPIES, OTHER)
TABLE = (  # the first match counts; kernels of a GPU, then operations of a CPU
    (ATTENTION, r"^triton_tem_\w*(flex|attention)"),
    (PRODUCTS, r"^triton_tem_"),
    (ENTROPY, r"log_?softmax|nll_loss|cross_entropy|logsumexp"),
    (POINTWISE, r"^triton_(poi|red|per|for|spl)_"),
    (ATTENTION, r"attention|attn|sdpa|fmha|flash_(fwd|bwd)|flash::|dot_do_o|convert_dq"),
    (OPTIMIZER, r"adam|multi_tensor_apply|lpnorm|_foreach_"),
    (COPIES, r"memcpy|memset|nccl|c10d::|gloo|all_?reduce|all_?gather|reduce_?scatter"),
    (PRODUCTS, r"gemm|gemv|nvjet|cublas|cutlass|xmma|wgmma|splitk|scaled_mm|matmul|\baten::(mm|bmm|addmm|baddbmm|"
               r"linear|mv|addmv|dot|_addmm_activation|mkldnn_linear)\b"),
    (COPIES, r"copy_kernel|direct_copy|catarray|\baten::(copy_|_to_copy|to|clone|contiguous|cat|stack)\b"),
    (POINTWISE, r"elementwise|vectorized|reduce|norm|rope|rotary|swiglu|silu|gelu|softmax|dropout|index|gather|scatter|"
                r"gammabeta|grad_weight|partials?_|"
                r"embedding|sort|scan|cumsum|cumulative|arange|fill|where|distribution|philox|unique|triu|tril|flip|"
                r"\baten::"),
)  # fmt: skip
PATTERNS = tuple((part, re.compile(pattern, re.IGNORECASE)) for part, pattern in TABLE)
UNSURE = (POINTWISE, COPIES, OTHER)  # what these names do depends on who launches them
PLAIN_COPY = re.compile(r"memcpy|memset|nccl", re.IGNORECASE)  # whoever launches it


class Piece(NamedTuple):
    """Time of one kernel or operation, and inside what it was launched: OPTIMIZER, ENTROPY or ''."""

    name: str
    inside: str
    us: float


def classify(name: str) -> str:
    """The part a kernel or operation belongs to, by its name."""
    return next((part for part, pattern in PATTERNS if pattern.search(name)), OTHER)


def of_profile(profile: torch.profiler.profile, *, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """The parts of a step, from a profile of several: a GPU's kernels where any ran, else operations of the CPU."""
    events: Any = profile.events() or []
    return divide(kernels(events) or operations(events), steps=steps)


def divide(pieces: Iterable[Piece], *, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds a step of each part, and of each name that no part claims, the longest first."""
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    unnamed = defaultdict[str, float](float)
    for name, inside, us in pieces:
        part = classify(name)
        if inside and part in UNSURE and not PLAIN_COPY.search(name):
            part = inside
        parts[part] += us / 1e6 / steps
        if part == OTHER:
            unnamed[name] += us / 1e6 / steps
    return parts, dict(sorted(unnamed.items(), key=lambda item: -item[1]))


def labels() -> dict[str, str]:
    """Name of a range that the profiler knows -> the part that what it launches belongs to."""
    of_entropy = [
        name
        for name, kind in vars(linear_cross_entropy).items()
        if isinstance(kind, type) and issubclass(kind, torch.autograd.Function)
    ]
    plain = [f"aten::{name}" for name in ("cross_entropy_loss", "_log_softmax_backward_data", "nll_loss_backward")]
    ranges = [*of_entropy, *(f"{name}Backward" for name in of_entropy), *plain]
    return {UPDATE: OPTIMIZER, **dict.fromkeys(ranges, ENTROPY)}


def _inside(event: Any, known: Mapping[str, str]) -> str:
    """What an operation on the host is part of, by the ranges around it."""
    while event is not None:
        if found := known.get(event.name):
            return found
        event = event.cpu_parent
    return ""


def kernels(events: Iterable[Any]) -> list[Piece]:
    """All that ran on the GPU. What launched it is known of most kernels, not of those in a CUDA graph."""
    known, totals = labels(), defaultdict[str, float](float)
    inside: dict[tuple[str, str], float] = defaultdict(float)
    told = set[int]()  # ranges of the host that have one number name the same kernels, each of them all
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:  # compiled regions are annotations
            totals[event.name] += event.time_range.elapsed_us()
            continue
        launched = _launched(event) if event.device_type == DeviceType.CPU and event.id not in told else []
        if launched and (part := _inside(event, known)):
            told.add(event.id)
            for kernel in launched:
                inside[kernel.name, part] += kernel.duration
    claimed = defaultdict[str, float](float)
    for (name, _), us in inside.items():
        claimed[name] += us
    shares = {name: min(1.0, totals[name] / us) for name, us in claimed.items() if us > 0}
    pieces = [Piece(name, part, us * shares.get(name, 0.0)) for (name, part), us in inside.items()]
    rest = [Piece(name, "", us - claimed[name]) for name, us in totals.items()]
    return [piece for piece in (*pieces, *rest) if piece.us > 0]


def _launched(event: Any) -> list[Any]:
    """The kernels of a range; its own shadow on the card is none, also where it is called as the kernel in it is."""
    return [each for each in event.kernels if not (event.is_user_annotation and each.name == event.name)]


def operations(events: Iterable[Any]) -> list[Piece]:
    """All that torch's operations did themselves; the time of Python and of autograd's bookkeeping is left to gaps."""
    known = labels()
    found = (event for event in events if "::" in event.name and "autograd::" not in event.name)
    return [Piece(event.name, _inside(event, known), event.self_cpu_time_total) for event in found]
