"""Answers in OpenAI's format: whole or streamed, log-probabilities, tool calls, and a store of the last ones."""
