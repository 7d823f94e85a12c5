"""Renderers: messages to tokens, and tokens back to messages."""
