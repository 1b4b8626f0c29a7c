"""Answers in OpenAI's format: whole or streamed, log-probabilities, tool calls, and those kept to be opened."""
