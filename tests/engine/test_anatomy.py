"""The parts of a step: names are sorted rightly, parts add up, and what no table knows is named."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from lockstep.engine import anatomy
from lockstep.engine.anatomy import (
    ATTENTION,
    COPIES,
    ENTROPY,
    OPTIMIZER,
    OTHER,
    PARTS,
    POINTWISE,
    PRODUCTS,
    Piece,
    classify,
    divide,
    kernels,
)
from lockstep.engine.step import UPDATE
from lockstep.kernels.linear_cross_entropy import linear_cross_entropy

# as profilers of Hopper cards and CPUs print them
NAMES = {
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT": PRODUCTS,
    "_adamw": OPTIMIZER,
    "_cross_entropy_row": ENTROPY,
    "void at::native::(anonymous namespace)::compute_grad_weight<float, long>": POINTWISE,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas": PRODUCTS,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>": PRODUCTS,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": PRODUCTS,
    "triton_tem_fused_mm_3": PRODUCTS,
    "aten::addmm": PRODUCTS,
    "aten::_scaled_mm": PRODUCTS,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7x128x128x128": ATTENTION,
    "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>": ATTENTION,
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>": ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>)": ATTENTION,
    "triton_tem_fused_flex_attention_backward_zeros_2": ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "triton_poi_fused__to_copy_mul_silu_4": POINTWISE,
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1": POINTWISE,
    "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda(...)>": POINTWISE,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<>>>": POINTWISE,
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>": POINTWISE,
    "aten::mul": POINTWISE,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., FusedAdamMathFunctor<float, 4>>": OPTIMIZER,
    "aten::_fused_adamw_": OPTIMIZER,
    "triton_red_fused__log_softmax_0": ENTROPY,
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, LogSoftMaxForwardEpilogue>": ENTROPY,
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>": ENTROPY,
    "Memcpy HtoD (Pinned -> Device)": COPIES,
    "Memset (Device)": COPIES,
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": COPIES,
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(...)>": COPIES,
    "aten::copy_": COPIES,
    "a_kernel_of_somebody": OTHER,
}


@pytest.mark.parametrize(("name", "part"), NAMES.items())
def test_names_of_real_kernels(name: str, part: str) -> None:
    assert classify(name) == part


def test_all_that_was_seen_is_in_a_part() -> None:
    drawn = random.Random(7)
    pieces = [Piece(name, inside, drawn.uniform(1, 500)) for name in NAMES for inside in ("", OPTIMIZER, ENTROPY)]
    parts, unnamed = divide(pieces, steps=2)
    assert parts.keys() == set(PARTS)
    assert sum(parts.values()) == pytest.approx(sum(piece.us for piece in pieces) / 2e6)
    other = [piece.us for piece in pieces if piece.name == "a_kernel_of_somebody" and not piece.inside]
    assert unnamed == {"a_kernel_of_somebody": pytest.approx(sum(other) / 2e6)}


def test_who_launches_decides_only_where_the_name_does_not() -> None:
    pieces = [Piece("void at::native::elementwise_kernel<>", OPTIMIZER, 1000.0), Piece("nvjet_x", ENTROPY, 1000.0)]
    pieces += [Piece("Memcpy DtoH", OPTIMIZER, 1000.0), Piece("void at::native::direct_copy<>", ENTROPY, 1000.0)]
    found = {part: seconds for part, seconds in divide(pieces, steps=1)[0].items() if seconds}
    assert found == {OPTIMIZER: 1e-3, PRODUCTS: 1e-3, COPIES: 1e-3, ENTROPY: 1e-3}


NUMBERS = itertools.count(1)


def event(name: str, us: float = 0.0, *, on_gpu: bool = False, note: bool = False, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, device_type=DeviceType.CUDA if on_gpu else DeviceType.CPU, is_user_annotation=note,
        time_range=SimpleNamespace(elapsed_us=lambda: us),
        **{"kernels": [], "cpu_parent": None, "id": next(NUMBERS), **more},
    )  # fmt: skip


def test_kernels_of_a_gpu_are_counted_once() -> None:
    """Annotations on the card span kernels and are none; what the update launched is told from the same name's rest."""
    update = event(UPDATE)
    launched = SimpleNamespace(name="elementwise", duration=30.0)
    events = [
        event("elementwise", 30.0, on_gpu=True),
        event("elementwise", 12.0, on_gpu=True),
        event("## Call CompiledFxGraph ##", 500.0, on_gpu=True, note=True),
        update,
        event("aten::div", cpu_parent=update, kernels=[launched]),
        event("aten::mul", kernels=[SimpleNamespace(name="elementwise", duration=12.0)]),
    ]
    assert sorted(kernels(events)) == [Piece("elementwise", "", 12.0), Piece("elementwise", OPTIMIZER, 30.0)]


def test_a_kernel_that_several_ranges_name_is_counted_once() -> None:
    """As the compiled update of compact moments: 2.5 s of kernels were once counted in a step of one."""
    update, twice = event(UPDATE), [SimpleNamespace(name="triton_poi_fused_0", duration=30.0)]
    events = [event("triton_poi_fused_0", 30.0, on_gpu=True), update, event("never seen", kernels=twice)]
    events += [event(name, cpu_parent=update, kernels=twice) for name in ("Compiled Region", "triton_poi_fused_0")]
    assert kernels(events) == [Piece("triton_poi_fused_0", OPTIMIZER, 30.0)]
    absent = event("aten::add", cpu_parent=update, kernels=[SimpleNamespace(name="of another card", duration=9.0)])
    assert kernels([update, absent]) == []
    brief = event("aten::add", cpu_parent=update, kernels=[SimpleNamespace(name="brief", duration=0.0)])
    assert kernels([event("brief", 0.0, on_gpu=True), update, brief]) == [], "shorter than the profiler's clock"


@pytest.mark.parametrize(("same", "note"), [(True, False), (False, True)])
def test_a_kernel_that_two_ranges_name_leaves_the_others_of_its_name_alone(same: bool, note: bool) -> None:
    """Two ranges of one number name one kernel, or the second is a mark whose shadow on the card is called so."""
    update, one = event(UPDATE), [SimpleNamespace(name="triton_poi_fused_0", duration=30.0)]
    region = event("Compiled Region", cpu_parent=update, kernels=one)
    again = event(
        "triton_poi_fused_0", note=note, cpu_parent=update, kernels=one, **({"id": region.id} if same else {})
    )
    ran = [event("triton_poi_fused_0", us, on_gpu=True) for us in (30.0, 40.0)]
    found = kernels([*ran, update, region, again])
    assert sorted(found) == [Piece("triton_poi_fused_0", "", 40.0), Piece("triton_poi_fused_0", OPTIMIZER, 30.0)]
    twice = kernels([*ran, update, region, event("aten::mul", cpu_parent=update, kernels=one)])
    assert twice == [Piece("triton_poi_fused_0", OPTIMIZER, 60.0), Piece("triton_poi_fused_0", "", 10.0)], (
        "another launch"
    )


def test_the_cross_entropy_is_found_by_what_runs_it() -> None:
    """The profiler names autograd functions after their class: of the real kernel, whatever it is called."""
    x, weight = torch.randn(40, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
        linear_cross_entropy(x, weight, torch.randint(64, (40,)), chunk_tokens=8).backward()
    pieces = anatomy.operations(watched.events() or [])
    assert {piece.inside for piece in pieces if piece.name == "aten::exp_"} == {ENTROPY}
    found, _ = divide(pieces, steps=1)
    assert found[ENTROPY] > 0
    assert found[PRODUCTS] > 0
