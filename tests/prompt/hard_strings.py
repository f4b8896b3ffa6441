"""Texts on which tokenizers differ where they differ at all."""

from __future__ import annotations

from hypothesis import strategies as st

TRAINING = [
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Grüße, naïve café, 日本語のテキスト 🙂🙂 stop the stopping stops; it's I'LL we've don't\n",
    "1234 56 7.89 2024-11-22   three   spaces\t\ttabs and      more\n\n\nlines مرحبا بالعالم שלום עולם привет мир\n",
    "the quick brown fox jumps over the lazy dog and the dog sleeps while the fox runs away again and again\n",
]
HARD = [
    "", " ", "  ", "     ", "a", " a", "a ", "  a  ", "\n", "\n\n\n", "\t", " \t \n ", "a\r\nb\rc", "x\u00a0y\u3000z",
    "the stopping dog stops", "The The the", "don't I'LL WE'VE it'S o'clock 'tis", "a  b   c    d     e      f",
    "🙂", "👨‍👩‍👧‍👦 family", "🏳️‍🌈🇩🇪🇯🇵", "e\u0301 é ﬁ ½ ① Ⅷ ｆｕｌｌ ㎏", "a\u200bb\u200d\ufeffc",
    "日本語のテキスト中文한국어", "ไทยไม่มีช่องว่าง", "مرحبا بالعالم ١٢٣", "שלום עולם", "हिन्दी में", "Ω≈ç√∫˜µ≤≥÷",
    "0", "12", "123", "1234", "12345678901234567890", "3.14 1,000,000.00 -5 +7 1e-9", "\x00\x01\x02\x7f\x80",
    "<s>", "</s>", "<unk>", "<0x0A>", "<|endoftext|>", "[INST] hi [/INST]", "▁", "▁▁a ▁", "Ġa Ċ", "<pad>x</s>",
    "a" * 300, "stop" * 60, "ab" * 200 + " " * 50, "!?!?..--__==((()))[]{}", "if(x==1){return;}// ok",
    "\\n \\t \\u0041",
    "http://example.com/a?b=c&d=e#f", "user@example.com", "CamelCase snake_case kebab-case SCREAMING",
    "\U0001f9d1\U0010ffff",
    "mixed日本english텍스트123🙂end",
]  # fmt: skip
TEXTS = st.text(max_size=40) | st.lists(st.sampled_from(HARD), min_size=1, max_size=4).map("".join)
