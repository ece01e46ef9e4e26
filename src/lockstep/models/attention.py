"""Attention kernels by name: which one runs here, and the call itself.

Shapes: B rows, L tokens, H query heads, K key/value heads (H = K * group), E head width.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from lockstep.errors import ConfigError

KERNELS = {
    "native_flash": SDPBackend.FLASH_ATTENTION,
    "native_math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
BY_AUTO = (*KERNELS, "flex")  # the kernels that `auto` may choose
MASKING = ("flex", "native_math")  # the kernels of a GPU that keep documents apart
NO_DROPOUT = ("flex", "flash_attn")  # the kernels that cannot drop probabilities
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHORT_ROW = 64  # tokens; a random length of diffusion may be one
FLEX_BLOCK = 128
FLEX_HEAD = 16  # the narrowest head that flex attention compiles for
FLEX_KERNEL: Any = {"BACKEND": "TRITON"}  # not the decoding kernel, which rows under 128 tokens would get and fail in


def resolve(  # noqa: PLR0913 - all that decides which kernels can run, by name
    backend: str,
    *,
    use_flash: bool,
    device_type: str,
    dtype_name: str,
    deterministic: bool,
    head_dim: int = 64,
    documents_apart: bool = False,
    windowed: bool = False,
    drops: bool = False,
) -> tuple[str, str]:
    """(kernel that runs, one line that says so). A kernel named by the user runs or is refused.

    `windowed`: some layers see only their neighbourhood, which is a mask like that of documents kept apart. `drops`:
    training drops probabilities; kernels that cannot are the last that auto tries.
    """
    masked = "documents are masked" if documents_apart else "layers see a window" if windowed else ""
    if backend == "auto" and masked and device_type == "cuda":
        return _choose_masking(use_flash, dtype_name, head_dim, masked)
    if backend == "auto":
        return _choose(use_flash, device_type, dtype_name, deterministic, head_dim, drops)
    if not use_flash and backend != "native_math":
        raise _refusal(backend, "model.use_flash_attention is false and this is a flash kernel")
    if masked and device_type == "cuda" and backend not in MASKING:
        what = "data.documents is masked" if documents_apart else "some layers see only a window"
        raise _refusal(backend, f"{what}, and on a GPU only {' and '.join(MASKING)} can do that")
    if backend == "flash_attn":
        return _resolve_flash_attn(device_type, dtype_name, head_dim)
    if reason := obstacle(backend, device_type, dtype_name, head_dim):
        raise _refusal(backend, reason)
    if backend == "cudnn" and deterministic:
        raise _refusal(backend, "its gradients differ from run to run, and system.deterministic is on")
    return backend, f"attention: {backend}, as asked"


def _choose(
    use_flash: bool, device_type: str, dtype_name: str, deterministic: bool, head_dim: int, drops: bool
) -> tuple[str, str]:
    if not use_flash:
        return "native_math", "attention: native_math (auto; model.use_flash_attention is false)"
    if device_type == "cpu":
        return "native_flash", "attention: native_flash (auto; torch's own kernel for the CPU)"
    skipped: list[str] = []
    for name in preferred(deterministic=deterministic, drops=drops):
        if not (reason := obstacle(name, device_type, dtype_name, head_dim)):
            repeats = deterministic or name == "flex"
            why = "same bits in every run" if repeats else "not bit-reproducible"
            return name, f"attention: {name} (auto; {why}{''.join(skipped)})"
        skipped.append(f"; not {name}: {reason}")
    return "native_math", f"attention: native_math (auto{''.join(skipped)})"


def preferred(*, deterministic: bool, drops: bool = False) -> tuple[str, ...]:
    """The kernels of a GPU in the order `auto` tries them where nothing is masked: the fastest at most shapes first.

    Where probabilities are dropped, those that cannot are last: by the plain maths every one would be written and read.
    """
    order = ("flex", "native_flash") if deterministic else ("cudnn", "native_flash", "flex")
    return tuple(sorted(order, key=NO_DROPOUT.__contains__)) if drops else order


def _choose_masking(use_flash: bool, dtype_name: str, head_dim: int, masked: str) -> tuple[str, str]:
    """On a GPU, where not every token may see every other."""
    reason = obstacle("flex", "cuda", dtype_name, head_dim) if use_flash else "model.use_flash_attention is false"
    if reason:
        return "native_math", f"attention: native_math (auto; {masked}; not flex: {reason})"
    return "flex", f"attention: flex (auto; {masked}; same bits in every run)"


def _resolve_flash_attn(device_type: str, dtype_name: str, head_dim: int) -> tuple[str, str]:
    """The flash-attn package where installed, else torch's kernel of the same algorithm."""
    if reason := obstacle("native_flash", device_type, dtype_name, head_dim):
        raise _refusal("flash_attn", reason)
    if device_type != "cuda":
        raise _refusal("flash_attn", "FlashAttention needs a CUDA GPU, and the flash-attn package one too")
    if has_package("flash_attn"):
        return "flash_attn", "attention: flash_attn (the flash-attn package)"
    return "native_flash", "attention: flash_attn is not installed: torch's own FlashAttention kernel (native_flash)"


