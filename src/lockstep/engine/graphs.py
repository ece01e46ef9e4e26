"""A whole step as one CUDA graph: a small model computes faster than the host can launch its kernels one by one.

Recorded once, after the rehearsal: forward, backward, finite flags, clip and update. All their state lies on the
device, and none of them depends on the number of the step. What does is done before each replay: rows, and what each
counts, are copied to where the recording reads them, the noise is keyed (a graph reads seed and offset of torch's
generator when it is replayed), and the weights of this step's turn are looked at.

The same kernels get the same numbers as without a graph, so the bits are the same, and a run may go on either way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lockstep.contracts import Batch, Objective
from lockstep.engine.step import RECORDED, Shares
from lockstep.runtime.determinism import reseed
from lockstep.runtime.reduce import Alone

if TYPE_CHECKING:
    from lockstep.engine.step import Stepper
    from lockstep.models.shapes import Shape

logger = logging.getLogger(__name__)

RECORDABLE = ("cuda",)
SMALL_MODEL = 20_000_000  # parameters; the steps of others take long enough
LAUNCH_BOUND = 0.5  # of a step's time goes by while it is launched: with what the loop does beside, the GPU would wait
PROBES = 3  # rehearsals that are timed


class Recording(Protocol):
    """Work of the device that can be done again."""

    values: Tensor  # what the work returns: written by each replay, in the same place

    def replay(self) -> None: ...


Record = Callable[[Callable[[], Tensor], Callable[[], object], torch.device], Recording]  # work, its rehearsal


class CudaRecording:
    """Records what `work` launches, on a stream of its own, where `rehearse` has warmed everything up."""

    def __init__(self, work: Callable[[], Tensor], rehearse: Callable[[], object], device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()
        outside, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(outside)
        try:
            with torch.cuda.stream(stream):
                rehearse()
                # Only this thread: those that load rows and write checkpoints pin memory meanwhile.
                with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                    self.values = work()
        except RuntimeError:
            _fresh_generator(device)
            raise
        finally:
            outside.wait_stream(stream)

    def replay(self) -> None:
        self._graph.replay()


def _fresh_generator(device: torch.device) -> None:
    """A generator that a recording has left in the middle refuses to draw ever after; each step keys it anyway."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(torch.Generator(device))


class StepGraph:
    """The step of batches that all look alike."""

    def __init__(self, stepper: Stepper, batch: Batch, record: Record) -> None:
        own = {name: tensor.to(stepper.device, copy=True) for name, tensor in batch.tensors.items()}
        self._stepper, self._batch = stepper, batch._replace(tensors=own)
        self._weights = torch.zeros_like(stepper.own_loss)  # what looking at weights has shown
        self._known = stepper.shares(batch.weights)
        self._shares = Shares(*({name: torch.full_like(stepper.own_loss, share) for name, share in each.items()}
                                for each in self._known))  # fmt: skip
        try:
            self._recording = record(self._work, lambda: stepper.rehearse([batch]), stepper.device)
        finally:  # what recording has left is in the memory of the graph, and was never computed
            stepper.exchange.zero()
            stepper.own_loss = stepper.weights = stepper.measures = stepper.zero
            stepper.updating = False

    def takes(self, batches: Sequence[Batch]) -> bool:
        """Whether this is a step like the recorded one."""
        return len(batches) == 1 and _look(batches[0]) == _look(self._batch)

    def replay(self, step: int, batch: Batch) -> Tensor:
        """Queue the step of this batch; the values of its reading are overwritten by the next one."""
        stepper = self._stepper
        for name, tensor in batch.tensors.items():
            self._batch.tensors[name].copy_(tensor, non_blocking=True)
        self._tell(stepper.shares(batch.weights))
        self._weights.copy_(stepper.look_at_weights(step, self._weights))
        reseed(stepper.device, stepper.seed, step, stepper.council.group.rank)
        stepper.updating = True
        stepper.before_change()
        self._recording.replay()
        return self._recording.values

    def _tell(self, shares: Shares) -> None:
        """What sums count this time, where that is another than the last time."""
        for before, now, kept in zip(self._known, shares, self._shares, strict=True):
            for name, share in now.items():
                if share != before[name]:
                    kept[name].fill_(share)
        self._known = shares

    def _work(self) -> Tensor:
        stepper = self._stepper
        loss = stepper.accumulate(RECORDED, [self._batch], self._batch.weights, recorded=self._shares)
        stepper.weights = self._weights
        return stepper.update(RECORDED, stepper.sum_up(loss))


def _look(batch: Batch) -> tuple[object, ...]:
    """All that a recording depends on, but for the numbers themselves."""
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(batch.tensors.items()))


def steadied(objective: Objective, shape: Shape, device: torch.device) -> Objective:
    """The objective with batches that all look alike, where its steps may be recorded then.

    That is a matter of the model's size, not of a clock: bits depend on it, and a run must go on with the same ones.
    """
    made = getattr(objective, "steadied", None)
    small = device.type in RECORDABLE and shape.parameters() < SMALL_MODEL
    return made() if made is not None and small else objective


def choose(stepper: Stepper, batches: Sequence[Batch], *, compiles: bool, record: Record = CudaRecording) -> None:
    """Make the step one graph where that can be done and pays, and say so. Call it after a rehearsal."""
    if stepper.device.type not in RECORDABLE or not stepper.steady:
        return
    if reason := obstacle(stepper, batches, compiles=compiles):
        logger.info("step: kernel by kernel (%s)", reason)
        return
    launching, whole = _timed(stepper, batches)
    took = f"auto; launching took {1e3 * launching:.1f} ms of {1e3 * whole:.1f}"
    if launching < LAUNCH_BOUND * whole:
        logger.info("step: kernel by kernel (%s)", took)
        return
    try:
        stepper.graph = StepGraph(stepper, batches[0], record)
    except RuntimeError as error:  # out of memory too: without a graph the step has room, as the rehearsal has shown
        logger.warning("step: kernel by kernel (recording it failed: %s)", str(error).splitlines()[0][:200])
        return
    logger.info("step: one CUDA graph (%s)", took)


def obstacle(stepper: Stepper, batches: Sequence[Batch], *, compiles: bool) -> str:
    """Why this step cannot be recorded, or ''."""
    reasons = {
        "ranks exchange gradients": not (stepper.council.alone and type(stepper.exchange) is Alone),
        "faults are armed": stepper.faults.armed,
        "every gradient is watched": stepper.watch is not None,
        "fingerprints are taken": stepper.prints is not None,
        "model.compile is off": not compiles,
        "it has several micro-batches": len(batches) > 1,
        "activations are computed again": getattr(stepper.model, "checkpointing", False),
        "moments are not in fp32": stepper.optimizer.kind != "fp32",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _timed(stepper: Stepper, batches: Sequence[Batch]) -> tuple[float, float]:
    """Seconds until a step was launched, and until it was done: of the quickest rehearsal."""
    taken = list[tuple[float, float]]()
    for _ in range(PROBES):
        stepper.rehearse(batches)
        taken.append(stepper.rehearsed)
    return min(taken, key=lambda each: each[1])
