"""Export a seeded random model to the format of each tool, once per folder; all rounds use the same export."""

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

from benchmarks.peers.catalog import SCRIPTS
from benchmarks.peers.process import installed, run_script
from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import random_weights
from workbench.model.spec import ModelSpec

EXPORT_RECORD = "export.json"
EXPORTERS = {"gguf": "export_gguf.py", "openvino": "export_openvino.py", "onnx": "export_onnx.py"}
TIMEOUT = 3600.0
# The ONNX builder requires tokens for begin, end and padding; the scripts make every tool ignore the end token.
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "bos_token": "t0", "pad_token": "t0"}


class ExportFailure(Exception):
    """The model could not be exported to this format; `status` says why: absent, unsupported or failed."""

    def __init__(self, answer: dict):
        super().__init__(answer["reason"])
        self.status = answer["status"]


@dataclass(frozen=True)
class ModelExports:
    """Exports of one model under `folder`, made by each tool's own exporter in its own interpreter. A model that is a
    GGUF `file` is not exported: each tool reads the file itself."""

    folder: Path
    spec: ModelSpec
    seed: int
    threads: int
    file: Path | None = None

    def export(self, model_format: str, format: str, python: str, packages: Sequence[str] = ()) -> tuple[Path, str]:
        """Export the model for one tool, or return an existing export.

        Args:
            model_format: Kind of export: folder, gguf, openvino, onnx.
            format: Weight format.
            python: The tool's interpreter.
            packages: Distributions of the tool; a change of their versions exports the model again.

        Returns:
            The path (a file for gguf, else a folder), and a description of its weights.

        Raises:
            ExportFailure: Where the tool cannot export it.
        """
        if self.file is not None:
            return self.file, f"weights as {self.file.name} stores them"
        if model_format == "none":
            return self.folder, ""
        dense = "float32" if format == "float32" else "bfloat16"
        source = self._made(f"folder-{dense}", "", lambda target: self._hugging_face(target, dense))
        if model_format == "folder":
            return source, f"weights {format}"
        script = EXPORTERS[model_format]
        code = "".join((SCRIPTS / name).read_text() for name in (script, "gguf_layout.py"))
        code += installed(python, tuple(packages))

        def make(target: Path) -> str:
            job = {"source": str(source), "target": str(target), "format": format}
            answer = run_script(python, script, job, threads=self.threads, timeout=TIMEOUT)
            if answer["status"] != "ok":
                raise ExportFailure(answer)
            return answer["detail"]

        made = self._made(f"{model_format}-{format}", code, make)
        return made / "model.gguf" if model_format == "gguf" else made, json.loads((made / EXPORT_RECORD).read_text())[
            "detail"
        ]

    def _made(self, name: str, code: str, make: Callable[[Path], str]) -> Path:
        """Return the folder `name`, filled and described by `make` unless it exists; atomically."""
        identity = json.dumps([self.spec.model_dump_json(), Path(__file__).read_text(), code])
        digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
        place = self.folder / f"{self.spec.name}-seed{self.seed}" / f"{name}-{digest}"
        if (place / EXPORT_RECORD).exists():
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=place.parent))
        try:
            detail = make(partial)
            (partial / EXPORT_RECORD).write_text(json.dumps({"detail": detail}))
            os.replace(partial, place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return place

    def _hugging_face(self, target: Path, dtype: str) -> str:
        kind = getattr(torch, dtype)
        tokenizer = target / "words.json"
        write_tokenizer(tokenizer, self.spec.vocab_size)
        save_folder(target, self.spec, random_weights(self.spec, kind, self.seed), kind, tokenizer)
        tokenizer.unlink()
        (target / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
        return f"weights {dtype}"


def write_tokenizer(file: Path, vocab: int) -> None:
    """Write a tokenizer with `vocab` entries `t0`, `t1`, ...: some tools require one, though no measurement uses it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{index}": index for index in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(file))