def obstacle(backend: str, device_type: str, dtype_name: str, head_dim: int) -> str:
    """Why this kernel cannot run here, or ''."""
    if backend == "native_math" or (backend == "native_flash" and device_type == "cpu"):
        return ""
    if device_type != "cuda":
        no_backward = "flex attention has no backward pass on the CPU"
        return no_backward if backend == "flex" else "it needs a CUDA GPU"
    if backend == "flex" and dtype_name == "fp64":
        return "it computes in fp32 at most"
    if backend == "flex" and head_dim < FLEX_HEAD:
        return f"heads of {head_dim} numbers are below its {FLEX_HEAD}"
    if backend == "flex":
        return "" if has_package("triton") else "flex attention needs the triton package"
    if dtype_name not in HALF:
        return f"it computes in bf16 and fp16, not in {dtype_name}"
    if head_dim % 8:
        return f"heads of {head_dim} numbers are no multiple of 8"
    return probe(backend, dtype_name, head_dim)


def probe(backend: str, dtype_name: str, head_dim: int) -> str:
    """Try the kernel once, forward and backward, on the GPU at hand; the reason if it cannot, else ''."""
    q = torch.zeros(1, 4, 128, head_dim, device="cuda", dtype=HALF[dtype_name], requires_grad=True)
    k = torch.zeros(1, 2, 128, head_dim, device="cuda", dtype=HALF[dtype_name])
    try:
        attend(q, k, k, backend=backend).sum().backward()
    except RuntimeError as error:
        return str(error).splitlines()[0][:120]
    return ""


def has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _refusal(backend: str, reason: str) -> ConfigError:
    return ConfigError(
        f"attention_backend {backend} cannot be used: {reason}",
        where="model.attention_backend",
        hint="model.attention_backend auto picks one that runs here",
    )


_plain = False  # see plainly()


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Flex attention by the plain maths while this lasts: its own kernel lets nobody look at single operations."""
    global _plain  # asked deep inside a model, by whoever runs it once more to find a fault
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def attend(  # noqa: PLR0913 - who sees whom, by name
    q_BHLE: Tensor,
    k_BKLE: Tensor,
    v_BKLE: Tensor,
    *,
    backend: str,
    causal: bool = True,
    mask: Any = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q k^T / sqrt(E)) v; each k/v head serves a run of consecutive query heads.

    `mask` says all about who sees whom, the future included: for flex its block mask, else (B, 1, L, L) booleans.
    `dropout` is of the probabilities; where a kernel has none, the plain maths steps in.
    """
    if dropout and backend in NO_DROPOUT:
        assert mask is None, "a block mask is flex attention's own"
        backend = "native_math"
    grouped = q_BHLE.shape[1] != k_BKLE.shape[1]
    if backend == "flash_attn":
        assert mask is None, "refused when the model was built"
        return _flash_attn_package(q_BHLE, k_BKLE, v_BKLE, causal=causal)
    if backend == "flex" and mask is not None and _plain:
        sizes = mask.shape[0], mask.shape[1], q_BHLE.shape[2], k_BKLE.shape[2]
        mask, backend = create_mask(mask.mask_mod, *sizes, device=str(q_BHLE.device)), "native_math"
    if backend == "flex" and mask is not None:
        flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
        return flex(q_BHLE, k_BKLE, v_BKLE, block_mask=mask, enable_gqa=grouped, kernel_options=FLEX_KERNEL)
    if backend == "flex":  # no gradient wanted: any kernel's forward pass repeats its bits, and none needs compiling
        return F.scaled_dot_product_attention(q_BHLE, k_BKLE, v_BKLE, is_causal=causal, enable_gqa=grouped)
    # Here and not around the model: checkpointing runs a block again, later. Without gradients, as in sampling, rows
    # can be shorter than the kernel takes (cuDNN: one token), and the plain maths may step in; as for any short row.
    kernels = [KERNELS[backend]]
    if backend == "cudnn" and _grows(q_BHLE, causal=causal):
        kernels.insert(0, KERNELS["native_flash"])
    helped = dropout or q_BHLE.shape[2] < SHORT_ROW or not torch.is_grad_enabled()
    if backend != "native_math" and helped:  # naming one twice fails in a compiled block
        kernels.append(SDPBackend.MATH)
    with sdpa_kernel(kernels, set_priority=True):
        plain = causal and mask is None
        return F.scaled_dot_product_attention(
            q_BHLE, k_BKLE, v_BKLE, attn_mask=mask, dropout_p=dropout, is_causal=plain, enable_gqa=grouped
        )


