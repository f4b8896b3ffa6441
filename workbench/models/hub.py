"""Fetch a model of the Hugging Face hub, by OWNER/NAME[@REVISION][:PART], as a folder of the files that are read.

`huggingface_hub` does the fetching (the extra `hub`); `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` are its own. Files
that are whole stay when a fetch is broken off, and every file is held to the hub's hash before the folder gets its name.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.models.store import HUB_NAME, fetching, place_of, storing

CONFIGS = ("config.json", "generation_config.json", "quantize_config.json")
TEXTS = ("tokenizer.json", "tokenizer_config.json", "tekken.json", "tokenizer.model", "chat_template.jinja")
TEMPLATES = "additional_chat_templates/"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
REVISION_FILE = ".revision"  # the commit that a folder holds
CHUNK = 1 << 20


def fetch_from_hub(name: str, report: Callable[[str], None]) -> tuple[Path, bool]:
    """Fetch a model of the hub unless it is at hand; return its folder, and whether it was fetched.

    Raises:
        WorkbenchError: for a name, revision or part that the hub has not, files that are not read, no network, files
            that are not those of the hub, no room, no permission, and where `huggingface_hub` is not installed.
    """
    found, target = HUB_NAME.fullmatch(name), place_of(name)
    assert found is not None and target is not None
    try:
        import huggingface_hub
    except ImportError:
        raise WorkbenchError(
            f"{name}: a model of the hub wants huggingface_hub; pip install 'inference-workbench[hub]'"
        ) from None
    with fetching(name, report) as folder:
        if target.is_dir():
            shutil.rmtree(folder)
            return target, False
        try:
            commit = _download(huggingface_hub, found["repo"], found["revision"], found["part"], folder, report)
        except WorkbenchError as error:
            raise WorkbenchError(f"{name}: {error}") from None
        except Exception as error:  # the errors of httpx have no other base
            with storing():
                raise error if getattr(error, "errno", None) else _refusal(name, error) from None
        finally:
            if not any(each for each in folder.iterdir() if each.name != ".cache"):
                shutil.rmtree(folder)
        with storing():
            shutil.rmtree(folder / ".cache", ignore_errors=True)
            (folder / REVISION_FILE).write_text(commit + "\n")
            target.parent.mkdir(exist_ok=True)
            os.replace(folder, target)
    return target, True


def _download(
    hub: Any, repo: str, revision: str | None, part: str | None, folder: Path, report: Callable[[str], None]
) -> str:
    """Bring the files of a model that are read into the folder; return the commit."""
    endpoint = os.environ.get("HF_ENDPOINT")
    api = hub.HfApi(endpoint=endpoint, library_name="inference-workbench")
    info = api.model_info(repo, revision=revision)
    commit, card = info.sha, info.card_data
    tree = api.list_repo_tree(repo, revision=commit, recursive=True)
    files = {each.path: each for each in tree if isinstance(each, hub.RepoFile)}
    where = {"revision": commit, "local_dir": folder, "endpoint": endpoint}

    def read_index() -> Iterable[str]:
        return json.loads(Path(hub.hf_hub_download(repo, INDEX, **where)).read_bytes())["weight_map"].values()

    names = files_to_read(files, part, read_index)
    size, licence = sum(files[name].size for name in names), (card or {}).get("license") or "not said"
    report(f"{repo} at {commit[:12]}: {len(names)} files, {size / 1e6:,.0f} MB; licence: {licence}")
    hub.snapshot_download(repo, allow_patterns=[glob.escape(name) for name in names], **where)
    for name in names:
        path = folder / name
        if not path.is_file() or not _is_the_hubs(path, files[name]):
            path.unlink(missing_ok=True)  # the rest stays, and this one is fetched anew
            raise WorkbenchError(f"{name} is not the file that the hub lists; it was deleted, fetch it again")
    return commit


def files_to_read(names: Iterable[str], part: str | None, read_index: Callable[[], Iterable[str]]) -> list[str]:
    """Choose the files of a repository that the workbench reads: safetensors before GGUF, and what belongs to them.

    Args:
        names: all paths in it.
        part: a piece of the name of the GGUF file that is meant, `Q4_K_M` for example; None where there is one.
        read_index: returns the names of files that the index of shards has.
    """
    names = sorted(names)
    texts = [name for name in names if name in TEXTS or (name.startswith(TEMPLATES) and name.count("/") == 1)]
    configs = [name for name in names if name in CONFIGS]
    if part is None and "config.json" in configs:
        if WEIGHTS in names:
            return [*configs, *texts, WEIGHTS]
        if INDEX in names:
            shards = sorted(set(read_index()))
            if absent := [each for each in shards if each not in names or "/" in each]:
                raise WorkbenchError(f"{INDEX} names {absent[0]!r}, which is no file beside it")
            return [*configs, *texts, INDEX, *shards]
    found = [name for name in names if name.endswith(".gguf") and "/" not in name]
    chosen = [name for name in found if part is None or part.lower() in name.lower()]
    wholes = {name.rpartition("-of-")[0].rpartition("-")[0] or name for name in chosen}
    if len(wholes) == 1:
        return chosen
    if not found:
        weights = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".safetensors"))]
        raise WorkbenchError(
            f"holds {weights[0] if weights else 'no weights'}; config.json with model.safetensors, or a GGUF file, is read"
        )
    raise WorkbenchError(
        f"holds several GGUF files ({', '.join(found)}); add a part of one's name behind a colon: OWNER/NAME:Q4_K_M"
    )


def _is_the_hubs(path: Path, listed: Any) -> bool:
    """Return whether a file has the hash that the hub lists: sha256 of large ones, git's of others."""
    digest = hashlib.sha256() if listed.lfs else hashlib.sha1(b"blob %d\0" % listed.size)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == (listed.lfs.sha256 if listed.lfs else listed.blob_id)


def _refusal(name: str, error: Exception) -> WorkbenchError:
    """Return the error for what `huggingface_hub` raised."""
    kinds = {each.__name__ for each in type(error).__mro__}
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "GatedRepoError" in kinds:
        why = "its makers ask for your agreement: accept the licence on its page, then `hf auth login`"
    elif "RevisionNotFoundError" in kinds:
        why = "the hub has the model, and no such revision; name a branch, a tag or a commit behind the @"
    elif "RepositoryNotFoundError" in kinds:
        why = "the hub has no such model, or keeps it from you: look at the name, or `hf auth login`"
    elif kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "TimeoutException"}:
        why = "the hub does not answer; run it again with a network: files that are whole are kept"
    else:
        why = f"could not be fetched ({line}); run it again: files that are whole are kept"
    return WorkbenchError(f"{name}: {why}")
