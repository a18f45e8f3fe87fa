"""Measures what happens under load: policies on recorded traces, the field's claims switch by switch, overload and
faults."""
