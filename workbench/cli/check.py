"""`workbench model check`: show which parts of a model are supported, its size and speed on this machine, and whether
its outputs are right.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from workbench.cli.shared import AsJson, Custom, print_json, say
from workbench.display import Table
from workbench.units import format_bytes, format_quantity


def check(
    model: Annotated[str, typer.Argument(help="a folder, FILE.gguf, demo, shape:NAME or one of `model list`")],
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="compare with transformers if it is installed")
    ] = True,
    custom: Custom = None,
    as_json: AsJson = False,
) -> None:
    """Check a model: support, size and speed on this machine.

    Outputs are compared with transformers; the first module that differs is named."""
    from workbench.check.report import check_model, passed
    from workbench.progress import discard, to_stderr

    found = check_model(model, compare, custom, discard if as_json else to_stderr)
    if as_json:
        print_json(found)
    else:
        show(found)
    raise typer.Exit(0 if passed(found) else 1)


def show(found: dict[str, Any]) -> None:
    """Print the result as one table, followed by the reasons for unsupported parts."""
    say(Table("", [*_model(found), *_machine(found), *_result(found)], ("what", found["model"])))
    if "carried_out" in found:
        from workbench.executors.capabilities import reasons_table

        say(reasons_table(found["carried_out"], "", "supported by"))
    say(*found["remarks"])
    if found["problem"]:
        say(f"refused: {found['problem']}", style="bold red")


def _model(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("family", found["family"])] if found.get("family") else []
    if files := found.get("files"):
        rows.append(("files", f"{files['format']}, {files['tensors']:,} tensors, {format_bytes(files['bytes'])}"))
    if (stored := found.get("stored")) and (stored["file_bytes"] or stored["widened"]):
        sizes = f"{format_bytes(stored['bytes'])} in few bits, {format_bytes(stored['file_bytes'])} in the files"
        rows.append(("stored as", f"{stored['blocks']}, head {stored['head']}: {sizes}"))
        rows += [("widened", line) for line in stored["widened"] or ["nothing"]]
    rows += [("tokenizer", found["tokenizer"])] if found.get("tokenizer") else []
    if sizes := found.get("sizes"):
        words = f"{sizes['parameters']:,} parameters, {sizes['layers']} layers of {sizes['hidden_size']:,}"
        rows.append(("sizes", f"{words}, vocabulary {sizes['vocab_size']:,}, context {sizes['context']:,}"))
    return rows + list(found.get("mechanisms", {}).items())


def _machine(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if memory := found.get("memory"):
        dtype = found.get("dtype", "bfloat16")
        formats = memory["weight_bytes"].items()
        weights = [f"{format_bytes(size)} {dtype if name == 'dense' else name}" for name, size in formats]
        tokens = ", ".join(f"{size:,.6g} {name}" for name, size in memory["cache_bytes_per_token"].items())
        pages = f"{', '.join(map(str, memory['pages']))} pages of {memory['page_size']} tokens"
        whole = format_bytes(memory["default_cache_bytes"])
        rows += [
            ("weights", ", ".join(weights)),
            ("cache", f"bytes a token: {tokens}; by default {pages}, {whole}"),
            ("free memory", format_bytes(memory["available_bytes"])),
        ]
    if speed := found.get("speed"):
        decode, prefill = (f"at most {speed[f'{kind}_tokens_per_s']:,.4g} tokens/s" for kind in ("decode", "prefill"))
        rates = f"{format_bytes(speed['read_bytes_per_s'])}/s and {format_quantity(speed['flops_per_s'], 'FLOP/s')}"
        weights = f"{format_bytes(speed['weight_bytes'])} of weights"
        beside = "; other processes ran meanwhile, so it may be faster: run it again" * speed["measured_beside_work"]
        rows += [
            ("decode", f"{decode} of one sequence at a context of {speed['decode_context']}"),
            ("prefill", f"{prefill} of a prompt of {speed['prefill_tokens']}"),
            ("estimated from", f"{weights}, {rates}, measured on this {speed['cpu']}{beside}"),
        ]
    return rows


def _result(found: dict[str, Any]) -> list[tuple[str, str]]:
    result = found["comparison"]
    if "skipped" in result:
        return [("beside transformers", f"not compared: {result['skipped']}")]
    largest = f"logits within {result['logit_difference']:.1e} of the largest"
    tokens = f"greedy tokens {'equal' if result['greedy_tokens'] == result['their_greedy_tokens'] else 'differ'}"
    lengths = " and ".join(f"{length:,}" for length in result["text_lengths"])
    places = f"{result['places']} places in the layers compared, on texts of {lengths} tokens"
    rows = [("beside transformers", f"{largest}, {tokens}, {places}")]
    if left_out := result["places_left_out"]:
        more = f", and {len(left_out) - 3} others" if len(left_out) > 3 else ""
        rows.append(("without a tensor there", "; ".join(left_out[:3]) + more))
    if result["reached"]:
        rows.append(("texts reach past", ", ".join(result["reached"])))
    if result["not_reached"]:
        rows.append(("not compared", "; ".join(result["not_reached"])))
    if first := result["first_difference"]:
        where = "" if first["layer"] is None else f"layer {first['layer']}, "
        size = f"{first['difference']:.1e} of the row's largest number"
        words = f"{where}{first['module']}, from position {first['position']} on, there in column {first['column']}"
        modules = f" ({first['ours']} here, {', '.join(first['theirs'])} there)" if first["theirs"] else ""
        rows.append(("first difference", f"{words}: {size}{modules}"))
    elif not result["equal"]:
        at = "" if result["logit_position"] is None else f", logits from position {result['logit_position']} on"
        rows.append(("first difference", f"in no module by itself{at}"))
    return rows
