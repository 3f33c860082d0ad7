"""HTTP clients for engine servers: the parts that all kinds of servers share."""
