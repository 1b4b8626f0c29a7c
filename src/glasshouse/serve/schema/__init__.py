"""Request schemas, errors in OpenAI's format, and the OpenAPI document of both."""
