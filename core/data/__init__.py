"""Rows, problems and preference pairs, from files to token ids and padded batches."""
