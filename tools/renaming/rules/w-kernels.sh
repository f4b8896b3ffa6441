#!/bin/bash
# Strings that no rule of w-kernels.txt can say. Run in the root of the checkout AFTER all renames and words of all writers
# and BEFORE the moves (it names today's paths). Every substitution may be run twice.
set -e
q() { perl -pi -e "$1" "${@:2}"; }   # q EXPRESSION FILES
# -- a field redeclared in a subclass, in case the rename of the base did not follow
q 's/^    held: int = ROWS_BOUND/    max_pages: int = ROWS_BOUND/; s/^    held: int = ANY/    max_pages: int = ANY/' compiled_kernels/quantized_attention/mlir_shape.py
# -- keywords of dataclasses.replace and dictionaries that become keywords
q 's/\bturn=turn, scale=1\.0/rotary_index=turn, scale=1.0/; s/"table": 0, "packing": None/"page_table": 0, "quantized": None/' compiled_kernels/prefill/shape.py
q 's/"heads": shape/"num_heads": shape/; s/"groups": shape/"num_kv_heads": shape/; s/"dim": shape/"head_dim": shape/; s/"size": step/"page_size": step/; s/"held": step/"max_pages": step/; s/"kind": step/"dtype": step/; s/"key_kind"/"key_format"/; s/"value_kind"/"value_format"/; s/"key_run"/"tokens_per_scale"/; s/"value_run"/"columns_per_scale"/; s/"lag": packing/"residual_length": packing/; s/"first": packing/"num_sink_tokens": packing/' compiled_kernels/decode_step/parts.py
# -- arguments of operator cases
q 's/"groups"/"num_kv_heads"/g; s/"share"/"queries_per_kv"/g' compiled_kernels/{paged,quantized}_attention/{cases,mlir}.py compiled_kernels/kv_write/{cases,mlir}.py tests/compiled_kernels/test_operators.py tests/compiled_kernels/triton_fixed_interpreted.py experiments/gpu_kernels.py tests/experiments/test_gpu_bench.py workbench/engine/trial.py workbench/testing/attention_lanes.py workbench/testing/kv_laws.py
# -- monkeypatched or reached by name
q 's/setattr\(right, "machine"/setattr(right, "machine_key"/' tests/compiled_kernels/test_right.py
q 's/\("project", "read", "close"\)/("qkv_proj", "attend", "o_proj")/' workbench/model/own_parts.py
q 's/getattr\(attention, "latent", None\)/getattr(attention, "kv_lora_rank", None)/' workbench/model/spec.py
q 's/"groups", 1\)/"num_kv_heads", 1)/g' workbench/widgets/attention/source.py
q 's/"lanes"/"backends"/g' workbench/study/doctor.py tests/test_cli.py
# -- fields of specs in tuples and dictionaries
q 's/"heads", "groups", "dim"/"num_heads", "num_kv_heads", "head_dim"/; s/\("attention", "hidden", /("attention", "intermediate_size", /; s/"vocab", "width", "layers", "context"/"vocab_size", "hidden_size", "layers", "max_position_embeddings"/; s/"tied",/"tie_word_embeddings",/' workbench/engine/mlir_step.py
q 's/"heads": 1, "groups": 1, "dim": 2/"num_heads": 1, "num_kv_heads": 1, "head_dim": 2/; s/"hidden": 1/"intermediate_size": 1/' workbench/model/families.py
q 's/"heads": heads, "groups": groups, "dim": dim/"num_heads": heads, "num_kv_heads": groups, "head_dim": dim/' workbench/model/family_fields.py
q 's/\{"hidden": /{"intermediate_size": /' workbench/model/any_config.py
q 's/\("width", /("hidden_size", /; s/\{"hidden": /{"intermediate_size": /' workbench/model/quantized.py
q 's/"heads"/"num_heads"/g; s/"groups"/"num_kv_heads"/g; s/"dim"/"head_dim"/g' workbench/model/variants.py
q 's/"heads": heads, "groups": groups, "dim": dim/"num_heads": heads, "num_kv_heads": groups, "head_dim": dim/' tests/engine/tiny.py
q 's/"heads": 4, "groups": 2, "dim": 16/"num_heads": 4, "num_kv_heads": 2, "head_dim": 16/' tests/engine/test_prefill.py
q 's/"groups"/"num_kv_heads"/g; s/\{"base": /{"rope_theta": /g' tests/engine/test_attention.py
q 's/"heads": 2\}/"num_heads": 2}/' tests/engine/test_kinds.py
q 's/"groups"/"num_kv_heads"/g; s/"heads", "dim", /"num_heads", "head_dim", /; s/def test_groups_by_number_or_name\(groups:/def test_groups_by_number_or_name(num_kv_heads:/; s/groups=groups/num_kv_heads=num_kv_heads/' tests/model/test_composition.py
q 's/"groups"/"num_kv_heads"/g; s/\{"heads": 12\}, "heads 12/{"num_heads": 12}, "num_heads 12/; s/\{"dim": 8\}, "dim 8/{"head_dim": 8}, "head_dim 8/; s/varied\(spec, groups=/varied(spec, num_kv_heads=/' tests/model/test_variants.py
q 's/\{"hidden": 14\}\), "do not divide its hidden of 14"/{"intermediate_size": 14}), "do not divide its intermediate_size of 14"/' tests/model/test_quantized.py
q 's/"groups"/"num_kv_heads"/g' tests/study/test_experiment.py tests/testing/test_attention_kit.py notebooks/04_attention_variants.py
q 's/\{"vocab": /{"vocab_size": /g' tests/engine/test_beam_search.py tests/engine/test_drafts.py
q 's/\{"context": /{"max_position_embeddings": /g' tests/engine/test_captured.py tests/engine/test_evict.py tests/engine/test_packed_cache.py tests/engine/test_windows.py
q 's/\{"tied": /{"tie_word_embeddings": /g' tests/engine/test_bad_requests.py tests/model/test_weights.py
# -- committed records: a spec (peers) and the settings `attention` (null figures)
python3 - <<'P'
import pathlib, re
NEW = {"heads": "num_heads", "groups": "num_kv_heads", "dim": "head_dim", "hidden": "intermediate_size", "vocab": "vocab_size", "width": "hidden_size", "context": "max_position_embeddings", "tied": "tie_word_embeddings", "base": "rope_theta",
       "fast_turns": "beta_fast", "slow_turns": "beta_slow", "whole_pairs": "truncate", "amplitude": "attention_factor"}
def inside(text, start):
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth: return at + 1
for path in sorted(pathlib.Path("experiments/records").glob("*.json")):
    text = path.read_text(); old = text; at = 0
    while (found := re.compile(r'"(spec|attention)":\s*\{').search(text, at)):
        begin = found.end() - 1; end = inside(text, begin)
        part = re.sub(r'"(\w+)":', lambda m: f'"{NEW.get(m[1], m[1])}":', text[begin:end])
        text = text[:begin] + part + text[end:]; at = begin + len(part)
    if text != old: path.write_text(text)
P
# -- a new package
mkdir -p workbench/model/hf && [ -e workbench/model/hf/__init__.py ] || printf '"""Hugging Face folders: config.json, weights, saving."""\n' > workbench/model/hf/__init__.py
echo "strings of compiled_kernels and workbench/model: done"
