"""llama.cpp as a yardstick, in an interpreter of its own: run as a script there, and asked from tests here.

Its interpreter is found as that of the peers' bench is: WORKBENCH_PEER_PYTHONS="llama.cpp=PATH", or this one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def python() -> str:
    """Return the interpreter that has llama-cpp-python, or skip the test."""
    import pytest

    from benchmarks.peers.catalog import FOREIGN_PEERS, INTERPRETERS_VARIABLE, interpreters, python_of

    peer = next(peer for peer in FOREIGN_PEERS if peer.tool == "llama.cpp")
    found = python_of(peer, interpreters())
    has_package = "import importlib.util, sys; sys.exit(importlib.util.find_spec('llama_cpp') is None)"
    if subprocess.run([found, "-c", has_package]).returncode:
        pytest.skip(
            f"llama.cpp is not here: {peer.install} (15 minutes of compilation); of another environment: "
            f"{INTERPRETERS_VARIABLE}=llama.cpp=PATH_OF_ITS_PYTHON"
        )
    return found


def ask(path: Path, texts: list[str] | None = None, ids: list[int] | None = None) -> dict[str, Any]:
    """Return what llama.cpp makes of a GGUF file.

    Args:
        path: the file.
        texts: to be cut into tokens; None: the file is read for its logits alone.
        ids: of a prompt; its logits are computed with a cache in float32.

    Returns:
        `plain` and `special`: ids of each text, control tokens unread and read; `begin`, `end`: the ids of these
        tokens and whether the first goes before a text; `pieces`: each token's bytes as hexadecimal digits; `template`;
        `logits` of each position.
    """
    job = {"path": str(path), "texts": texts, "ids": ids}
    done = subprocess.run([python(), __file__], input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def answer(job: dict[str, Any]) -> dict[str, Any]:
    import ctypes

    import llama_cpp  # pyright: ignore[reportMissingImports]

    def piece(vocab: Any, id: int) -> bytes:
        buffer = ctypes.create_string_buffer(4096)
        length = llama_cpp.llama_token_to_piece(vocab, id, buffer, len(buffer), 0, True)
        return buffer.raw[: max(0, length)]

    length = max(8, len(job["ids"] or ()))
    model = llama_cpp.Llama(
        job["path"], n_ctx=length, n_batch=length, n_threads=1, logits_all=True, verbose=False, flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, vocab_only=job["ids"] is None,
    )  # fmt: skip
    found: dict[str, Any] = {}
    if job["texts"] is not None:
        for name, special in (("plain", False), ("special", True)):
            found[name] = [model.tokenize(text.encode(), add_bos=False, special=special) for text in job["texts"]]
        vocab = llama_cpp.llama_model_get_vocab(model.model)
        found["pieces"] = [piece(vocab, id).hex() for id in range(model.n_vocab())]
        found["begin"] = [model.token_bos(), bool(llama_cpp.llama_vocab_get_add_bos(vocab))]
        found["end"] = model.token_eos()
        found["template"] = model.metadata.get("tokenizer.chat_template")
    if job["ids"] is not None:
        model.eval(job["ids"])
        found["logits"] = model.scores[: len(job["ids"])].tolist()
    return found


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
