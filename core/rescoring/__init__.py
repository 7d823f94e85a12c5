"""Old responses under other rewards: what would have been different."""
