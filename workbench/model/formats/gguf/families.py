"""Convert architectures of GGUF files to the equivalent config.json, and map their tensors' names.

A row of `ARCHITECTURES` has the family of an architecture and the values that llama.cpp's code implies. Keys:
gguf-py/gguf/constants.py; meanings: src/models/*.cpp and conversion/*.py of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.errors import WorkbenchError, nearest
from workbench.model.checkpoint_names import CheckpointNames
from workbench.model.formats.gguf.file import GGUFFile
from workbench.model.formats.gguf.rotary import read_rotary
from workbench.model.formats.gguf.values import GGUFValues
from workbench.model.hf.fields import ConfigFields

# GGUF's names are one set for all families. Tensors that are cut from a stacked one get a name of their own
# (see gguf_checkpoint.py).
GGUF_NAMES = CheckpointNames(
    layer="blk", embedding="token_embd", embedding_norm="token_embd_norm", positions="position_embd",
    norm="output_norm", head="output",
    attention_norm="attn_norm", attention_post_norm="post_attention_norm",
    feedforward_norm="ffn_norm", feedforward_post_norm="post_ffw_norm",
    queries="attn_q", keys="attn_k", values="attn_v", output="attn_output",
    query_norm="attn_q_norm", key_norm="attn_k_norm", sinks="attn_sinks.weight",
    gate="ffn_gate", up="ffn_up", down="ffn_down",
    router="ffn_gate_inp", selection_bias="exp_probs_b.bias", expert_gate="ffn_gate_exps.{expert}",
    expert_up="ffn_up_exps.{expert}", expert_down="ffn_down_exps.{expert}", shared="ffn_shexp",
    shared_gate="ffn_gate_inp_shexp",
)  # fmt: skip
SHARED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}  # of a shared expert: GGUF's names, ours

Changes = Callable[[GGUFValues], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture: how its metadata become a config.json, and its tensors' names.

    Args:
        family: the `model_type` of its config.
        keys: config keys by metadata keys, beside `COMMON_KEYS`.
        values: config values that the architecture implies.
        changes: function that computes config values from several metadata or from tensors.
        interleaved: rotary pairs are columns (2i, 2i + 1) of a head. llama.cpp stores families with rotary type NORM
            this way; Llama's rows are permuted from Hugging Face's order.
        norm_offset: stored weights of norms have 1 added.
        layer_norm: config key of the LayerNorm's eps; empty for RMS norms.
        eps: whether its config has a key for eps; OLMo's norms have a fixed eps.
        rotary_share: config key of the rotated fraction of a head.
        base: base of the rotary embedding, if the metadata have none.
        names: names other than `GGUF_NAMES`.
    """

    family: str
    keys: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    changes: Changes = lambda _: {}
    interleaved: bool = False
    norm_offset: bool = False
    layer_norm: str = ""
    eps: bool = True
    rotary_share: str = "partial_rotary_factor"
    base: float = 10_000.0
    names: dict[str, str] = field(default_factory=dict)


COMMON_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
# Keys without effect, with the values for which they have none.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "expert_count": (0,), "expert_used_count": (0,), "expert_shared_count": (0,),
    "nextn_predict_layers": (0,), "pooling_type": (0,), "use_parallel_residual": (False,),
    "rope.scaling.finetuned": (True, False), "attention.sliding_window": (0,), "final_logit_softcapping": (0.0,),
    "tensor_data_layout": ("Meta AI original pth", "reference"), "attention.scale": (0.0,),
    "expert_weights_scale": (0.0, 1.0), "leading_dense_block_count": (0,), "attention.layer_norm_epsilon": (1e-5,),
}  # fmt: skip


