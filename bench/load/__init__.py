"""Measures a server under load: policies on recorded traces, the field's claims switch by switch, overload, faults."""
