"""Pages on their way to Sphinx: links follow the files, commands fit a phone, blocks are filled."""

from __future__ import annotations

from pathlib import Path

from tools.site.notebooks import read_course, widget_shown
from tools.site.stage import moved, spread, stage


def checkout(root: Path) -> Path:
    for path, text in {
        "README.md": "| write | [docs/guide/a.md](docs/guide/a.md) |\n",
        "docs/index.md": "# Front\n",
        "docs/guide/a.md": "# A\n\n[b](../b.md#there) and [code](../../code.py), [gone](gone.md), ![p](no.png)\n",
        "docs/b.md": "# B\n\n<!-- built: one -->\n\n<!-- built: two -->\n",
        "code.py": "",
        "notebooks/01_x.py": "# %% [markdown]\n# # X\n# [a](../docs/guide/a.md)\n\n# %%\nwidgets.PageMap(runner)\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_links_follow_the_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    problems = stage(out, checkout(tmp_path / "in"), {"one": lambda root: f"made in {root.name}"})
    assert problems == [
        "docs/b.md: there is no block 'two'; there are one",
        "docs/guide/a.md: a link to gone.md, which is not there",
        "docs/guide/a.md: a link to no.png, which is not there",
    ]
    assert "[b](../b.md#there) and code (`code.py`)" in (out / "guide" / "a.md").read_text()
    assert (out / "b.md").read_text() == "# B\n\nmade in in\n\n\n"
    assert "[a](../guide/a.md)" in (out / "notebooks" / "01_x.ipynb").read_text()


def test_addresses_of_other_machines_and_code_are_no_links() -> None:
    where, root = {"docs/a.md": "a.md"}, Path("/nowhere")
    problems: list[str] = []
    text = "[see](https://x.org) `[a](b)` [top](#top)\n```\n[a](b)\n```\n"
    assert moved(text, "docs/a.md", where, root, problems) == text.replace(
        "[see](https://x.org)", "see (`https://x.org`)"
    )
    assert problems == []


def test_commands_fit_a_phone() -> None:
    text = "```\nworkbench a    # does a\nworkbench b\n```\n"
    assert spread(text) == "```sh\n# does a\nworkbench a\nworkbench b\n```\n"
    long = "workbench " + "x" * 80
    assert spread(f"```\n{long}\n{long}  # y\n```\n") == f"```sh\n{long}\n\n# y\n{long}\n```\n"
    for kept in ("```\nTTFT 1\nworkbench a\n```\n", "```python\nworkbench  # a\n```\n\n```yaml\na: b\n```\n"):
        assert spread(kept) == kept


def test_a_cell_shows_the_widget_of_its_last_line() -> None:
    assert widget_shown("widgets.PageMap(runner)") == "PageMap"
    assert widget_shown("a = 1\nview = widgets.Chat(x).wait()\nview") == "Chat"
    assert widget_shown("pages, timeline = widgets.PageMap(x), widgets.Timeline(x)\npages") == "PageMap"
    assert widget_shown("widgets.Chat(x).wait()") == "Chat"
    for other in ("widgets.Chat(x).wait().figures", "view = widgets.Chat(x)", "print(1)", "!ls", "view"):
        assert widget_shown(other) is None


def test_a_later_cell_has_a_picture_where_its_notebook_has_one(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for name in ("chat", "chat-02_b"):
        (tmp_path / "pictures" / f"{name}.png").write_bytes(name.encode())
    for name in ("01_a", "02_b", "03_c"):
        (tmp_path / f"{name}.py").write_text("# %%\nwidgets.Chat(x)\n\n# %%\nwidgets.Chat(y)\n")
    course = read_course(tmp_path)
    assert {name: [len(cell.outputs) for cell in each.cells] for name, each in course.items()} == {
        "01_a.py": [1, 0], "02_b.py": [1, 0], "03_c.py": [0, 0]
    }  # fmt: skip
    first, own = (course[name].cells[0].outputs[0].data["image/png"] for name in ("01_a.py", "02_b.py"))
    assert first != own
