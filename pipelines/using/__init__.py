"""A trained model in use: chat, an OpenAI-compatible server, export."""
