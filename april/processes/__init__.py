"""Other processes: hosts with engines and functions, a trainer's ranks, actors of Ray, a trainer's workers."""
