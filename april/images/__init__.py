"""Images on their way in: read from what users and clients give, checked, and placed among the tokens of a prompt."""
