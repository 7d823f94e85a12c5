cat > fizz.py <<'PROGRAM'
for number in range(1, 16):
    print("Fizz" * (number % 3 == 0) + "Buzz" * (number % 5 == 0) or number)
PROGRAM
