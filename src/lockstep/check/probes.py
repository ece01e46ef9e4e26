"""What training steps do not cover: the memory a model leaves free, and kernels that only the fast paths use.

Each probe gives stamps like training does: the outputs that a kernel repeats, bit for bit. cuDNN's dQ it cannot repeat.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from lockstep.check.errand import Errand
from lockstep.check.records import Workload
from lockstep.check.training import Named, Training, plan_faults, steps_of, write_dump
from lockstep.engine.step import mark
from lockstep.health.fingerprint import digest_tensor, keys
from lockstep.health.prints import as_hex, digests
from lockstep.health.records import Stamp
from lockstep.models import attention
from lockstep.runtime import faults
from lockstep.runtime.host_time import own_seconds

PATTERN = "pattern"
CHUNK_WORDS = {"cuda": 1 << 25, "cpu": 1 << 17}  # 256 MiB, 1 MiB
SPARE_CHUNKS = 2  # given back where the card is full: the step needs some room
STRIDE = -0x61C8864680B583EB  # between the words of two chunks: odd, and no small multiple is near another
WORD = (1 << 64) - 1
SHOWN_WORDS = 8
SALT = 1 << 40  # keys between two inputs of a probe


# ----------------------------------------------------------------------------------------------------------- memory


class Pattern:
    """Words that are known for every place, in most of the free memory. Each look reads them all and turns every bit.

    Word i of chunk c is k(i) + c * STRIDE, so the digest of a chunk is known from sums over the k(i) alone. Those are
    computed by the CPU: what the card says is held against something that it had no part in.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.words = CHUNK_WORDS[device.type]
        self.turned = False
        self.device = device
        base = keys(0, self.words, device=torch.device("cpu"))
        self._base = [int(value) for value in digest_tensor(base).tolist()]
        self._keys = int(base.sum())
        del base
        self.chunks = self._fill(max(1, size_bytes // (8 * self.words)))
        self._expected = {turned: self._expect(turned) for turned in (False, True)}

    @property
    def size_bytes(self) -> int:
        return 8 * self.words * len(self.chunks)

    def look(self) -> tuple[list[int], list[dict[str, Any]]]:
        """Two numbers that are 0 where every word is right, and the first wrong words of wrong chunks."""
        deviations = digests(self.chunks) - self._expected[self.turned]
        places = torch.arange(len(self.chunks), device=self.device)[:, None]
        folded = (deviations * (2 * places + 1)).sum(0).tolist()  # keyed: two wrong chunks do not cancel
        wrong = torch.nonzero(deviations.any(1)).flatten().tolist()
        found = [entry for chunk in wrong[:SHOWN_WORDS] for entry in self._wrong_words(chunk)]
        for chunk in self.chunks:
            chunk.bitwise_not_()
        self.turned = not self.turned
        return folded, found

    def _fill(self, count: int) -> list[torch.Tensor]:
        base = self._make(0)
        chunks = [base]
        try:
            while len(chunks) < count:
                chunks.append(base + _signed(len(chunks) * STRIDE))
        except torch.OutOfMemoryError:
            chunks = chunks[: max(1, len(chunks) - SPARE_CHUNKS)]
            torch.cuda.empty_cache()
        return chunks

    def _make(self, chunk: int) -> torch.Tensor:
        return keys(0, self.words, device=self.device).add_(_signed(chunk * STRIDE))

    def _expect(self, turned: bool) -> torch.Tensor:
        (plain, keyed), count, rows = self._base, self.words, []
        for chunk in range(len(self.chunks)):
            shift = chunk * STRIDE
            sums = (plain + count * shift, keyed + self._keys * shift)
            if turned:  # ~x is -x - 1
                sums = (-sums[0] - count, -sums[1] - self._keys)
            rows.append([_signed(value) for value in sums])
        return torch.tensor(rows, device=self.device)

    def _wrong_words(self, chunk: int) -> list[dict[str, Any]]:
        right = self._make(chunk)
        if self.turned:
            right.bitwise_not_()
        places = torch.nonzero(right != self.chunks[chunk]).flatten()[:SHOWN_WORDS].tolist()
        return [
            {
                "word": chunk * self.words + place,
                "right": f"{int(right[place]) & WORD:016x}",
                "wrong": f"{int(self.chunks[chunk][place]) & WORD:016x}",
            }
            for place in places
        ]


def _signed(value: int) -> int:
    value &= WORD
    return value - (1 << 64) if value >> 63 else value


class MemoryProbe:
    """A small model trains while the rest of the memory holds a pattern, which is read after every step."""

    chain = ""  # the pattern is no part of what the card adds up

    def __init__(self, workload: Workload, errand: Errand, device: torch.device) -> None:
        planned = plan_faults(workload, errand)
        own = [fault for fault in planned.faults if fault.tensor == PATTERN]
        self.faults = faults.Plan(tuple(own))
        others = faults.Plan(tuple(fault for fault in planned.faults if fault not in own))
        self.training = Training(workload, errand, device, planned_faults=others)
        self.device, self.size_bytes = device, workload.pattern_bytes
        self.facts = self.training.facts
        self._like = torch.empty(CHUNK_WORDS[device.type], dtype=torch.int64, device="meta")

    @property
    def tensors(self) -> Named:
        return [*self.training.tensors, (PATTERN, self._like)]

    def stamps(self) -> Iterator[Stamp]:
        pattern: Pattern | None = None
        wrong: list[dict[str, Any]] = []
        for stamp in self.training.stamps():
            pattern = pattern or Pattern(self.device, self.size_bytes)  # after a step: what that needs, it has by now
            self.faults.weights([(PATTERN, pattern.chunks[0])], stamp.step)
            began = own_seconds()
            folded, found = pattern.look()
            wrong += [{"step": stamp.step, **word} for word in found]
            self.facts |= {
                "pattern_bytes": pattern.size_bytes,
                "wrong_words": wrong[:SHOWN_WORDS],
            }
            yield replace(stamp, sums=stamp.sums + as_hex([folded]), seconds=stamp.seconds + own_seconds() - began)


# ---------------------------------------------------------------------------------------------------------- kernels


class Probe(abc.ABC):
    """A kernel called over and over with the same inputs. `compute` gives what must have the same bits each time."""

    chain = ""

    def __init__(self, workload: Workload, errand: Errand, device: torch.device) -> None:
        self.workload, self.errand, self.device = workload, errand, device
        self.faults = plan_faults(workload, errand)
        self.facts: dict[str, Any] = {}
        self.tensors: Named = []
        with repeating_or_not():  # also while it is asked: what does not repeat is refused where bits must
            if reason := self.obstacle():
                self.facts["skipped"] = reason
                return
            self.prepare()
            self.tensors = [(name, tensor.to("meta")) for name, tensor in self.compute().items()]

    @abc.abstractmethod
    def obstacle(self) -> str:
        """Why this card cannot do it, or ''."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Make the inputs."""

    @abc.abstractmethod
    def compute(self) -> Mapping[str, torch.Tensor]:
        """What must repeat its bits."""

    def stamps(self) -> Iterator[Stamp]:
        if "skipped" in self.facts:
            return
        for step in range(steps_of(self.workload, self.errand)):
            since, began = own_seconds(), mark(self.device)
            with repeating_or_not():
                made = self.compute()
            ended = mark(self.device)
            self.faults.weights(made.items(), step)
            sums = as_hex(digests(list(made.values())).tolist())
            seconds = began.elapsed_time(ended) / 1e3 if began and ended else own_seconds() - since
            self._dump(step, made)
            yield Stamp(step, sums=sums, seconds=seconds)

    def _dump(self, step: int, made: Mapping[str, torch.Tensor]) -> None:
        dump = self.errand.dump
        if dump and (dump.workload, dump.step) == (self.workload.name, step) and dump.tensor in made:
            write_dump(self.errand, dump, made[dump.tensor])

    def drawn(self, place: int, *shape: int) -> torch.Tensor:
        """Numbers of mean 0 and variance 1 that do not depend on any generator."""
        start = place * SALT
        bits = keys(start, start + math.prod(shape), device=self.device) >> 40  # 24 bits with a sign
        return bits.to(torch.float32).mul_(math.sqrt(3.0) / (1 << 23)).view(shape)


class AttentionProbe(Probe):
    """The attention kernel of the fast default, forward and backward: output, dK and dV, which it repeats."""

    def obstacle(self) -> str:
        width = int(self.workload.settings["width"])
        return attention.obstacle(self._backend, self.device.type, "bf16", width)

    @property
    def _backend(self) -> str:
        return str(self.workload.settings.get("backend", "cudnn"))

    def prepare(self) -> None:
        sizes: Mapping[str, Any] = self.workload.settings
        rows, length, width = (int(sizes[name]) for name in ("rows", "length", "width"))
        heads = [int(sizes["heads"]), int(sizes["kv_heads"]), int(sizes["kv_heads"]), int(sizes["heads"])]
        drawn = [self.drawn(place, rows, count, length, width).bfloat16() for place, count in enumerate(heads)]
        self.q, self.k, self.v = (tensor.requires_grad_() for tensor in drawn[:3])
        self.flowing = drawn[3]
        self.facts |= {"attention": self._backend, "precision": "bf16"}

    def compute(self) -> Mapping[str, torch.Tensor]:
        output = attention.attend(self.q, self.k, self.v, backend=self._backend)
        _, dk, dv = torch.autograd.grad(output, (self.q, self.k, self.v), self.flowing)
        return {"forward": output.detach(), "dk": dk, "dv": dv}


class Fp8Probe(Probe):
    """A matrix product in fp8 with a scale for each factor."""

    def obstacle(self) -> str:
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) < (8, 9):
            return f"{torch.cuda.get_device_name(self.device)} has no fp8"
        return ""

    def prepare(self) -> None:
        sizes: Mapping[str, Any] = self.workload.settings
        rows, inner, columns = (int(sizes[name]) for name in ("rows", "inner", "columns"))
        self.left = self.drawn(0, rows, inner).to(torch.float8_e4m3fn)
        self.right = self.drawn(1, columns, inner).to(torch.float8_e4m3fn).t()
        self.scales = (torch.tensor(0.5, device=self.device), torch.tensor(2.0**-3, device=self.device))
        self.facts |= {"precision": "fp8"}

    def compute(self) -> Mapping[str, torch.Tensor]:
        multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage] - it has no other name
        one, other = self.scales
        product = multiply(self.left, self.right, scale_a=one, scale_b=other, out_dtype=torch.bfloat16)
        return {"product": product}


@contextlib.contextmanager
def repeating_or_not() -> Iterator[None]:
    """Kernels are allowed that the deterministic mode refuses: what they cannot repeat is not compared."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


KINDS: dict[str, Callable[[Workload, Errand, torch.device], Any]] = {
    "memory": MemoryProbe,
    "attention_probe": AttentionProbe,
    "fp8_probe": Fp8Probe,
}
