"""`glasshouse generate`: one streamed completion, prompts from stdin, or a chat session."""