def _grows(q_BHLE: Tensor, *, causal: bool) -> bool:
    """Whether this may be a sample, one row that is a token longer each time: cuDNN would make a plan for it, 40 ms."""
    return causal and len(q_BHLE) == 1 and not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def _flash_attn_package(q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, *, causal: bool) -> Tensor:
    from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

    repeatable = torch.are_deterministic_algorithms_enabled()
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BHLE, k_BKLE, v_BKLE))
    return flash_attn_func(q, k, v, causal=causal, deterministic=repeatable).transpose(1, 2)


@functools.cache
def _compiled_flex() -> Any:
    """Flex attention outside a compiled block: it is only fused, and only worth having, when compiled itself."""
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=8)
def causal_block_mask(length: int, device: torch.device) -> Any:
    """Which blocks of the score matrix flex attention visits; made once per length, outside any compiled block.

    As it is written `kernels.attention_pass` knows it.
    """

    def causal(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(causal, None, None, length, length, device=device, BLOCK_SIZE=FLEX_BLOCK)


@functools.lru_cache(maxsize=8)
def everyones_block_mask(length: int, device: torch.device) -> Any:
    """The same where every token sees all; written so that `kernels.attention_pass` knows it."""

    def everyone(_b: Tensor, _h: Tensor, query: Tensor, _key: Tensor) -> Tensor:
        return query >= 0

    return create_block_mask(everyone, None, None, length, length, device=device, BLOCK_SIZE=FLEX_BLOCK)


@functools.lru_cache(maxsize=8)
def window_mask(length: int, device: torch.device, *, backend: str, window: int) -> Any:
    """For `attend`: all tokens in both directions, or those at most `window` away. None: no mask is needed."""
    window = window if window < length - 1 else 0
    if backend != "flex":
        return (_near(torch.arange(length, device=device), window)[None, None]) if window else None

    def near(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key).abs() <= (window or length)

    return create_block_mask(near, None, None, length, length, device=device, BLOCK_SIZE=FLEX_BLOCK)


def _near(places_L: Tensor, window: int) -> Tensor:
    return (places_L[:, None] - places_L).abs() <= window


def document_mask(documents_BL: Tensor, *, backend: str, causal: bool = True, window: int = 0) -> Any:
    """For `attend`: a token sees only its own document; of that, if causal, what is before it, and with a `window`
    what is at most so far away. Made once for all blocks.

    (B, 1, L, L) booleans are a byte for each pair of tokens; flex attention needs only to know which of its blocks to
    visit, and skips those between two documents.
    """
    rows, length = documents_BL.shape
    device = documents_BL.device
    if backend != "flex":
        same_B1LL = documents_BL[:, None, :, None] == documents_BL[:, None, None, :]
        if causal:
            same_B1LL &= torch.ones(length, length, dtype=torch.bool, device=device).tril()
        if window:
            same_B1LL &= _near(torch.arange(length, device=device), window)
        return same_B1LL

    def same_document(row: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = documents_BL[row, query] == documents_BL[row, key]
        if causal:
            seen = seen & (query >= key)
        return seen & ((query - key).abs() <= window) if window else seen

    return create_block_mask(same_document, rows, None, length, length, device=device, BLOCK_SIZE=FLEX_BLOCK)
