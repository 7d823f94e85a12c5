"""Looking back at runs: what `compare`, `rescore`, `forensics`, `inspect`, `replay`, `blame` do."""
