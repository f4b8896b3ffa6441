"""Rewrite committed records in the field's words: keys and settings change their names, figures stay as they are.

    python -m tools.rename_record_keys experiments/records/*.json
    python -m tools.rename_record_keys --check experiments/records/*.json   # names the files that hold an old name

A record is JSON; the experiment inside it is a YAML text. Both are rewritten as texts, so that formatting stays, and
compared afterwards: with names put back, nothing else may differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Old name -> new name, of keys, columns, settings and event kinds (2026-11-22).
RENAMED: dict[str, str] = {
    "lane": "backend",
    "lane_used": "backend_used",
    "lane_reason": "backend_reason",
    "decode_lane": "decode_backend",
    "auto_lane": "auto_backend",
    "input_bias": "qkv_bias",
    "output_bias": "o_proj_bias",
    "norm_eps": "rms_norm_eps",
    "final_softcap": "final_logit_softcapping",
    "feedforward_bias": "mlp_bias",
    "end_ids": "eos_token_ids",
    "query_latent": "q_lora_rank",
    "value_dim": "v_head_dim",
    "low_factor": "low_freq_factor",
    "high_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
    "because": "reason",
    "promise": "slo",
    "goodput_share": "slo_attainment",
    "set_backs": "num_preemptions",
    "set_back": "preemption_mode",
    "company": "determinism",
    "companions": "other_requests",
    "companion_tokens": "other_request_tokens",
    "interruption": "prefill_interference",
    "parted_prompts": "diverged_prompts",
    "requests_a_life": "requests_per_ttl",
    "patience": "starvation_limit",
    "formed": "step_planned",
    "planned": "scheduled",
    "refused_wish": "refused_decision",
    "note_seconds": "telemetry_seconds",
    "note_s": "telemetry_s",
    "instruments_share_of_decode": "telemetry_share_of_decode",
    "checks": "verifications",
}

# The same inside of a model's `spec`, of `attention` and of `cache` alone: elsewhere these words are other names.
RENAMED_IN_SPEC: dict[str, str] = {
    "heads": "num_heads",
    "groups": "num_kv_heads",
    "dim": "head_dim",
    "hidden": "intermediate_size",
    "vocab": "vocab_size",
    "width": "hidden_size",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "base": "rope_theta",
    "fast_turns": "beta_fast",
    "slow_turns": "beta_slow",
    "whole_pairs": "truncate",
    "amplitude": "attention_factor",
    "window": "sliding_window",
    "sinks": "num_sink_tokens",
}
RENAMED_IN_CACHE: dict[str, str] = {"group": "quant_group", "residual": "residual_length", "sinks": "num_sink_tokens"}
RENAMED_TEXTS = {"the same company": "the same batch", "varying company": "varying batches"}  # in rules of verdicts


def rewritten(text: str, names: Mapping[str, str]) -> str:
    """Return the JSON text of a record with `names` in it.

    Raises:
        ValueError: if two keys of one object would become one.
    """
    made = re.sub(r'"(?:[^"\\]|\\.)*"', lambda match: _literal(match[0], names), text)
    before, after = json.loads(text), json.loads(made)
    if _renamed(before, names) != after or _figures(before) != _figures(after):
        raise ValueError("two keys of one object would become one")
    return made


def rewritten_within(text: str, parts: str, names: Mapping[str, str]) -> str:
    """Return the JSON text of a record with `names` in the objects of these `parts` ("spec|attention"), figures as they
    were.

    Raises:
        ValueError: if two keys of one object would become one.
    """
    made = re.sub(rf"\b({parts})\.(\w+)\b", lambda m: f"{m[1]}.{names.get(m[2], m[2])}", text)
    objects, at = re.compile(rf'"(?:{parts})":\s*\{{'), 0
    while found := objects.search(made, at):
        begin, end = found.end() - 1, _end_of_object(made, found.end() - 1)
        part = re.sub(r'"(\w+)":', lambda match: f'"{names.get(match[1], match[1])}":', made[begin:end])
        made, at = made[:begin] + part + made[end:], begin + len(part)
    in_yaml = rf"\\n(?:{parts}):(?:\\n +\w+: [^\\\"]*)+"  # a block of an experiment's YAML, escaped as in JSON
    made = re.sub(
        in_yaml, lambda block: re.sub(r"(\\n +)(\w+)(?=:)", lambda m: m[1] + names.get(m[2], m[2]), block[0]), made
    )
    if _figures(json.loads(text)) != _figures(json.loads(made)):
        raise ValueError("two keys of one object would become one")
    return made


def _end_of_object(text: str, begin: int) -> int:
    _, end = json.JSONDecoder().raw_decode(text, begin)
    return end


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {_new(key, names): _renamed(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, names) for each in value]
    if isinstance(value, str):
        return _new(value, names)
    return value


def _new(text: str, names: Mapping[str, str]) -> str:
    return _yaml(_path(text, names), names)


def _path(text: str, names: Mapping[str, str]) -> str:
    """Return a name, or a dotted path of names, renamed; any other text as it is."""
    if not re.fullmatch(r"\w+(?:\.\w+)*", text):
        return text
    return ".".join(names.get(part, part) for part in text.split("."))


def _yaml(text: str, names: Mapping[str, str]) -> str:
    """Return a YAML text or a `path=value` override with its keys renamed; any other text as it is."""
    if "\n" in text:
        pattern = re.compile(r"^(\s*(?:- )*)([\w.]+)(?=:(?:\s|$))", re.MULTILINE)
        return pattern.sub(lambda match: match[1] + _path(match[2], names), text)
    return re.sub(r"(?<![\w.])([a-z_]+(?:\.[a-z_]+)*)(?==)", lambda match: _path(match[1], names), text)


def _literal(literal: str, names: Mapping[str, str]) -> str:
    """Return a JSON string literal renamed, escaped as it was."""
    text = json.loads(literal)
    made = _new(text, names)
    return literal if made == text else json.dumps(made, ensure_ascii=literal.isascii())


def _figures(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [each for key in value for each in _figures(value[key])]
    if isinstance(value, list):
        return [each for item in value for each in _figures(item)]
    return [value] if isinstance(value, int | float) else []


def current(text: str) -> str:
    """Return the JSON text of a record in today's names."""
    for old, new in RENAMED_TEXTS.items():
        text = text.replace(old, new)
    text = rewritten_within(rewritten(text, RENAMED), "spec|attention", RENAMED_IN_SPEC)
    return rewritten_within(text, "cache", RENAMED_IN_CACHE)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--check", action="store_true", help="write nothing; name the files that would change")
    given = parser.parse_args()
    changed = []
    for file in given.records:
        text = file.read_text(encoding="utf-8")
        made = current(text)
        if made != text:
            changed.append(str(file))
            if not given.check:
                file.write_text(made, encoding="utf-8")
    print(f"{'old names in' if given.check else 'rewritten:'} {', '.join(changed) or 'none'}")
    return int(given.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
