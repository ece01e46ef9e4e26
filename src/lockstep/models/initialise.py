"""First weights as a pure function of (seed, parameter name, place in the tensor).

w[i] = std * Irwin-Hall(8) of hash(seed, name, i): the eight bytes of a 64-bit hash added up are close to normal (excess
kurtosis -0.15, nothing beyond 4.9 standard deviations) and stay integers until one last multiplication. So any
slice of a tensor can be made alone, on any device, and has the bits of the whole: no generator, no dependence on
world size, sharding or the kind of GPU.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from lockstep.runtime.parallel import flat_offset, local

BYTES_MEAN = 8 * 255 // 2
BYTES_STD = math.sqrt(8 * (256**2 - 1) / 12)
CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}  # elements at a time: what fits the cache of a core; enough to fill a GPU
ADDITIONS = (".lora_a", ".lora_b")  # see lora.py, which fills them
HEADS = ("output.weight", "outcome.weight")  # what makes logits
RESIDUAL = ("attention.wo.weight", "mlp.w2.weight")  # projections back into the residual stream


def _signed(value: int) -> int:
    """The 64-bit pattern as torch's int64 spells it."""
    return value - (1 << 64) if value >= 1 << 63 else value


GAMMA = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)
EVEN_BYTES = 0x00FF00FF00FF00FF
LANES = 0x0001000100010001


def stream_key(seed: int, name: str) -> int:
    """Where the stream of one parameter starts."""
    return _signed(int.from_bytes(hashlib.sha256(f"{seed}\n{name}".encode()).digest()[:8], "little"))


@torch.no_grad()
def fill(tensor: Tensor, *, seed: int, name: str, std: float, offset: int = 0) -> None:
    """Fill a contiguous tensor with elements offset, offset + 1, ... of the parameter called `name`."""
    assert tensor.is_contiguous()
    wide = tensor.dtype in (torch.float32, torch.float64)  # where the integers are exact
    flat, key, scale = tensor.view(-1), stream_key(seed, name), std / BYTES_STD
    chunk = min(CHUNK.get(tensor.device.type, 1 << 20), max(1, flat.numel()))
    counter = torch.arange(1, chunk + 1, device=tensor.device).mul_(GAMMA)
    hashed, shifted = torch.empty_like(counter), torch.empty_like(counter)
    for start in range(0, flat.numel(), chunk):
        count = min(chunk, flat.numel() - start)
        z, t = hashed[:count], shifted[:count]
        torch.add(counter[:count], _signed((key + (offset + start) * GAMMA) % (1 << 64)), out=z)
        _splitmix64(z, t)
        number = _sum_of_bytes(z, t).sub_(BYTES_MEAN)
        flat[start : start + count] = number if wide else number.float().mul_(scale)
    if wide:
        flat.mul_(scale)


def _splitmix64(z: Tensor, t: Tensor) -> None:
    """The finaliser of splitmix64, in place; `t` is scratch. int64 wraps; >> copies the sign, so it is masked off."""
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, None)):
        torch.bitwise_right_shift(z, shift, out=t)
        z.bitwise_xor_(t.bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            z.mul_(factor)


def _sum_of_bytes(z: Tensor, t: Tensor) -> Tensor:
    """The eight bytes of each number added up, in place: in pairs, then all lanes by one multiplication."""
    torch.bitwise_right_shift(z, 8, out=t)
    z.bitwise_and_(EVEN_BYTES).add_(t.bitwise_and_(EVEN_BYTES))
    return z.mul_(LANES).bitwise_right_shift_(48)


@torch.no_grad()
def initialise(
    model: nn.Module, *, seed: int, std: float, head_std: float | None = None, depth_scaled: bool = False
) -> None:
    """All parameters of a model: norms 1, biases 0, matrices random.

    Optionally quieter residual projections and another head. Of a model in shards each rank fills its own: together
    they have the bits of the whole.
    """
    parameters = {name: item for name, item in model.named_parameters() if not name.endswith(ADDITIONS)}
    residual_branches = sum(name.endswith(RESIDUAL) for name in parameters)
    for name, parameter in parameters.items():
        spread = std
        if name in HEADS and head_std is not None:
            spread = head_std
        elif depth_scaled and name.endswith(RESIDUAL):
            spread = std / math.sqrt(residual_branches)
        if parameter.dim() == 1:
            local(parameter).fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            fill(local(parameter), seed=seed, name=name, std=spread, offset=flat_offset(parameter))
