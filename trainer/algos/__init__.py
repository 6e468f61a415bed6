"""One file per algorithm. `base.py` says what the loop asks of each; the loop names none."""
