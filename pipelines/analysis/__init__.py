"""Finished runs opened for reading: comparison, rescoring, forensics, replay, microscope."""
