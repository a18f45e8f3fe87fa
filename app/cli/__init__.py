"""The command line. `main` reads it; each command's work is in a module of its own, loaded when it is asked for."""
