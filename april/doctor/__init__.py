"""``april doctor``: examines what a server can do, what to change, and whether april will be exact with it."""
