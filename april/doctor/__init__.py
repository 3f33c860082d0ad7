"""Implements ``april doctor``: examines what a server can do, what to change there, and whether results are exact."""
