"""The kinds of engines: creating them from settings, recognising their servers and probing them."""
