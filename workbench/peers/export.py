"""A seeded random model as every tool reads it, kept in a folder: made once, used by all rounds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.model.save import save_folder
from workbench.model.spec import ModelSpec
from workbench.model.weights import random_weights
from workbench.peers.catalog import SCRIPTS
from workbench.peers.process import installed, run_script

DONE = "export.json"
EXPORTERS = {"gguf": "export_gguf.py", "openvino": "export_openvino.py", "onnx": "export_onnx.py"}
TIMEOUT = 3600.0
# The ONNX builder insists on tokens for begin, end and padding; the scripts tell every tool to go on after an end.
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "bos_token": "t0", "pad_token": "t0"}


class ExportFailure(Exception):
    """The model could not be had in this form; `status` is absent, unsupported or failed."""

    def __init__(self, answer: dict):
        super().__init__(answer["reason"])
        self.status = answer["status"]


@dataclass(frozen=True)
class Exports:
    """The forms of one model under `folder`. Made with the tools' own exporters, in the tools' own interpreters."""

    folder: Path
    spec: ModelSpec
    seed: int
    threads: int

    def model(self, reads: str, format: str, python: str, packages: Sequence[str] = ()) -> tuple[Path, str]:
        """Where the model lies for a tool that reads `reads` (a file for gguf, else a folder), and what its
        weights are. `packages` are those of the tool: other versions of them export anew. Raises ExportFailure."""
        if reads == "none":
            return self.folder, ""
        dense = "float32" if format == "float32" else "bfloat16"
        source = self._made(f"folder-{dense}", "", lambda target: self._hugging_face(target, dense))
        if reads == "folder":
            return source, f"weights {format}"
        script = EXPORTERS[reads]
        code = "".join((SCRIPTS / name).read_text() for name in (script, "gguf_layout.py"))
        code += installed(python, tuple(packages))

        def make(target: Path) -> str:
            job = {"source": str(source), "target": str(target), "format": format}
            answer = run_script(python, script, job, threads=self.threads, timeout=TIMEOUT)
            if answer["status"] != "ok":
                raise ExportFailure(answer)
            return answer["detail"]

        made = self._made(f"{reads}-{format}", code, make)
        return made / "model.gguf" if reads == "gguf" else made, json.loads((made / DONE).read_text())["detail"]

    def _made(self, name: str, code: str, make: Callable[[Path], str]) -> Path:
        """The folder `name`, which `make` fills and describes unless it is there: whole or not at all."""
        told = json.dumps([self.spec.model_dump_json(), Path(__file__).read_text(), code])
        digest = hashlib.sha256(told.encode()).hexdigest()[:10]
        place = self.folder / f"{self.spec.name}-seed{self.seed}" / f"{name}-{digest}"
        if (place / DONE).exists():
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=place.parent))
        try:
            detail = make(partial)
            (partial / DONE).write_text(json.dumps({"detail": detail}))
            os.replace(partial, place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return place

    def _hugging_face(self, target: Path, dtype: str) -> str:
        kind = getattr(torch, dtype)
        tokenizer = target / "words.json"
        write_tokenizer(tokenizer, self.spec.vocab)
        save_folder(target, self.spec, random_weights(self.spec, kind, self.seed), kind, tokenizer)
        tokenizer.unlink()
        (target / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
        return f"weights {dtype}"


def write_tokenizer(file: Path, vocab: int) -> None:
    """A tokenizer of `vocab` words `t0`, `t1`, ...: some tools insist on one, none of our figures uses it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{index}": index for index in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(file))
