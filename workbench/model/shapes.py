"""Define architectures of published models by name, for performance work with random weights."""

from __future__ import annotations

from workbench.errors import WorkbenchError, nearest
from workbench.model.attention_spec import AttentionSpec, QKNormSpec, RotaryConfig, RotaryScaling
from workbench.model.spec import LayerSpec, ModelSpec, MoESpec, NormSpec, RouterSpec

_LLAMA31 = RotaryScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def named_shape(name: str) -> ModelSpec:
    """Return the architecture `name` from its published config.json, without end tokens (random weights do not end).
    Raises WorkbenchError for an unknown name.

    Example: `workbench.named_shape("llama-3.1-8b")`
    """
    if name not in SHAPES:
        raise WorkbenchError(f"no shape {name!r}{nearest(name.lower(), SHAPES)}; known: {', '.join(SHAPES)}")
    return SHAPES[name]


def _shape(
    name: str,
    *,
    vocab: int,
    width: int,
    layers: int,
    heads: int,
    groups: int,
    hidden: int,
    context: int,
    base: float = 10_000.0,
    scaling: RotaryScaling = RotaryScaling(),  # noqa: B008 (a frozen value)
    tied: bool = False,
) -> ModelSpec:
    layer = LayerSpec(
        attention=AttentionSpec(num_heads=heads, num_kv_heads=groups, head_dim=width // heads), intermediate_size=hidden
    )
    return ModelSpec(
        name=name,
        vocab_size=vocab,
        hidden_size=width,
        layers=(layer,) * layers,
        max_position_embeddings=context,
        rotary=RotaryConfig(rope_theta=base, scaling=scaling),
        norm=NormSpec(eps=1e-5),
        tie_word_embeddings=tied,
    )


# OLMoE (Muennighoff et al., 2024): 64 experts of 1,024 columns, of which a token takes 8, and norms over all queries
# and all keys.
_OLMOE = _shape("olmoe-1b-7b", vocab=50_304, width=2048, layers=16, heads=16, groups=16, hidden=1024, context=4096)
_OLMOE_LAYER = _OLMOE.layers[0].model_copy(
    update={
        "attention": _OLMOE.layers[0].attention.model_copy(update={"qk_norm": QKNormSpec(over="projection")}),
        "experts": MoESpec(
            num_experts=64, num_experts_per_tok=8, router=RouterSpec(score="softmax", softmax_chosen=False)
        ),
    }
)

SHAPES: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _shape("tiny", vocab=257, width=64, layers=2, heads=4, groups=2, hidden=128, context=256),
        _shape(
            "smollm2-135m",
            vocab=49_152,
            width=576,
            layers=30,
            heads=9,
            groups=3,
            hidden=1536,
            context=8192,
            base=100_000.0,
            tied=True,
        ),
        _shape(
            "tinyllama-1.1b",
            vocab=32_000,
            width=2048,
            layers=22,
            heads=32,
            groups=4,
            hidden=5632,
            context=2048,
        ),
        _OLMOE.model_copy(update={"layers": (_OLMOE_LAYER,) * 16}),
        _shape(
            "llama-3.1-8b",
            vocab=128_256,
            width=4096,
            layers=32,
            heads=32,
            groups=8,
            hidden=14_336,
            context=131_072,
            base=500_000.0,
            scaling=_LLAMA31,
        ),
        _shape(
            "llama-3-70b",
            vocab=128_256,
            width=8192,
            layers=80,
            heads=64,
            groups=8,
            hidden=28_672,
            context=8192,
            base=500_000.0,
        ),
        _shape(
            "llama-3.1-70b",
            vocab=128_256,
            width=8192,
            layers=80,
            heads=64,
            groups=8,
            hidden=28_672,
            context=131_072,
            base=500_000.0,
            scaling=_LLAMA31,
        ),
        _shape(
            "llama-2-13b",
            vocab=32_000,
            width=5120,
            layers=40,
            heads=40,
            groups=40,
            hidden=13_824,
            context=4096,
        ),
        # GPT-3 (Brown et al., 2020, table 2.1), for counts only: its feed-forward has two matrices of 49,152 columns,
        # the same number of parameters as the three of 32,768 here; its positions are learned.
        _shape(
            "gpt-3-175b",
            vocab=50_257,
            width=12_288,
            layers=96,
            heads=96,
            groups=96,
            hidden=32_768,
            context=2048,
            tied=True,
        ),
    )
}
