"""Scaffold a user-defined family from a folder's config: a file that registers it, and its test.

The nearest known family reads the keys it knows; other keys are listed and refused until the user decides on them. The
package itself is not edited: `--custom FILE`, or `model.custom` in settings, loads the file.
"""

from __future__ import annotations

import json
import keyword
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from pydantic import ValidationError

from workbench.errors import WorkbenchError, cannot_write
from workbench.model.checkpoint_names import CheckpointNames
from workbench.model.formats.open import open_checkpoint, read_config
from workbench.model.hf.any_config import FIELD_ALIASES
from workbench.model.hf.families import FAMILIES, read_names
from workbench.model.hf.family_fields import as_family, renamed
from workbench.model.hf.fields import ConfigFields
from workbench.model.hf.weights import IGNORED_TENSORS
from workbench.model.model_parameters import stored_parameters

READERS = "workbench.model.hf"  # the package of functions that read configs
# Keys without effect on a trained model's computation: descriptions, dropout, training, settings of generation.
NEUTRAL_KEYS = frozenset({
    "_name_or_path", "activation_dropout", "add_cross_attention", "architectures", "attention_dropout",
    "attention_softmax_in_fp32", "attn_pdrop", "auto_map", "aux_loss_alpha", "bias_dropout_fusion", "bos_token_id",
    "chunk_size_feed_forward", "classifier_dropout", "cross_attention_hidden_size", "decoder_start_token_id",
    "dropout", "dtype", "emb_pdrop", "embd_pdrop", "embedding_dropout", "eod_token_id", "eos_token_id", "ep_size",
    "finetuning_task", "gradient_checkpointing", "hidden_dropout", "id2label", "init_device", "init_std",
    "initializer_range", "input_jitter_noise",
    "is_decoder", "is_encoder_decoder", "label2id", "layerdrop", "logits_to_keep", "masked_softmax_fusion",
    "model_type", "no_bias_init", "output_attentions", "output_dropout", "output_hidden_states",
    "output_router_logits", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "resid_pdrop",
    "reorder_and_upcast_attn", "residual_dropout", "return_dict", "return_dict_in_generate", "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id", "seq_aux", "slow_but_exact", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "tie_encoder_decoder",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "unk_token_id", "use_bfloat16",
    "use_cache", "verbose",
})  # fmt: skip


@dataclass(frozen=True)
class Nearest:
    """The known model family most similar to a model folder.

    Args:
        family: its model_type.
        renames: keys that the family reads, by their names in the folder.
        unknown: keys that the family does not mention, with their values.
        names: names of the family's tensors under this config.
        missing: tensors of the family that the folder lacks, in the first layer and outside of the layers.
        extra: tensors of the folder that the family lacks, in the first layer and outside of the layers.
        also: other families that match equally well in tensors and keys.
    """

    family: str
    renames: dict[str, str]
    unknown: dict[str, Any]
    names: CheckpointNames
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


def nearest_family(path: Path) -> Nearest:
    """Return the known family that matches the model at `path` best, judged first by tensor names, then by config keys.

    Raises:
        WorkbenchError: if no family reads the config, with the reason of the family that reads most of its keys.
    """
    config, stored = read_config(path), _stored_shapes(path)
    found: list[tuple[tuple[float, ...], Nearest]] = []
    refusals: list[tuple[int, str]] = []
    for family in FAMILIES:
        unknown = {key: value for key, value in config.values.items() if value is not None and not _known(key, family)}
        try:
            found.append(_likeness(config, family, unknown, stored))
        except WorkbenchError as error:
            refusals.append((len(unknown), f"{family}: {error}"))
    if not found:
        raise WorkbenchError(f"{path}: no known family reads a config like this one; nearest is {min(refusals)[1]}")
    best = max(likeness for likeness, _ in found)
    first, *others = [near for likeness, near in found if likeness == best]
    return replace(first, also=tuple(other.family for other in others))


