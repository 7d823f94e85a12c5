"""Models: sources, loading, LoRA, attention, prefix sharing, precision and device."""
