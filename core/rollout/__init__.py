"""From prompts to sampled groups: what stands between an engine and a rollout batch."""
