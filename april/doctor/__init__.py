"""``april doctor``: what a server can and cannot do, what to change, and whether april will be exact with it."""
