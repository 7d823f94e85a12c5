"""Looking at what was trained: reports, the evidence of steps, comparisons, forensics."""
