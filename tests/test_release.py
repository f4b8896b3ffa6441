"""A release: one version everywhere, a complete wheel and sdist, and the project that `workbench init` makes."""

from __future__ import annotations

import ast
import json
import re
import tarfile
import zipfile
from datetime import date
from email import message_from_string
from pathlib import Path

import nbformat
import pytest
import yaml

import workbench
from tests.fresh_environment import build_release
from workbench.cli import main
from workbench.cli.init import NEXT, TEMPLATE
from workbench.experiment.experiment import Experiment
from workbench.lab.start import notebooks_in
from workbench.testing import check_sampler

ROOT = Path(__file__).resolve().parents[1]
NAMES = ["README.md", "first.yaml", "mask.py", "notebook.ipynb", "sampler.py", "test_laws.py"]
TEXTS = (".py", ".yaml", ".json", ".j2", ".md", ".js", ".css", ".toml", ".ipynb")
MAX_WHEEL_MIB = 40  # the wheel, with the weights of the demo models
# What the first light, the zoo, the claims, the course and the project want, by a file of each.
WANTED = [
    "workbench/demo/target/model.safetensors", "workbench/demo/chat/card.json", "workbench/reports/report.html.j2",
    "experiments/project/notebook.ipynb", "experiments/project/test_laws.py", "experiments/project/README.md",
    "experiments/first_light.yaml",
    "experiments/zoo/quest.py", "experiments/zoo/quest.yaml", "notebooks/00_start.py", "notebooks/01_one_request.py",
    "notebooks/jupytext.toml", "compiled_kernels/masks.py",
]  # fmt: skip
ABSOLUTE = re.compile(rb"(?<![\w./])/(?:work|root|home|Users)/\w")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_release(tmp_path_factory.mktemp("release"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "lab"]) == 0
    monkeypatch.chdir(tmp_path / "lab")
    return tmp_path / "lab"


def test_there_is_one_version(capsys: pytest.CaptureFixture[str]) -> None:
    version = workbench.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"workbench {version}\n"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", changelog, re.M)
    assert newest and newest[1] == version and date.fromisoformat(newest[2]) == citation["date-released"]
    assert version not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_citation_has_what_the_format_wants() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["license"] == "MIT"
    assert {"message", "title", "authors"} <= set(citation)
    assert all(set(author) <= {"name", "family-names", "given-names", "orcid"} for author in citation["authors"])
    assert citation["authors"][0]["name"] in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_every_public_name_is_there() -> None:
    from workbench import parts, testing

    for module in (workbench, parts, testing):
        for name in module.__all__:
            assert getattr(module, name) is not None


def test_the_wheel_is_complete_and_has_nothing_of_the_checkout(release: tuple[Path, Path]) -> None:
    wheel = release[1]
    with zipfile.ZipFile(wheel) as archive:
        sizes = {each.filename: each.file_size for each in archive.infolist()}
        info = f"inference_workbench-{workbench.__version__}.dist-info"
        tops = {name.split("/")[0] for name in sizes}
        extension = info.replace(".dist-info", ".data")  # of JupyterLab, which looks for it beside the interpreter
        assert tops == {"workbench", "compiled_kernels", "experiments", "notebooks", info, extension}
        manifest = f"{extension}/data/share/jupyter/labextensions/inference-workbench/package.json"
        assert json.loads(archive.read(manifest))["version"] == workbench.__version__
        assert not set(WANTED) - set(sizes)
        strange = [name for name in sizes if re.search(r"__pycache__|\.pyc$|/pictures/|/\.|^/|\.\.", name)]
        assert not strange
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        assert metadata["Version"] == workbench.__version__ and metadata["License-Expression"] == "MIT"
        core = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
        needs = {re.split(r"[^\w-]", line)[0] for line in core}
        assert {"torch", "hypothesis", "pytest", "jupyterlab"} <= needs
        texts = [name for name in sizes if name.endswith(TEXTS)]
        assert [name for name in texts if ABSOLUTE.search(archive.read(name))] == []
    assert wheel.stat().st_size < MAX_WHEEL_MIB << 20


