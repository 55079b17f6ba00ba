"""The OpenAI-compatible HTTP server over a deployed model."""
