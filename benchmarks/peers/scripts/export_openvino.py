"""Export a Hugging Face folder as OpenVINO IR with optimum-intel, which also compresses weights to INT8 or INT4."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from typing import Any

from peer_protocol import answer_with

# Groups of 32 as the other tools have them; the head and the embedding stay INT8, optimum's default.
COMPRESSION: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "sym": True},
    "int4": {"bits": 4, "sym": True, "group_size": 32, "ratio": 1.0},
    "int4-head": {"bits": 4, "sym": True, "group_size": 32, "ratio": 1.0, "all_layers": True},
}


def export(job: dict) -> dict:
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    options = COMPRESSION.get(job["format"])
    config = OVWeightQuantizationConfig(**options) if options else None
    model = OVModelForCausalLM.from_pretrained(
        job["source"], export=True, compile=False, load_in_8bit=False, quantization_config=config
    )
    model.save_pretrained(job["target"])
    return {"detail": json.dumps(options) if options else f"weights as in the folder ({job['format']})"}


if __name__ == "__main__":
    answer_with(export)
