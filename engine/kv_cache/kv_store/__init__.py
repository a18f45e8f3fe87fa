"""K/V store apart from the servers: the process that keeps blocks, and the connector by which engines use it."""
