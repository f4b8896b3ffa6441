"""Convert a model to a GGUF file, which llama.cpp and this library read.

If llama.cpp has no keys for a tokenizer, the whole tokenizer.json is written under a key that llama.cpp ignores; there
the file can only be used with token ids, not with text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import Checkpoint
from workbench.model.formats.gguf.families import ARCHITECTURES, GGUF_NAMES, SHARED, Architecture
from workbench.model.formats.gguf.file import GGUFArray, GGUFFile
from workbench.model.formats.gguf.rotary import llama3_factors
from workbench.model.formats.gguf.values import END_TOKENS
from workbench.model.formats.gguf.write import WRITTEN_TYPES, WrittenTensor, write_gguf, written_type
from workbench.model.formats.open import gguf_file, open_checkpoint
from workbench.model.formats.texts import open_chat_template, open_tokenizer
from workbench.model.hf.families import read_spec
from workbench.model.hf.weights import read_parameter, wanted_parameters
from workbench.model.model_parameters import stored_parameters
from workbench.model.parameters import StoredParameter, StoredPart
from workbench.model.spec import ModelSpec
from workbench.prompt.tokenization.gguf_vocabulary import KEYS, TEMPLATE_KEY, TOKEN_NAMES, WHOLE_KEY
from workbench.prompt.tokenization.gguf_vocabulary_write import vocabulary_metadata
from workbench.prompt.tokenization.tokenizer import Tokenizer

# GGUF names of families that differ from their own name.
RELATIVES = {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2"}
SAME_AS = {"int8": "Q8_0", "int4": "Q4_0"}
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}  # general.file_type
PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def convert_to_gguf(source: str | Path, target: str | Path, weights: str, dtype: torch.dtype) -> dict[str, Any]:
    """Write the model at `source` as the GGUF file `target`.

    Matrices are written as `weights`; norms, biases and routers in float32. A GGUF file's tokenizer is copied; a
    folder's tokenizer is written in llama.cpp's keys if possible, else as a tokenizer.json.

    Args:
        source: a folder or a GGUF file.
        target: a new file, NAME.gguf.
        weights: f32, f16, bf16, q8_0 (or int8), q4_0 (or int4), or dense: as `dtype`.
        dtype: the model's own dtype.

    Returns:
        The source's format, the type and number of the matrices, the bytes written, the form of the tokenizer, and the
        differences of llama.cpp's computation from this library's ("" for none).

    Raises:
        WorkbenchError: for a model that cannot be read or expressed in GGUF, and for an existing target.
    """
    source, target = Path(source), Path(target)
    kind = PLAIN.get(dtype, "F32") if weights == "dense" else SAME_AS.get(weights, weights.upper())
    if kind not in WRITTEN_TYPES:
        known = ", ".join(each.lower() for each in WRITTEN_TYPES)
        raise WorkbenchError(f"--weights {weights}: supported for GGUF: {known}, or dense")
    if target.suffix != ".gguf" or target.exists():
        raise WorkbenchError(f"{target}: " + ("is there already" if target.exists() else "must be called NAME.gguf"))
    spec, checkpoint = read_spec(source), open_checkpoint(source)
    name, architecture = _architecture(checkpoint)
    metadata = {
        "general.architecture": name,
        "general.name": spec.name,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
        **{f"{name}.{key}": value for key, value in _metadata(spec, architecture).items()},
    }
    vocabulary, tokenizer = _tokenizer(source, checkpoint, spec)
    metadata |= vocabulary
    tensors = list(_tensors(spec, checkpoint, architecture, kind))
    try:
        with TemporaryDirectory(dir=target.parent) as folder:
            outline = Path(folder) / target.name
            write_gguf(outline, metadata, tensors, matrices=False)
            _check(spec, outline, name)
        write_gguf(target, metadata, tensors)
    except OSError as error:
        raise WorkbenchError(f"{target}: cannot be written ({error.strerror or error})") from error
    matrices = sum(tensor.type.name == kind for tensor in tensors)
    return {
        "from": checkpoint.format,
        "weights": kind,
        "bytes": target.stat().st_size,
        "matrices": matrices,
        "tokenizer": tokenizer,
        "llama.cpp": _llama_cpp_difference(spec, name),
    }


def _architecture(checkpoint: Checkpoint) -> tuple[str, Architecture]:
    family = checkpoint.config.get("model_type")
    named = {architecture.family: name for name, architecture in ARCHITECTURES.items()}
    name = RELATIVES.get(family) or named.get(family)
    if name is None:
        known = ", ".join(sorted({*named, *RELATIVES}))
        raise WorkbenchError(f"{checkpoint.path}: {family} cannot be written as GGUF; supported: {known}")
    return name, ARCHITECTURES[name]


def _llama_cpp_difference(spec: ModelSpec, name: str) -> str:
    """Return how llama.cpp (November 2026) computes a model of this architecture differently; "" for no difference."""
    a: Any = spec.layers[0].attention
    windows, large = any(layer.attention.sliding_window for layer in spec.layers), len(spec.layers) == 64
    found = {
        "phi3": (windows, "it ignores sliding windows"),
        "exaone4": (windows and not large, "it reads sliding windows only in models of 64 layers"),
        "olmoe": (a.num_kv_heads != a.num_heads, "it refuses fewer key heads than query heads"),
        "command-r": (a.qk_norm is not None and not large, "it reads query norms only in models of 64 layers"),
    }
    differs, what = found.get(name, (False, ""))
    return what if differs else ""


def _metadata(spec: ModelSpec, architecture: Architecture) -> dict[str, Any]:
    """Return the architecture's keys without its name. Missing keys are detected when the file is read back."""
    first = spec.layers[0]
    a: Any = first.attention
    if a.kind != "grouped":
        raise WorkbenchError(f"{spec.name}: latent attention cannot be written as GGUF")
    eps = "attention.layer_norm_epsilon" if spec.norm.kind == "layer" else "attention.layer_norm_rms_epsilon"
    found: dict[str, Any] = {
        "block_count": len(spec.layers),
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": first.intermediate_size,
        "vocab_size": spec.vocab_size,
        "attention.head_count": a.num_heads,
        "attention.head_count_kv": a.num_kv_heads,
        "attention.key_length": a.head_dim,
        "attention.value_length": a.head_dim,
        eps: spec.norm.eps,
    }
    if a.position == "rotary":
        found |= {"rope.dimension_count": a.rotary_dim, **_rotary(spec)}
    if first.experts is not None:
        found |= {
            "expert_count": first.experts.num_experts,
            "expert_used_count": first.experts.num_experts_per_tok,
            "expert_feed_forward_length": first.intermediate_size,
        }
        if first.experts.shared_intermediate_size:
            found["expert_shared_feed_forward_length"] = first.experts.shared_intermediate_size
    windows = [layer.attention.sliding_window for layer in spec.layers]
    if any(windows):
        found["attention.sliding_window"] = max(window or 0 for window in windows)
        if architecture.family in ("olmo2", "exaone4", "cohere2"):
            found["attention.sliding_window_pattern"] = [window is not None for window in windows]
    return found | _scales(spec, a, architecture)


