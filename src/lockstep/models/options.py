"""Settings of the models (section `model`)."""

from __future__ import annotations

from typing import Literal

from lockstep.config.section import Section, setting

AttentionBackend = Literal["auto", "native_flash", "native_math", "cudnn", "flash_attn", "flex"]
FROM_SHAPE = "null: as the shape named by model_path"


class ModelOptions(Section, frozen=True):
    """What every model has: the shape comes from model_path, each size can be overridden."""

    model_path: str = setting(
        "", "Shape by name, a folder in Hugging Face form, or a hub id.", min_length=1, max_length=500
    )
    init: Literal["random", "pretrained", "pretrained-truncated"] = setting(
        "random", "Where the first weights come from; pretrained-truncated keeps only the first num_layers layers."
    )
    hidden_size: int | None = setting(None, f"Width of the model ({FROM_SHAPE}).", ge=2, le=1 << 20)
    num_attention_heads: int | None = setting(None, f"Query heads ({FROM_SHAPE}).", ge=1, le=1 << 12)
    intermediate_size: int | None = setting(None, f"Width of the feed-forward layer ({FROM_SHAPE}).", ge=1, le=1 << 22)
    vocab_size: int | None = setting(
        None, f"Rows of the embedding; at least the tokenizer's size ({FROM_SHAPE}).", ge=2, le=1 << 24
    )
    max_position_embeddings: int | None = setting(
        None, f"Longest context the model accepts ({FROM_SHAPE}).", unit="tokens", ge=1, le=1 << 30
    )
    init_std: float = setting(
        0.02, "Standard deviation of the first weights; lower it if training diverges.", gt=0, le=10
    )
    head_init_std: float | None = setting(None, "The same for the output matrix (null: init_std).", gt=0, le=10)
    dropout: float = setting(0.0, "Dropout on the residual branches.", ge=0, lt=1)
    attention_backend: AttentionBackend = setting(
        "auto",
        "Attention kernel; a named one is used or refused. auto on a GPU: the first that runs of cudnn, native_flash, "
        "flex and native_math; where bits must repeat, of flex, native_flash and native_math. It says which.",
        role="layout",
    )
    use_flash_attention: bool = setting(
        True, "false: auto picks native_math, and naming a flash kernel is refused.", role="layout"
    )
    compile: Literal["auto", "on", "off"] = setting(
        "auto",
        "torch.compile of each block; auto: on a GPU outside debug.",
        role="layout",
    )

    def compiles(self, *, on_gpu: bool, debug: bool) -> bool:
        """Whether blocks are compiled."""
        return self.compile == "on" or (self.compile == "auto" and on_gpu and not debug)


class DecoderOptions(ModelOptions, frozen=True):
    """A model of LLaMA's blocks, whichever way it looks."""

    num_key_value_heads: int | None = setting(
        None, f"Grouped-query heads; must divide the query heads ({FROM_SHAPE}).", ge=1, le=1 << 12
    )
    head_dim: int | None = setting(None, f"Width of one head; must be even ({FROM_SHAPE}).", ge=2, le=1 << 14)
    rope_theta: float | None = setting(None, f"Base of the rotary frequencies ({FROM_SHAPE}).", gt=0, le=1e12)
    rope_scaling: Literal["auto", "none"] = setting(
        "auto", "auto: llama3 frequency scaling where the shape has it; none: plain rotary positions."
    )
    tie_word_embeddings: bool | None = setting(None, f"Share embedding and output matrix ({FROM_SHAPE}).")
    depth_scaled_init: bool = setting(False, "Divide the residual projections' std by sqrt(2 * num_layers).")
    dropout: float = setting(0.0, "Dropout on the residual branches; LLaMA itself uses none.", ge=0, lt=1)


