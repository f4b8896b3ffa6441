"""From messages to tokens and back: templates, tokenizer, detokenizer, stop strings. It may not import models,
schedulers or the engine."""