def _scales(spec: ModelSpec, a: Any, architecture: Architecture) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if architecture.family.startswith("granite"):
        found = {
            "attention.scale": a.scale or a.head_dim**-0.5,
            "embedding_scale": spec.embedding_scale,
            "residual_scale": spec.residual_scale,
            "logit_scale": 1 / spec.logit_scale,
        }
    if architecture.family.startswith("cohere"):
        found["logit_scale"] = spec.logit_scale
    if a.softcap:
        found["attn_logit_softcapping"] = a.softcap
    if spec.final_logit_softcapping:
        found["final_logit_softcapping"] = spec.final_logit_softcapping
    if a.qkv_clip:
        found["attention.clamp_kqv"] = a.qkv_clip
    if "use_parallel_residual" in architecture.keys:
        found["use_parallel_residual"] = spec.layers[0].parallel != "no"
    return found


def _rotary(spec: ModelSpec) -> dict[str, Any]:
    scaling = spec.rotary.scaling
    found: dict[str, Any] = {"rope.freq_base": spec.rotary.rope_theta}
    for layer in spec.layers:
        if (own := getattr(layer.attention, "rotary", None)) is not None:
            found["rope.freq_base_swa"] = own.rope_theta
    if scaling.kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.kind == "yarn":
        found |= {
            "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
            "rope.scaling.yarn_beta_fast": scaling.beta_fast,
            "rope.scaling.yarn_beta_slow": scaling.beta_slow,
        }
    return found


