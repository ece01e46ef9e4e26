"""Matrix products of bf16 by one of the algorithms that cublasLt proposes, which torch has loaded anyway; by ctypes.

Shapes as torch has them: (M, K) times (K, N). The library counts by columns, so it is asked for the transposed product
of the transposed factors, which lie in memory just like that.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNED = 256  # bytes: what the library supposes of an address that it is not told of
SCRATCH_BYTES = 32 << 20  # at most, for an algorithm that needs some
MOST_PROPOSALS = 8  # it makes no more
TYPES = {torch.float32: 0, torch.bfloat16: 14}  # cudaDataType
SUM_IN_FP32 = 68  # cublasComputeType_t
TRANSPOSE_FIRST, TRANSPOSE_SECOND, MOST_SCRATCH = 3, 4, 1  # attributes of a product and of a preference
KERNEL = (1, 4), (5, 4), (8, 2)  # attributes of an algorithm, and their bytes: those of Kernel
STATUSES = {
    1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED",
}  # fmt: skip
NOT_FOR_IT = (7, 15)  # statuses of products that the library knows no way for


class Kernel(NamedTuple):
    """What a rule knows of a proposal, by the library's own numbers; of two that are alike, the first is taken.

    The tile that a block computes (cublasLtMatmulTile_t), how its warps share it (a custom option), and the blocks that
    share what they load (cublasLtClusterShape_t).
    """

    tile: int
    variant: int
    cluster: int


class Matrix(NamedTuple):
    """How one lies in memory."""

    rows: int
    columns: int
    row_step: int
    column_step: int

    @property
    def lies_by_rows(self) -> bool:
        return self.column_step == 1

    @property
    def is_dense(self) -> bool:
        """Rows one after another, or columns, perhaps with gaps that keep them aligned."""
        if self.lies_by_rows:
            return self.row_step >= self.columns and self.row_step % 8 == 0
        return self.row_step == 1 and self.column_step >= self.rows and self.column_step % 8 == 0


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("scratch", ctypes.c_size_t), ("status", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


def matrix(x: Tensor) -> Matrix:
    return Matrix(*x.shape, *x.stride())


class Product:
    """first @ second, of bf16, into contiguous memory of a given type: how it may be computed, and doing so."""

    def __init__(self, first: Matrix, second: Matrix, result: torch.dtype, device: torch.device) -> None:
        library = _library()
        assert library is not None
        self.library, self.handle, self.described = library, _handle(device), ctypes.c_void_p()
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(self.described), SUM_IN_FP32, TYPES[torch.float32]))
        made = Matrix(first.rows, second.columns, second.columns, 1)
        kinds = (second, torch.bfloat16), (first, torch.bfloat16), (made, result)
        self.layouts = [self._layout(each, TYPES[kind]) for each, kind in kinds]
        weakref.finalize(self, _free, library, self.described, self.layouts).atexit = False
        for attribute, each in ((TRANSPOSE_FIRST, second), (TRANSPOSE_SECOND, first)):
            turned = ctypes.c_int32(not each.lies_by_rows)
            _check(library.cublasLtMatmulDescSetAttribute(self.described, attribute, ctypes.byref(turned), _size(4)))
        self.proposals = {_kernel(library, each): each for each in reversed(self._ask())}

    def run(self, kernel: Kernel, first: Tensor, second: Tensor, out: Tensor, *, adds: bool) -> None:
        """Into `out`, which is added to where that is said; on torch's stream, like any other kernel."""
        proposal = self.proposals[kernel]
        scratch = torch.empty(proposal.scratch, dtype=torch.uint8, device=out.device) if proposal.scratch else None
        one, kept = ctypes.c_float(1.0), ctypes.c_float(float(adds))
        left, right, result = self.layouts
        with torch.cuda.device(out.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            status = self.library.cublasLtMatmul(
                self.handle, self.described, ctypes.byref(one), _address(second), left, _address(first), right,
                ctypes.byref(kept), _address(out), result, _address(out), result, ctypes.byref(proposal.algorithm),
                _address(scratch), _size(proposal.scratch), stream,
            )  # fmt: skip
        _check(status)

    def _layout(self, of: Matrix, kind: int) -> ctypes.c_void_p:
        """Of the matrix by columns, which is the one by rows transposed."""
        sizes = (of.columns, of.rows, of.row_step) if of.lies_by_rows else (of.rows, of.columns, of.column_step)
        made, numbers = ctypes.c_void_p(), [ctypes.c_uint64(size) for size in sizes]
        _check(self.library.cublasLtMatrixLayoutCreate(ctypes.byref(made), kind, *numbers))
        return made

    def _ask(self) -> list[_Proposal]:
        """Best first, to the library's mind; none where it knows no way."""
        left, right, result = self.layouts
        preference, most = ctypes.c_void_p(), ctypes.c_size_t(SCRATCH_BYTES)
        found, count = (_Proposal * MOST_PROPOSALS)(), ctypes.c_int()
        _check(self.library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        try:
            size = _size(ctypes.sizeof(most))
            _check(
                self.library.cublasLtMatmulPreferenceSetAttribute(preference, MOST_SCRATCH, ctypes.byref(most), size)
            )
            status = self.library.cublasLtMatmulAlgoGetHeuristic(
                self.handle, self.described, left, right, result, result, preference, MOST_PROPOSALS, found,
                ctypes.byref(count),
            )  # fmt: skip
            if status not in NOT_FOR_IT:
                _check(status)  # a passing failure is no answer: it would be remembered, and give other bits
        finally:
            self.library.cublasLtMatmulPreferenceDestroy(preference)
        return [each for each in found[: count.value] if each.status == 0]


@cache
def _library() -> Any:
    """As torch has loaded it; None where it has not."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


def is_at_hand() -> bool:
    """Whether there is such a library here."""
    return _library() is not None


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    """For one card; kept for as long as the process lives."""
    made = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(ctypes.byref(made)))
    return made


def _kernel(library: Any, proposal: _Proposal) -> Kernel:
    numbers: list[int] = []
    for attribute, size in KERNEL:
        number, written = ctypes.c_uint32(), ctypes.c_size_t()
        _check(
            library.cublasLtMatmulAlgoConfigGetAttribute(
                ctypes.byref(proposal.algorithm), attribute, ctypes.byref(number), _size(size), ctypes.byref(written)
            )
        )
        numbers.append(number.value)
    return Kernel(*numbers)


def _free(library: Any, described: ctypes.c_void_p, layouts: list[ctypes.c_void_p]) -> None:
    library.cublasLtMatmulDescDestroy(described)
    for each in layouts:
        library.cublasLtMatrixLayoutDestroy(each)


def _size(number: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(number)


def _address(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cublasLt failed: CUBLAS_STATUS_{STATUSES.get(status, status)}")