def _llama(values: GGUFValues) -> dict[str, Any]:
    """Llama, Mistral and Mixtral share an architecture."""
    window = values.integer("attention.sliding_window", default=0, minimum=0)
    if values.integer("expert_count", default=0, minimum=0):
        return {"model_type": "mixtral", "sliding_window": window or None, **_experts(values, "num_local_experts")}
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def _experts(values: GGUFValues, count: str, width: str = "") -> dict[str, Any]:
    found = {
        count: values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
    }
    own = values.integer("expert_feed_forward_length", default=None)
    if width:
        found[width] = own or values.integer("feed_forward_length")
    elif own is not None:
        found["intermediate_size"] = own
    return found


def _qwen2_moe(values: GGUFValues) -> dict[str, Any]:
    shared = values.integer("expert_shared_feed_forward_length", default=None)
    if shared is None:
        shared = values.shape("blk.0.ffn_gate_shexp.weight")[0]
    experts = _experts(values, "num_experts", "moe_intermediate_size")
    return {**experts, "shared_expert_intermediate_size": shared}


def _gemma2(values: GGUFValues) -> dict[str, Any]:
    return {
        "sliding_window": values.integer("attention.sliding_window", default=4096),
        "query_pre_attn_scalar": _query_scale(values, of_27b=46),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", default=30.0),
    }


def _gemma3(values: GGUFValues) -> dict[str, Any]:
    """Only full layers scale their rotary; windowed layers have their own base."""
    full = read_rotary(values, base=1_000_000.0)
    scaling = full.pop("rope_scaling", None) or {"rope_type": "default"}
    local = values.number("rope.freq_base_swa", default=10_000.0)
    window = values.integer("attention.sliding_window", default=0, minimum=0)
    period = values.integer("attention.sliding_window_pattern", default=6)
    layers = values.integer("block_count")
    kinds = ["sliding_attention" if window and (index + 1) % period else "full_attention" for index in range(layers)]
    return {
        "sliding_window": window or 4096,
        "layer_types": kinds,
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": full["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": _query_scale(values, of_27b=62),
        "final_logit_softcapping": values.number("final_logit_softcapping", default=None, zero=True) or None,
    }


def _query_scale(values: GGUFValues, of_27b: int) -> int:
    """Return the number that gives the scale of scores as its inverse root; model sizes are distinguished by the number
    of layers, as in llama.cpp.
    """
    if values.integer("block_count") == of_27b:
        return values.integer("embedding_length") // values.integer("attention.head_count")
    return values.head_dim()


def _olmo2(values: GGUFValues) -> dict[str, Any]:
    """OLMo 2, or with windows OLMo 3."""
    window = values.integer("attention.sliding_window", default=0, minimum=0)
    layers = values.integer("block_count")
    pattern = values.flags("attention.sliding_window_pattern", layers, period=4)
    if not window:
        return {}
    full = read_rotary(values, base=500_000.0)
    scaling = full.pop("rope_scaling", None) or {"rope_type": "default"}
    local = values.number("rope.freq_base_swa", default=full["rope_theta"])
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in pattern],
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": full["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _cohere2(values: GGUFValues) -> dict[str, Any]:
    pattern = values.flags("attention.sliding_window_pattern", values.integer("block_count"), period=4)
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in pattern]}


def _exaone4(values: GGUFValues) -> dict[str, Any]:
    window = values.integer("attention.sliding_window", default=0, minimum=0)
    pattern = values.flags("attention.sliding_window_pattern", values.integer("block_count"), period=4)
    if not window:
        return {"sliding_window": None}
    kinds = ["sliding_attention" if each else "full_attention" for each in pattern]
    return {"sliding_window": window, "layer_types": kinds}


def _falcon(values: GGUFValues) -> dict[str, Any]:
    """With a second norm Falcon 40B; with several key/value heads and one norm Falcon 11B; else Falcon 7B."""
    groups = values.integer("attention.head_count_kv", default=values.integer("attention.head_count"))
    two = values.has("blk.0.attn_norm_2.weight")
    if groups == 1 and not two:
        return {"multi_query": True, "new_decoder_architecture": False}
    return {"new_decoder_architecture": True, "num_kv_heads": groups, "num_ln_in_parallel_attn": 2 if two else 1}


