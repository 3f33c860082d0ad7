"""april's core for rollouts that run elsewhere: in worker processes, in agent loops, in functions of a trainer.

Where :mod:`april.driver` talks to the engines itself, here somebody else does: each rollout asks the
:class:`Coordinator`, one thing at a time, whether to start, what to send to a server and what came of it. Trainers,
servers and what carries the questions (Ray, HTTP, plain calls) are unknown here.

========================  ===============================================================================
``coordinator.py``        what the trainer and the rollouts ask
``execution.py``          the core behind the questions, and which rollout waits for which answer
``messages.py``           what travels between processes
``calls.py``              the rollout's half: one call of a rollout, from however many requests
``run.py``                the trainer's half: draws, aborts, batches, checkpoints
========================  ===============================================================================
"""
