"""The shape of any decoder from its Hugging Face config.json: enough to count memory where the model is not read.

A family that is read here (see families.py) is exact. Of others the fields that nearly all configs share are taken,
under their several names, and what is not known of them is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.model.config_fields import REQUIRED, Fields, read_object
from workbench.model.families import FAMILIES, MOST_LAYERS, spec_from_config
from workbench.model.spec import Attention, LayerKind, ModelSpec

# The same figure under the names that families gave it, the commonest first.
NAMES: dict[str, tuple[str, ...]] = {
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "groups": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num"),
    "dim": ("head_dim", "kv_channels", "d_kv", "attention_head_dim"),
    "hidden": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "inner_dim"),
    "vocab": ("vocab_size", "padded_vocab_size", "n_vocab"),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_hidden": ("moe_intermediate_size", "expert_intermediate_size"),
}
INSIDE = ("text_config", "language_config", "llm_config")  # where models of several kinds keep the decoder's
PLAIN_FEEDFORWARD = (
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
    """The decoder in `file`, and remarks on what is not exact. Raises WorkbenchError where it lacks a figure."""
    config = read_object(file)
    name = file.resolve().parent.name
    remarks = []
    for key in INSIDE:
        if isinstance(config.get(key), dict):
            config = {
                **config[key],
                "tie_word_embeddings": config[key].get("tie_word_embeddings", config.get("tie_word_embeddings")),
            }
            remarks.append(f"only the decoder in {key} is counted")
            break
    family = config.get("model_type")
    if family in FAMILIES:
        try:
            return spec_from_config(config, name, str(file)), remarks
        except WorkbenchError as error:
            remarks.append(f"counted by the fields that configs share, since the model is not read whole ({error})")
    else:
        remarks.append(f"family {family!r} is not read: counted by the fields that configs share, without biases")
    return _shared_fields(Fields(config, str(file)), name, remarks), remarks


def _shared_fields(fields: Fields, name: str, remarks: list[str]) -> ModelSpec:
    width, heads = _integer(fields, "width"), _integer(fields, "heads")
    groups = 1 if fields.get("multi_query") is True else _integer(fields, "groups", heads)
    dim = _integer(fields, "dim", width // heads)
    if heads % groups:
        raise fields.wrong("num_key_value_heads", groups, f"a divisor of the heads ({heads})")
    if fields.get("kv_lora_rank") is not None:
        remarks.append("latent attention is counted as if keys and values of every head were cached")
    hidden = _hidden(fields, width, remarks)
    windows = _windows(fields, _integer(fields, "layers"), remarks)
    return ModelSpec(
        name=name,
        vocab=_integer(fields, "vocab"),
        width=width,
        layers=tuple(
            LayerKind(attention=Attention(heads=heads, groups=groups, dim=dim, window=window), hidden=hidden)
            for window in windows
        ),
        context=_integer(fields, "context", 2048),
        tied=fields.boolean("tie_word_embeddings", default=fields.get("model_type") in PLAIN_FEEDFORWARD),
    )


def _hidden(fields: Fields, width: int, remarks: list[str]) -> int:
    """The width of a gated feed-forward that has as many numbers."""
    hidden = _integer(fields, "hidden", 4 * width)
    experts = _integer(fields, "experts", 0)
    if experts > 1:
        remarks.append(f"{experts} experts are counted in the weights, as one feed-forward in the activations")
        return experts * _integer(fields, "expert_hidden", hidden)
    if fields.get("model_type") in PLAIN_FEEDFORWARD:
        remarks.append("its feed-forward has two matrices, not three; learned positions are not counted")
        return -(-2 * hidden // 3)
    return hidden


def _windows(fields: Fields, layers: int, remarks: list[str]) -> Sequence[int | None]:
    """Each layer's window: by `layer_types`, by a pattern, or the same for all."""
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


def _integer(fields: Fields, figure: str, default: Any = REQUIRED) -> int:
    names = NAMES[figure]
    for key in names:
        if fields.get(key) is not None:
            most = MOST_LAYERS if figure == "layers" else 2**48
            return fields.integer(key, least=0 if figure == "experts" else 1, most=most)
    if default is REQUIRED:
        raise WorkbenchError(
            f"{fields.where}: has none of {', '.join(names)}; without the {figure} memory cannot be counted"
        )
    return default
