"""Text for messages: makes text from servers safe to print, and builds commands that install optional packages."""