def _gpt_oss(values: GGUFValues) -> dict[str, Any]:
    scaling = read_rotary(values, base=150_000.0).get("rope_scaling")
    if scaling is not None:
        scaling["truncate"] = False  # as it was trained
    return {"rope_scaling": scaling, **_experts(values, "num_local_experts")}


def _flag(tensor: str, key: str) -> Changes:
    return lambda values: {key: values.has(tensor)}


GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", changes=_llama, interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", changes=_qwen2_moe, values={"norm_topk_prob": False}),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3_moe", changes=lambda values: _experts(values, "num_experts", "moe_intermediate_size"),
        values={"norm_topk_prob": True},
    ),
    "gemma": Architecture("gemma", values=GEMMA, norm_offset=True),
    "gemma2": Architecture("gemma2", changes=_gemma2, values=GEMMA, norm_offset=True),
    "gemma3": Architecture("gemma3_text", changes=_gemma3, values=GEMMA, norm_offset=True),
    "phi2": Architecture("phi", layer_norm="layer_norm_eps"),
    "phi3": Architecture("phi3", WINDOW, names={"gate_up": "ffn_up"}),
    "gpt2": Architecture("gpt2", layer_norm="layer_norm_epsilon"),
    "starcoder2": Architecture("starcoder2", WINDOW, layer_norm="norm_epsilon"),
    "gptneox": Architecture(
        "gpt_neox", {"use_parallel_residual": "use_parallel_residual"}, layer_norm="layer_norm_eps",
        rotary_share="rotary_pct",
    ),
    "falcon": Architecture("falcon", changes=_falcon, layer_norm="layer_norm_epsilon"),
    "stablelm": Architecture(
        "stablelm", {"use_parallel_residual": "use_parallel_residual"},
        changes=_flag("blk.0.attn_q_norm.weight", "qk_layernorm"), layer_norm="layer_norm_eps",
    ),
    "nemotron": Architecture("nemotron", norm_offset=True, layer_norm="norm_eps"),
    "olmo": Architecture("olmo", {"attention.clamp_kqv": "clip_qkv"}, interleaved=True, eps=False),
    "olmo2": Architecture("olmo2", changes=_olmo2),
    "olmoe": Architecture(
        "olmoe", changes=lambda values: _experts(values, "num_experts"), values={"norm_topk_prob": False}
    ),
    "granite": Architecture("granite", GRANITE_KEYS, interleaved=True),
    "granitemoe": Architecture(
        "granitemoe", GRANITE_KEYS, changes=lambda values: _experts(values, "num_local_experts"), interleaved=True
    ),
    "smollm3": Architecture("smollm3", interleaved=True),
    "arcee": Architecture("arcee", interleaved=True),
    "command-r": Architecture(
        "cohere", {"logit_scale": "logit_scale"}, changes=_flag("blk.0.attn_q_norm.weight", "use_qk_norm"),
        interleaved=True, layer_norm="layer_norm_eps",
    ),
    "cohere2": Architecture(
        "cohere2", {"logit_scale": "logit_scale", **WINDOW}, changes=_cohere2, interleaved=True,
        layer_norm="layer_norm_eps",
    ),
    "exaone4": Architecture("exaone4", changes=_exaone4),
    "glm4": Architecture("glm4", interleaved=True, names={"gate_up": "ffn_up"}),
    "ernie4_5": Architecture("ernie4_5", interleaved=True, base=500_000.0),
    "seed_oss": Architecture("seed_oss", names={"feedforward_norm": "post_attention_norm"}),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "gpt-oss": Architecture(
        "gpt_oss", WINDOW, changes=_gpt_oss, base=150_000.0, names={"feedforward_norm": "post_attention_norm"}
    ),
}  # fmt: skip


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the file's architecture. Raises WorkbenchError for an unsupported one, and for a file that is not a model
    (an adapter, a vision tower).
    """
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise WorkbenchError(f"{file.path}: holds a {kind}, not a model")
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        given = "is missing" if name is None else f"{name!r} is not supported"
        known = ", ".join(ARCHITECTURES)
        raise WorkbenchError(
            f"{file.path}: general.architecture {given}; supported: {known}{nearest(str(name), ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def names_of(file: GGUFFile, tensors: Mapping[str, Any]) -> CheckpointNames:
    """Return the names under which the file stores a model's tensors."""
    architecture = architecture_of(file)
    changed = dict(architecture.names)
    if "blk.0.attn_qkv.weight" in tensors:
        changed["qkv"] = "attn_qkv"
    if "blk.0.attn_norm_2.weight" in tensors:  # Falcon 40B: attention's norm is the second
        changed |= {"attention_norm": "attn_norm_2", "feedforward_norm": "attn_norm"}
    return replace(GGUF_NAMES, interleaved=architecture.interleaved, **changed)  # type: ignore[arg-type] (fields)


