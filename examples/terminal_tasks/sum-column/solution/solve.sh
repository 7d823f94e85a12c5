tail -n +2 "$SALES" | awk -F, '{ sum += $2 } END { print sum }' > total.txt
tail -n +2 "$SALES" | sort -t, -k2 -n | tail -n 1 | cut -d, -f1 > largest.txt
