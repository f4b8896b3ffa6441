"""Pictures of packages: their order and their arcs say what the imports are."""

from __future__ import annotations

import itertools
from pathlib import Path

import networkx
from hypothesis import given
from hypothesis import strategies as st

from tools.site.packages import direct, downwards, picture, read_packages
from tools.structure import ROOT, modules


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, set[str]]:
    """Draw edges from lower to higher names, and at most one back."""
    names = "abcdefghi"[: draw(st.integers(2, 9))]
    pairs = draw(st.sets(st.sampled_from([*itertools.combinations(names, 2)])))
    pairs |= {(b, a) for a, b in draw(st.sets(st.sampled_from([*itertools.combinations(names, 2)]), max_size=1))}
    return {name: {b for a, b in pairs if a == name} for name in names}


@given(graphs())
def test_arcs_are_the_transitive_reduction_and_point_up_in_circles_alone(edges: dict[str, set[str]]) -> None:
    order, graph = downwards(edges), networkx.DiGraph({name: [*others] for name, others in edges.items()})
    down, up = ({(order[a], order[b]) for a, b in arcs} for arcs in direct(order, edges))
    assert sorted(order) == sorted(edges) and up <= {*graph.edges}
    assert all(order.index(a) > order.index(b) for a, b in up)
    assert bool(up) != networkx.is_directed_acyclic_graph(graph)
    assert up or down == {*networkx.transitive_reduction(graph).edges}


def test_packages_are_those_of_the_code() -> None:
    packages = {package.name: package for package in read_packages(ROOT)}
    folders = {f"workbench/{path.parent.name}" for path in (ROOT / "workbench").glob("*/__init__.py")}
    assert set(packages) == folders | {"workbench", "compiled_kernels"}
    shown = {name: set(package.below) for name, package in packages.items()}
    assert {"workbench/scheduler", "workbench/executors", "workbench/trace"} <= shown["workbench/engine"]
    assert not shown["compiled_kernels"], "tensors in, tensors out"
    for name, package in packages.items():
        assert package.nodes and sorted(package.nodes) == sorted(package.edges), name
        if not any(node.endswith("/") for node in package.nodes):
            assert direct(package.nodes, package.edges)[1] == [], name
    every, drawn = list(packages.values()), []
    for package in every:
        every += package.inner
        drawn += [f"{package.name}/{node}" for node in package.nodes if node.endswith(".py")]
    whole = [path.relative_to(ROOT).as_posix() for path in modules().values() if not path.name.startswith("__")]
    assert sorted(drawn) == sorted(whole)


def test_a_picture_has_a_row_a_file_and_names_its_arcs() -> None:
    html = picture(["a.py", "b/"], {"a.py": {"b/"}, "b/": set()}, {"a.py": 'Say "a" & go.'}, {"b/": "#b"})
    assert html.count("<li ") == 2 and html.count("<path ") == 1
    assert 'aria-label="imports among 2 parts: a.py imports b/"' in html
    assert "Say &quot;a&quot; &amp; go." in html and '<a href="#b">' in html


def test_the_front_door_is_left_out(tmp_path: Path) -> None:
    for path, text in {
        "workbench/__init__.py": "from workbench.a import one\n",
        "workbench/errors.py": '"""Say what is wrong. And more."""\n',
        "workbench/a/__init__.py": '"""A package."""\n',
        "workbench/a/one.py": "import workbench.errors\n",
        "workbench/b/__init__.py": "",
        "workbench/b/inner/__init__.py": '"""Inside."""\n',
        "workbench/b/two.py": "from workbench.b.inner import three\nfrom workbench.a import one\n",
        "workbench/b/inner/three.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    packages = {package.name: package for package in read_packages(tmp_path)}
    assert list(packages) == ["workbench/b", "workbench/a", "workbench"]
    assert packages["workbench"].nodes == ["errors.py"]
    assert packages["workbench"].summaries["errors.py"] == "Say what is wrong."
    assert packages["workbench/b"].nodes == ["two.py", "inner/"] and packages["workbench/b"].below == ["workbench/a"]
    assert packages["workbench/b"].summaries["inner/"] == "Inside." and packages["workbench/a"].above == ["workbench/b"]
