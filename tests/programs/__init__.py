"""Random programs, each run with us and without, of four kinds; ``python -m programs`` draws and checks them."""
