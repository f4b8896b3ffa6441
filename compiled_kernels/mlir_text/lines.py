"""MLIR text under construction, one operation a line."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_kernels.mlir_text.target import vector


class Lines:
    """A builder of MLIR text: `emit` adds a line; `let` adds one that defines a value and returns the value's name, as
    do all methods below.

    Values, indices and memories are MLIR names (`%v7`); `lanes` is the length of the vectors at hand, of float32
    unless an `element` type is given. Names begin with `prefix`, so that two texts can stand in one function.
    """

    def __init__(self, prefix: str = "v") -> None:
        self.lines: list[str] = []
        self._prefix = prefix
        self._count = 0

    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def serial(self) -> int:
        """Return a number for names that must be unique: how many lines there are."""
        return len(self.lines)

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def let(self, expression: str) -> str:
        self._count += 1
        name = f"%{self._prefix}{self._count}"
        self.lines.append(f"{name} = {expression}")
        return name

    def index(self, value: int) -> str:
        return self.let(f"arith.constant {value} : index")

    def constant(self, constant: str, lanes: int, element: str = "f32") -> str:
        """Emit a vector of one constant, as MLIR spells it."""
        return self.let(f"arith.constant dense<{constant}> : {vector(lanes, element)}")

    def index_of(self, place: str, kind: str) -> str:
        """Emit an integer of 64 bits at `place` (`%sizes[%zero]`) of a memory of memref type `kind`, as an index."""
        return self.let(f"arith.index_cast {self.let(f'memref.load {place} : {kind}')} : i64 to index")

    def splat(self, scalar: str, lanes: int) -> str:
        return self.let(f"vector.broadcast {scalar} : f32 to {vector(lanes)}")

    def load(self, memory: str, at: str, kind: str, lanes: int, element: str) -> str:
        """Emit a load of `lanes` numbers from `memory`, of memref type `kind`, at the indices `at`."""
        return self.let(f"vector.load {memory}[{at}] : {kind}, {vector(lanes, element)}")

    def store(self, value: str, memory: str, at: str, kind: str, lanes: int, element: str = "f32") -> None:
        self.emit(f"vector.store {value}, {memory}[{at}] : {kind}, {vector(lanes, element)}")

    def extend(self, value: str, lanes: int, element: str) -> str:
        """Convert a vector to float32."""
        if element == "f32":
            return value
        given, floats = vector(lanes, element), vector(lanes)
        if element == "i8":
            integers = self.let(f"arith.extsi {value} : {given} to {vector(lanes, 'i32')}")
            return self.let(f"arith.sitofp {integers} : {vector(lanes, 'i32')} to {floats}")
        return self.let(f"arith.extf {value} : {given} to {floats}")

    def truncate(self, value: str, lanes: int, element: str) -> str:
        """Round a vector of float32 to `element`."""
        if element == "f32":
            return value
        return self.let(f"arith.truncf {value} : {vector(lanes)} to {vector(lanes, element)}")

    def fma(self, a: str, b: str, c: str, lanes: int) -> str:
        return self.let(f"vector.fma {a}, {b}, {c} : {vector(lanes)}")

    def dot_pairs(self, sums: str, a: str, b: str) -> str:
        """Add to sums [16] the products of 16 pairs of bfloat16 (AVX512_BF16: VDPBF16PS)."""
        pairs = vector(32, "bf16")
        return self.let(
            f'llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"({sums}, {a}, {b}) : '
            f"({vector(16)}, {pairs}, {pairs}) -> {vector(16)}"
        )

    def dot_bytes(self, sums: str, a: str, b: str) -> str:
        """Add to sums [16] the products of 16 times four bytes, those of `a` unsigned, those of `b` signed; all three
        are 16 words of 32 bits (AVX512_VNNI: VPDPBUSD)."""
        words, octets = vector(16, "i32"), vector(64, "i8")
        a, b = (self.let(f"vector.bitcast {each} : {words} to {octets}") for each in (a, b))
        return self.let(
            f'llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"({sums}, {a}, {b}) : '
            f"({words}, {octets}, {octets}) -> {words}"
        )

    def dot_words(self, a: str, b: str, lanes: int) -> str:
        """The sums of products of `lanes` (8 or 16) pairs of int16, exact; all three are words of 32 bits (VPMADDWD)."""
        words, halves = vector(lanes, "i32"), vector(2 * lanes, "i16")
        a, b = (self.let(f"vector.bitcast {each} : {words} to {halves}") for each in (a, b))
        name = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
        return self.let(f'llvm.call_intrinsic "{name}"({a}, {b}) : ({halves}, {halves}) -> {words}')

    def splat_pair(self, pair: str) -> str:
        """Broadcast one pair of bfloat16 16 times: the partner of 16 pairs in `dot_pairs`."""
        bits = self.let(f"vector.bitcast {pair} : vector<2xbf16> to vector<1xi32>")
        single = self.let(f"vector.extract {bits}[0] : i32 from vector<1xi32>")
        spread = self.let(f"vector.broadcast {single} : i32 to vector<16xi32>")
        return self.let(f"vector.bitcast {spread} : vector<16xi32> to vector<32xbf16>")

    def exp(self, value: str, lanes: int) -> str:
        """Emit e to the x (see `expand_exp`); of one number where `lanes` is 0."""
        return self.let(f"math.exp {value} : {vector(lanes) if lanes else 'f32'}")

    def hsum(self, value: str, lanes: int) -> str:
        """Sum across a vector: halves are added until one number is left, in the order in which `hsums` adds."""
        while lanes > 1:
            lanes //= 2
            halves = (
                self.let(
                    f"vector.extract_strided_slice {value} {{offsets = [{at}], sizes = [{lanes}], strides = [1]}} : "
                    f"{vector(2 * lanes)} to {vector(lanes)}"
                )
                for at in (0, lanes)
            )
            value = self.let(f"arith.addf {', '.join(halves)} : {vector(lanes)}")
        return self.let(f"vector.extract {value}[0] : f32 from {vector(1)}")

    def hsums(self, vectors: list[str], lanes: int) -> str:
        """Sum `lanes` vectors of `lanes` into one vector of their totals: in each round two are folded into one, so
        that the whole takes lanes - 1 additions in place of as many reductions."""
        kind, step = vector(lanes), lanes // 2
        while len(vectors) > 1:
            half = len(vectors) // 2
            folded = []
            for a, b in zip(vectors[:half], vectors[half:], strict=True):
                # element i of the sum: a's fold where bit `step` is clear, b's where it is set
                low = [i if not i & step else lanes + (i ^ step) for i in range(lanes)]
                high = [i | step if not i & step else lanes + i for i in range(lanes)]
                left = self.let(f"vector.shuffle {a}, {b} {low} : {kind}, {kind}")
                right = self.let(f"vector.shuffle {a}, {b} {high} : {kind}, {kind}")
                folded.append(self.let(f"arith.addf {left}, {right} : {kind}"))
            vectors, step = folded, step // 2
        return vectors[0]

    def begin_loop(
        self, result: str, over: str, names: Sequence[str], initial: Sequence[str], lanes: int, element: str = "f32"
    ) -> list[str]:
        """Begin a loop `over` (`%o = %from to %to step %one`) that carries vectors, `names` inside it, `initial` at
        first; return their names after it."""
        begins = ", ".join(f"{name} = {start}" for name, start in zip(names, initial, strict=True))
        kinds = ", ".join([vector(lanes, element)] * len(names))
        self.emit(f"{result}:{len(names)} = scf.for {over} iter_args({begins}) -> ({kinds}) {{")
        return [f"{result}#{i}" for i in range(len(names))]

    def end_loop(self, sums: Sequence[str], lanes: int, element: str = "f32") -> None:
        """End the loop: `sums` are carried on."""
        self.emit(f"scf.yield {', '.join(sums)} : {', '.join([vector(lanes, element)] * len(sums))}")
        self.emit("}")
