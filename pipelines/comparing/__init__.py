"""Looking back at finished runs: algorithms on one step, runs beside runs, rewards scored again."""
