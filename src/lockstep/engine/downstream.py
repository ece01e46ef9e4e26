"""Is a pretrained encoder worth anything? It learns to label texts, beside the same encoder with random first weights.

Probe: the encoder stays as it is; a linear classifier is fitted to the mean of its hidden states over the tokens of a
text (L2-regularised logistic regression in float64, all texts at once: the optimum is unique, nothing is drawn).
Fine-tune: the encoder learns too, a few epochs of AdamW. In both, a seed decides which texts are kept for the test, the
random first weights, and what fine-tuning draws; the two encoders of a seed see exactly the same.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.contracts import Vocabulary
from lockstep.data.tokenize import TokenizerFile
from lockstep.engine.labelled import Labelled
from lockstep.runtime.precision import Precision, resolve

BATCH_ROWS = 32
FEWEST_TOKENS = 128  # of a row on a GPU
L2 = 1.0  # of the sum of the losses, on standardised features
FITTING_STEPS = 300
EPOCHS = 3
WEIGHT_DECAY = 0.01
WARMUP_SHARE = 0.1
MAX_GRAD_NORM = 1.0
CLEAR = 2.0  # standard deviations that a difference must exceed
BASE_RATE, BASE_WIDTH, TOP_RATE = 5e-5, 768, 1e-3  # BERT's rate at BERT's width; narrower models take larger steps

# Shapes: N texts, B texts of a batch, L tokens, D width, C labels.


@dataclass(frozen=True)
class How:
    """What is done, and how often."""

    method: str = "probe"  # or finetune
    seeds: int = 3
    epochs: int = EPOCHS
    learning_rate: float | None = None  # None: by the width of the model


@dataclass(frozen=True)
class Rows:
    """Texts as the encoder takes them: [CLS] tokens [SEP], cut to the longest row."""

    ids: tuple[tuple[int, ...], ...]
    pad: int
    cut: int  # texts that were longer

    def batch(self, places: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs_BL, documents_BL); documents are 1 at tokens and 0 where there are none."""
        width = self.width(places, device)
        inputs_BL = torch.full((len(places), width), self.pad, dtype=torch.int64)
        documents_BL = torch.zeros(len(places), width, dtype=torch.int32)
        for row, place in enumerate(places):
            ids = self.ids[place]
            inputs_BL[row, : len(ids)] = torch.tensor(ids)
            documents_BL[row, : len(ids)] = 1
        return inputs_BL.to(device), documents_BL.to(device)

    def width(self, places: Sequence[int], device: torch.device) -> int:
        """Of their batch: as short as can be; on a GPU, whose kernel is compiled anew for each width, one of a few."""
        needed = max(len(self.ids[place]) for place in places)
        if device.type != "cuda":
            return needed
        return min(max(len(ids) for ids in self.ids), max(FEWEST_TOKENS, 1 << (needed - 1).bit_length()))


@dataclass(frozen=True)
class Task:
    """What is learnt of one seed: labels of the texts at `train`, judged at `test`."""

    rows: Rows
    labels_N: torch.Tensor
    train: list[int]
    test: list[int]
    classes: int


def encode(texts: Sequence[str], tokenizer: TokenizerFile, *, longest: int) -> Rows:
    """Texts as rows of at most `longest` tokens, those at the beginning and the end included."""
    vocabulary: Vocabulary = tokenizer.vocabulary()
    begin, end, pad = (vocabulary.specials[name] for name in ("cls", "sep", "pad"))
    room = longest - 2
    found = tokenizer.encode(list(texts))
    ids = tuple((begin, *(int(token) for token in array[:room]), end) for array in found)
    return Rows(ids, pad, cut=sum(len(array) > room for array in found))


# ------------------------------------------------------------------------------------------------ two ways to learn


def pooled(model: nn.Module, inputs_BL: torch.Tensor, documents_BL: torch.Tensor) -> torch.Tensor:
    """The mean hidden state of the tokens of each text, (B, D) in float32."""
    hidden_BLD: torch.Tensor = model.hidden(inputs_BL, documents_BL)  # pyright: ignore[reportCallIssue] - an encoder's
    mask_BL1 = (documents_BL > 0).unsqueeze(-1).to(torch.float32)
    return (hidden_BLD.float() * mask_BL1).sum(1) / mask_BL1.sum(1)


