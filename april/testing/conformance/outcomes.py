"""How a check says that it has not passed."""


class Broken(Exception):
    """The promise is broken; the message says how."""


class NotOffered(Exception):
    """The engine declares that it does not promise this."""


class NotTested(Exception):
    """The equipment to test this is not there."""
