"""The only folder that knows SGLang."""
