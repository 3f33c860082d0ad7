"""The suite for gateways: twenty promises to agents that bring a client of their own, and to the trainer."""
