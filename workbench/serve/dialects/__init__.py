"""Dialects of the server, one module each; `DIALECTS` names modules and classes, which are imported when served."""

from __future__ import annotations

DIALECTS = {
    "openai.chat": "openai_chat:OpenAIChat",
    "openai.completions": "openai_completions:OpenAICompletions",
    "openai.responses": "openai_responses:OpenAIResponses",
    "openai.embeddings": "openai_embeddings:OpenAIEmbeddings",
    "anthropic.messages": "anthropic_messages:AnthropicMessages",
    "vllm.tokenize": "vllm_tokenizer:VllmTokenize",
    "vllm.detokenize": "vllm_tokenizer:VllmDetokenize",
}
SIGN_THOUGHTS = ("openai.responses", "anthropic.messages")  # are built with the key of signatures