def scaffold(name: str, path: Path, folder: Path = Path()) -> tuple[Path, Path]:
    """Write `NAME.py`, which registers the family `name`, and `test_NAME.py` into `folder`, and return both.

    Raises:
        WorkbenchError: for a name that is no identifier, a known family, or files that exist already.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise WorkbenchError(f"a family cannot be called {name!r}: letters, digits and underscores, no digit first")
    model_type = read_config(path).get("model_type")
    if not isinstance(model_type, str):
        raise WorkbenchError(f"{path}: config.json has no model_type, by which a family is found")
    if model_type in FAMILIES:
        raise WorkbenchError(f"{path}: its family {model_type!r} is known already; `workbench model check {path}`")
    files = folder / f"{name}.py", folder / f"test_{name}.py"
    if there := next((file for file in files if file.exists()), None):
        raise WorkbenchError(f"{there}: exists already; move it, or choose another name")
    near = nearest_family(path)
    for file, text in zip(files, (_table(name, model_type, path, near), _test(name, path)), strict=True):
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise cannot_write(str(file), error) from error
    return files


def _stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the stored tensors; empty if the folder has no weights yet."""
    try:
        tensors = open_checkpoint(path).tensors
    except WorkbenchError:
        return {}
    return {name: tensor.shape for name, tensor in tensors.items()}


def _likeness(
    config: ConfigFields, family: str, unknown: dict[str, Any], stored: dict[str, tuple[int, ...]]
) -> tuple[tuple[float, ...], Nearest]:
    """Return the similarity of the folder to a family, as numbers to compare in order, and the match itself."""
    renames = {} if family in FAMILIES and _reads(config, family) else _aliases(config)
    fields = as_family(renamed(config, **renames), family)
    try:
        spec = FAMILIES[family].read(fields, "scaffold")
    except ValidationError as error:
        raise WorkbenchError(str(error)) from None
    names = read_names(fields)
    if stored and f"{names.embedding}.weight" not in stored:
        base = names.without_prefix()
        names = base if f"{base.embedding}.weight" in stored else names
    unknown = {key: value for key, value in unknown.items() if key not in renames.values()}
    wanted = {part.name: part.shape for each in stored_parameters(spec, names).values() for part in each.parts}
    ignored = (*IGNORED_TENSORS, *([f"{names.head}.weight"] if spec.tie_word_embeddings else []))
    stored = {name: shape for name, shape in stored.items() if name in wanted or not name.endswith(ignored)}
    near = Nearest(
        family, renames, unknown, names, _first_layer(wanted, stored, names), _first_layer(stored, wanted, names)
    )
    same = len(wanted.items() & stored.items()) / max(1, len(wanted.keys() | stored.keys()))
    shapes, theirs = Counter(wanted.values()), Counter(stored.values())
    alike = (shapes & theirs).total() / max(1, (shapes | theirs).total())
    return (same, alike, -len(unknown), -len(renames)), near


def _reads(config: ConfigFields, family: str) -> bool:
    try:
        FAMILIES[family].read(as_family(config, family), "scaffold")
    except (WorkbenchError, ValidationError):
        return False
    return True


def _aliases(config: ConfigFields) -> dict[str, str]:
    """Return the most common name of each size -> the config's own name for it, where they differ."""
    found = {}
    for usual, *others in FIELD_ALIASES.values():
        other = next((name for name in others if config.get(name) is not None), None)
        if config.get(usual) is None and other is not None:
            found[usual] = other
    return found


def _first_layer(those: Mapping[str, object], others: Mapping[str, object], names: CheckpointNames) -> tuple[str, ...]:
    """Return names of `those` that `others` lack: outside of layers, and in the first layer and its first expert."""
    found = [name for name in those if name not in others]
    later = [f"{names.layer}.", ".experts."]
    return tuple(
        name for name in found
        if not any(part in name and not name.partition(part)[2].startswith("0.") for part in later)
        or name.endswith((".gate_up_proj", ".down_proj"))
    )[:24]  # fmt: skip


def _known(key: str, family: str) -> bool:
    """Return whether a family's reader mentions a key, or the key has no effect."""
    return key in NEUTRAL_KEYS or key in mentioned_keys(FAMILIES[family].read)