def _tokenizer(source: Path, checkpoint: Checkpoint, spec: ModelSpec) -> tuple[dict[str, Any], str]:
    """Return the keys of the tokenizer and the chat template (copied from a GGUF file, or converted from a folder), and
    the form of the tokenizer.
    """
    if (file := gguf_file(source)) is not None:
        own = {key: value for key, value in GGUFFile(file).metadata.items() if key.startswith("tokenizer.")}
        said = "as in the source" if f"{KEYS}.tokens" in own or WHOLE_KEY in own else "none"
        return {key: value.values() if isinstance(value, GGUFArray) else value for key, value in own.items()}, said
    if len(spec.eos_token_ids) > len(END_TOKENS):
        raise WorkbenchError(
            f"{checkpoint.config.source}: eos_token_id has {len(spec.eos_token_ids)} ids; GGUF has keys for "
            f"{len(END_TOKENS)}: {', '.join(END_TOKENS)}"
        )
    tokenizer, template = open_tokenizer(source), open_chat_template(source)
    found, said = _vocabulary(tokenizer, spec)
    named: dict[str, int] = {}
    if type(begin := checkpoint.config.get("bos_token_id")) is int and begin >= 0:
        named["bos_token"] = begin
    if tokenizer is not None:
        if tokenizer.bos_token_ids:
            named["bos_token"] = tokenizer.bos_token_ids[0]
        names = {} if template is None else template.names
        known = tokenizer.special_token_ids
        named |= {name: known[names[name]] for name in TOKEN_NAMES if names.get(name) in known}
    if template is not None:
        found[TEMPLATE_KEY] = template.text
        found |= {f"{TEMPLATE_KEY}.{name}": text for name, text in template.texts.items() if text != template.text}
    # The template's end token goes first, since eos_token_id is read as that token.
    ends = sorted(spec.eos_token_ids, key=lambda id: id != named.get("eos_token"))
    found |= {
        f"{KEYS}.{TOKEN_NAMES[name]}_token_id": id for name, id in named.items() if name != "eos_token" or not ends
    }
    return found | {f"{KEYS}.{key}": id for key, id in zip(END_TOKENS, ends, strict=False)}, said


def _vocabulary(tokenizer: Tokenizer | None, spec: ModelSpec) -> tuple[dict[str, Any], str]:
    """Return a tokenizer's keys, and its form: llama.cpp's keys, or a tokenizer.json with the reason."""
    none = {f"{KEYS}.model": "no_vocab"}
    if tokenizer is None:
        return none, "none"
    try:
        found, notes = vocabulary_metadata(tokenizer, spec.vocab_size)
    except WorkbenchError as error:
        return none | {WHOLE_KEY: tokenizer.to_json()}, f"tokenizer.json, which llama.cpp does not read: {error}"
    kind = "sentencepiece" if found[f"{KEYS}.model"] == "llama" else f"byte-level, {found[f'{KEYS}.pre']}"
    return found, "; ".join([f"vocabulary of llama.cpp ({kind})", *notes])