def config_of(files: Sequence[GGUFFile]) -> ConfigFields:
    """Return the config.json equivalent to the metadata.

    Args:
        files: the parts of the model, the first with the metadata.

    Raises:
        WorkbenchError: for missing or wrong metadata, and for unknown metadata that change the model.
    """
    architecture = architecture_of(files[0])
    values = GGUFValues(files)
    config: dict[str, Any] = {"model_type": architecture.family, **architecture.values}
    config |= {ours: values.integer(theirs) for theirs, ours in COMMON_KEYS.items()}
    config["num_key_value_heads"] = values.integer("attention.head_count_kv", default=config["num_attention_heads"])
    config["intermediate_size"] = values.integer("feed_forward_length")
    config["n_inner"] = config["ffn_hidden_size"] = config["intermediate_size"]
    config["vocab_size"] = values.shape("token_embd.weight")[0]
    config["head_dim"] = values.head_dim()
    eps = "attention.layer_norm_epsilon" if architecture.layer_norm else "attention.layer_norm_rms_epsilon"
    if architecture.eps:
        config[architecture.layer_norm or "rms_norm_eps"] = values.number(eps)
    config |= read_rotary(values, architecture.base)
    if (share := values.rotary_share()) is not None:
        config[architecture.rotary_share] = share
    for theirs, ours in architecture.keys.items():
        if (value := values.take(theirs)) is not None and not (ours == "sliding_window" and value == 0):
            config[ours] = value
    config |= _biases(values) | architecture.changes(values)
    config["tie_word_embeddings"] = not values.has("output.weight")
    config["eos_token_id"] = values.end_token_ids() or None
    config["torch_dtype"] = _dtype(values.tensors)
    values.refuse_unread(HARMLESS)
    return ConfigFields(config, str(files[0].path))


def _biases(values: GGUFValues) -> dict[str, Any]:
    """Return the bias flags under the names of all families, derived from the tensors."""
    qkv = values.has("blk.0.attn_q.bias") or values.has("blk.0.attn_qkv.bias")
    feedforward, output = values.has("blk.0.ffn_up.bias"), values.has("blk.0.attn_output.bias")
    return {
        "attention_bias": qkv, "use_bias": qkv, "use_qkv_bias": qkv, "qkv_bias": qkv, "bias": qkv,
        "attention_out_bias": output, "mlp_bias": feedforward,
    }  # fmt: skip


def _dtype(tensors: Mapping[str, Any]) -> str:
    """Return the dtype of computation: that of most matrix numbers, or bfloat16 if those are quantized."""
    numbers: dict[str, int] = {}
    for tensor in tensors.values():
        if len(tensor.shape) > 1:
            size = tensor.size // tensor.type.bytes * tensor.type.values
            numbers[tensor.type.name] = numbers.get(tensor.type.name, 0) + size
    most = max(numbers, key=lambda name: numbers[name], default="F32")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")
