echo hello > greeting.txt
