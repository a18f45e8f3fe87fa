"""Metrics, traces and logs of a server. Import from the modules: logs are needed before anything large is loaded."""
