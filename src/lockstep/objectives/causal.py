"""Next-token prediction: the causal language model.

Maths. A row is T + 1 tokens x_0..x_T of the corpus, documents joined by a separator. The loss of a batch is the SUM

    loss = sum over rows, t = 0..T-1 of  -log p(x_{t+1} | x_0..x_t),      weight = number of targets,

and a step divides the sum over all micro-batches and ranks by the weight over all of them, so the cut into batches
changes nothing. The shift by one happens once, in `collate`: inputs are x_0..x_{T-1}, targets x_1..x_T. Rows overlap
by one token (stride T), so every token of the corpus but the first is predicted exactly once. The optimum is the
entropy rate of the source (Shannon 1948); the neural form is Bengio et al. 2003, the transformer's Radford et al. 2018.

With `data.documents` = masked a row is several documents side by side: p(x_{t+1} | ...) is conditioned on the tokens of
x_{t+1}'s own document only, those in this row. The first token of a document then has nothing to be predicted from, so
it is no target and is not counted in the weight: the loss of a row is the sum over its documents, each alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.contracts import Batch, Draw, Rows, SampleOptions, Sum
from lockstep.errors import ConfigError
from lockstep.kernels.linear_cross_entropy import IGNORE
from lockstep.objectives.options import CausalOptions

if TYPE_CHECKING:
    from lockstep.contracts import Array

PACK_TOKENS = 1 << 20  # tokens gathered before rows are cut
GREEDY_BELOW = 1e-6  # a temperature at which the likeliest token leaves the others nothing that fp32 could hold


def build(options: CausalOptions, *, documents: str = "separated") -> Causal:
    """The objective `causal`; `documents` is `data.documents`."""
    options.check(documents)
    return Causal(documents=documents)


class Causal:
    """Predict each token from all before it, or from all before it in its document."""

    terms: Mapping[str, float] = {"loss": 1.0}

    def __init__(self, *, documents: str = "separated") -> None:
        self.columns: Mapping[str, str] = CausalOptions.columns_of(documents)

    def pack(self, documents: Iterable[Array], *, context_length: int, separator: int) -> Iterator[dict[str, Array]]:
        """Blocks of rows of context_length + 1 tokens; each document is followed by the separator (none if < 0).

        The tail that does not fill a row is dropped. Where documents are kept apart, `starts` is 1 at the first token
        of each.
        """
        parts: list[Array] = []
        starts: list[int] = []  # where documents begin in what was gathered
        gathered = 0
        end = np.array([separator] if separator >= 0 else [], dtype=np.int32)
        for document in documents:
            if len(document) == 0:
                continue
            starts.append(gathered)
            parts += [np.asarray(document, dtype=np.int32), end]
            gathered += len(document) + len(end)
            if gathered >= max(PACK_TOKENS, context_length + 1):
                stream = np.concatenate(parts)
                yield self._rows(stream, starts, context_length)
                used = (gathered - 1) // context_length * context_length
                parts, starts = [stream[used:].copy()], [start - used for start in starts if start >= used]
                gathered -= used
        if gathered > context_length:
            yield self._rows(np.concatenate(parts), starts, context_length)

    def _rows(self, stream: Array, starts: list[int], context_length: int) -> dict[str, Array]:
        columns = {"tokens": _cut(stream, context_length)}
        if "starts" in self.columns:
            begins = np.zeros(len(stream), np.uint8)
            begins[starts] = 1
            columns["starts"] = _cut(begins, context_length)
        return columns

    def collate(self, rows: Rows, draw: Draw) -> Batch:  # noqa: ARG002 - nothing is random here
        """The rows as they are: nothing more has to be copied on the way to the device, where they are `expanded`."""
        return self.collate_many(rows.columns, 1)[0]

    def collate_many(self, columns: Mapping[str, Array], count: int) -> list[Batch]:
        """The same for several batches of equally many rows: tensors are cut far faster than arrays are made one."""
        cuts = {name: torch.from_numpy(column).unflatten(0, (count, -1)).unbind() for name, column in columns.items()}
        rows, length = cuts["tokens"][0].shape
        targets = rows * (length - 1)
        if "starts" not in cuts:
            weights = {"loss": targets}
            return [Batch({"tokens": tokens}, weights, rows, targets) for tokens in cuts["tokens"]]
        firsts = columns["starts"][:, 1:].reshape(count, -1).sum(1).tolist()  # of a document: nothing predicts them
        return [
            Batch({"tokens": tokens, "starts": starts}, {"loss": targets - first}, rows, targets)
            for tokens, starts, first in zip(cuts["tokens"], cuts["starts"], firsts, strict=True)
        ]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The SUM of cross-entropies."""
        parts = expanded(batch)
        return {"loss": model(parts["inputs"], parts["targets"], documents_BL=parts.get("documents"))}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Sum]:
        """Loss, and how often the most likely token was the right one."""
        parts = expanded(batch)
        apart = parts.get("documents")
        total, correct = model(parts["inputs"], parts["targets"], documents_BL=apart, count_correct=True)
        weight = batch.weights["loss"]
        return {"loss": Sum(total, weight), "accuracy": Sum(correct, weight)}

    @torch.no_grad()
    def sample(self, model: nn.Module, prompt: list[int], options: SampleOptions) -> list[int]:
        """Tokens that follow the prompt, one by one; the model sees at most its last max_position_embeddings."""
        if not prompt:
            raise ConfigError("an empty prompt has nothing to continue", hint="at least one token")
        window: int = _shape(model).max_position_embeddings
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(options.seed)  # on the CPU: the same draws on every device
        tokens = list(prompt)
        was_training = model.training
        model.eval()
        try:
            with eager(model):
                while len(tokens) < len(prompt) + options.tokens:
                    logits_BLV = model(torch.tensor([tokens[-window:]], device=device))
                    tokens.append(draw(logits_BLV[0, -1].float().cpu(), options, generator))
                    if tokens[-1] in options.stop:
                        break
        finally:
            model.train(was_training)
        return tokens[len(prompt) :]


