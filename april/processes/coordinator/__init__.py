"""april's core for rollouts that run elsewhere: in worker processes, in agent loops, in functions of a trainer.

Where :mod:`april.driver` talks to the engines itself, here somebody else does: each rollout asks the
:class:`Coordinator`, one thing at a time, whether to start, what to send to a server and what came of it. Trainers,
servers and what carries the questions (Ray, HTTP, plain calls) are unknown here.

========================  ===============================================================================
``coordinator.py``        the core behind questions: what the trainer and the rollouts ask
``asked_host.py``         which rollout runs which sample and waits for which answer
``messages.py``           what travels between processes
``calls.py``              the rollout's half: one call of a rollout, from however many requests
``run.py``                the trainer's half: draws, aborts, batches, checkpoints
========================  ===============================================================================
"""