def test_the_wheel_has_every_tracked_file_of_its_packages(release: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(release[1]) as archive:
        held = {*archive.namelist()}
    source = release[1].parent.parent / "source"
    for package in ("workbench", "compiled_kernels", "experiments"):
        names = {path.relative_to(source).as_posix() for path in (source / package).rglob("*") if path.is_file()}
        missing = {name for name in names - held if not re.search(r"\.md$|records/", name)}
        assert missing == set(), "declare it in pyproject.toml under tool.setuptools.package-data"


def test_the_sdist_is_the_checkout(release: tuple[Path, Path]) -> None:
    with tarfile.open(release[0]) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    source = release[0].parent.parent / "source"
    tracked = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    tracked = {name for name in tracked if not re.search(r"\.egg-info/|^build/", name)}
    assert tracked - names == set(), "name it in MANIFEST.in"
    assert all(re.search(r"^PKG-INFO$|^setup\.cfg$|\.egg-info/", name) for name in names - tracked)


def test_init_copies_the_project_and_says_what_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for folder in ("lab", "there", "deep/in/here"):
        assert main(["init", folder]) == 0
        said = capsys.readouterr().out
        assert f"cd {folder}" in said and all(command in said for command in NEXT)
        assert sorted(path.name for path in Path(folder).iterdir()) == NAMES
        for name in NAMES:
            assert (Path(folder) / name).read_bytes() == (TEMPLATE / name).read_bytes()
    assert sorted(path.name for path in TEMPLATE.iterdir() if path.is_file()) == NAMES


@pytest.mark.parametrize("words", [["lab"], ["lab", "--course"]])
def test_init_overwrites_nothing(words: list[str], project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mask.py").write_text("mine")
    before = {path: path.read_bytes() for path in project.iterdir()}
    assert main(["init", *[str(project) if word == "lab" else word for word in words]]) == 2
    error = capsys.readouterr().err
    assert "is not empty (README.md, first.yaml, mask.py, ...); name a new one" in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in project.iterdir()} == before
    assert main(["init", str(project / "mask.py")]) == 2
    assert "is a file; name a new folder" in capsys.readouterr().err


def test_init_brings_the_course_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "lab"), "--course"]) == 0
    theirs, ours = notebooks_in(tmp_path / "lab" / "notebooks"), notebooks_in(ROOT / "notebooks")
    assert [path.name for path in theirs] == [path.name for path in ours] and len(ours) >= 12
    assert all(mine.read_bytes() == its.read_bytes() for mine, its in zip(theirs, ours, strict=True))


def test_the_experiment_and_the_filter_of_the_project(project: Path) -> None:
    experiment = Experiment.from_file(Path("first.yaml"))
    for name in experiment.variants:
        assert Experiment.from_yaml(experiment.variant(name).to_yaml()) == experiment.variant(name)
    check_sampler("sampler.py:TopA", examples=20).raise_if_failed()
    source = (project / "sampler.py").read_text()
    (project / "sampler.py").write_text(source.replace("logits.masked_fill(", "logits.masked_fill_("))
    assert not check_sampler("sampler.py:TopA", examples=20).passed


def test_the_files_of_the_project_use_the_public_api_alone() -> None:
    from tests.zoo.test_public_api import forbidden_imports

    document = nbformat.read(TEMPLATE / "notebook.ipynb", as_version=4)
    nbformat.validate(document)
    cells = ["".join(cell.source) for cell in document.cells if cell.cell_type == "code"]
    assert json.loads((TEMPLATE / "notebook.ipynb").read_text())["cells"][1]["outputs"] == []
    notebook = "\n".join(line for cell in cells for line in cell.splitlines() if not line.startswith("%"))
    for name in NAMES:
        if name.endswith(".py"):
            source = (TEMPLATE / name).read_text(encoding="utf-8")
            assert [each for each in forbidden_imports(source) if each != "pytest"] == []
    ast.parse(notebook)
    assert forbidden_imports(notebook) == ["mask.Dilated"]


def test_what_the_project_says_of_itself_is_so() -> None:
    text = (TEMPLATE / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in NAMES if name != "README.md")
    for line in re.findall(r"^(?:workbench|pytest|jupyter)[^#\n]*", text, re.M):
        words = line.split()
        if words[0] == "workbench":
            assert main([words[1], "--help"]) == 0
