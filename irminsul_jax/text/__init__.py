"""Text in and out: tokenizer, chat templates, incremental detokenising. No jax, no model."""
