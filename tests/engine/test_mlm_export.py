"""`lockstep export` of a masked-LM run: transformers loads model and tokenizer, and fills the same blanks as we do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.inference import fill_blanks, load_run
from tests.conftest import Outcome
from tests.gates.training import FEW_DOCUMENTS

transformers: Any = pytest.importorskip("transformers")
Cli = Callable[..., Outcome]
PROMPT = "the [MASK] of a [MASK]"


@pytest.mark.parametrize(
    ("architecture", "tokenizer"), [("bert", "wordpiece"), ("modern", "builtin"), ("bert", "word")]
)
def test_transformers_reads_an_export(
    architecture: str, tokenizer: str, in_dir: Path, shared_cache: Path, lockstep: Cli
) -> None:
    words = ("--device", "cpu", "--max-steps", "3", "--name", "a", f"data.data_path={FEW_DOCUMENTS}",
             f"model.architecture={architecture}", f"data.tokenizer_name={tokenizer}", "model.init_std=0.2",
             "report.sample_prompt=", "report.tensorboard=false", "training.save_interval=0")  # fmt: skip
    trained = lockstep("train", "mlm", "tiny", *words)
    assert trained.code == 0, trained.text
    exported = lockstep("export", "runs/a", "--to", "hf", "out")
    assert exported.code == 0, exported.text
    theirs = transformers.AutoModelForMaskedLM.from_pretrained("out")
    reader = transformers.AutoTokenizer.from_pretrained("out")
    ours = load_run(Path("runs/a"))
    ids = reader(PROMPT, return_tensors="pt")["input_ids"]
    roles = ours.tokenizer.vocabulary().specials
    expected = [roles["cls"], *ours.tokenizer.encode_prompt(PROMPT), roles["sep"]]
    assert ids[0].tolist() == expected, "[CLS], [SEP] and the mask as here"
    assert (reader.mask_token_id, reader.pad_token_id) == (roles["mask"], roles["pad"])
    with torch.no_grad():
        logits = theirs.eval()(ids).logits
        assert torch.allclose(logits, ours.model.cpu()(ids), atol=1e-4)
    assert len(fill_blanks(ours.model, ours.objective, ours.tokenizer, PROMPT).blanks) == 2
