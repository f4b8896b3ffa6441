"""Read the sizes of any decoder from its Hugging Face config.json, to estimate memory even for unsupported models.

Supported families (see families.py) are exact. For other families, the fields that nearly all configs have are read
under their various names, and remarks name the inexact parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.custom import registered
from workbench.errors import WorkbenchError
from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec, MLASpec
from workbench.model.hf.families import FAMILIES, spec_from_config
from workbench.model.hf.family_fields import MAX_LAYERS
from workbench.model.hf.fields import REQUIRED, ConfigFields, read_object
from workbench.model.spec import LayerSpec, ModelSpec, MoESpec

# Names of the same figure in different families, the most common first.
FIELD_ALIASES: dict[str, tuple[str, ...]] = {
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "groups": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num"),
    "dim": ("head_dim", "kv_channels", "d_kv", "attention_head_dim"),
    "hidden": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "inner_dim"),
    "vocab": ("vocab_size", "padded_vocab_size", "n_vocab"),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "used": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts"),
    "shared": ("n_shared_experts", "num_shared_experts"),
    "expert_hidden": ("moe_intermediate_size", "expert_intermediate_size", "ffn_dim_exp"),
    "dense_layers": ("first_k_dense_replace", "moe_layer_start_index"),
}
MAY_BE_ZERO = ("experts", "shared", "dense_layers")
DECODER_KEYS = ("text_config", "language_config", "llm_config")  # sections with the decoder
MLA_KEYS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
# Families with a feed-forward of two matrices and no gate; their embedding is tied to the head by default.
UNGATED_FAMILIES = (
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "opt",
    "bloom",
    "falcon",
    "phi",
    "gpt_bigcode",
    "starcoder2",
    "mpt",
)


def spec_from_any_config(file: Path) -> tuple[ModelSpec, list[str]]:
    """Return the spec of the decoder that `file` describes, and remarks on inexact parts. Raises WorkbenchError if a
    size is missing.
    """
    config = read_object(file)
    name = file.resolve().parent.name
    remarks = []
    for key in DECODER_KEYS:
        if isinstance(inner := config.get(key), dict):
            config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **inner}
            remarks.append(f"only the decoder under {key} is counted")
            break
    family = config.get("model_type")
    if family in FAMILIES or registered(str(family)) is not None:
        try:
            return spec_from_config(config, name, str(file)), remarks
        except WorkbenchError as error:
            remarks.append(f"counted from common config fields, since the model cannot be read in full ({error})")
    else:
        remarks.append(f"family {family!r} is not supported: counted from common config fields, without biases")
    return _shared_fields(ConfigFields(config, str(file)), name, remarks), remarks


def _shared_fields(fields: ConfigFields, name: str, remarks: list[str]) -> ModelSpec:
    width, layers = _integer(fields, "width"), _integer(fields, "layers")
    windows = _windows(fields, layers, remarks)
    sparse = _feedforwards(fields, width, remarks)
    dense: dict[str, Any] = {"intermediate_size": _dense_hidden(fields, width, remarks)}
    first = _integer(fields, "dense_layers", 0) if "experts" in sparse else layers
    return ModelSpec(
        name=name,
        vocab_size=_integer(fields, "vocab"),
        hidden_size=width,
        layers=tuple(
            LayerSpec(attention=_attention(fields, width, window), **(dense if index < first else sparse))
            for index, window in enumerate(windows)
        ),
        max_position_embeddings=_integer(fields, "context", 2048),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=fields.get("model_type") in UNGATED_FAMILIES),
    )


def _attention(fields: ConfigFields, width: int, window: int | None) -> AnyAttentionSpec:
    heads = _integer(fields, "heads")
    if fields.get(MLA_KEYS[0]) is not None:
        latent, rope, plain, value = (fields.integer(key) for key in MLA_KEYS)
        query = fields.integer("q_lora_rank", default=None)
        return MLASpec(
            num_heads=heads,
            kv_lora_rank=latent,
            qk_rope_head_dim=rope,
            qk_nope_head_dim=plain,
            v_head_dim=value,
            q_lora_rank=query,
        )
    groups = 1 if fields.get("multi_query") is True else _integer(fields, "groups", heads)
    if heads % groups:
        raise fields.invalid("num_key_value_heads", groups, f"a divisor of the heads ({heads})")
    return AttentionSpec(
        num_heads=heads, num_kv_heads=groups, head_dim=_integer(fields, "dim", width // heads), sliding_window=window
    )


def _dense_hidden(fields: ConfigFields, width: int, remarks: list[str]) -> int:
    """Return the width of a gated feed-forward with the same number of parameters."""
    hidden = _integer(fields, "hidden", 4 * width)
    if fields.get("model_type") not in UNGATED_FAMILIES:
        return hidden
    remarks.append("its feed-forward has two matrices, not three; learned positions are not counted")
    return -(-2 * hidden // 3)


def _feedforwards(fields: ConfigFields, width: int, remarks: list[str]) -> dict[str, Any]:
    """Return the fields of layers with a mixture; shared experts are counted as ordinary ones."""
    count, shared = _integer(fields, "experts", 0), _integer(fields, "shared", 0)
    hidden = _integer(fields, "hidden", 4 * width)
    if count < 2:
        return {"intermediate_size": hidden}
    remarks.append(f"a mixture of {count} experts" + (f" and {shared} shared ones" if shared else ""))
    experts = MoESpec(num_experts=count + shared, num_experts_per_tok=_integer(fields, "used", 2) + shared)
    return {"intermediate_size": _integer(fields, "expert_hidden", hidden), "experts": experts}


def _windows(fields: ConfigFields, layers: int, remarks: list[str]) -> Sequence[int | None]:
    """Return each layer's window, from `layer_types`, from a pattern, or the same for all."""
    window: Any = fields.get("sliding_window") or fields.get("attention_window_size")
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        other = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if other:
            remarks.append(f"layers of kind {', '.join(other)} are counted as full attention")
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if not isinstance(window, int) or isinstance(window, bool) or fields.get("use_sliding_window") is False:
        return [None] * layers
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 1:
        return [None if (index + 1) % pattern == 0 else window for index in range(layers)]
    return [window] * layers


def _integer(fields: ConfigFields, figure: str, default: Any = REQUIRED) -> int:
    names = FIELD_ALIASES[figure]
    for key in names:
        if fields.get(key) is not None:
            most = MAX_LAYERS if figure == "layers" else 2**48
            return fields.integer(key, minimum=0 if figure in MAY_BE_ZERO else 1, maximum=most)
    if default is REQUIRED:
        raise WorkbenchError(
            f"{fields.source}: has none of {', '.join(names)}; without the {figure} memory cannot be counted"
        )
    return default
