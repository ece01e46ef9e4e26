"""Algorithm Distillation (Laskin et al. 2022): the actions of a learner, from the history of its learning.

Maths. A history is what one source learner met while it learnt a task: states s_t, actions a_t, rewards r_t, over many
episodes. A row is a window of T steps of it that begins with an episode. The loss of a batch is the SUM

    loss_action = sum over rows, t = 0..T-1 of  -log p(a_t | s_t, and all s, a, r of the window before),

its weight rows * T. So contexts of every length from none to T - 1 are trained at once, and nothing is ever said from
padding. Who predicts the actions of a learner well has to learn as it does: in an unseen task the model improves
without any update.

With label smoothing e each target is (1 - e) of the action and e of all actions alike. With `dynamics` the model also
says, knowing a_t, where the step leads (both coordinates) and what it pays, of all steps but the last of an episode or
window, whose s_{t+1} no history tells: `loss_dynamics`, with its own weight. A compressed model also says where the
regions of its source learner begin and end: `loss_token_type`.

The histories lie on the device as three bytes a step; a batch is only which ones, and where their windows begin: a hash
of (seed, epoch, row), so new in every epoch and the same for any cut into batches, ranks and workers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.contracts import Batch, Draw, Rows, SampleOptions, Sum
from lockstep.errors import ConfigError
from lockstep.objectives.options import DistillOptions
from lockstep.runtime.splitmix import splitmix64
from lockstep.worlds.observed import Histories, observe

if TYPE_CHECKING:
    from lockstep.contracts import Array

WINDOWS = 0x616477  # no hash is used twice
INSIDE, BEGINS, ENDS = range(3)  # of a region
UNKNOWN = -100  # no target
ACTION, KIND, OUTCOME = "loss_action", "loss_token_type", "loss_dynamics"  # the terms


class Score(NamedTuple):
    """Of one term: the sum of its cross-entropies, and how many were right."""

    total: Tensor
    right: Tensor


def build(options: DistillOptions) -> Distill:
    """The objective `distill`."""
    return Distill(options)


class Distill:
    """Predict each action of a source learner from all that it has met before."""

    steady = True  # all batches are equally large, in every way

    def __init__(self, options: DistillOptions | None = None) -> None:
        self.options = options or DistillOptions()
        self.columns: Mapping[str, str] = DistillOptions.columns_of("histories")
        self.terms: Mapping[str, float] = {ACTION: 1.0}
        self._length = 0
        self._histories: Histories | None = None
        self._on: dict[torch.device, Tensor] = {}

    def with_histories(self, histories: Histories, *, length: int, terms: Mapping[str, float]) -> Self:
        """The same for these histories, in windows of that many steps; `terms` of the model beside the action's."""
        made = copy.copy(self)
        made._histories, made._length, made._on = histories, length, {}
        made.terms = {ACTION: 1.0, **terms}
        return made

    @property
    def histories(self) -> Histories:
        assert self._histories is not None, "with_histories comes first"
        return self._histories

    @property
    def watched(self) -> Mapping[str, str]:
        """What is told of every training step, and the term that each is a mean over."""
        return {name: term for term in self.terms for name in (term, _accuracy(term))}

    def pack(self, documents: Iterable[Array], *, context_length: int, separator: int) -> Iterator[Mapping[str, Array]]:
        """Histories are no documents."""
        del documents, context_length, separator
        raise _no_text()

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        """Which histories, and where their windows begin."""
        places, count = rows.columns["histories"][:, 0], len(rows.ids)
        episodes = (self.histories.steps.shape[2] - self._length) // self.histories.horizon + 1
        starts = self._drawn(rows, draw) % np.uint64(episodes) * np.uint64(self.histories.horizon)
        tensors = {
            "histories": torch.from_numpy(places.astype(np.int64)),
            "starts": torch.from_numpy(starts.astype(np.int64)),
        }
        told = self._length - 1 - (self._length - 1) // self.histories.horizon  # steps whose outcome the window tells
        weights = {term: count * (told if term == OUTCOME else self._length) for term in self.terms}
        return Batch(tensors, weights, count, count * self._length)

    def _drawn(self, rows: Rows, draw: Draw) -> Array:
        seed = splitmix64(np.array([WINDOWS], np.uint64) ^ np.uint64(draw.seed & (1 << 64) - 1))
        return splitmix64(splitmix64(seed + rows.epochs.astype(np.uint64)) + rows.ids.astype(np.uint64))

    def windows(self, batch: Batch) -> Tensor:
        """(3, B, L) of the batch: cells, actions, rewards."""
        histories = batch.tensors["histories"]
        return self._table(histories.device)[:, histories[:, None], self._places(batch)]

    def _places(self, batch: Batch) -> Tensor:
        """(B, L): where the steps of each row lie in its history."""
        starts = batch.tensors["starts"]
        return starts[:, None] + torch.arange(self._length, device=starts.device)

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._on:
            self._on[device] = torch.from_numpy(np.array(self.histories.steps)).to(device)  # of the file, a copy
        return self._on[device]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The SUM of each term, and how many answers were right."""
        scores = self._scores(model, batch, smoothing=self.options.label_smoothing)
        sums = {term: score.total for term, score in scores.items()}
        return {**sums, **{_accuracy(term): score.right for term, score in scores.items()}}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Sum]:
        """Loss and accuracy of each answer, without smoothing. `loss` is the action's: an agent is there to act."""
        sums: dict[str, Sum] = {}
        for term, score in self._scores(model, batch, smoothing=0.0).items():
            weight = batch.weights[term]
            sums |= {term: Sum(score.total, weight), _accuracy(term): Sum(score.right, weight)}
        return {"loss": sums[ACTION], **sums}

    def _scores(self, model: nn.Module, batch: Batch, *, smoothing: float) -> dict[str, Score]:
        about, steps = self.histories, self.windows(batch)
        cells, actions, rewards = steps
        taken = actions.long()
        seen = observe(cells, actions, rewards, size=about.size, horizon=about.horizon, no_action=about.actions)
        said = model(seen, taken)
        found = {ACTION: _score([said["action"]], [taken], smoothing)}
        if KIND in self.terms:
            found[KIND] = _score([said["kind"]], [self._kinds(batch)])
        if OUTCOME in self.terms:
            outcome = self._outcome(steps)
            found[OUTCOME] = _score([said[name] for name in outcome], list(outcome.values()))
        return found

    def _kinds(self, batch: Batch) -> Tensor:
        """Where each step lay in its region, when all episodes were still there."""
        about, places = self.histories, self._places(batch)
        lay = places // about.horizon * about.stride * about.horizon + places % about.horizon
        place = lay % about.region
        return torch.where(place == about.region - 1, ENDS, torch.where(place == 0, BEGINS, INSIDE))

    def _outcome(self, steps: Tensor) -> dict[str, Tensor]:
        """Where each step led and what it paid; unknown where the next step begins an episode, or is not there."""
        about, (cells, _, rewards) = self.histories, steps.long()
        after = F.pad(cells[:, 1:], (0, 1))
        number = torch.arange(1, self._length + 1, device=cells.device)
        told = (number % about.horizon != 0) & (number < self._length)
        outcome = {"x": after // about.size, "y": after % about.size, "reward": rewards}
        return {name: value.masked_fill(~told, UNKNOWN) for name, value in outcome.items()}

    def sample(self, model: nn.Module, prompt: list[int], options: SampleOptions) -> list[int]:
        """An agent does not speak, it walks."""
        del model, prompt, options
        raise _no_text()


def _score(logits: Sequence[Tensor], targets: Sequence[Tensor], smoothing: float = 0.0) -> Score:
    """Of answers that belong together: right is where all of them are."""
    total, right = torch.zeros((), device=targets[0].device), torch.ones_like(targets[0], dtype=torch.bool)
    for logits_BLC, targets_BL in zip(logits, targets, strict=True):
        wide_BLC = logits_BLC if logits_BLC.dtype == torch.float64 else logits_BLC.float()
        losses_N = F.cross_entropy(
            wide_BLC.flatten(0, 1),
            targets_BL.flatten(),
            reduction="none",  # whose kernels use the whole card; those that sum too have one block
            label_smoothing=smoothing,
            ignore_index=UNKNOWN,
        )
        total = total + losses_N.sum()
        right = right & (logits_BLC.argmax(-1) == targets_BL)
    return Score(total, right.sum())


def _accuracy(term: str) -> str:
    return term.replace("loss", "acc")


def _different(targets: Tensor) -> float:
    """How many of equal weight there are: one over the chance that two are the same."""
    counts = targets.bincount().double()
    return float(counts.sum() ** 2 / counts.square().sum().clamp_min(1e-30))


def _no_text() -> ConfigError:
    return ConfigError("agents learn from histories, not from text", where="data", hint="lockstep collect ad")