def mentioned_keys(reader: Any) -> frozenset[str]:
    """Return every string in the code of `reader`, and in the functions and tables of this package that it uses."""
    seen: set[int] = set()
    found: set[str] = set()
    queue: list[Any] = [reader]
    while queue:
        each = queue.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType) and each.__module__.startswith(READERS):
            names = [name for code in _codes(each.__code__) for name in code.co_names]
            queue += [each.__globals__[name] for name in names if name in each.__globals__]
            queue += [constant for code in _codes(each.__code__) for constant in code.co_consts]
            queue += [*(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()]
        elif isinstance(each, str):
            found.add(each)
        elif isinstance(each, dict):
            queue += [*each, *each.values()]
        elif isinstance(each, tuple | list):
            queue += each
    return frozenset(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _table(name: str, model_type: str, path: Path, near: Nearest) -> str:
    """Return the text of the file that registers the family."""
    helpers = ["as_family", "refuse_others", *(["renamed"] if near.renames else [])]
    changed = {
        field.name: value for field in fields(CheckpointNames)
        if (value := getattr(near.names, field.name)) != getattr(FAMILIES[near.family].names, field.name)
    }  # fmt: skip
    unknown = "".join(f"    {json.dumps(key)}: (),  # {_short(value)} there\n" for key, value in near.unknown.items())
    unknown = f"{{\n{unknown}}}" if unknown else "{}"
    renames = ", ".join(f"{ours}={json.dumps(theirs)}" for ours, theirs in near.renames.items())
    lines = [
        f'"""Read the family {model_type}: its tensors and keys are most similar to those of {near.family}.',
        "",
        f"Scaffolded from {path}, which is MODEL here:",
        "",
        f"    workbench model check MODEL --custom {name}.py",
        f"    python -m pytest test_{name}.py",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        *(["from dataclasses import replace", ""] if changed else []),
        "import workbench",
        "from workbench.model.hf.families import FAMILIES, Family",
        f"from workbench.model.hf.family_fields import {', '.join(helpers)}",
        "from workbench.model.hf.fields import ConfigFields",
        "from workbench.model.spec import ModelSpec",
        "",
        f'NEAREST = FAMILIES["{near.family}"]',
    ]
    if near.also:
        lines += [
            f"# TODO: as near are {', '.join(near.also)}: neither tensors nor keys tell them apart.",
        ]
    if near.unknown:
        lines += [
            f"# TODO: {near.family} does not know these keys. A value that is not listed is refused: list it once you",
            f"# know that it changes nothing, or read the key in {name} and delete its line.",
        ]
    lines += [f"UNKNOWN_KEYS: dict[str, tuple[object, ...]] = {unknown}"]
    names = "NEAREST.names"
    if changed:
        names = f"replace(NEAREST.names, {', '.join(f'{key}={value!r}' for key, value in changed.items())})"
    for words, those in (("lacks", near.missing), ("has besides", near.extra)):
        if those:
            lines += [f"# TODO: of the tensors that {near.family} has the folder {words}, in layers and outside:"]
            lines += [f"#     {each}" for each in those]
    lines += [
        f"NAMES = {names}",
        "",
        "",
        f"def {name}(config: ConfigFields, name: str) -> ModelSpec:",
        f'    """Read {model_type} (TODO: its source)."""',
        "    refuse_others(config, **UNKNOWN_KEYS)",
        *([f"    config = renamed(config, {renames})"] if renames else []),
        f'    spec = NEAREST.read(as_family(config, "{near.family}"), name)',
        f"    return spec  # TODO: what differs from {near.family}: spec.model_copy(update={{...}})",
        "",
        "",
        f'workbench.register("{model_type}")(Family({name}, NAMES))',
    ]
    return "\n".join(lines) + "\n"


def _short(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _test(name: str, path: Path) -> str:
    """Return the text of the family's test."""
    return f'''"""Test the family of {name}.py on the folder that it was scaffolded from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import workbench
from workbench.check.report import check_model
from workbench.oracle import naive

FOLDER = "{path.resolve()}"
CUSTOM = str(Path(__file__).with_name("{name}.py"))
PROMPT = (3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9)


def test_it_decodes_what_the_oracle_decodes() -> None:
    """Greedy tokens from pages, one by one, are those of the whole text without a cache."""
    runner = workbench.load(FOLDER, custom=CUSTOM, dtype="float32", backend="eager")
    ids = [token % runner.model.spec.vocab_size for token in PROMPT]
    request = workbench.Request("greedy", tuple(ids), workbench.SamplingParameters(temperature=0, max_tokens=8))
    (finished,) = (event for event in runner.stream(request) if event.kind == "finished")
    whole = naive.logits(runner.model, torch.tensor([*ids, *finished.token_ids]))
    assert finished.token_ids
    for position, token in enumerate(finished.token_ids, len(ids) - 1):
        best = whole[position].topk(2).values
        assert token == int(whole[position].argmax()) or best[0] - best[1] < 1e-4 * best[0].abs()


def test_it_computes_what_transformers_computes() -> None:
    found = check_model(FOLDER, custom=CUSTOM)
    assert found["problem"] is None
    if "skipped" in found["comparison"]:
        pytest.skip(found["comparison"]["skipped"])
    assert found["comparison"]["equal"], found["comparison"]["first_difference"]
'''
