"""Text for messages: what servers send, made safe to print, and commands that install optional packages."""
