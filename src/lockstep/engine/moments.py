"""AdamW's moments in fewer bytes: bf16, or int8 with a scale for each block of a row; rounded at random, unbiased.

With beta2 = 0.999 a step changes the second moment by a thousandth, and bf16 has 256 numbers from one power of two to
the next: rounded to the nearest, a moment never moves again. Rounded up or down with the right chances, its
expectation is what fp32 would hold. The chances come from a hash of (seed, parameter, step, place in the whole
tensor): no generator, the same numbers however the tensor is cut, and after a resume.

A byte k stands for scale * (k / 127)^2 with the sign of k in the first moment, and for scale * 2^((k - 255) / 8) in the
second, whose numbers differ more and whose relative error decides the size of a step. Above zero the second never
becomes zero, or the first would be divided by epsilon. Blocks lie along the rows, which no sharding cuts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

BLOCK = 256
FIRST, SECOND = "exp_avg", "exp_avg_sq"
FIRST_SCALE, SECOND_SCALE = "exp_avg_scale", "exp_avg_sq_scale"
MOMENTS, SCALES = (FIRST, SECOND), (FIRST_SCALE, SECOND_SCALE)
FIRST_CODES = 127
CODES, LAST, STEPS_PER_OCTAVE, TINY = 256, 255, 8, 1e-38
WORD = 1 << 32


def signed(value: int) -> int:
    """The lowest 32 bits as torch's int32 spells them."""
    value %= WORD
    return value - WORD if value >= WORD >> 1 else value


MIX_1, MIX_2, STRIDE = signed(0x7FEB352D), signed(0x846CA68B), signed(0x9E3779B1)


def stream_key(seed: int, name: str) -> int:
    """Where the noise of one parameter begins."""
    return signed(int.from_bytes(hashlib.sha256(f"rounding\n{seed}\n{name}".encode()).digest()[:4], "little"))


def mixed(x: Tensor) -> Tensor:
    """A well-mixed 32-bit hash of each number (Wellons' lowbias32); int32 wraps, >> copies the sign."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * MIX_1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * MIX_2
    return x ^ ((x >> 16) & 0xFFFF)


def noise(shape: torch.Size, *, first: Tensor, key: Tensor, step: Tensor) -> Tensor:
    """32 random bits for each element of a run of rows; `first` is the flat index of its first element in the whole."""
    places = torch.arange(shape.numel(), dtype=torch.int32, device=key.device).view(shape)
    one, other = mixed(key + mixed(step)), mixed((key ^ STRIDE) + mixed(step + 1))
    return mixed(mixed((places + first) * STRIDE + one) ^ other)


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """One of the two neighbours, with chances that make the expectation x; `bits` are numbers of 16 bits."""
    return ((x.float().view(torch.int32) + bits) & -65536).view(torch.float32).to(torch.bfloat16)


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of 16 bits."""
    return bits & 0xFFFF, (bits >> 16) & 0xFFFF


