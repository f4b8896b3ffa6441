"""Download a model from the Hugging Face hub, by OWNER/NAME[@REVISION][:PART], as a folder of the files that the
workbench reads.

`huggingface_hub` does the fetching (the extra `hub`); `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` are its own. Files
that are complete stay if a download is interrupted; the hash of every file is checked before the folder gets its name.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, installed_by
from workbench.models.store import HUB_NAME, fetching, place_of
from workbench.units import format_bytes

TEXTS = re.compile(
    r"(config|generation_config|quantize_config|tokenizer|tokenizer_config|tekken)\.json|tokenizer\.model"
    r"|chat_template\.jinja|additional_chat_templates/[^/]+\.jinja"
)
WHOLE, SHARDS = "model.safetensors", re.compile(r"[^/]+-of-\d+\.safetensors|model\.safetensors\.index\.json")
PART_OF_GGUF = re.compile(r"-\d+-of-\d+\.gguf$")
# Errors of huggingface_hub and httpx, which have no common base, by their classes' names.
OFFLINE = "the hub does not answer; run it again with a network: complete files are kept"
CAUSES = {
    "GatedRepoError": "its makers ask for your agreement: accept the licence on its page, then `hf auth login`",
    "RevisionNotFoundError": "the hub has the model, but not this revision; name a branch, a tag or a commit behind @",
    "RepositoryNotFoundError": "the hub has no such model, or hides it from you: check the name, or `hf auth login`",
    **dict.fromkeys(("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "TimeoutException"), OFFLINE),
}


def fetch_from_hub(name: str, report: Callable[[str], None]) -> Path:
    """Download a model from the hub unless it is already there; return its folder.

    Raises:
        WorkbenchError: the hub lacks the name, revision or part, its files are in an unsupported format, a file's hash
            differs, there is no network, disk space or permission, or `huggingface_hub` is not installed.
    """
    target, match = place_of(name), HUB_NAME.fullmatch(name)
    assert target is not None and match is not None
    with installed_by("hub", name):
        import huggingface_hub
    with fetching(name, report) as folder:
        if target.is_dir():
            return target
        try:
            commit = _download(huggingface_hub, match[1], match[2], match[3], folder, report)
        except WorkbenchError as error:
            raise WorkbenchError(f"{name}: {error}") from None
        except Exception as error:
            if getattr(error, "errno", None):  # the disk's
                raise
            causes = (CAUSES[each.__name__] for each in type(error).__mro__ if each.__name__ in CAUSES)
            raise WorkbenchError(f"{name}: {next(causes, ' '.join(str(error).split()) or repr(error))}") from None
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # what it knows of files that came, to go on
        (folder / ".revision").write_text(commit + "\n")
        target.parent.mkdir(exist_ok=True)
        os.replace(folder, target)
    return target


def _download(
    hub: Any, repo: str, revision: str | None, part: str | None, folder: Path, report: Callable[[str], None]
) -> str:
    """Download the needed files of a model into the folder; return the commit."""
    endpoint = os.environ.get("HF_ENDPOINT")
    api = hub.HfApi(endpoint=endpoint, library_name="inference-workbench")
    info = api.model_info(repo, revision=revision)
    tree = api.list_repo_tree(repo, revision=info.sha, recursive=True)
    files = {each.path: each for each in tree if isinstance(each, hub.RepoFile)}
    names = files_to_read(files, part)
    size, licence = sum(files[name].size for name in names), (info.card_data or {}).get("license")
    report(f"{repo} at {info.sha[:12]}: {len(names)} files, {format_bytes(size)}; licence: {licence or 'not said'}")
    patterns = [glob.escape(name) for name in names]
    hub.snapshot_download(repo, revision=info.sha, allow_patterns=patterns, local_dir=folder, endpoint=endpoint)
    for name in names:
        if not _is_whole(folder / name, files[name]):
            (folder / name).unlink(missing_ok=True)
            raise WorkbenchError(f"{name} differs from the file that the hub lists; it was deleted, fetch it again")
    return info.sha


def files_to_read(names: Iterable[str], part: str | None) -> list[str]:
    """Choose the files of a repository that the workbench reads: safetensors, else GGUF, with config and tokenizer
    files.

    Args:
        names: all paths in the repository.
        part: a part of the GGUF file's name, such as `Q4_K_M`; None if there is only one.
    """
    names = sorted(names)
    texts = [name for name in names if TEXTS.fullmatch(name)]
    weights = [name for name in names if name == WHOLE] or [name for name in names if SHARDS.fullmatch(name)]
    if part is None and weights and "config.json" in texts:
        return [*texts, *weights]
    ggufs = [name for name in names if name.endswith(".gguf") and "/" not in name]
    chosen = [name for name in ggufs if (part or "").lower() in name.lower()]
    if len({PART_OF_GGUF.sub("", name) for name in chosen}) == 1:
        return chosen
    if ggufs:
        raise WorkbenchError(f"holds the GGUF files {', '.join(ggufs)}; add a part of one's name: OWNER/NAME:Q4_K_M")
    raise WorkbenchError(f"holds no GGUF file, and {WHOLE} with config.json is read only without :PART")


def _is_whole(path: Path, listed: Any) -> bool:
    """Return whether a file has the hash that the hub lists: sha256 of large ones, git's of others."""
    with path.open("rb") as file:
        if listed.lfs:
            return hashlib.file_digest(file, "sha256").hexdigest() == listed.lfs.sha256
        return hashlib.sha1(b"blob %d\0" % listed.size + file.read()).hexdigest() == listed.blob_id
