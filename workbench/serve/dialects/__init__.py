"""Dialects of the server, one module each; `DIALECTS` names modules and classes, which are imported when served."""

from __future__ import annotations

DIALECTS = {
    "openai.chat": "openai.chat:OpenAIChat",
    "openai.completions": "openai.completions:OpenAICompletions",
    "openai.responses": "responses.responses:OpenAIResponses",
    "openai.embeddings": "openai.embeddings:OpenAIEmbeddings",
    "anthropic.messages": "anthropic.messages:AnthropicMessages",
    "vllm.tokenize": "vllm_tokenizer:VllmTokenize",
    "vllm.detokenize": "vllm_tokenizer:VllmDetokenize",
}
SIGN_THOUGHTS = ("openai.responses", "anthropic.messages")  # built with the signing key
