"""Read a model without its weights: all that a cluster's front needs to turn texts and conversations into requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import describe_model, model_folder
from workbench.errors import WorkbenchError
from workbench.model.formats.texts import open_chat_template, open_tokenizer
from workbench.model.hf.generation import read_sampling_defaults
from workbench.model.spec import ModelSpec
from workbench.prompt.own_template import own_template
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class FleetModel:
    """The spec, the tokenizer and the chat template of a fleet's model; the replicas hold the weights."""

    spec: ModelSpec
    tokenizer: Tokenizer | None
    name: str

    @classmethod
    def of(cls, config: EngineConfig) -> FleetModel:
        """Read the model that `config` names, without weights (WorkbenchError if it cannot be read)."""
        spec, _ = describe_model(config.model.name, config.attention, config.model.context)
        folder = model_folder(config.model.name)
        tokenizer = None if folder is None else open_tokenizer(folder)
        if tokenizer is not None:
            tokenizer.check_vocab_size(spec.vocab_size)
        return cls(spec, tokenizer, config.model.name)

    def check_encodes_for(self, other: FleetModel) -> None:
        """Raise WorkbenchError if another model cannot read prompts encoded by this model's tokenizer."""
        mine, its = self.tokenizer, other.tokenizer
        words = "deploy: {0} has another {1} than {2}, the front's model; give a model with the same {1}"
        if self.spec.vocab_size != other.spec.vocab_size:
            raise WorkbenchError(words.format(other.name, "vocabulary", self.name))
        if (mine is None) != (its is None) or mine and its and mine.to_json() != its.to_json():
            raise WorkbenchError(words.format(other.name, "tokenizer", self.name))

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's makers recommend, as defaults of requests."""
        folder = model_folder(self.name)
        return {} if folder is None or not folder.is_dir() else read_sampling_defaults(folder)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """Return the template of the model's folder, or the workbench's own if the tokenizer has its control tokens."""
        folder = model_folder(self.name)
        found = None if folder is None else open_chat_template(folder)
        return found if found is not None or self.tokenizer is None else own_template(self.tokenizer)