@torch.no_grad()
def features(model: nn.Module, rows: Rows, precision: Precision) -> torch.Tensor:
    """What the frozen encoder makes of every text: (N, D) in float64 on the CPU. Texts of like length go together."""
    model.eval()
    order = sorted(range(len(rows.ids)), key=lambda place: len(rows.ids[place]))
    found: list[torch.Tensor] = []
    for first in range(0, len(order), BATCH_ROWS):
        with precision.context():
            found.append(pooled(model, *rows.batch(order[first : first + BATCH_ROWS], precision.device)).cpu())
    features_ND = torch.empty(len(order), found[0].shape[1], dtype=torch.float64)
    features_ND[torch.tensor(order)] = torch.cat(found).double()
    return features_ND


def probe(features_ND: torch.Tensor, task: Task) -> float:
    """Accuracy on the test texts of a linear classifier fitted to the others."""
    seen_ND, labels_N = features_ND[task.train], task.labels_N[task.train]
    mean_D, scale_D = seen_ND.mean(0), seen_ND.std(0, correction=0).clamp_min(1e-12)
    known_ND = (seen_ND - mean_D) / scale_D
    weight_CD = torch.zeros(task.classes, seen_ND.shape[1], dtype=torch.float64, requires_grad=True)
    bias_C = torch.zeros(task.classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight_CD, bias_C], max_iter=FITTING_STEPS, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses = F.cross_entropy(F.linear(known_ND, weight_CD, bias_C), labels_N, reduction="sum")
        loss = (losses + L2 / 2 * weight_CD.square().sum()) / len(labels_N)
        loss.backward()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportArgumentType] - takes a Tensor as well
    with torch.no_grad():
        guessed = F.linear((features_ND[task.test] - mean_D) / scale_D, weight_CD, bias_C).argmax(1)
    return (guessed == task.labels_N[task.test]).double().mean().item()


def finetune(model: nn.Module, task: Task, how: How, *, seed: int, precision: Precision) -> float:
    """Accuracy on the test texts after the model has learnt from the others. The model is changed."""
    device, train = precision.device, task.train
    with torch.no_grad():
        width = pooled(model, *task.rows.batch(train[:1], device)).shape[1]
    head = nn.Linear(width, task.classes, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    rate = how.learning_rate or min(TOP_RATE, BASE_RATE * BASE_WIDTH / width)
    trained = [parameter for parameter in (*model.parameters(), *head.parameters()) if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=WEIGHT_DECAY)
    count = math.ceil(len(train) / BATCH_ROWS) * how.epochs
    warmup = max(1, round(WARMUP_SHARE * count))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (count - step) / max(1, count - warmup))
    )
    model.train()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)  # order and dropout
        for _ in range(how.epochs):
            order = [train[place] for place in torch.randperm(len(train)).tolist()]
            for first in range(0, len(order), BATCH_ROWS):
                places = order[first : first + BATCH_ROWS]
                with precision.context():
                    logits_BC = head(pooled(model, *task.rows.batch(places, device)))
                F.cross_entropy(logits_BC.float(), task.labels_N[places].to(device)).backward()
                nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    return _tested(model, head, task, precision)


@torch.no_grad()
def _tested(model: nn.Module, head: nn.Linear, task: Task, precision: Precision) -> float:
    model.eval()
    right = 0
    for first in range(0, len(task.test), BATCH_ROWS):
        places = task.test[first : first + BATCH_ROWS]
        with precision.context():
            guessed = head(pooled(model, *task.rows.batch(places, precision.device))).argmax(1).cpu()
        right += int((guessed == task.labels_N[places]).sum())
    return right / len(task.test)


# ------------------------------------------------------------------------------------------------ side by side