def _tensors(spec: ModelSpec, checkpoint: Checkpoint, architecture: Architecture, kind: str) -> Iterator[WrittenTensor]:
    """Yield the tensors under GGUF's names, with stacked experts, and with 1 added to norms if the architecture
    requires it.
    """
    changed = dict(architecture.names)
    if architecture.family in ("gpt2", "gpt_neox", "falcon", "phi3"):
        changed["qkv"] = "attn_qkv"
    names = replace(GGUF_NAMES, interleaved=architecture.interleaved, **changed)
    wanted = wanted_parameters(checkpoint, spec)
    for name, parameter in stored_parameters(spec, names).items():
        yield from _parameter(parameter, checkpoint, wanted[name], architecture.norm_offset, kind)
    scaling = spec.rotary.scaling
    if scaling.kind == "llama3":
        columns = spec.layers[0].attention.head_dim
        factors = llama3_factors(spec.rotary.rope_theta, scaling.factor, columns).float()
        yield WrittenTensor("rope_freqs.weight", (columns // 2,), written_type((1,), kind), lambda: factors)


def _parameter(
    parameter: StoredParameter, checkpoint: Checkpoint, source: StoredParameter, norm_offset: bool, kind: str
) -> Iterator[WrittenTensor]:
    def numbers() -> dict[str, Tensor]:
        return {part.name: own for part, own in parameter.to_stored(read_parameter(checkpoint, source, torch.float32))}

    stacks: dict[str, list[StoredPart]] = {}
    for part in parameter.parts:
        stacks.setdefault(_stack_name(part.name), []).append(part)
    for name, parts in stacks.items():
        offset = float(norm_offset and name.endswith("norm.weight"))
        shape = (len(parts), *parts[0].shape) if "_exps." in name else parts[0].shape
        own_kind = "F32" if "ffn_gate_inp" in name or "norm" in name or name.endswith("bias") else kind

        def read(parts: list[StoredPart] = parts, shape: tuple[int, ...] = shape, offset: float = offset) -> Tensor:
            found = numbers()
            return torch.stack([found[part.name] for part in parts]).view(shape) + offset

        yield WrittenTensor(name, shape, written_type(shape, own_kind), read)


def _stack_name(name: str) -> str:
    """Return the tensor that a part belongs to: all experts of a layer share one."""
    layer, _, rest = name.partition(".ffn_")
    words = rest.split(".")
    if words[0].endswith("_exps"):
        return f"{layer}.ffn_{words[0]}.{words[-1]}"
    if words[0] == "shexp":
        theirs = next(theirs for theirs, ours in SHARED.items() if ours == words[1])
        return f"{layer}.ffn_{theirs}_shexp.weight"
    return name


def _check(spec: ModelSpec, written: Path, architecture: str) -> None:
    try:
        _compare(spec, read_spec(written))
    except WorkbenchError as error:
        raise WorkbenchError(f"{spec.name}: GGUF's {architecture} cannot express this model ({error})") from None


def _compare(given: ModelSpec, found: ModelSpec) -> None:
    """Raise WorkbenchError if the model read back differs from the written one."""
    for name in type(given).model_fields:
        right, read = getattr(given, name), getattr(found, name)
        if name == "layers":
            fields = [
                f"{key} {getattr(a, key)!s:.60} is read as {getattr(b, key)!s:.60}"
                for one, other in zip(right, read, strict=False)
                for a, b in ((one, other), (one.attention, other.attention))
                for key in type(a).model_fields
                if key != "attention" and getattr(a, key) != getattr(b, key)
            ]
            if fields or len(right) != len(read):
                raise WorkbenchError(fields[0] if fields else f"{len(right)} layers are read as {len(read)}")
        elif name not in ("name", "eos_token_ids") and right != read:
            raise WorkbenchError(f"{name} {right!s:.80} is read as {read!s:.80}")