class LlamaOptions(DecoderOptions, frozen=True):
    """A LLaMA: each token sees those before it."""

    model_type: Literal["llama"] = setting("llama", "Model family; must agree with the family being trained.")
    model_path: str = setting(
        "meta-llama/Llama-3.1-8B-Instruct",
        "Shape by name (see `lockstep config explain model.model_path`), a folder in Hugging Face form, or a hub id.",
        min_length=1,
        max_length=500,
    )
    num_layers: int = setting(4, "Number of transformer layers.", ge=1, le=1000)


class LladaOptions(DecoderOptions, frozen=True):
    """A LLaDA: the same blocks, and every token sees the whole row."""

    model_type: Literal["llada"] = setting("llada", "Model family; must agree with the family being trained.")
    model_path: str = setting(
        "lockstep/llada-small",
        "Shape by name (lockstep/llada-tiny, -demo, -small, -base, GSAI-ML/LLaDA-8B-Base, ...), a folder in Hugging "
        "Face form, or a hub id; a LLaMA, Qwen2 or Qwen3 may be one's beginning.",
        min_length=1,
        max_length=500,
    )
    num_layers: int | None = setting(None, f"Number of transformer layers ({FROM_SHAPE}).", ge=1, le=1000)
    lora_rank: int = setting(
        0, "Train only low-rank additions of this rank to frozen weights; 0: all weights.", ge=0, le=4096
    )
    lora_alpha: float | None = setting(
        None, "Additions are scaled by alpha / rank (null: twice the rank).", gt=0, le=1e6
    )
    lora_targets: str = setting(
        "all", "Matrices with additions: all, or some of q,k,v,o,gate,up,down.", min_length=1, max_length=100
    )


class EncoderOptions(ModelOptions, frozen=True):
    """An encoder: every token sees the whole row."""

    model_type: Literal["encoder"] = setting("encoder", "Model family; must agree with the family being trained.")
    model_path: str = setting(
        "lockstep/mlm-small",
        "Shape by name (lockstep/mlm-tiny, -small, -base, -modern, bert-base-uncased, ...), a folder in Hugging Face "
        "form, or a hub id.",
        min_length=1,
        max_length=500,
    )
    architecture: Literal["prenorm", "bert", "modern"] | None = setting(
        None,
        "prenorm: norms before each branch, learned positions; bert: as BertForMaskedLM; modern: as ModernBERT, "
        f"rotary positions and GeGLU ({FROM_SHAPE}).",
    )
    num_layers: int | None = setting(None, f"Number of transformer layers ({FROM_SHAPE}).", ge=1, le=1000)
    dropout: float = setting(0.1, "Dropout on embeddings and residual branches.", ge=0, lt=1)


class AgentOptions(ModelOptions, frozen=True):
    """An agent: it reads a history of steps and says the next action."""

    model_type: Literal["agent"] = setting("agent", "Model family; must agree with the family being trained.")
    model_path: str = setting(
        "lockstep/ad",
        "Shape by name (lockstep/ad-tiny, -demo, lockstep/ad, lockstep/ad-compressed), each size can be overridden.",
        min_length=1,
        max_length=500,
    )
    num_layers: int | None = setting(None, f"Number of transformer layers ({FROM_SHAPE}).", ge=1, le=1000)
    dropout: float = setting(0.1, "Dropout on the embedded steps and residual branches.", ge=0, lt=1)
    attention_dropout: float = setting(0.1, "Dropout on the attention probabilities.", ge=0, lt=1)
    compressed: bool | None = setting(
        None, f"Read the history region by region, of the earlier ones only a summary ({FROM_SHAPE})."
    )
    region: int | None = setting(None, f"Steps of such a region ({FROM_SHAPE}).", unit="steps", ge=1, le=1 << 20)
    summary_tokens: int | None = setting(
        None, f"Learned tokens that carry a region into the next; 0: it is forgotten ({FROM_SHAPE}).", ge=0, le=1024
    )
    dynamics: bool = setting(False, "Also learn where each step leads and what it pays.")
    dynamics_strength: float = setting(1.0, "How much that counts beside the action.", ge=0, le=1e6)
