"""``april doctor``: examines what a server can do, what to change, and whether april gives exact results with it."""
