"""What every stage is given: its context, inputs, engines, files and trained models."""
