"""Select pages inside a decode step: summarize a page that became full, and select the pages that a row's queries of
one key/value head read."""

from __future__ import annotations

import math

from compiled_kernels.builder.functions import alloca, function, loop, when
from compiled_kernels.builder.target import SIZE_BOUND, Named, indices, memref
from compiled_kernels.builder.values import Value, constant
from compiled_kernels.builder.vectors import total
from compiled_kernels.page_selection.selection import PageSelection
from compiled_kernels.paged_attention.mlir_shape import DecodeAttention
from compiled_kernels.scalar_code.mlir import scalar_code

MOVES = {"min": Value.minimum, "max": Value.maximum, "mean": Value.__add__}


def summary_arguments(shape: DecodeAttention, selection: PageSelection) -> list[Named]:
    """Return the arguments for the pages' summaries, each [page, group, dim]."""
    kind = memref((SIZE_BOUND, shape.num_kv_heads, shape.head_dim), shape.dtype)
    return [Named(f"summary{at}", kind) for at in range(len(selection.summaries))]


def _places(shape: DecodeAttention) -> list[Named]:
    tables = [Named(name, shape.types[name]) for name in ("table", "lengths")]
    return [*tables, *indices("row", "group")]


def summarize(shape: DecodeAttention, selection: PageSelection, name: str) -> None:
    """Build the function @{name}_summarize(keys, summaries, table, lengths, row, group): if the row's last position is
    the last of its page, it computes the summaries of that page."""
    lanes, size, summaries = shape.columns, shape.page_size, summary_arguments(shape, selection)
    with function(f"{name}_summarize", [Named("keys", shape.pages), *summaries, *_places(shape)]) as given:
        length = given["lengths"][given["row"]].to("index")
        with when((length % size).equals(0)):
            page = given["table"][given["row"], (length - 1) // size].to("index")
            for column in range(0, shape.head_dim, lanes):

                def key(offset: Value | int, column: int = column) -> Value:
                    return given["keys"].load(lanes, page, given["group"], offset, column).to("f32")

                with loop(1, size, carried=[key(0)] * len(summaries)) as offset:
                    added = key(offset.index)
                    moved = zip(selection.summaries, offset.carried, strict=True)
                    offset.carry([MOVES[kind](so_far, added) for kind, so_far in moved])
                for summary, kind, value in zip(summaries, selection.summaries, offset.results, strict=True):
                    value = value / float(size) if kind == "mean" else value
                    given[summary.name].store(value, page, given["group"], column)


def select(shape: DecodeAttention, selection: PageSelection, name: str) -> None:
    """Build the function @{name}_select(q [share, dim], summaries, table, lengths, row, group, chosen): it selects the
    pages of the row's table that the row reads for one key/value head, up to its own page."""
    queries, chosen = Named("q", shape.types["queries"]), Named("chosen", shape.types["chosen"])
    first = selection.first
    arguments = [queries, *summary_arguments(shape, selection), *_places(shape), chosen]
    with function(f"{name}_select", arguments) as given:
        scores, marks = alloca(memref((shape.max_pages,), "f32")), given["chosen"]
        least, read = constant(-math.inf, "f32"), constant(1, "i8")
        own = (given["lengths"][given["row"]].to("index") - 1) // shape.page_size
        marks[own] = read
        with when(own.compared("ule", first + selection.keep)) as otherwise:
            with loop(0, own) as page:
                marks[page.index] = read
            with otherwise():
                with loop(0, first) as page:
                    marks[page.index] = read
                with loop(first, own) as page:
                    number = given["table"][given["row"], page.index].to("index")
                    with loop(0, shape.queries_per_kv, carried=[least]) as head:
                        head.carry([head.carried[0].maximum(_score(shape, selection, given, number, head.index))])
                    scores[page.index], marks[page.index] = head.results[0], read.like(0)
                with loop(0, selection.keep):
                    with loop(first, own, carried=[least, own]) as page:
                        highest, place = page.carried
                        score = scores[page.index]
                        higher = score.compared("ogt", highest)
                        page.carry([higher.select(score, highest), higher.select(page.index, place)])
                    scores[page.results[1]], marks[page.results[1]] = least, read


def _score(
    shape: DecodeAttention, selection: PageSelection, given: dict[str, Value], page: Value, head: Value
) -> Value:
    """Return the score of a page for a query head."""
    program, lanes = selection.term, shape.columns
    names = [name for name, _ in program.inputs]
    found = constant(0.0, "f32", lanes)
    for column in range(0, shape.head_dim, lanes):
        inputs = {names[0]: given["q"].load(lanes, head, column).to("f32")}
        for name, summary in zip(names[1:], summary_arguments(shape, selection), strict=True):
            inputs[name] = given[summary.name].load(lanes, page, given["group"], column).to("f32")
        found = found + scalar_code(program, inputs, lanes)
    return total(found)
