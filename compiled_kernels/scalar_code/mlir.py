"""Write a program as MLIR text: of vectors, or of single numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Mapping

from compiled_kernels.mlir_text import Lines, number
from compiled_kernels.scalar_code.lower import lowered
from compiled_kernels.scalar_code.program import Kind, Program, Step

OF_INTEGERS = {
    "add": "arith.addi", "sub": "arith.subi", "mul": "arith.muli", "quot": "arith.divsi", "rem": "arith.remsi",
    "min": "arith.minsi", "max": "arith.maxsi", "and": "arith.andi", "or": "arith.ori", "xor": "arith.xori",
    "shl": "arith.shli", "shr": "arith.shrsi", "lt": "arith.cmpi slt,", "le": "arith.cmpi sle,",
    "eq": "arith.cmpi eq,", "ne": "arith.cmpi ne,",
}  # fmt: skip
OF_FLOATS = {
    "add": "arith.addf", "sub": "arith.subf", "mul": "arith.mulf", "div": "arith.divf", "min": "arith.minimumf",
    "max": "arith.maximumf", "lt": "arith.cmpf olt,", "le": "arith.cmpf ole,", "eq": "arith.cmpf oeq,",
    "ne": "arith.cmpf une,", "neg": "arith.negf", "abs": "math.absf", "exp": "math.exp", "exp2": "math.exp2",
    "log": "math.log", "sqrt": "math.sqrt", "sin": "math.sin", "cos": "math.cos", "floor": "math.floor",
    "ceil": "math.ceil",
}  # fmt: skip


class ScalarCode:
    """Programs of one function of a kernel, written to `lines`.

    Integers that come in are indices, floats are float32, bools i1; vectors of `lanes` of them where `lanes` is not 0.
    Tables are memories that `declarations` has, for the module: their names begin with `name`.
    """

    def __init__(self, lines: Lines, name: str, lanes: int = 0):
        self.lines, self.name, self.lanes = lines, name, lanes
        self.declarations: dict[str, str] = {}

    def emit(self, program: Program, inputs: Mapping[str, str], single: Container[str] = ()) -> str:
        """Emit the program over values of these names; return its result's. Inputs in `single` are single numbers
        also where vectors are computed."""
        steps, bits = lowered(program)
        values = [self._input(inputs[name], kind, bits, name in single) for name, kind in program.inputs]
        for step in steps.steps:
            values.append(self._step(step, [(values[each], steps.kind(each)) for each in step.reads], bits))
        return values[steps.result]

    def _type(self, kind: Kind, bits: int) -> str:
        element = {"bool": "i1", "int": f"i{bits}", "float": "f32"}[kind]
        return f"vector<{self.lanes}x{element}>" if self.lanes else element

    def _input(self, name: str, kind: Kind, bits: int, single: bool) -> str:
        spread = single and self.lanes
        if kind == "int":
            of = f"vector<{self.lanes}xindex>" if self.lanes and not single else "index"
            to = f"i{bits}" if spread else self._type(kind, bits)
            name = self.lines.let(f"arith.index_cast {name} : {of} to {to}")
        if not spread:
            return name
        element = f"i{bits}" if kind == "int" else "f32"
        return self.lines.let(f"vector.broadcast {name} : {element} to {self._type(kind, bits)}")

    def _constant(self, value: float, kind: Kind, bits: int) -> str:
        if kind == "float":
            special = {math.inf: "0x7F800000", -math.inf: "0xFF800000"}
            text = "0x7FC00000" if math.isnan(value) else special.get(value, number(value))
        else:
            text = str(value).lower()  # true, false, or an integer
        if self.lanes:
            return self.lines.let(f"arith.constant dense<{text}> : {self._type(kind, bits)}")
        return self.lines.let(f"arith.constant {text}" if kind == "bool" else f"arith.constant {text} : {self._type(kind, bits)}")

    def _step(self, step: Step, reads: list[tuple[str, Kind]], bits: int) -> str:
        lines, operation = self.lines, step.operation
        if operation == "const":
            return self._constant(step.numbers[0], step.kind, bits)
        if operation == "table":
            return self._table(step, reads[0][0], bits)
        names = ", ".join(name for name, _ in reads)
        given = reads[0][1]
        of, to = self._type(given, bits), self._type(step.kind, bits)
        if operation == "select":
            chosen = self._type(step.kind, bits)
            return lines.let(f"arith.select {names} : {self._type('bool', bits)}, {chosen}")
        if operation == "float":
            return lines.let(f"arith.{'uitofp' if given == 'bool' else 'sitofp'} {names} : {of} to {to}")
        if operation == "int":
            return lines.let(f"arith.{'extui' if given == 'bool' else 'fptosi'} {names} : {of} to {to}")
        if operation == "not":
            ones = self._constant(True if given == "bool" else -1, given, bits)
            return lines.let(f"arith.xori {names}, {ones} : {of}")
        if operation == "tanh":
            return self._tanh(names, bits)
        if given != "float" and operation in ("neg", "abs"):
            below = lines.let(f"arith.subi {self._constant(0, 'int', bits)}, {names} : {of}")
            return below if operation == "neg" else lines.let(f"arith.maxsi {names}, {below} : {of}")
        return lines.let(f"{(OF_FLOATS if given == 'float' else OF_INTEGERS)[operation]} {names} : {of}")

    def _tanh(self, x: str, bits: int) -> str:
        """tanh x = 1 - 2 / (exp(2x) + 1)."""
        lines, of = self.lines, self._type("float", bits)
        one, two = (self._constant(each, "float", bits) for each in (1.0, 2.0))
        power = lines.let(f"math.exp {lines.let(f'arith.mulf {x}, {two} : {of}')} : {of}")
        share = lines.let(f"arith.divf {two}, {lines.let(f'arith.addf {power}, {one} : {of}')} : {of}")
        return lines.let(f"arith.subf {one}, {share} : {of}")

    def _table(self, step: Step, index: str, bits: int) -> str:
        """Emit numbers of a table, element by element."""
        lines, element = self.lines, "f32" if step.kind == "float" else f"i{bits}"
        numbers = ", ".join(number(each) if step.kind == "float" else str(each) for each in step.numbers)
        kind = f"memref<{len(step.numbers)}x{element}>"
        digest = hashlib.blake2b(f"{kind}{numbers}".encode(), digest_size=6).hexdigest()
        name = f"@{self.name}_table_{digest}"
        self.declarations[name] = f'memref.global "private" constant {name} : {kind} = dense<[{numbers}]>'
        table = lines.let(f"memref.get_global {name} : {kind}")
        if not self.lanes:
            return self._entry(table, kind, index, bits)
        found = self._constant(0, step.kind, bits)
        for element_at in range(self.lanes):
            at = lines.let(f"vector.extract {index}[{element_at}] : i{bits} from vector<{self.lanes}xi{bits}>")
            each = self._entry(table, kind, at, bits)
            found = lines.let(f"vector.insert {each}, {found}[{element_at}] : {element} into {self._type(step.kind, bits)}")
        return found

    def _entry(self, table: str, kind: str, index: str, bits: int) -> str:
        place = self.lines.let(f"arith.index_cast {index} : i{bits} to index")
        return self.lines.let(f"memref.load {table}[{place}] : {kind}")
