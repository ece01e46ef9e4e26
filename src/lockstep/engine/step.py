"""One optimizer step: forward, backward, clip, update - and no look at the device until the loop asks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.profiler import record_function

from lockstep.contracts import Batch, Objective
from lockstep.engine.compact import make_optimizer
from lockstep.engine.council import Council
from lockstep.engine.options import TrainingOptions
from lockstep.engine.schedule import learning_rates
from lockstep.health.finite import GradientWatch
from lockstep.health.prints import Prints
from lockstep.kernels.linear_cross_entropy import summands_of
from lockstep.runtime import faults
from lockstep.runtime.determinism import reseed
from lockstep.runtime.marks import Marks, NoMarks
from lockstep.runtime.parallel import local
from lockstep.runtime.precision import Precision
from lockstep.runtime.reduce import Alone, Apart, Exchange, Reducer

if TYPE_CHECKING:
    from lockstep.engine.graphs import StepGraph

logger = logging.getLogger(__name__)

NORM_EPSILON = 1e-6
UPDATE = "lockstep: update"  # as a profile calls it
RECORDED = -2  # no step: a graph is recorded, and whoever replays it keys the noise and waits before any change


@dataclass(frozen=True)
class Reading:
    """What the host learns of a step, once it looks."""

    loss: float
    own_loss: float  # this rank's part of it
    own_gradient: float  # finite if this rank's own gradients were, before they were exchanged
    grad_norm: float
    lr: float
    fatal: bool  # NaN or Inf: nothing was updated, and nothing will be
    overflow: bool  # fp16 only: nothing was updated, the scale was halved
    loss_scale: float
    weights: float = 0.0  # finite if the weights that were looked at in this step were
    measures: Mapping[str, float] = field(default_factory=dict[str, float])  # what the objective watches


class Shares(NamedTuple):
    """What the sum of each term, and of each measure that is watched, is multiplied by."""

    terms: Mapping[str, Any]  # numbers, or where a recording finds them
    watched: Mapping[str, Any]


class Pending:
    """A step that was launched; `read` waits for it."""

    def __init__(
        self,
        values: torch.Tensor,
        began: torch.cuda.Event | None = None,
        computed: torch.cuda.Event | None = None,
        *,
        watched: Iterable[str] = (),
    ) -> None:
        self.values, self.watched = values, watched
        self.began, self.computed, self.ended = began, computed, mark(values.device)
        self.made = time.perf_counter()  # on the CPU the step is done by now
        if self.ended:
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.ended.record()

    def read(self) -> Reading:
        if self.ended:
            self.ended.synchronize()
        loss, own_loss, own_gradient, grad_norm, lr, fatal, overflow, scale, weights, *measures = self.values.tolist()
        told = dict(zip(self.watched, measures, strict=True))
        known = (loss, own_loss, own_gradient, grad_norm, lr, bool(fatal), bool(overflow), scale, weights)
        return Reading(*known, told)

    def seconds(self, previous: Pending | None) -> float | None:
        """From the end of the previous step (or this one's beginning) to its end, by the GPU's clock; None: no GPU."""
        since = previous.ended if previous else self.began
        return since.elapsed_time(self.ended) / 1e3 if since and self.ended else None

    def own_seconds(self) -> float | None:
        """Forward and backward by the GPU's clock, without waiting for other ranks; None: no GPU."""
        return self.began.elapsed_time(self.computed) / 1e3 if self.began and self.computed else None


def mark(device: torch.device) -> torch.cuda.Event | None:
    """A point in the GPU's queue of work; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Stepper:
    """Everything a step needs, with its state on the device.

    A bad step changes nothing: fused AdamW's `found_inf` leaves parameters, moments and counts untouched, and
    `halted` is sticky, so that after a NaN the weights before it are still there when the host reads the flag.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        options: TrainingOptions,
        *,
        precision: Precision,
        seed: int,
        faults: faults.Plan,
    ) -> None:
        self.model, self.objective, self.precision, self.seed, self.faults = model, objective, precision, seed, faults
        self.device = precision.device
        self.max_norm = options.max_grad_norm
        self.optimizer = make_optimizer(model, options, self.device, seed=seed)
        self.rates = learning_rates(options).to(self.device)
        self.last_rate = torch.tensor(float(options.max_steps - 1), device=self.device)
        self.halted = torch.zeros((), device=self.device)
        self.zero, self.one = torch.zeros((), device=self.device), torch.ones((), device=self.device)
        self.before_change: Callable[[], object] = lambda: None  # what an update has to wait for
        self.watch: GradientWatch | None = None  # in debug mode: every gradient, at the price of a sync
        self.updating = False  # True from the update until the step counts: the state is then of no step
        self.parameters = self.optimizer.parameters
        self.exchange: Exchange = Alone(self.parameters)
        self.council = Council(objective.terms)
        self.link: Marks = NoMarks()
        self.prints: Prints | None = None  # of every gradient, weight and moment, where replicas are compared
        self.waited_seconds = 0.0  # for the other ranks, on the host, in the last step
        self.own_loss = self.zero
        self.weights = self.zero  # not finite: a weight is not, on some rank
        self.watched: Mapping[str, str] = getattr(objective, "watched", {})  # measure -> the term it is a mean over
        self.measures = self.zero  # of the last step, in that order
        self.graph: StepGraph | None = None  # the whole step, recorded: see graphs.py
        self.rehearsed = (0.0, 0.0)  # seconds until the last rehearsal was launched, and until it was done

    @property
    def steady(self) -> bool:
        """Whether all batches look alike, so that a step can be recorded."""
        return bool(getattr(self.objective, "steady", False))

    def connect(self, exchange: Exchange, council: Council, link: Marks) -> None:
        """Work with other ranks from now on, and under somebody's eye."""
        self.exchange, self.council, self.link = exchange, council, link

    def launch(self, step: int, batches: Sequence[Batch]) -> Pending:
        """Queue one optimizer step over this rank's micro-batches."""
        weights = self.agree(batches)
        began = mark(self.device)
        self.link.enter("forward", step)
        if self.graph and self.graph.takes(batches):
            pending = Pending(self.graph.replay(step, batches[0]), began, mark(self.device), watched=self.watched)
            self.updating = False
            return pending
        if self.faults.armed:
            self.faults.at("forward", step)
        loss = self.accumulate(step, batches, weights)
        if self.faults.armed:
            self.faults.at("backward", step)
            loss = self.faults.loss(loss, step)
            self.faults.gradients(self.model.named_parameters(), step)
        computed = mark(self.device)
        self.weights = self.look_at_weights(step, loss)
        loss = self.sum_up(loss)
        if self.watch:
            scale = self.precision.scaler.scale.item() if self.precision.scaler else 1.0
            for line in self.watch.lines(step, self.model.named_parameters(), scale=scale):
                logger.warning("%s", line)
        with record_function(UPDATE):
            values = self.update(step, loss)
        pending = Pending(values, began, computed, watched=self.watched)
        self.updating = False
        return pending

    def again(
        self, step: int, batches: Sequence[Batch], weights: Mapping[str, int], *, first_place: int = -1
    ) -> torch.Tensor:
        """The forward and backward passes of a step once more, faults included: this rank's loss; nothing is updated.

        Gradients are those of this rank alone, but for a model in shards, which has no others than those of all.
        """
        exchange = self.exchange
        self.exchange = Apart(exchange) if isinstance(exchange, Reducer) else exchange
        try:
            if self.faults.armed:
                self.faults.again(step)
            loss = self.accumulate(step, batches, weights, first_place=first_place)
            if self.faults.armed:
                loss = self.faults.loss(loss, step)
                self.faults.gradients(self.model.named_parameters(), step)
            return loss
        finally:
            self.exchange = exchange

    def agree(self, batches: Sequence[Batch]) -> Mapping[str, int]:
        """The weights of the global batch."""
        if self.council.alone:
            return self.council.agree(batches).weights
        self.link.enter("communication")
        since = time.perf_counter()
        agreed = self.council.agree(batches)
        self.waited_seconds = time.perf_counter() - since
        return agreed.weights

    def shares(self, weights: Mapping[str, int]) -> Shares:
        """What sums count in the means of the global batch."""
        terms = {term: coefficient / max(1, weights[term]) for term, coefficient in self.objective.terms.items()}
        return Shares(terms, {name: 1 / max(1, weights[term]) for name, term in self.watched.items()})

    def accumulate(
        self,
        step: int,
        batches: Sequence[Batch],
        weights: Mapping[str, int],
        *,
        first_place: int = -1,
        recorded: Shares | None = None,
    ) -> torch.Tensor:
        """Gradients of the step's loss: sums over all micro-batches, divided once by the weight of the global batch.

        Noise is keyed by the micro-batch's place in the global batch, whichever rank it is on: by default this one.
        `recorded`: where a recording finds the shares of the step that it is replayed for.
        """
        scaler = self.precision.scaler
        first_place = first_place if first_place >= 0 else self.council.group.rank * len(batches)
        shares, watched = recorded or self.shares(weights)
        foretold = len(shares) == 1 and not (scaler or self.steady)  # those of a recording lie on the device
        ahead = next(iter(shares.values())) if foretold else 1.0
        self.exchange.zero()
        losses, measures = list[torch.Tensor](), list[torch.Tensor]()
        for index, batch in enumerate(batches):
            self.link.enter("forward")
            if step != RECORDED:
                reseed(self.device, self.seed, step, first_place + index)
            with self.precision.context(), summands_of(ahead):
                sums = self.objective.loss(self.model, batch.to(self.device))
            first, *others = (self.precision.widen(sums[term]) * share for term, share in shares.items())
            part = torch.stack([first, *others]).sum() if others else first
            self.link.enter("backward")
            self.exchange.before_backward(last=index == len(batches) - 1)
            (part * scaler.scale if scaler else part).backward()
            losses.append(part.detach())
            if watched:
                counted = [sums[name].detach().to(part.dtype) * share for name, share in watched.items()]
                measures.append(torch.stack(counted))
        self.measures = self.exchange.add_up(measures) if watched else self.zero
        return self.exchange.add_up(losses)

    def look_at_weights(self, step: int, like: torch.Tensor) -> torch.Tensor:
        """0, or NaN if one of the weights of this step's turn is not finite: a tensor each step, all of them in turn.

        What no batch reads (the row of a rare token) would otherwise lie there for long.
        """
        looked_at = local(self.parameters[step % len(self.parameters)]).detach()
        if not looked_at.numel():  # a shard may be empty
            return self.zero.to(like.dtype)
        low, high = torch.aminmax(looked_at)  # NaN shows in both; a norm would be infinite for a weight above 1e19
        return (low - low + (high - high)).to(like.dtype)

    def sum_up(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradients and loss over all ranks."""
        self.own_loss = loss
        if self.council.alone:
            self.exchange.finish()
            return loss
        self.link.enter("communication")
        since = time.perf_counter()
        self.exchange.finish()
        parts = torch.stack((loss, self.weights.to(loss.dtype)))  # in one exchange
        together = self.exchange.total(torch.cat((parts, self.measures)) if self.watched else parts)
        loss, self.weights, self.measures = together[0], together[1], together[2:] if self.watched else self.measures
        self.waited_seconds += time.perf_counter() - since + self.exchange.waited_seconds
        self.link.enter("backward")  # the update belongs to it
        return loss

    def update(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        """Clip and apply the gradients, unless something is not finite."""
        scaler = self.precision.scaler
        scale = scaler.scale if scaler else self.one
        norm = self.exchange.norm(self.parameters)
        own_gradient = self.exchange.own(norm)
        if scaler:
            norm = norm / scale
        looked_at = loss + norm + self.weights
        bad = torch.nan_to_num(looked_at - looked_at, nan=1.0).float()  # 0 if finite, else 1: two small operations
        overflow = bad * torch.isfinite(loss + self.weights) if scaler else self.zero
        fatal = bad - overflow if scaler else bad
        torch.maximum(self.halted, fatal, out=self.halted)  # in place: a graph looks for it where it was
        skip = torch.maximum(self.halted, overflow) if scaler else self.halted
        self.optimizer.lr.copy_(self.rates.take(torch.minimum(self.optimizer.applied, self.last_rate).long()))
        divisor = scale
        if self.max_norm > 0:
            clipped = torch.clamp((norm + NORM_EPSILON) / self.max_norm, min=1.0)
            divisor = scale * clipped if scaler else clipped
        if self.faults.armed and step >= 0:
            self.faults.at("optimizer", step)
        if self.prints:
            self.prints.of_gradients(step)
        self.updating = True
        if step != RECORDED:
            self.before_change()
        self.optimizer.step(divisor, skip)
        values = torch.stack(
            [loss, self.own_loss, own_gradient, norm, self.optimizer.lr, fatal, overflow, scale, self.weights]
        )
        if self.watched:
            values = torch.cat((values, self.measures))
        if scaler:
            scaler.update(overflow)
        if self.faults.armed and step >= 0:
            self.faults.weights(self.model.named_parameters(), step)
        if self.prints:
            self.prints.of_state(step)
        return values

    def rehearse(self, batches: Sequence[Batch]) -> Reading:
        """A whole step that changes nothing: meets out-of-memory at once, compiles, and shows the first loss."""
        scaler, began = self.precision.scaler, time.perf_counter()
        scale = scaler.state_dict() if scaler else None
        self.halted.fill_(1.0)  # from here on nothing changes but the loss scale
        weights = self.agree(batches)
        if self.graph and self.graph.takes(batches):
            values = self.graph.replay(-1, batches[0])
        else:
            values = self.update(-1, self.sum_up(self.accumulate(-1, batches, weights)))
        pending = Pending(values, watched=self.watched)
        reading = pending.read()
        self.rehearsed = (pending.made - began, time.perf_counter() - began)
        self.updating = False
        self.halted.zero_()
        self.exchange.zero()
        if scaler and scale:
            scaler.load_state_dict(scale)
        return reading
