"""From prompts to sampled groups: prompts, episodes, engines' servers, weight sync."""
