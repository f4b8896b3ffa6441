"""Export a Hugging Face Llama folder as GGUF: in float32 or bfloat16 with the `gguf` package, then quantized by
llama.cpp if asked."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from pathlib import Path

from gguf_layout import llama_tensors, rotary_scaling
from peer_protocol import Unsupported, answer_with


def export(job: dict) -> dict:
    target = Path(job["target"], "model.gguf")
    if job["format"] in ("float32", "bfloat16"):
        _write(Path(job["source"]), target, job["format"])
        return {"detail": f"all matrices {job['format']}"}
    whole = target.with_name("whole.gguf")
    _write(Path(job["source"]), whole, "bfloat16")
    try:
        return {"detail": _quantize(whole, target, job["format"], job["threads"])}
    finally:
        whole.unlink()


def _write(source: Path, target: Path, format: str) -> None:
    import gguf

    config = json.loads((source / "config.json").read_text())
    rope = rotary_scaling(config)
    scaling = rope.get("rope_type", "default")
    if scaling not in ("default", "llama3"):
        raise Unsupported(f"rotary scaling {scaling!r} is not exported to GGUF")
    heads = config["num_attention_heads"]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType.BF16 if format == "bfloat16" else gguf.GGMLQuantizationType.F32
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if format == "bfloat16" else gguf.LlamaFileType.ALL_F32)
    for name, values in llama_tensors(source, config):
        if values.ndim == 1:  # norms, biases and rotary factors stay float32
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantize(source: Path, target: Path, format: str, threads: int) -> str:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    int8 = format == "int8"
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0 if int8 else llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.pure = format == "int4-head"  # every matrix in the same format, the head too
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise RuntimeError("llama_model_quantize failed")
    return ", ".join(f"{name} {kind}" for name, kind in _kinds(target).items())


def _kinds(file: Path) -> dict[str, str]:
    """Return the GGUF types of the head and of a layer's matrix."""
    import gguf

    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    return {"layers": kinds["blk.0.ffn_gate.weight"], "head": kinds.get("output.weight", kinds["token_embd.weight"])}


if __name__ == "__main__":
    answer_with(export)
