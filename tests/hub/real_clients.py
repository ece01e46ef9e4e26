"""Program of test_real_clients: what users of the hub do, with the libraries they do it with."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from datasets import load_dataset
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from transformers import AutoConfig, PreTrainedTokenizerFast

    found: dict[str, object] = {}
    found["info"] = [file.rfilename for file in HfApi().model_info("acme/tiny").siblings or ()]
    found["config"] = json.loads(open(hf_hub_download("acme/tiny", "config.json")).read())["model_type"]  # noqa: SIM115, PTH123
    snapshot_download("acme/tiny")
    found["llama"] = type(AutoConfig.from_pretrained("acme/tiny")).__name__
    found["tokenizer"] = PreTrainedTokenizerFast.from_pretrained("acme/tiny").encode("a b")
    train = load_dataset("stanfordnlp/imdb", split="train")
    found["rows"] = len(train)
    stream = load_dataset("allenai/c4", "en", split="train", streaming=True)
    found["streamed"] = next(iter(stream))["text"][-3:]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