@dataclass(frozen=True)
class Side:
    """The accuracies of one encoder, a seed each."""

    accuracies: tuple[float, ...]
    texts: int  # of one test

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def deviation(self) -> float:
        """Over the seeds."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0

    @property
    def noise(self) -> float:
        """The deviation over the seeds, but not less than what so few test texts leave open."""
        mean = min(max(self.mean, 0.5 / self.texts), 1 - 0.5 / self.texts)
        return max(self.deviation, math.sqrt(mean * (1 - mean) / self.texts))


@dataclass(frozen=True)
class Comparison:
    """A pretrained encoder against the same one with random first weights."""

    how: How
    labelled: Labelled
    cut: int  # texts that were longer than a row
    frequent: float  # share of the most frequent label
    pretrained: Side
    random: Side

    @property
    def difference(self) -> float:
        return self.pretrained.mean - self.random.mean

    @property
    def deviations(self) -> float:
        """The difference in standard deviations of a difference between two seeds."""
        return self.difference / math.hypot(self.pretrained.noise, self.random.noise)

    @property
    def verdict(self) -> str:
        if abs(self.deviations) <= CLEAR:
            return f"no clear difference: {CLEAR:g} standard deviations are asked for"
        return "pretraining helps" if self.difference > 0 else "pretraining harms: random first weights are better"

    def lines(self) -> list[str]:
        """For people."""
        count, test = len(self.labelled.texts), self.pretrained.texts
        title = {"probe": "Linear probe on the frozen encoder", "finetune": f"Fine-tuning, epochs: {self.how.epochs}"}
        cut = [f"  cut     {self.cut:,} texts are longer than a row: their beginning counts"] if self.cut else []
        sides = (("pretrained", self.pretrained), ("random first weights", self.random))
        seeds = f"{self.how.seeds} seed{'s' * (self.how.seeds != 1)}"
        return [
            f"{title[self.how.method]}: {count:,} texts, {len(self.labelled.names)} labels, {seeds}",
            f"  split   {count - test:,} to learn from, {test:,} to test, by the hash of seed and text",
            *cut,
            f"  {'most frequent label':<22} {self.frequent:.4f}",
            *(f"  {name:<22} {side.mean:.4f} ± {side.deviation:.4f}" for name, side in sides),
            f"  {'difference':<22} {self.difference:+.4f}, {self.deviations:+.1f} standard deviations",
            f"Verdict: {self.verdict}",
        ]

    def fields(self) -> dict[str, Any]:
        """For programs."""
        sides = {"pretrained": self.pretrained, "random": self.random}
        return {
            "method": self.how.method,
            "seeds": self.how.seeds,
            "texts": len(self.labelled.texts),
            "test_texts": self.pretrained.texts,
            "labels": list(self.labelled.names),
            "most_frequent": self.frequent,
            **{
                name: {"accuracies": list(side.accuracies), "mean": side.mean, "deviation": side.deviation}
                for name, side in sides.items()
            },
            "difference": self.difference,
            "deviations": self.deviations,
            "verdict": self.verdict,
        }


def compare(
    model: nn.Module, untrained: Callable[[int], nn.Module], rows: Rows, labelled: Labelled, how: How
) -> Comparison:
    """Both encoders on the same splits; `untrained(seed)` makes the same encoder with random first weights."""
    device = next(model.parameters()).device
    precision = Precision(resolve("auto", device), device)
    labels_N = torch.tensor(labelled.labels)
    splits = [labelled.split(seed) for seed in range(how.seeds)]
    tasks = [Task(rows, labels_N, train, test, len(labelled.names)) for train, test in splits]
    fixed_ND = features(model, rows, precision) if how.method == "probe" else None
    pretrained: list[float] = []
    random: list[float] = []
    for seed, task in enumerate(tasks):
        other = untrained(seed)
        if fixed_ND is not None:
            pretrained.append(probe(fixed_ND, task))
            random.append(probe(features(other, rows, precision), task))
            continue
        for encoder, found in ((copy.deepcopy(model), pretrained), (other, random)):
            found.append(finetune(encoder, task, how, seed=seed, precision=precision))
    tested = min(len(task.test) for task in tasks)
    frequent = Counter(labelled.labels).most_common(1)[0][1] / len(labelled.labels)
    return Comparison(how, labelled, rows.cut, frequent, Side(tuple(pretrained), tested), Side(tuple(random), tested))
