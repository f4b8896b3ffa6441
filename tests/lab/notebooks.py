"""Notebooks that tests of the lab open."""

from __future__ import annotations

PICTURED = """# %%
import anywidget
class Square(anywidget.AnyWidget):
    _esm = '''export default {render({el}) {
        el.classList.add("wb-square");
        el.innerHTML = "<svg width='120' height='80'><rect width='120' height='80' fill='teal'/></svg>";
    }}'''
    def _repr_mimebundle_(self, **kwargs):
        data, metadata = super()._repr_mimebundle_(**kwargs)
        return data | {"text/html": "<svg width='120' height='80'><rect width='120' height='80'/></svg>"}, metadata
Square()
"""
