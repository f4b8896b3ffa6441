"""Define the names and layouts of the tensors that a model family stores in its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class CheckpointNames:
    """Names of stored tensors, without `.weight` and `.bias`; a layer's tensors have the prefix `layer` and its number.

    A fused tensor (`qkv`, `gate_up`) is named if a family has one, and takes precedence over its parts' names.
    `qkv_order` is the order of its rows: all queries, keys and values; for each head its own; or for each key/value
    head the queries that share it, its key and its value.
    """

    layer: str = "model.layers"
    embedding: str = "model.embed_tokens"
    embedding_norm: str = "model.embedding_norm"
    positions: str = "model.embed_positions"
    norm: str = "model.norm"
    head: str = "lm_head"

    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    feedforward_norm: str = "post_attention_layernorm"
    feedforward_post_norm: str = "post_feedforward_layernorm"

    qkv: str = ""
    qkv_order: Literal["stacked", "by_head", "by_group"] = "stacked"
    queries: str = "self_attn.q_proj"
    keys: str = "self_attn.k_proj"
    values: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    norm_per_head: str = ""  # suffix of a norm weight per head: `{name}{norm_per_head}{head}` (StableLM)
    sinks: str = "self_attn.sinks"
    interleaved: bool = False  # rotary pairs are columns (2i, 2i + 1) of a head

    recurrent: str = ""  # the recurrence, in place of attention

    gate_up: str = ""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"  # module with an activation's learned numbers
    transposed: bool = False  # matrices of blocks are stored for x @ weight (GPT-2)

    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    experts: Literal["apart", "woven", "fused", "fused_transposed"] = "apart"
    expert_gate: str = "mlp.experts.{expert}.gate_proj"  # each expert's own, or the fused tensor of all
    expert_up: str = "mlp.experts.{expert}.up_proj"
    expert_down: str = "mlp.experts.{expert}.down_proj"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"

    def without_prefix(self) -> CheckpointNames:
        """Return the names of tensors in files of a base model, which lack the first word (except for the head)."""
        prefixed = ("layer", "embedding", "embedding_norm", "positions", "norm")
        return replace(self, **{name: getattr(self, name).partition(".")[2] for name in prefixed})


LLAMA_NAMES = CheckpointNames()
