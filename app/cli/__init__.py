"""The command line. `main` reads it; what each command does is in a module of its own, loaded when it is asked for."""