def blocks_of(width: int) -> int:
    """How many scales a row of that width has."""
    return -(-width // BLOCK)


def in_blocks(x_RC: Tensor) -> Tensor:
    """(rows, blocks, numbers of a block); the last one filled up with zeros."""
    width = x_RC.shape[1]
    size = min(BLOCK, width)
    return torch.nn.functional.pad(x_RC, (0, -width % size)).unflatten(1, (-1, size))


def out_of_blocks(x_RBS: Tensor, width: int) -> Tensor:
    return x_RBS.flatten(1)[:, :width]


def encode_first(m_RC: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Signed bytes, and the largest number of each block."""
    m_RBS = in_blocks(m_RC)
    scale_RB1 = m_RBS.abs().amax(-1, keepdim=True)
    share = torch.where(scale_RB1 > 0, m_RBS.abs() / scale_RB1, 0) * FIRST_CODES**2
    code = share.sqrt().floor().clamp(max=FIRST_CODES - 1)
    code = code + (in_blocks(_uniform(bits, m_RC.dtype)) < (share - code * code) / (2 * code + 1))
    code = torch.where(m_RBS < 0, -code, code)
    return out_of_blocks(code, m_RC.shape[1]).to(torch.int8), scale_RB1.squeeze(-1).float()


def decode_first(code_RC: Tensor, scale_RB: Tensor, dtype: torch.dtype) -> Tensor:
    code_RBS = in_blocks(code_RC.to(dtype))
    value_RBS = code_RBS * code_RBS.abs() * (scale_RB.to(dtype) / FIRST_CODES**2)[..., None]
    return out_of_blocks(value_RBS, code_RC.shape[1])


@cache
def second_values(device: torch.device) -> Tensor:
    """What the codes of second moments stand for, as shares of the scale: a table, so that all ways round alike."""
    codes = torch.arange(1, CODES, dtype=torch.float64, device="cpu")
    shares = torch.cat([torch.zeros(1, device="cpu"), torch.exp2((codes - LAST) / STEPS_PER_OCTAVE).float()])
    return shares.to(device)


def encode_second(v_RC: Tensor, bits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes, and the largest number of each block."""
    v_RBS = in_blocks(v_RC)
    scale_RB1 = v_RBS.amax(-1, keepdim=True)
    share = torch.where(scale_RB1 > 0, v_RBS / scale_RB1, 0)
    about = (LAST + STEPS_PER_OCTAVE * share.float().clamp(min=TINY).log2()).floor().clamp(1, LAST - 1).to(torch.int32)
    lower = (about - (share < values[about]).int()).clamp(1, LAST - 1)  # log2 may be off by a bit, the table is not
    lower = (lower + (share >= values[lower + 1]).int()).clamp(max=LAST - 1)
    low, high = values[lower].to(share.dtype), values[lower + 1].to(share.dtype)
    code = lower + (in_blocks(_uniform(bits, v_RC.dtype)) < (share - low) / (high - low)).int()
    code = torch.where(v_RBS > 0, code, 0)
    return out_of_blocks(code, v_RC.shape[1]).to(torch.uint8), scale_RB1.squeeze(-1).float()


def decode_second(code_RC: Tensor, scale_RB: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    share_RBS = in_blocks(values[code_RC.to(torch.int32)].to(dtype))
    return out_of_blocks(share_RBS * scale_RB.to(dtype)[..., None], code_RC.shape[1])


def _uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """From [0, 1), the middle of each of 65,536 parts."""
    return (bits.to(dtype) + 0.5) / 65536


def empty_states(part: Tensor, kind: str) -> dict[str, Tensor]:
    """The moments of a tensor (or of its part here), all zero. What has no rows to cut into blocks stays fp32."""
    if kind == "int8" and part.ndim == 2:
        scales = torch.zeros(part.shape[0], blocks_of(part.shape[1]), device=part.device)
        return {
            FIRST: torch.zeros_like(part, dtype=torch.int8),
            SECOND: torch.zeros_like(part, dtype=torch.uint8),
            FIRST_SCALE: scales,
            SECOND_SCALE: scales.clone(),
        }
    dtype = torch.bfloat16 if kind == "bf16" else part.dtype
    return {FIRST: torch.zeros_like(part, dtype=dtype), SECOND: torch.zeros_like(part, dtype=dtype)}


def decode(states: Mapping[str, Tensor], dtype: torch.dtype, values: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments in the numbers the update computes in."""
    if FIRST_SCALE not in states:
        return states[FIRST].to(dtype), states[SECOND].to(dtype)
    first = decode_first(states[FIRST], states[FIRST_SCALE], dtype)
    return first, decode_second(states[SECOND], states[SECOND_SCALE], values, dtype)


def encode(
    first: Tensor, second: Tensor, bits: Tensor, states: Mapping[str, Tensor], values: Tensor
) -> dict[str, Tensor]:
    """Both moments as `states` keeps them."""
    low, high = halves(bits)
    if FIRST_SCALE in states:
        (m, m_scale), (v, v_scale) = encode_first(first, low), encode_second(second, high, values)
        return {FIRST: m, SECOND: v, FIRST_SCALE: m_scale, SECOND_SCALE: v_scale}
    if states[FIRST].dtype == torch.bfloat16:
        return {FIRST: round_to_bf16(first, low), SECOND: round_to_bf16(second, high)}
    return {FIRST: first, SECOND: second}
