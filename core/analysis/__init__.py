"""What is read from finished steps and runs: alarms, microscope, comparisons, forensics."""