def expanded(batch: Batch) -> Mapping[str, Tensor]:
    """Inputs and targets, shifted by one, once; where documents are kept apart, which one of its row an input is of.

    Made on the device the batch lies on. What was expanded before is left as it is.
    """
    if "tokens" not in batch.tensors:
        return batch.tensors
    tokens_BL = batch.tensors["tokens"].long()
    parts = {"inputs": tokens_BL[:, :-1].contiguous(), "targets": tokens_BL[:, 1:].contiguous()}
    if "starts" in batch.tensors:
        starts_BL = batch.tensors["starts"]
        parts["targets"] = parts["targets"].masked_fill(starts_BL[:, 1:] == 1, IGNORE)
        parts["documents"] = starts_BL[:, :-1].cumsum(1, dtype=torch.int32)
    return parts


def _shape(model: nn.Module) -> Any:
    return model.shape


def is_compiled(model: nn.Module) -> bool:
    """Whether parts of it are; in shards it is their forward alone."""
    return any(module._compiled_call_impl is not None or "forward" in vars(module) for module in model.modules())


def eager(model: nn.Module) -> AbstractContextManager[Any]:
    """Compiled blocks would be compiled anew for each length; and only then is the compiler worth importing."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


def _cut(stream: Array, context_length: int) -> Array:
    """Rows of context_length + 1 with stride context_length; the last entry of one is the first of the next."""
    count = (len(stream) - 1) // context_length
    windows = np.lib.stride_tricks.sliding_window_view(stream, context_length + 1)
    return windows[: count * context_length : context_length].copy()


def draw(logits_V: Tensor, options: SampleOptions, generator: torch.Generator) -> int:
    """One token: the likeliest at temperature 0, else from the top k."""
    if options.temperature < GREEDY_BELOW:
        return int(logits_V.argmax())
    k = min(options.top_k, logits_V.numel()) if options.top_k > 0 else logits_V.numel()
    top_K, ids_K = logits_V.topk(k)
    chances_K = torch.softmax(top_K / options.temperature, dim=-1)
    return int(ids_K[torch.multinomial(chances_K, 1, generator=generator)])
